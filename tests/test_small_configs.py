"""The configs of small networks: their sizes, and that a training goes on as if it had not been stopped."""

import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from reproduction.configs import network_config, set_data, set_epochs, set_images
from reproduction.results import build, cost
from reproduction.tables import TABLES

import attncnn_plugin  # noqa: F401

NAMES = sorted(path.stem for path in Path(__file__).parents[1].glob('configs/small/*.py'))
QUICK = ('deit', 'cmhsa_narrow')


def test_every_config_is_in_a_table():
    assert sorted({row.config for table in TABLES.values() for row in table.rows.values()}) == NAMES


def test_sizes():
    """From 0.2 to 1 million parameters, in both phases; the page has those of the second phase, and multiply-adds."""
    page = (Path(__file__).parents[1] / 'docs/reproduce.md').read_text()
    rows = re.findall(r'^\| (`.*) \| ([\d,]+) \| ([\d.]+)M \|$', page, re.MULTILINE)
    found = {name: tuple(numbers) for names, *numbers in rows for name in re.findall('`(.*?)`', names)}
    assert sorted(found) == NAMES
    for name in NAMES:
        model = build(network_config(name, {}))
        assert 2e5 <= sum(parameter.numel() for parameter in model.parameters()) <= 1e6, name
        if getattr(model.backbone, 'phase', None) == 'conv' and name != 'cmhsa_conv':
            model.backbone.to_attention()
        parameters, multiply_adds = cost(model)
        assert found[name] == (f'{parameters:,}', f'{multiply_adds / 1e6:.1f}') and 2e5 <= parameters <= 1e6, name


def test_resnet_has_the_multiply_adds_of_the_quadratic_network():
    """Counted by hand here: linear maps, and rows and columns of the attention."""
    resnet, quadratic = (cost(build(network_config(name, {})))[1] for name in ('resnet', 'sa_quadratic'))
    linear = 256 * (12 * 64 + 4 * (9 * 64 * 64 + 64 * 64 + 2 * 64 * 128)) + 64 * 10
    assert quadratic == linear + 4 * 9 * 256 * 64 * (16 + 16) and abs(resnet / quadratic - 1) < 0.01


def trained(name, work_dir, epochs, resume=False):
    """The weights of a config after three iterations an epoch on the digits."""
    config = network_config(name, {})
    set_data(config, 'digits', None, test_images=10)
    set_images(config, 30, seed=3)
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
