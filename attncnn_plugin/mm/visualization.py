"""Pictures and scalars of the heads' attention while a model is trained (Cordonnier et al. 2020, Figures 3 to 5)."""

import math
from typing import Any, Dict, List, Optional

import torch
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop
from mmpretrain.registry import HOOKS
from torch import Tensor, nn

from ..analysis import AttentionMaps, attention_maps, head_centers
from ..analysis.layer_maps import attention_layers, shown_layers
from ..attention import PrunableHeads
from ..loaded_model import evenly_spread
from ..training.phases import TwoPhases
from ..training.random_state import random_numbers_kept
from ..transformers.heads import transformer_heads
from .rebuild import unwrapped
from .rehearsal import is_rehearsal, warn_of_rehearsal
from .runner import HEAD_NUMBERS


@HOOKS.register_module()
class AttentionVisualizationHook(Hook):
    """Shows where the heads of a model attend to, by the visualizer of the run: on the disk, in TensorBoard, in WandB.

    The model has attention of this package, or is a vision transformer of mmpretrain or timm: ViT, DeiT, BEiT, Swin.

    At the start, every ``interval`` epochs and at the end there are two pictures, ``attention_centers``, one panel a
    layer, and ``attention_probs``, one map a head. At the start and after every epoch each head's centre and width are
    recorded as scalars, ``attention/{layer}/head{number}/center_row``, ``…/center_column`` and ``…/width``, in tokens;
    their step is the number of epochs that are done. From them
    :func:`~attncnn_plugin.visualization.plot_center_movement` draws the way of the centres. Those of windows are means
    over queries, as in head reports. A head that gives nothing to the grid, but all to a null key, has none.

    A head keeps its number when others are pruned. Attention that depends on content is shown as its mean over some
    images of the validation set, or of the training set if there is none. A CMHSA and a
    ConvToAttention have attention from their transition on.
    The weights shown are those in training, not their average by an ``EMAHook``.

    The training is the same with this hook and without it: it draws no random numbers, and all modules stay in their
    modes. Only the first rank does anything.

    Args:
        interval (int): Number of epochs from one picture to the next. Defaults to 10.
        num_images (int): Images over which attention that depends on content is averaged. Defaults to 8.
    """

    def __init__(self, interval: int = 10, num_images: int = 8):
        for name, value in dict(interval=interval, num_images=num_images).items():
            if type(value) is not int or value < 1:
                raise ValueError(f'{name}={value!r} of AttentionVisualizationHook must be a whole number of at least 1')
        self.interval = interval
        self.num_images = num_images
        self._images = None
        self._drawn = None  # the epoch of the last pictures
        self._parameters = {}  # by layer, parameters of its heads when they were last numbered

    @master_only
    def before_train(self, runner) -> None:
        """The state at the start, or that of the checkpoint that the run goes on from.

        Raises:
            TypeError: The loop does not count epochs.
            ImportError: matplotlib is not installed.
        """
        if not isinstance(runner.train_loop, EpochBasedTrainLoop):
            raise TypeError(
                'AttentionVisualizationHook counts epochs, but the loop is a '
                f'{type(runner.train_loop).__name__}: use train_cfg=dict(by_epoch=True, …)'
            )
        if is_rehearsal(runner):
            warn_of_rehearsal(runner, 'AttentionVisualizationHook', 'There is nothing to show')
            return
        model = unwrapped(runner.model)
        waits = not attention_layers(model) and any(isinstance(module, TwoPhases) for module in model.modules())
        if not waits and not _layers(model):
            runner.logger.warning(
                'AttentionVisualizationHook shows attention of this package and of vision transformers, but the model, '
                f'of type {type(model).__name__}, has none: there is nothing to show'
            )
            return
        from .. import visualization  # noqa: F401, to fail now rather than later

        with random_numbers_kept():
            self._images = self._some_images(runner)
        if waits:
            runner.logger.info(
                'AttentionVisualizationHook has nothing to show before the convolutions turn into attention'
            )
        self._show(runner, runner.epoch, draw=True)

    @master_only
    def before_train_epoch(self, runner) -> None:
        """Numbers the heads again, for some may have been pruned."""
        self._number_heads(runner)

    @master_only
    def after_train_epoch(self, runner) -> None:
        """The scalars, and the pictures if it is their turn."""
        epochs = runner.epoch + 1
        self._show(runner, epochs, draw=epochs % self.interval == 0 or epochs == runner.max_epochs)

    @master_only
    def after_train(self, runner) -> None:
        """The pictures of a training that was stopped before its last epoch."""
        if self._drawn != runner.epoch:
            self._show(runner, runner.epoch, draw=True)

    def _show(self, runner, epochs: int, draw: bool) -> None:
        """Records the scalars after some epochs, and draws the pictures."""
        model = unwrapped(runner.model)
        layers = _layers(model)
        if not layers:
            return
        numbers = self._number_heads(runner)
        with random_numbers_kept(), torch.no_grad():
            maps, scalars = attention_maps(model, self._images), {}
            for name, own in maps.items():
                centers, widths = head_centers(own)
                for number, center, width in zip(numbers[name], centers.tolist(), widths.tolist()):
                    if math.isnan(width):  # the head looks at nothing in the grid
                        continue
                    values = dict(center_row=center[0], center_column=center[1], width=width)
                    scalars.update({f'attention/{name}/head{number}/{key}': value for key, value in values.items()})
            runner.visualizer.add_scalars(scalars, step=epochs)
            if draw:
                self._draw(runner, maps, numbers, epochs)

    def _draw(self, runner, maps: Dict[str, AttentionMaps], numbers: Dict[str, List[int]], epochs: int) -> None:
        from ..visualization import plot_attention_centers, plot_attention_probs
        from ..visualization.style import image_of

        figures = dict(
            attention_centers=plot_attention_centers(maps, numbers=numbers),
            attention_probs=plot_attention_probs(maps, numbers=numbers),
        )
        for name, figure in figures.items():
            runner.visualizer.add_image(name, image_of(figure), step=epochs)
        self._drawn = epochs

    def _some_images(self, runner) -> Tensor:
        """Images of the validation set, evenly spread, as the model takes them, ``(B, C, H, W)``."""
        loader = runner.train_dataloader if runner.val_loop is None else runner.val_dataloader
        samples = [loader.dataset[i] for i in evenly_spread(len(loader.dataset), self.num_images)]
        inputs = unwrapped(runner.model).data_preprocessor(loader.collate_fn(samples), False)['inputs']
        return inputs if isinstance(inputs, Tensor) else inputs[0]  # the first view of self-supervised learning

    def _number_heads(self, runner) -> Dict[str, List[int]]:
        """The numbers of the heads by layer: those that they had when the layer had all of its heads.

        Checkpoints hold them, as the entry ``HEAD_NUMBERS`` of the message hub.
        """
        info, model = runner.message_hub.runtime_info, unwrapped(runner.model)
        known, numbers, parameters = info.get(HEAD_NUMBERS, {}), {}, {}
        for name, layer in _layers(model).items():
            parameters[name] = head_parameter(layer)
            numbers[name] = list(known.get(name, range(layer.num_heads)))
            if len(numbers[name]) != layer.num_heads:
                left = heads_left(self._parameters.get(name), parameters[name])
                numbers[name] = list(range(layer.num_heads)) if left is None else [numbers[name][i] for i in left]
        self._parameters = parameters
        runner.message_hub.update_info(HEAD_NUMBERS, numbers)
        return numbers


