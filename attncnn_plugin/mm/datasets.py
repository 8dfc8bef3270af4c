"""Datasets in mmpretrain's registry: the digits of scikit-learn, and parts of any other."""

from typing import List, Union

import numpy as np
from mmengine.dataset import BaseDataset
from mmpretrain.datasets import BaseDataset as ImageDataset
from mmpretrain.registry import DATASETS

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
        NotImplementedError: mmengine takes no part of ``dataset``, a wrapper of others.
        ValueError: ``num_images`` is below 1; a class has too few images; or an image has no class, or several.

    Examples:
        >>> subset = balanced_subset(dict(type='Digits', split='train', pipeline=[]), num_images=200, seed=1)
        >>> len(subset), np.bincount(subset.get_gt_labels()).tolist()
        (200, [20, 20, 20, 20, 20, 20, 20, 20, 20, 20])
    """
    dataset = DATASETS.build(dataset) if isinstance(dataset, dict) else dataset
    dataset.full_init()
    labels = np.array([dataset.get_data_info(i).get('gt_label', -1) for i in range(len(dataset))])
    if labels.ndim != 1 or labels.min(initial=0) < 0:
        raise ValueError('the images of a BalancedSubset must have one gt_label each')
    counts = np.bincount(labels, minlength=len(dataset.metainfo.get('classes') or ()))
    rarest = int(counts.min(initial=len(labels)))
    if not 1 <= num_images <= rarest * len(counts):
        raise ValueError(
            f'num_images={num_images} of BalancedSubset must be from 1 to {rarest * len(counts)}: the dataset has '
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
