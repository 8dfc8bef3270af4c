"""Datasets, parts of them, and the validation loss."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.processes import free_port, run
from hypothesis import given
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.dataset import BaseDataset, ConcatDataset
from mmengine.registry import DefaultScope
from mmengine.runner import LogProcessor, Runner
from mmpretrain.registry import DATASETS, METRICS
from mmpretrain.structures import DataSample
from sklearn.datasets import load_digits

from attncnn_plugin.mm.datasets import balanced_subset


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
    dataset = dict(type='LabelsAlone', labels=list(labels), serialize_data=False)
    return DATASETS.build(dict(type='BalancedSubset', dataset=dataset, num_images=num_images, **kwargs))


def labels_of(subset):
    return [subset.get_data_info(i)['gt_label'] for i in range(len(subset))]


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
        assert labels_of(subset) == [labels[i] for i in chosen]
    assert set(numbers(subsets[0])) <= set(numbers(subsets[1]))


def test_the_seed_decides():
    labels = list(range(5)) * 20
    drawn = [numbers(subset_of(labels, 50, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    often = np.bincount(np.concatenate([numbers(subset_of(labels, 50, seed=seed)) for seed in range(100)]))
    assert often.min() > 25 and often.max() < 75  # each image as likely as any other


@pytest.mark.parametrize(
    'labels, classes, largest, message',
    [  # ImageNet has two cranes, the bird and the machine
        ([0, 0, 0, 0, 1, 1, 1, 2, 2, 2], ('crane', 'heron', 'crane'), 9, '10 images in 3 classes, and 3 of the rarest'),
        ([0, 1, 1, 2], ('zero', 'one'), 3, '4 images in 3 classes'),
    ],
)
def test_classes_of_one_name_or_of_none(labels, classes, largest, message):
    dataset = LabelsAlone(labels)
    dataset._metainfo['classes'] = classes
    with pytest.raises(ValueError, match=f'from 1 to {largest}: the dataset has {message}'):
        balanced_subset(dataset, largest + 1)
    assert np.bincount(labels_of(balanced_subset(dataset, largest))).tolist() == [largest // 3] * 3


@pytest.mark.parametrize(
    'labels, num_images, message',
    [
        ([0, 1, 1], 3, 'num_images=3 .* from 1 to 2: the dataset has 3 images in 2 classes, and 1 of the rarest'),
        ([0, 2, 2], 1, 'num_images=1 .* from 1 to 0: .* in 3 classes, and 0 of the rarest'),
        ([0, 1], 0, 'num_images=0 of BalancedSubset must be'),
        ([[0, 1], [1, 1]], 1, 'the images of a BalancedSubset must have one gt_label each'),
        ([0, -1], 1, 'the images of a BalancedSubset must have one gt_label each'),
    ],
)
def test_parts_that_cannot_be_had(labels, num_images, message):
    with pytest.raises(ValueError, match=message):
        subset_of(labels, num_images)


def test_no_part_of_several_datasets():
    with pytest.raises(NotImplementedError, match='get_subset_'):
        balanced_subset(ConcatDataset([LabelsAlone([0, 1])]), num_images=2)


def digits(split):
    return DATASETS.build(dict(type='Digits', split=split, pipeline=[]))


def test_every_digit_is_in_one_split():
    train, test = digits('train'), digits('test')
    assert (len(train), len(test)) == (1433, 364)
    images = np.stack([dataset[i]['img'] for dataset in (train, test) for i in range(len(dataset))])
    labels = np.concatenate([train.get_gt_labels(), test.get_gt_labels()])
    assert images.shape == (1797, 8, 8) and images.dtype == np.uint8

    everything = load_digits()
    ours = sorted(zip(labels.tolist(), np.round(images / 255 * 16).reshape(1797, -1).tolist()))
    assert ours == sorted(zip(everything.target.tolist(), everything.images.reshape(1797, -1).tolist()))
    assert np.ptp(np.bincount(test.get_gt_labels())) <= 2  # as many of every class

    assert train.metainfo['classes'] == test.metainfo['classes'] == tuple('0123456789')


def test_in_colour():
    grey, colour = digits('test'), DATASETS.build(dict(type='Digits', split='test', color_type='color', pipeline=[]))
    assert colour[5]['img'].shape == (8, 8, 3) and (colour[5]['img'] == grey[5]['img'][..., None]).all()


def test_wrong_split():
    with pytest.raises(ValueError, match="split='val' is unknown: choose one of"):
        digits('val')
    with pytest.raises(ValueError, match="color_type='RGB' is unknown"):
        DATASETS.build(dict(type='Digits', color_type='RGB', pipeline=[]))


METRIC_LIST = [dict(type='Accuracy', topk=(1,)), dict(type='CrossEntropy')]


def digits_config(repository, work_dir):
    config = Config.fromfile(repository / 'configs/sa_quadratic_digits.py')
    config.val_evaluator = config.test_evaluator = METRIC_LIST
    config.work_dir, config.log_level = str(work_dir), 'WARNING'
    return config


def test_logs_have_the_value_of_each_validation():
    """And not the mean of the last ten, as those of losses and times."""
    metric = METRICS.build(dict(type='CrossEntropy'))
    metric.process({}, [dict(pred_score=torch.tensor([0.25, 0.75]), gt_label=torch.tensor([1]))])
    (name,) = metric.evaluate(1)
    assert not re.search(LogProcessor().mean_pattern, f'val/{name}')


def test_it_is_the_loss_of_the_classifier(repository, tmp_path):
    """Against torch's cross entropy of all test images at once; the batches of the loader are not of one size."""
    config = digits_config(repository, tmp_path)
    config.test_dataloader.batch_size = 50
    config.experiment_name = 'cross_entropy'
    runner = Runner.from_cfg(config)
    dataset = runner.build_dataloader(config.test_dataloader).dataset
    images = torch.stack([sample['inputs'] for sample in dataset]).float()
    labels = torch.cat([sample['data_samples'].gt_label for sample in dataset])
    model = runner.model.eval()
    with torch.no_grad():
        logits = model((images - 77.9) / 95.9)
    found = runner.test()
    assert found['cross_entropy/mean'] == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=1e-5)
    assert list(found) == ['accuracy/top1', 'cross_entropy/mean']  # save_best='auto' goes by the first


