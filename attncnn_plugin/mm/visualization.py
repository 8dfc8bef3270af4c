"""Pictures and scalars of the heads' attention while a model is trained (Cordonnier et al. 2020, Figures 3 to 5)."""

import math

import torch
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmpretrain.registry import HOOKS
from torch import Tensor

from ..analysis import head_centers, mean_attention
from ..training import parts_in_phases
from ..training.loops import random_numbers_kept
from .runner import add_scalars, check_loop, head_numbers, unwrapped


@HOOKS.register_module()
class AttentionVisualizationHook(Hook):
    """Shows where the heads of a model attend to, by the visualizer of the run: on the disk, in TensorBoard, in WandB.

    The model has softmax attention between patches, of this package or of others.

    At the start, every ``interval`` epochs and at the end there are two pictures, ``attention_centers``, one panel a
    layer, and ``attention_probs``, one map a head. At the start and after every epoch each head's centre and width are
    recorded as scalars, ``attention/{layer}/head{number}/center_row``, ``…/center_column`` and ``…/width``, in tokens,
    from which :func:`~attncnn_plugin.visualization.plot_center_movement` draws the way of the centres. A head that
    gives all to a null key has none.

    A head keeps its number when others are pruned. Attention that depends on content is shown as its mean over eight
    images of the validation set, or of the training set if there is none. The weights shown are those in training, not
    their average by an ``EMAHook``. The training is the same with this hook and without it.

    Args:
        interval (int): Number of epochs from one picture to the next. Defaults to 10.
    """

    def __init__(self, interval: int = 10):
        if type(interval) is not int or interval < 1:
            raise ValueError(f'interval={interval!r} of AttentionVisualizationHook must be a whole number, at least 1')
        self.interval, self._images = interval, None

    @master_only
    def before_train(self, runner) -> None:
        """Shows the state at the start, or that of the checkpoint that the run resumes.

        Raises:
            TypeError: The loop does not count epochs.
            ValueError: The model has no attention between patches, and nothing that becomes one.
            ImportError: matplotlib is not installed.
        """
        check_loop(runner, self)
        from .. import visualization  # noqa: F401, to fail now rather than later

        with random_numbers_kept():
            self._images = self._some_images(runner)
        self._show(runner, runner.epoch, draw=True)

    @master_only
    def after_train_epoch(self, runner) -> None:
        """Records the scalars, and draws the pictures if it is their turn."""
        epochs = runner.epoch + 1
        self._show(runner, epochs, draw=epochs % self.interval == 0)

    @master_only
    def after_train(self, runner) -> None:
        """Draws the pictures of the end, which may have come early."""
        if runner.epoch % self.interval:
            self._show(runner, runner.epoch, draw=True, record=False)

    def _show(self, runner, epochs: int, draw: bool, record: bool = True) -> None:
        """Records the scalars after some epochs, and draws the pictures."""
        model, scalars = unwrapped(runner.model), {}
        with random_numbers_kept(), torch.no_grad():
            try:
                maps = mean_attention(model, self._images)
            except ValueError:
                if parts_in_phases(model, 'conv'):
                    return  # before the transition
                raise
            numbers = head_numbers(runner, {name: len(own.probs) for name, own in maps.items()})
            for name, own in maps.items():
                centers, widths = head_centers(own)
                for number, center, width in zip(numbers[name], centers.tolist(), widths.tolist()):
                    if math.isnan(width):  # the head looks at nothing in the grid
                        continue
                    values = dict(center_row=center[0], center_column=center[1], width=width)
                    scalars.update({f'attention/{name}/head{number}/{key}': value for key, value in values.items()})
        if record:
            add_scalars(runner, scalars, epochs)
        if draw:
            from ..visualization import plot_attention_centers, plot_heads
            from ..visualization.style import image_of

            plots = dict(attention_centers=plot_attention_centers, attention_probs=plot_heads)
            for name, plot in plots.items():
                runner.visualizer.add_image(name, image_of(plot(maps, numbers=numbers)), step=epochs)

    def _some_images(self, runner) -> Tensor:
        """Returns images of the validation set, evenly spread, as the model takes them, ``(B, C, H, W)``."""
        loader = runner.train_dataloader if runner.val_loop is None else runner.val_dataloader
        length = len(loader.dataset)
        number = min(length, 8)
        samples = [loader.dataset[i * length // number] for i in range(number)]
        inputs = unwrapped(runner.model).data_preprocessor(loader.collate_fn(samples), False)['inputs']
        return inputs if isinstance(inputs, Tensor) else inputs[0]  # the first view of self-supervised learning
