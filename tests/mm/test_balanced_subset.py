"""Class-balanced parts of datasets."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mmengine.dataset import BaseDataset, ConcatDataset
from mmengine.registry import DefaultScope
from mmpretrain.registry import DATASETS

from attncnn_plugin.mm.datasets import BalancedSubset


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        yield


@DATASETS.register_module()
class LabelsAlone(BaseDataset):
    """Images of given labels, which are their numbers."""

    def __init__(self, labels, **kwargs):
        self.labels = labels
        classes = tuple(f'class {i}' for i in range(max(np.ravel(labels)) + 1))
        super().__init__(metainfo=dict(classes=classes), **kwargs)

    def load_data_list(self):
        return [dict(number=i, gt_label=label) for i, label in enumerate(self.labels)]


def subset_of(labels, num_images, **kwargs):
    dataset = dict(type='LabelsAlone', labels=list(labels))
    return DATASETS.build(dict(type='BalancedSubset', dataset=dataset, num_images=num_images, **kwargs))


def numbers(subset):
    return [subset[i]['number'] for i in range(len(subset))]


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99), data=st.data())
def test_as_many_of_each_class_and_nested(counts, seed, data):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts)).tolist()
    larger = data.draw(st.integers(1, len(counts) * min(counts)))
    smaller = data.draw(st.integers(1, larger))
    subsets = [subset_of(labels, number, seed=seed) for number in (smaller, larger)]
    for number, subset in zip((smaller, larger), subsets):
        chosen = numbers(subset)
        assert len(subset) == number == len(set(chosen)) and chosen == sorted(chosen)
        assert np.ptp(np.bincount([labels[i] for i in chosen], minlength=len(counts))) == (number % len(counts) > 0)
        assert subset.get_gt_labels().tolist() == [labels[i] for i in chosen]
        assert [subset.get_cat_ids(i) for i in range(number)] == [[labels[i]] for i in chosen]
        assert [subset.get_data_info(i)['number'] for i in range(number)] == chosen
    assert set(numbers(subsets[0])) <= set(numbers(subsets[1]))


def test_the_seed_decides():
    labels = list(range(5)) * 20
    drawn = [numbers(subset_of(labels, 50, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    often = np.bincount(np.concatenate([numbers(subset_of(labels, 50, seed=seed)) for seed in range(100)]))
    assert often.min() > 25 and often.max() < 75  # each image as likely as any other


def test_classes_of_one_name():
    """ImageNet has two cranes, the bird and the machine."""
    dataset = LabelsAlone([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    dataset._metainfo['classes'] = ('crane', 'heron', 'crane')
    assert np.bincount(BalancedSubset(dataset, 9).get_gt_labels()).tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match='at most 9: the dataset has 10 images in 3 classes, and 3 of the class heron'):
        BalancedSubset(dataset, 10)


def test_labels_without_a_name():
    dataset = LabelsAlone([0, 1, 1, 2])
    dataset._metainfo['classes'] = ('zero', 'one')
    assert BalancedSubset(dataset, 3).get_gt_labels().tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match='at most 3: the dataset has 4 images in 3 classes'):
        BalancedSubset(dataset, 4)


def test_as_wrappers_of_mmengine():
    lazy = subset_of([0, 1, 0, 1], 2, lazy_init=True)
    assert lazy.metainfo == dict(classes=('class 0', 'class 1')) and 'not read yet' in repr(lazy)
    lazy.metainfo['classes'] = ()
    assert len(lazy.metainfo['classes']) == 2
    lazy.full_init()
    copy = pickle.loads(pickle.dumps(lazy))
    assert numbers(copy) == numbers(lazy) and 'BalancedSubset of 2 images, seed 0, read, of\n' in repr(copy)
    with pytest.raises(NotImplementedError, match='give another num_images'):
        lazy.get_subset([0])
    inner = subset_of([0, 1] * 10, 10)
    again = DATASETS.build(dict(type='BalancedSubset', dataset=inner, num_images=4))
    assert set(numbers(again)) < set(numbers(inner))
    concatenated = ConcatDataset([LabelsAlone([0, 0, 1]), LabelsAlone([1, 0, 1])])
    balanced = DATASETS.build(dict(type='BalancedSubset', dataset=concatenated, num_images=4))
    assert np.bincount(balanced.get_gt_labels()).tolist() == [2, 2]


def test_digits():
    digits = dict(type='Digits', split='train', pipeline=[dict(type='PackInputs')])
    subset = DATASETS.build(dict(type='BalancedSubset', dataset=digits, num_images=100))
    assert subset[99]['inputs'].shape == (1, 8, 8) and subset.metainfo['classes'][9] == '9'
    assert np.bincount([subset[i]['data_samples'].gt_label.item() for i in range(100)]).tolist() == [10] * 10


@pytest.mark.parametrize(
    'labels, num_images, message',
    [
        ([0, 1, 1], 3, 'num_images=3 .* at most 2: the dataset has 3 images in 2 classes, and 1 of the class class 0'),
        ([0, 2, 2], 1, 'num_images=1 .* at most 0: .* and 0 of the class class 1'),
        ([0, 1], 0, 'num_images=0 of BalancedSubset must be'),
        ([0, 1], 1.5, 'num_images=1.5 of BalancedSubset must be'),
        ([[0, 1], [1, 1]], 1, r'image 0 of LabelsAlone has gt_label=\[0, 1\]'),
        ([0, -1], 1, r'image 1 of LabelsAlone has gt_label=\[-1\]'),
    ],
)
def test_errors(labels, num_images, message):
    with pytest.raises(ValueError, match=message):
        subset_of(labels, num_images)


def test_no_dataset():
    with pytest.raises(TypeError, match=r'dataset=\[1\] of BalancedSubset must be a dataset'):
        DATASETS.build(dict(type='BalancedSubset', dataset=[1], num_images=1))