def test_certain_and_wrong():
    """A probability that underflows has a loss that is finite, and said in the docstring; NaN stays NaN."""
    metric = METRICS.build(dict(type='CrossEntropy'))
    scores = torch.tensor([1000.0, 0.0]).softmax(0)
    metric.process({}, [dict(pred_score=scores, gt_label=torch.tensor([label])) for label in (0, 1)])
    assert metric.evaluate(2) == {'cross_entropy/mean': pytest.approx(-math.log(2**-126) / 2, rel=1e-6)}
    metric.process({}, [dict(pred_score=torch.full((2,), math.nan), gt_label=torch.tensor([0]))])
    assert math.isnan(metric.evaluate(1)['cross_entropy/mean'])


def test_several_classes_are_refused():
    sample = DataSample().set_pred_score(torch.tensor([0.5, 0.5])).set_gt_label([0, 1])
    with pytest.raises(ValueError, match=r'gt_label=\[0, 1\] must be one class'):
        METRICS.build(dict(type='CrossEntropy')).process({}, [sample.to_dict()])


@pytest.mark.slow
def test_two_processes_have_the_loss_of_one(repository, tmp_path):
    """41 images: the second process has one twice, which counts once. On a port that is given."""
    config = digits_config(repository, tmp_path)
    config.test_dataloader.dataset.indices = 41
    config.dump(tmp_path / 'config.py')
    torch.save(Runner.from_cfg(config).model.state_dict(), tmp_path / 'model.pth')
    found = []
    for tool, name, processes, variables in (
        ('python', 'test.py', [], {}),
        ('bash', 'dist_test.sh', [2], dict(PORT=free_port())),
    ):
        out = tmp_path / f'{tool}.json'
        command = [tool, repository / 'tools' / name, tmp_path / 'config.py', tmp_path / 'model.pth', *processes]
        run(*command, '--work-dir', tmp_path, '--out', out, '--out-item', 'metrics', folder=tmp_path, **variables)
        found.append(Config.fromfile(out))
    assert found[0]['cross_entropy/mean'] == pytest.approx(found[1]['cross_entropy/mean'], rel=1e-6)
    assert np.isfinite(found[0]['cross_entropy/mean'])
