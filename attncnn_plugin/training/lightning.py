"""Two phases and pruning in Lightning's ``Trainer``."""

from typing import Any, Dict, List, Optional, Union

from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from .head_pruning import PruneHeads
from .loops import check_one_device, follow_as_it_loads
from .two_phases import TwoPhases

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

AVERAGES = {'StochasticWeightAveraging', 'WeightAveraging'}  # callbacks of either package that keep a copy
KEY = 'attncnn_plugin.parameters'  # in checkpoints: by optimizer and group, the names of its parameters


class EpochCallback(Callback):
    """Calls objects such as ``TwoPhases`` and ``PruneHeads`` at the beginning of each epoch.

    ``trainer.fit(…, ckpt_path=…)`` resumes from any checkpoint, with the module as it is built for the first epoch, and
    ``trainer.test(…, ckpt_path=…)`` loads any. The optimizers are those that the module has configured, and the
    schedules continue. The copy of a ``WeightAveraging`` or a ``StochasticWeightAveraging`` changes with the module.

    Args:
        *parts (TwoPhases | PruneHeads): What happens, in this order.
    """

    def __init__(self, *parts: Union[TwoPhases, PruneHeads]) -> None:
        self.parts = parts
        self.follows: List[RemovableHandle] = []

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Checks the module, before a checkpoint is loaded into it.

        Raises:
            TypeError: The training is distributed.
            ValueError: A part cannot do what it is told.
        """
        check_one_device(trainer.world_size)
        self.names: List[List[List[Optional[str]]]] = []  # None for parameters of others; not of an earlier fit
        self.epoch: Optional[int] = None  # that has begun
        for part in self.parts:
            part.check(pl_module)
        self.teardown()
        self.follows = [follow_as_it_loads(module) for module in (pl_module, *_copies(trainer))]

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Leaves the module as any other: it no longer takes the structure of what it loads."""
        for handle in self.follows:
            handle.remove()

    on_exception = teardown

    def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: Dict[str, Any]) -> None:
        """Adds the names of the optimizers' parameters: their order is no longer that of a new optimizer."""
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        checkpoint[KEY] = [
            [[names.get(parameter) for parameter in group['params']] for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    def on_load_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: Dict[str, Any]) -> None:
        self.names = checkpoint.get(KEY, [])

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Gives the optimizers, which are new, their parameters as in the checkpoint, whose state comes next."""
        named, own = dict(pl_module.named_parameters()), set(pl_module.parameters())
        for optimizer, groups in zip(trainer.optimizers, self.names):
            for group, names in zip(optimizer.param_groups, groups):
                others = iter([parameter for parameter in group['params'] if parameter not in own])
                group['params'][:] = [next(others) if name is None else named[name] for name in names]

    def on_train_epoch_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.epoch = trainer.current_epoch
        for part in self.parts:
            part.on_epoch_begin(pl_module, trainer.optimizers, trainer.current_epoch, _copies(trainer))

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Begins an epoch for Lightning, which does not where it resumes from the last batch of the one before."""
        if batch_idx == 0 and self.epoch != trainer.current_epoch:
            self.on_train_epoch_start(trainer, pl_module)


def _copies(trainer: Any) -> List[nn.Module]:
    """Returns the copies that callbacks for averages keep."""
    callbacks = [own for own in trainer.callbacks if AVERAGES & {cls.__name__ for cls in type(own).__mro__}]
    kept = [value for callback in callbacks for value in vars(callback).values() if isinstance(value, nn.Module)]
    return [own.module if isinstance(own, AveragedModel) else own for own in kept]
