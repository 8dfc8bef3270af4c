"""scikit-learn's handwritten digits as an mmpretrain dataset."""

from typing import List, Optional

import numpy as np
from mmpretrain.datasets import BaseDataset
from mmpretrain.registry import DATASETS


@DATASETS.register_module()
class Digits(BaseDataset):
    """The 1,797 handwritten digits that come inside scikit-learn: real images without a download.

    An image is 8x8 pixels, uint8, as ``'img'`` of shape (8, 8), or (8, 8, 3): a pipeline needs no loading step and
    resizes it at will. Every fifth image of a class is for testing: 1,433 are in the training set, 364 in the test set.

    Args:
        split (str): The dataset split, supports "train" and "test". Defaults to "train".
        color_type (str): "grayscale", or "color" for three channels, for models of colour images. Defaults to
            "grayscale".
        metainfo (dict, optional): Meta information for dataset, such as categories information. Defaults to None.
        **kwargs: Other keyword arguments in ``BaseDataset``.

    Raises:
        ValueError: There is no such split, or no such kind of image.
        ImportError: scikit-learn is not installed.
    """

    METAINFO = {'classes': tuple('0123456789')}

    def __init__(self, split: str = 'train', color_type: str = 'grayscale', metainfo: Optional[dict] = None, **kwargs):
        if split not in ('train', 'test'):
            raise ValueError(f"The split must be one of ['train', 'test'], but got {split!r}")
        if color_type not in ('grayscale', 'color'):
            raise ValueError(f"The color_type must be one of ['grayscale', 'color'], but got {color_type!r}")
        self.split = split
        self.color_type = color_type
        super().__init__(ann_file='', metainfo=metainfo, **kwargs)

    def load_data_list(self) -> List[dict]:
        """Load images and ground truth labels."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError('The digits are those of scikit-learn: pip install scikit-learn') from error
        digits = load_digits()
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # scikit-learn's grey levels are 0 to 16
        if self.color_type == 'color':
            images = np.repeat(images[..., None], 3, axis=-1)
        seen = [0] * 10
        samples = []
        for image, label in zip(images, digits.target.tolist()):
            if (seen[label] % 5 == 0) == (self.split == 'test'):
                samples.append(dict(img=image, gt_label=label))
            seen[label] += 1
        return samples

    def extra_repr(self) -> List[str]:
        """The extra repr information of the dataset."""
        return [f'Split: \t{self.split}']
