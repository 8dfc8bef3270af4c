"""The validation loss."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.processes import run
from mmengine.config import Config
from mmengine.runner import LogProcessor, Runner
from mmpretrain.registry import METRICS
from mmpretrain.structures import DataSample

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
    """41 images: the second process has one twice, which counts once."""
    config = digits_config(repository, tmp_path)
    config.test_dataloader.dataset.indices = 41
    config.dump(tmp_path / 'config.py')
    torch.save(Runner.from_cfg(config).model.state_dict(), tmp_path / 'model.pth')
    found = []
    for tool, processes in (('python', []), ('bash', [2])):
        name = 'test.py' if tool == 'python' else 'dist_test.sh'
        out = tmp_path / f'{tool}.json'
        command = [tool, repository / 'tools' / name, tmp_path / 'config.py', tmp_path / 'model.pth', *processes]
        run(*command, '--work-dir', tmp_path, '--out', out, '--out-item', 'metrics', folder=tmp_path)
        found.append(Config.fromfile(out))
    assert found[0]['cross_entropy/mean'] == pytest.approx(found[1]['cross_entropy/mean'], rel=1e-6)
    assert np.isfinite(found[0]['cross_entropy/mean'])