def _layers(model: nn.Module) -> Dict[str, Any]:
    """The layers whose heads can be shown: none before the convolutions of a network turn into attention."""
    try:
        return shown_layers(model)
    except ValueError:  # there are none
        return {}


def head_parameter(layer: nn.Module) -> Optional[Tensor]:
    """A parameter with an entry for each head, by which heads can be recognized after others were pruned.

    Returns:
        Tensor | None: ``(N_h, n)``, the first parameter of heads that pruning only shortens: ``value.weight`` changes,
        as what a pruned head did is added to others. None for a layer whose heads cannot be pruned.
    """
    if not isinstance(layer, PrunableHeads):
        heads = transformer_heads(layer)
        if heads is None:
            return None
        name, (dim, maps, width) = next(iter(heads.layout.items()))  # queries come first
        entries = layer.get_parameter(name).detach().clone().movedim(dim, 0)
        return entries.unflatten(0, (maps, heads.num_heads, width))[0].flatten(1)
    places = layer.head_parameters().items()
    name, (dim, width) = next((name, place) for name, place in places if name != 'value.weight')
    if not isinstance(width, int):
        return None
    entries = layer.get_parameter(name).detach().clone().movedim(dim, 0)
    return entries.unflatten(0, (layer.num_heads, width)).flatten(1)


def heads_left(before: Optional[Tensor], after: Optional[Tensor]) -> Optional[List[int]]:
    """The heads that are left after others were pruned, by their entries in :func:`head_parameter`.

    Args:
        before (Tensor, optional): The entries before, ``(N_h, n)``.
        after (Tensor, optional): The entries after, of fewer heads in the same order.

    Returns:
        list[int] | None: The places that these heads had before, rising. None if they cannot be found there.

    Examples:
        >>> heads_left(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [3.0]]))
        [0, 2]
    """
    if before is None or after is None:
        return None
    left: List[int] = []
    for entry in after:
        places = range(left[-1] + 1 if left else 0, len(before))
        place = next((place for place in places if torch.equal(before[place], entry)), None)
        if place is None:
            return None
        left.append(place)
    return left
