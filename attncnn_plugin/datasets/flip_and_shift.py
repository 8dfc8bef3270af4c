"""Augmentation of small images a batch at a time: a loader that does so image by image takes much of a CPU's time."""

from typing import Optional

import torch
import torch.nn.functional as F
from mmpretrain.models import ClsDataPreprocessor
from mmpretrain.registry import MODELS
from torch import Tensor


@MODELS.register_module()
class FlipAndShift(ClsDataPreprocessor):
    """mmpretrain's preprocessor of images, which flips and shifts the images of a training first.

    It is what ``RandomFlip`` and ``RandomCrop`` with padding do in a pipeline (C20 and L21 have both). All images of
    a batch have the same size.

    Args:
        flip (float): Probability that an image is flipped horizontally. Defaults to 0.5.
        shift (int): The most pixels by which an image is shifted along each axis; zeros come in. Defaults to 4.
        **kwargs: Other keyword arguments in ``ClsDataPreprocessor``.

    Raises:
        ValueError: ``flip`` is no probability, or ``shift`` is negative.

    Examples:
        >>> preprocessor = FlipAndShift(flip=1, shift=0)
        >>> preprocessor(dict(inputs=[torch.tensor([[[1, 2, 3]]], dtype=torch.uint8)]), training=True)['inputs']
        tensor([[[[3., 2., 1.]]]])
    """

    def __init__(self, flip: float = 0.5, shift: int = 4, **kwargs):
        if not 0 <= flip <= 1 or shift < 0:
            raise ValueError(f'flip={flip} of FlipAndShift must be from 0 to 1, and shift={shift} at least 0')
        super().__init__(**kwargs)
        self.flip = flip
        self.shift = shift

    def forward(self, data: dict, training: bool = False) -> dict:
        """Flips and shifts the images in training, then normalizes them.

        Args:
            data (dict): Of the data loader: ``'inputs'`` are images of (C, H, W), stacked or in a list.
            training (bool): Whether to flip and shift. Defaults to False.

        Returns:
            dict: As the model takes it.
        """
        inputs = data['inputs']
        images = self.cast_data(inputs if isinstance(inputs, Tensor) else torch.stack(list(inputs)))
        if training:
            images = flip_and_shift(images, self.flip, self.shift)
        return super().forward({**data, 'inputs': images}, training)


def flip_and_shift(images: Tensor, flip: float, shift: int, generator: Optional[torch.Generator] = None) -> Tensor:
    """Flips and shifts each image of a batch.

    Args:
        images (Tensor): ``(B, C, H, W)``.
        flip (float): Probability that an image is flipped horizontally.
        shift (int): The most pixels by which it is shifted along each axis; zeros come in.
        generator (torch.Generator, optional): Of the random numbers. Defaults to None, means PyTorch's own of the CPU.

    Returns:
        Tensor: ``(B, C, H, W)``, with the channels last in memory, as convolutions on CPUs want them.
    """
    number, _, height, width = images.shape
    first_row, first_column = torch.randint(2 * shift + 1, (2, number, 1), generator=generator)
    rows, columns = first_row + torch.arange(height), first_column + torch.arange(width)  # (B, H), (B, W)
    columns = torch.where(torch.rand(number, 1, generator=generator) < flip, columns.flip(1), columns)
    image, rows, columns = (
        index.to(images.device) for index in (torch.arange(number)[:, None, None], rows[:, :, None], columns[:, None])
    )
    padded = F.pad(images, (shift, shift, shift, shift)).permute(0, 2, 3, 1)
    return padded[image, rows, columns].permute(0, 3, 1, 2)
