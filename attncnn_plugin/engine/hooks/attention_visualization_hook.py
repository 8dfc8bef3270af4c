"""Pictures and scalars of what the heads attend to, while a model is trained (C20, Figures 3 to 5)."""

from typing import Dict, List, Optional

import torch
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop
from mmpretrain.registry import HOOKS
from torch import Tensor, nn

from ...analysis.attention_maps import attention_layers, depends_on_content, grid_of, mean_attention_probs_of
from ...analysis.head_centers import head_centers, query_maps
from ...layers.prunable_heads import PrunableHeads
from ...utils.runner import HEAD_NUMBERS
from ...utils.sampling import evenly_spread
from .random_state import random_numbers_kept
from .rebuild import unwrapped


@HOOKS.register_module()
class AttentionVisualizationHook(Hook):
    """Shows where the heads of a model attend to, by the visualizer of the run: on the disk, in TensorBoard, in WandB.

    At the start, every ``interval`` epochs and at the end there are two pictures, ``attention_centers``, one panel a
    layer, and ``attention_probs``, one map a head. At the start and after every epoch each head's centre and width are
    recorded as scalars, ``attention/{layer}/head{number}/center_row``, ``…/center_column`` and ``…/width``, in tokens;
    their step is the number of epochs that are done. From them
    :func:`~attncnn_plugin.visualization.figures.plot_center_movement` draws the way of the centres.

    A head keeps its number when others are pruned. Attention that depends on content is shown as its mean over some
    images of the validation set (of the training set where there is none). The weights of the training
    are the same with this hook and without it: nothing random is drawn, and all modules stay in their modes. Only the
    first rank does anything. A CMHSA has attention from its transition on. What is shown are the weights in training,
    not their average by an ``EMAHook``.

    Args:
        interval (int): Number of epochs from one picture to the next. Defaults to 10.
        num_images (int): Images to average attention over that depends on content. Defaults to 8.
    """

    def __init__(self, interval: int = 10, num_images: int = 8):
        for name, value in dict(interval=interval, num_images=num_images).items():
            if type(value) is not int or value < 1:
                raise ValueError(f'{name}={value!r} of AttentionVisualizationHook must be a whole number of at least 1')
        self.interval = interval
        self.num_images = num_images
        self._images = None
        self._size = None  # of the grid that the images are on
        self._drawn = None  # the epoch of the last pictures
        self._rows = {}  # what tells the heads of a layer apart, at the last look

    @master_only
    def before_train(self, runner) -> None:
        """The state at the start, or that of the checkpoint that the run goes on from.

        Raises:
            TypeError: The loop does not count epochs.
            ModuleNotFoundError: matplotlib is not installed.
        """
        if not isinstance(runner.train_loop, EpochBasedTrainLoop):
            raise TypeError(
                'AttentionVisualizationHook counts epochs, but the loop is a '
                f'{type(runner.train_loop).__name__}: use train_cfg=dict(by_epoch=True, …)'
            )
        from ...visualization import figures  # noqa: F401, to fail now rather than later

        with random_numbers_kept():
            self._images = self._some_images(runner)
        self._look(runner, runner.epoch, draw=True)

    @master_only
    def before_train_epoch(self, runner) -> None:
        """Follows heads that were pruned since the last look."""
        self._numbers(runner)

    @master_only
    def after_train_epoch(self, runner) -> None:
        """The scalars, and the pictures if it is their turn."""
        epochs = runner.epoch + 1
        self._look(runner, epochs, draw=epochs % self.interval == 0 or epochs == runner.max_epochs)

    @master_only
    def after_train(self, runner) -> None:
        """The pictures of a training that was stopped before its last epoch."""
        if self._drawn != runner.epoch:
            self._look(runner, runner.epoch, draw=True)

    def _look(self, runner, epochs: int, draw: bool) -> None:
        model = unwrapped(runner.model)
        layers = attention_layers(model)
        if not layers:
            return
        numbers = self._numbers(runner)
        with random_numbers_kept(), torch.no_grad():
            self._size = self._size or grid_of(model, self._images)
            by_content = mean_attention_probs_of(model, self._images)
            scalars = {}
            for name, layer in layers.items():
                centers, widths = head_centers(layer, *self._size, probs=by_content.get(name))
                for number, center, width in zip(numbers[name], centers.tolist(), widths.tolist()):
                    values = dict(center_row=center[0], center_column=center[1], width=width)
                    scalars.update({f'attention/{name}/head{number}/{key}': value for key, value in values.items()})
            runner.visualizer.add_scalars(scalars, step=epochs)
            if draw:
                self._draw(runner, model, by_content, numbers, epochs)

    def _draw(
        self, runner, model: nn.Module, by_content: Dict[str, Tensor], numbers: Dict[str, List[int]], epochs: int
    ) -> None:
        from ...visualization.figures import plot_attention_centers, plot_attention_probs
        from ...visualization.style import image_of

        maps = {
            name: query_maps(layer, *self._size, probs=by_content.get(name))
            for name, layer in attention_layers(model).items()
        }
        figures = dict(
            attention_centers=plot_attention_centers(model, *self._size, probs=by_content, numbers=numbers),
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

    def _numbers(self, runner) -> Dict[str, List[int]]:
        """What the heads of each layer were called when it had all of them; the numbers go into checkpoints."""
        info = runner.message_hub.runtime_info
        known, numbers, rows = info.get(HEAD_NUMBERS, {}), {}, {}
        for name, layer in attention_layers(unwrapped(runner.model)).items():
            rows[name] = _rows_of(layer)
            numbers[name] = list(known.get(name, range(layer.num_heads)))
            if len(numbers[name]) != layer.num_heads:
                kept = _kept(self._rows.get(name), rows[name])
                numbers[name] = list(range(layer.num_heads)) if kept is None else [numbers[name][i] for i in kept]
        self._rows = rows
        runner.message_hub.update_info(HEAD_NUMBERS, numbers)
        return numbers


def _rows_of(layer: nn.Module) -> Optional[Tensor]:
    """A parameter of each head, ``(N_h, n)``, that pruning leaves as it is; None for a layer that keeps its heads."""
    if not isinstance(layer, PrunableHeads) or depends_on_content(layer):
        return None
    name, (dim, _) = next((name, place) for name, place in layer.head_parameters().items() if name != 'value.weight')
    rows = layer.get_parameter(name).detach().clone().movedim(dim, 0)
    return rows.flatten(1) if rows.ndim > 1 else rows[:, None]


def _kept(before: Optional[Tensor], after: Optional[Tensor]) -> Optional[List[int]]:
    """Which rows are left, in order; None if they are not all among those before."""
    if before is None or after is None:
        return None
    kept = []
    for row in after:
        rest = (index for index in range(kept[-1] + 1 if kept else 0, len(before)) if torch.equal(before[index], row))
        index = next(rest, None)
        if index is None:
            return None
        kept.append(index)
    return kept
