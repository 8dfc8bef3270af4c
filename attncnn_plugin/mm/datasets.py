"""Datasets and the augmentation of small images in mmpretrain's registries."""

from typing import List, Union

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dataset import BaseDataset
from mmpretrain.datasets import BaseDataset as ImageDataset
from mmpretrain.models import ClsDataPreprocessor
from mmpretrain.registry import DATASETS, MODELS
from torch import Tensor

from ..attention.window import check_choice


@DATASETS.register_module('BalancedSubset')
def balanced_subset(dataset: Union[BaseDataset, dict], num_images: int, seed: int = 0) -> BaseDataset:
    """Keeps ``num_images`` images of a dataset, equally many of each class: ``type='BalancedSubset'``.

    Where the number is not a multiple of that of classes, some classes have one image more. Of the same seed the images
    of a smaller number are among those of a larger one.

    Args:
        dataset (BaseDataset | dict): The dataset, or its config: one whose images have one class each, ``'gt_label'``;
            no wrapper of others.
        num_images (int): Number of images to keep.
        seed (int): Which ones. Defaults to 0.

    Raises:
        TypeError: ``dataset`` is no dataset, or one that has no parts.
        ValueError: ``num_images`` is below 1; a class has too few images; or an image has no class, or several.

    Examples:
        >>> subset = balanced_subset(dict(type='Digits', split='train', pipeline=[]), num_images=200, seed=1)
        >>> len(subset), np.bincount(subset.get_gt_labels()).tolist()
        (200, [20, 20, 20, 20, 20, 20, 20, 20, 20, 20])
    """
    dataset = DATASETS.build(dataset) if isinstance(dataset, dict) else dataset
    if not isinstance(dataset, BaseDataset):
        raise TypeError(f'dataset={dataset!r} of BalancedSubset must be a dataset of mmpretrain, or its config')
    if not isinstance(num_images, int) or num_images < 1:
        raise ValueError(f'num_images={num_images!r} of BalancedSubset must be a number of images, at least 1')
    dataset.full_init()
    labels = np.array([dataset.get_data_info(i).get('gt_label', -1) for i in range(len(dataset))])
    if labels.ndim != 1 or labels.min(initial=0) < 0:
        raise ValueError('the images of a BalancedSubset must have one gt_label each')
    counts = np.bincount(labels, minlength=len(dataset.metainfo.get('classes') or ()))
    rarest = int(counts.min(initial=len(labels)))
    if num_images > rarest * len(counts):
        raise ValueError(
            f'num_images={num_images} of BalancedSubset must be at most {rarest * len(counts)}: the dataset has '
            f'{len(labels)} images in {len(counts)} classes, and {rarest} of the rarest'
        )
    # In a random order of all images: the first one of every class, then the second one of every class, …
    order = np.random.default_rng(seed).permutation(len(labels))
    rounds = np.empty(len(labels), dtype=int)
    for label in range(len(counts)):
        rounds[labels[order] == label] = np.arange(counts[label])
    dataset.get_subset_(np.sort(order[np.argsort(rounds, kind='stable')[:num_images]]).tolist())
    return dataset


@DATASETS.register_module()
class Digits(ImageDataset):
    """The 1,797 handwritten digits that come inside scikit-learn: real images without a download.

    An image is 8x8 pixels, uint8, as ``'img'`` of shape (8, 8), or (8, 8, 3): a pipeline needs no loading step and
    resizes it at will. Every fifth image of a class is for testing: 1,433 are in the training set, 364 in the test set.

    Args:
        split (str): The dataset split, supports "train" and "test". Defaults to "train".
        color_type (str): "grayscale", or "color" for three channels. Defaults to "grayscale".
        **kwargs: Other keyword arguments in ``BaseDataset``.

    Raises:
        ValueError: There is no such split, or no such kind of image.
        ImportError: scikit-learn is not installed.
    """

    METAINFO = {'classes': tuple('0123456789')}

    def __init__(self, split: str = 'train', color_type: str = 'grayscale', **kwargs):
        check_choice('split', split, ('train', 'test'))
        check_choice('color_type', color_type, ('grayscale', 'color'))
        self.split, self.color_type = split, color_type
        super().__init__(ann_file='', **kwargs)

    def load_data_list(self) -> List[dict]:
        """Loads images and ground truth labels."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # scikit-learn's grey levels are 0 to 16
        if self.color_type == 'color':
            images = np.repeat(images[..., None], 3, axis=-1)
        labels = digits.target
        of_its_class = np.array([np.count_nonzero(labels[:i] == label) for i, label in enumerate(labels)])
        chosen = np.flatnonzero((of_its_class % 5 == 0) == (self.split == 'test'))
        return [dict(img=images[i], gt_label=int(labels[i])) for i in chosen]


@MODELS.register_module()
class FlipAndShift(ClsDataPreprocessor):
    """mmpretrain's preprocessor, which flips and shifts the images of a training first, all of the same size.

    It is what ``RandomFlip`` and ``RandomCrop`` with padding do in a pipeline (C20 and L21 have both).

    Args:
        flip (float): Probability that an image is flipped horizontally. Defaults to 0.5.
        shift (int): The most pixels by which an image is shifted along each axis; zeros come in. Defaults to 4.
        **kwargs: Other keyword arguments in ``ClsDataPreprocessor``.

    Raises:
        ValueError: ``flip`` is no probability, or ``shift`` is negative; images of several sizes in training.

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
        """Flips and shifts the images in training, then normalizes them."""
        if not training:
            return super().forward(data, training)
        inputs = data['inputs']
        sizes = sorted({tuple(image.shape[-2:]) for image in inputs})
        if len(sizes) > 1:
            raise ValueError(
                f'FlipAndShift got images of {len(sizes)} sizes, such as {sizes[0]} and {sizes[-1]}: put '
                "dict(type='Resize', scale=…) before PackInputs in the pipelines of the config"
            )
        images = self.cast_data(inputs if isinstance(inputs, Tensor) else torch.stack(list(inputs)))
        return super().forward({**data, 'inputs': self._moved(images)}, training)

    def _moved(self, images: Tensor) -> Tensor:
        """Flips and shifts each image of a batch; the result has its channels last, as CPUs convolve faster."""
        number, _, height, width = images.shape
        rows, columns = torch.randint(2 * self.shift + 1, (2, number)).tolist()
        flips = (torch.rand(number) < self.flip).tolist()
        moved = torch.empty_like(images, memory_format=torch.channels_last)
        for own, image, i, j, flip in zip(moved, F.pad(images, [self.shift] * 4), rows, columns, flips):
            image = image[:, i : i + height, j : j + width]
            own.copy_(image.flip(2) if flip else image)
        return moved
