"""A part of a dataset with as many images of every class, for comparisons in little data."""

import copy
from collections import Counter
from typing import List, Union

import numpy as np
from mmengine.dataset import BaseDataset, force_full_init
from mmpretrain.registry import DATASETS


@DATASETS.register_module()
class BalancedSubset:
    """A wrapper that keeps ``num_images`` images of a dataset, as many of each class as of any other.

    Where the number is not a multiple of that of classes, some classes have one image more. Of the same seed the images
    of a smaller number are among those of a larger one. The images have the order of the dataset. The dataset stays in
    memory as a whole; mmengine's ``ClassBalancedDataset``, on the other hand, repeats images of rare classes.

    Args:
        dataset (BaseDataset | dict): The dataset, or its config: one whose images have one class each, ``'gt_label'``.
            Any wrapper of mmengine with ``get_data_info`` will do too.
        num_images (int): Number of images to keep.
        seed (int): Which ones. Defaults to 0.
        lazy_init (bool): Whether the dataset is read later, by ``full_init()``. Defaults to False.

    Raises:
        TypeError: ``dataset`` is no dataset.
        ValueError: ``num_images`` is below 1; a class has too few images; or, from ``full_init()``, an image has no
            class, or several.

    Examples:
        >>> from mmpretrain.registry import DATASETS
        >>> digits = dict(type='Digits', split='train', pipeline=[])
        >>> subset = DATASETS.build(dict(type='BalancedSubset', dataset=digits, num_images=200, seed=1))
        >>> len(subset), np.bincount(subset.get_gt_labels()).tolist()
        (200, [20, 20, 20, 20, 20, 20, 20, 20, 20, 20])
    """

    def __init__(self, dataset: Union[BaseDataset, dict], num_images: int, seed: int = 0, lazy_init: bool = False):
        self.dataset = DATASETS.build(dataset) if isinstance(dataset, dict) else dataset
        if not hasattr(self.dataset, 'get_data_info'):
            raise TypeError(
                f'dataset={dataset!r} of BalancedSubset must be a dataset of mmengine or mmpretrain, or its config'
            )
        if not isinstance(num_images, int) or num_images < 1:
            raise ValueError(f'num_images={num_images!r} of BalancedSubset must be a number of images, at least 1')
        self.num_images = num_images
        self.seed = seed
        self._metainfo = self.dataset.metainfo
        self._fully_initialized = False
        if not lazy_init:
            self.full_init()

    @property
    def metainfo(self) -> dict:
        """A copy of the meta information of the dataset."""
        return copy.deepcopy(self._metainfo)

    def full_init(self) -> None:
        """Reads the dataset, and draws the images."""
        if self._fully_initialized:
            return
        self.dataset.full_init()
        labels = [self._label(i) for i in range(len(self.dataset))]
        self._check_classes(labels)
        # In a random order of all images: the first one of every class, then the second one of every class, …
        order = np.random.default_rng(self.seed).permutation(len(labels))
        seen: Counter = Counter()
        rounds = []
        for i in order:
            rounds.append(seen[labels[i]])
            seen[labels[i]] += 1
        self.indices = np.sort(order[np.argsort(rounds, kind='stable')[: self.num_images]])
        self._labels = np.array(labels)[self.indices]
        self._fully_initialized = True

    def _label(self, index: int) -> int:
        label = np.atleast_1d(self.dataset.get_data_info(index).get('gt_label', []))
        if label.shape != (1,) or label[0] < 0:
            raise ValueError(
                f'image {index} of {type(self.dataset).__name__} has gt_label={label.tolist()}, but BalancedSubset is '
                'for images of one class each'
            )
        return int(label[0])

    def _check_classes(self, labels: List[int]) -> None:
        names = self._metainfo.get('classes') or ()
        counts = np.bincount(np.array(labels, dtype=int), minlength=len(names))  # classes may have one name, as cranes
        rarest = counts.argmin() if len(counts) else None
        fewest = 0 if rarest is None else counts[rarest]
        most = len(counts) * fewest
        if self.num_images > most:
            name = names[rarest] if rarest is not None and rarest < len(names) else rarest
            raise ValueError(
                f'num_images={self.num_images} of BalancedSubset must be at most {most}: the dataset has '
                f'{len(labels)} images in {len(counts)} classes, and {fewest} of the class {name}'
            )

    @force_full_init
    def __len__(self) -> int:
        return len(self.indices)

    @force_full_init
    def __getitem__(self, idx: int):
        return self.dataset[int(self.indices[idx])]

    @force_full_init
    def get_data_info(self, idx: int) -> dict:
        """Get annotation by index."""
        return self.dataset.get_data_info(int(self.indices[idx]))

    @force_full_init
    def get_cat_ids(self, idx: int) -> List[int]:
        """Get category id by index."""
        return [int(self._labels[idx])]

    @force_full_init
    def get_gt_labels(self) -> np.ndarray:
        """Get all ground-truth labels."""
        return self._labels.copy()

    def get_subset_(self, indices: Union[List[int], int]) -> None:
        """Not supported, as in mmengine's wrappers."""
        raise NotImplementedError('BalancedSubset has no get_subset: give another num_images')

    get_subset = get_subset_

    def __repr__(self) -> str:
        state = 'read' if self._fully_initialized else 'not read yet'
        dataset = '\n'.join(f'    {line}' for line in repr(self.dataset).splitlines())
        return f'BalancedSubset of {self.num_images} images, seed {self.seed}, {state}, of\n{dataset}'
