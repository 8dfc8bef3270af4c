"""Two phases and pruning in the ``Trainer`` of Hugging Face's transformers."""

from typing import Any, Optional, Union

from transformers import Trainer, TrainerCallback

from ..pruning.optimizers import check_optimizer
from .head_pruning import PruneHeads
from .loops import check_one_device, follow_as_it_loads
from .two_phases import TwoPhases


class EpochCallback(TrainerCallback):
    """Calls objects such as :class:`TwoPhases` and :class:`PruneHeads` at the beginning of each epoch.

    ``trainer.train(resume_from_checkpoint=…)`` resumes from any checkpoint, with the model as it is built for the
    first epoch; ``load_best_model_at_end`` loads any, too. To resume a model of transformers itself, whose files can
    have other names than its modules, give the trainer what
    :func:`~attncnn_plugin.hugging_face.load_hugging_face` makes of the checkpoint. The schedule is the trainer's.

    Args:
        trainer (Trainer): The trainer. Its optimizer is created at once, for the model of the first epoch, since the
            trainer would create it after it has loaded a checkpoint of another structure.
        *parts (TwoPhases | PruneHeads): What happens, in this order.

    Raises:
        TypeError: The training is distributed: its wrapper cannot be built anew between two epochs.
        ValueError: The trainer has ``model_init`` instead of a model, or a part cannot do what it is told.

    Examples:
        >>> trainer.add_callback(EpochCallback(trainer, TwoPhases(epoch=5)))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, trainer: Trainer, *parts: Union[TwoPhases, PruneHeads]) -> None:
        check_one_device(max(trainer.args.world_size, trainer.args.n_gpu))
        if trainer.model_init is not None:
            raise ValueError('the Trainer has a model_init, which builds another model later: give it a model')
        for part in parts:
            part.check(trainer.model)
        self.parts = parts
        self.follows = follow_as_it_loads(trainer.model, trainer.create_optimizer())

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Checks that model and optimizer have the structure of the checkpoint that was loaded.

        Raises:
            ValueError: They have not.
        """
        name, optimizer = type(kwargs['model']).__name__, kwargs['optimizer']
        trained = {parameter for group in optimizer.param_groups for parameter in group['params']}
        if not trained <= set(kwargs['model'].parameters()):
            raise ValueError(
                f'the optimizer has parameters of before the {name} took the structure of the checkpoint by itself: '
                'put the network into a module of your own, and give that to the Trainer'
            )
        try:
            check_optimizer(optimizer, trained)
        except ValueError as error:
            raise ValueError(
                f'the optimizer does not fit the {name} ({error}): to resume a model of transformers, give the Trainer '
                'load_hugging_face(checkpoint); to resume with this optimizer, leave out the EpochCallback'
            ) from error
        self.epoch: Optional[int] = None  # the last that has begun in this run

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leaves the model as any other: it no longer takes the structure of what it loads."""
        self.follows.remove()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Calls the parts; not again where an epoch is resumed in the middle."""
        epoch = state.epoch or 0
        if epoch != int(epoch) and self.epoch is not None:  # the Trainer does not know the length of the data set
            epoch = self.epoch + 1
        self.epoch = int(epoch)
        if epoch == self.epoch:
            for part in self.parts:
                part.on_epoch_begin(kwargs['model'], kwargs['optimizer'], self.epoch)
