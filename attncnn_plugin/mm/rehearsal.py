"""Runs that train nothing: mmpretrain's ``vis_scheduler.py`` lets a config's schedule act on a stand-in for a model."""

from torch import nn
from torch.utils.data import DataLoader

from .rebuild import unwrapped


def is_rehearsal(runner) -> bool:
    """Whether the model of a run is a stand-in, which takes no data, and the data loader has none.

    The tool's model is one layer behind an identity in the place of the data preprocessor; a model to be trained has a
    data preprocessor. Its data loader is a list of numbers.
    """
    preprocessor = getattr(unwrapped(runner.model), 'data_preprocessor', None)
    return isinstance(preprocessor, nn.Identity) and not isinstance(runner.train_dataloader, DataLoader)


def warn_of_rehearsal(runner, hook: str, consequence: str) -> None:
    """Says that a hook stands aside, and what that means for the schedule that the run shows."""
    stand_in = type(unwrapped(runner.model)).__name__
    runner.logger.warning(
        f'{hook} stands aside: {stand_in} only stands in for a model, in a tool that shows a schedule. {consequence}'
    )
