"""The configs of small networks: their sizes, and that a training goes on as if it had not been stopped."""

import re
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from torch import nn

import attncnn_plugin  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / 'tools'))
from reproduction.configs import network_config, set_data, set_epochs, set_images  # noqa: E402
from reproduction.results import build, cost  # noqa: E402
from reproduction.tables import TABLES  # noqa: E402

NAMES = sorted(path.stem for path in Path(__file__).parents[1].glob('configs/small/*.py'))
QUICK = ('sa_quadratic', 'deit', 'cmhsa_narrow', 'resnet_to_attention')


def built(name):
    return build(network_config(name, {}))


def test_every_config_is_in_a_table():
    assert sorted({row.config for table in TABLES.values() for row in table.rows.values()}) == NAMES


@pytest.mark.parametrize('name', NAMES)
def test_size(name):
    """From 0.2 to 1 million parameters, in both phases."""
    model = built(name)
    counts = [sum(parameter.numel() for parameter in model.parameters())]
    for module in list(model.modules()):
        if getattr(module, 'phase', None) == 'conv':
            module.to_attention()
            counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert all(2e5 <= count <= 1e6 for count in counts), counts


def test_the_table_of_the_documentation():
    """Parameters and multiply-adds of every config, in its second phase where its name does not say another."""
    page = (Path(__file__).parents[1] / 'docs/reproduce.md').read_text()
    rows = re.findall(r'^\| (`.*) \| ([\d,]+) \| ([\d.]+)M \|$', page, re.MULTILINE)
    found = {}
    for names, parameters, multiply_adds in rows:
        for name in re.findall('`(.*?)`', names):
            model = built(name)
            for module in list(model.modules()):
                if getattr(module, 'phase', None) == 'conv' and name != 'cmhsa_conv':
                    module.to_attention()
            found[name] = f'{parameters}, {multiply_adds}'
            own = cost(model)
            assert found[name] == f'{own[0]:,}, {own[1] / 1e6:.1f}', name
    assert sorted(found) == NAMES


def test_resnet_has_the_multiply_adds_of_the_quadratic_network():
    """Counted by hand here: convolutions and linear maps, and rows and columns of the attention."""
    counted = 0

    def count(module, inputs, output):
        nonlocal counted
        counted += module.weight.numel() * output.numel() // module.weight.shape[0]

    resnet, quadratic = built('resnet'), built('sa_quadratic')
    for module in resnet.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(count)
    assert cost(resnet)[1] == counted > 0
    linear = 256 * (12 * 64 + 4 * (9 * 64 * 64 + 64 * 64 + 2 * 64 * 128)) + 64 * 10
    attention = 4 * 9 * 256 * 64 * (16 + 16)
    assert cost(quadratic)[1] == linear + attention
    assert abs(counted / (linear + attention) - 1) < 0.01


def trained(name, work_dir, epochs, resume=False, seed=3):
    """The weights of a config after three iterations an epoch on the digits."""
    config = network_config(name, {})
    set_data(config, 'digits', None, test_images=10)
    set_images(config, 30, seed)
    config.train_dataloader.batch_size = 10
    set_epochs(config, 3, 30)
    config.merge_from_dict(
        {
            'train_cfg.max_epochs': epochs,
            'work_dir': str(work_dir),
            'log_level': 'ERROR',
            'experiment_name': f'{work_dir}-{epochs}',
            'load_from': None,
            'resume': resume,
        }
    )
    runner = Runner.from_cfg(Config(config.to_dict()))
    runner.train()
    return runner.model.state_dict()


@pytest.mark.parametrize(
    'name', [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_training_that_was_stopped_ends_with_the_same_weights(name, tmp_path):
    """Number by number, with augmentation, mixed images and dropped paths."""
    whole = trained(name, tmp_path / 'whole', 3)
    trained(name, tmp_path / 'stopped', 2)
    torch.manual_seed(123)
    resumed = trained(name, tmp_path / 'stopped', 3, resume=True)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())
    assert all(torch.isfinite(value).all() for value in whole.values())
