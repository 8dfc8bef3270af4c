import numpy as np
import pytest
from mmpretrain.registry import DATASETS
from sklearn.datasets import load_digits

import attncnn_plugin  # noqa: F401


def build(split):
    return DATASETS.build(dict(type='Digits', split=split, pipeline=[]))


def test_every_digit_is_in_one_split():
    train, test = build('train'), build('test')
    assert (len(train), len(test)) == (1433, 364)
    images = np.stack([dataset[i]['img'] for dataset in (train, test) for i in range(len(dataset))])
    labels = np.concatenate([train.get_gt_labels(), test.get_gt_labels()])
    assert images.shape == (1797, 8, 8) and images.dtype == np.uint8

    everything = load_digits()
    ours = sorted(zip(labels.tolist(), np.round(images / 255 * 16).reshape(1797, -1).tolist()))
    assert ours == sorted(zip(everything.target.tolist(), everything.images.reshape(1797, -1).tolist()))
    assert np.ptp(np.bincount(test.get_gt_labels())) <= 2  # as many of every class

    assert train.metainfo['classes'] == test.metainfo['classes'] == tuple('0123456789')
    assert 'Split: \ttest' in repr(test)


def test_in_colour():
    grey, colour = build('test'), DATASETS.build(dict(type='Digits', split='test', color_type='color', pipeline=[]))
    assert colour[5]['img'].shape == (8, 8, 3) and (colour[5]['img'] == grey[5]['img'][..., None]).all()


def test_wrong_split():
    with pytest.raises(ValueError, match="must be one of .* but got 'val'"):
        build('val')
    with pytest.raises(ValueError, match="must be one of .* but got 'RGB'"):
        DATASETS.build(dict(type='Digits', color_type='RGB', pipeline=[]))
