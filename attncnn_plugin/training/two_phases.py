"""Models that are convolutional at first and attention later (L21, section 4)."""

import inspect
import itertools
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Dict, Iterable, List, Optional, Protocol, Sequence, Union, runtime_checkable

import torch
from torch import nn

from ..attention.images import ImageAttention
from ..attention.window import CONVOLUTIONS
from ..change import Change, all_or_nothing, check_not_distributed, within
from ..convert import convs_to_attention
from ..convert.models import check_convertible
from ..convert.pixels import check_settings
from ..pruning import replace_parameters
from .loops import Optimizers, check_epochs, in_list, uncompiled


@runtime_checkable
class PhasedModule(Protocol):
    """A module whose convolutions become attention."""

    phase: str  # 'conv' or 'attn'

    def to_attention(self, generator: Optional[torch.Generator] = None) -> Change:
        """Turns the convolutions into attention, in place, and returns what has changed.

        Args:
            generator (torch.Generator, optional): Of the CPU, for whatever is drawn: the same on every rank.
        """


def parts_in_phases(model: nn.Module, phase: Optional[str] = None) -> List[PhasedModule]:
    """Returns the modules of a model whose convolutions become attention: all, or those that are in a phase."""
    modules = (module for module in model.modules() if not hasattr(module, '_orig_mod'))  # of torch.compile, the same
    parts = [module for module in modules if isinstance(module, PhasedModule)]
    return [part for part in parts if phase in (None, part.phase)]


class TwoPhases:
    """Turns the convolutions of a model into attention at the beginning of an epoch, in any training loop.

    The optimizer stays the same object and begins anew, as L21's does: it forgets its state, and parameters of
    attention join the groups of the kernels and biases whose places they take, in the order of the model. The rates are
    those of the loop's schedule, which can have a second warm-up at the same epoch.

    To resume, call :func:`follow_with_optimizer` before you load the model and the optimizer.

    Args:
        epoch (int): Number of epochs of the first phase. 0 is before the first epoch.
        layers (str | Sequence[str], optional): The convolutions to turn, names or globs such as
            ``'layer4.*.conv2'``, of a CNN. Defaults to None, means those of a model that has phases, such as a CMHSA.
        seed (int): Of what is drawn; the same on every rank. Defaults to 0.
        **settings (Any): With ``layers``: those of :func:`~attncnn_plugin.convert.conv_to_mhsa`. Heads need
            ``alpha=6`` or so to learn.

    Raises:
        TypeError: A setting is unknown.
        ValueError: ``epoch`` is no number of epochs, or settings without ``layers``.
    """

    def __init__(
        self, epoch: int, layers: Union[str, Sequence[str], None] = None, seed: int = 0, **settings: Any
    ) -> None:
        (self.epoch,) = check_epochs(f'epoch={epoch!r} of TwoPhases', [epoch])
        if settings and layers is None:
            raise ValueError(f'{settings} of TwoPhases are for the layers of a CNN: give layers, names or globs')
        unknown = settings.keys() - inspect.signature(check_settings).parameters
        if unknown:
            raise TypeError(f'TwoPhases has no argument {min(unknown)}: with layers it takes those of conv_to_mhsa')
        self.globs = [layers] if isinstance(layers, str) else layers
        self.seed, self.settings = seed, settings

    def check(self, model: nn.Module) -> None:
        """Refuses a model that cannot turn.

        Raises:
            TypeError: The model is wrapped for distributed training, or a convolution or a setting is unknown.
            ValueError: There is nothing to turn into attention, or something that cannot turn.
        """
        model = uncompiled(model)
        check_not_distributed(model, nn.DataParallel)
        phase = self._phase(model)
        if phase is None:
            phased = 'module with phases, such as a CMHSA, or a ConvToAttention of mmpretrain,'
            what = phased if self.globs is None else f'convolution layers={self.globs}'
            raise ValueError(
                f'TwoPhases finds no {what} in a {type(model).__name__}: give the model one, or name convolutions of a '
                "CNN, such as layers='layer4.*.conv2'"
            )
        if phase == 'conv' and self.globs is not None:
            check_convertible(model, self.globs, self.settings)

    def on_epoch_begin(
        self, model: nn.Module, optimizer: Optimizers, epoch: int, copies: Iterable[nn.Module] = ()
    ) -> List[Change]:
        """Turns the model, if this is the epoch; call it at the beginning of each.

        Args:
            model (nn.Module): The model. Give that in a wrapper for distributed training, ``ddp.module``, and build a
                new wrapper if something has changed.
            optimizer (Optimizer | Iterable[Optimizer]): What trains the model.
            epoch (int): Number of epochs that are over.
            copies (Iterable[nn.Module]): Averages of the model, such as the ``module`` of timm's ``ModelEmaV3``.
                Defaults to none.

        Returns:
            list[Change]: What was done; empty at other epochs, and where a checkpoint of this epoch is resumed.

        Raises:
            TypeError: The model is wrapped.
            ValueError: The model is attention before the epoch, or convolutional after it; a copy has other layers; or
                the optimizer has parameters in places of its own. Model, optimizer and copies are as they were.
        """
        self.check(model)
        model = uncompiled(model)
        phase = self._phase(model)
        if epoch < self.epoch and phase == 'attn':
            raise ValueError(
                f'the model is attention at epoch {epoch}, before epoch={self.epoch} of TwoPhases turns it: start with '
                'convolutions, or train attention without TwoPhases'
            )
        if epoch < self.epoch or phase == 'attn':
            return []
        if epoch > self.epoch:
            raise ValueError(
                f'the model has convolutions at epoch {epoch}, but epoch={self.epoch} of TwoPhases has turned them: '
                'call follow_with_optimizer(model, optimizer, state_dict) before you load, or give a later epoch'
            )
        models = [model, *map(uncompiled, copies)]
        with all_or_nothing(models, optimizers := in_list(optimizer)):
            changes = [self._turn(own, optimizers if own is model else []) for own in models]
        for own in models:
            own.zero_grad(set_to_none=True)
        return changes[0]

    def _phase(self, model: nn.Module) -> Optional[str]:
        """Returns the phase of a model; None for one that has none."""
        if self.globs is None:
            phases = {part.phase for part in parts_in_phases(model)}
            return max(phases, default=None)  # 'conv' where one is
        chosen = [own for name, own in model.named_modules() if any(fnmatchcase(name, glob) for glob in self.globs)]
        kinds = {'attn': ImageAttention, 'conv': CONVOLUTIONS}
        found = (phase for phase, kind in kinds.items() if any(isinstance(own, kind) for own in chosen))
        return next(found, None)

    def _turn(self, model: nn.Module, optimizers: Sequence[Any]) -> List[Change]:
        names: Dict[Any, str] = {module: name for name, module in model.named_modules()}
        seeded = torch.Generator().manual_seed
        if self.globs is None:
            parts = parts_in_phases(model, 'conv')
            changes = {names[part]: part.to_attention(seeded(self.seed)) for part in parts}
        else:
            changes = {'': convs_to_attention(model, self.globs, generator=seeded(self.seed), **self.settings)}
        for own, (name, change) in itertools.product(optimizers, changes.items()):
            replace_parameters(own, replace(change, replaced=within(name, change.replaced)), anew=True)
        return list(changes.values())
