"""The last line of a tool's output: what is missing, and what would do; and settings that are refused at once."""

import importlib
import sys
from urllib.error import URLError

import mmengine
import pytest
import torch
from helpers.digits import run, small_config
from mmpretrain.datasets import utils
from mmpretrain.registry import DATASETS, HOOKS, MODELS

import attncnn_plugin
from attncnn_plugin import installation as frameworks
from attncnn_plugin import mm
from attncnn_plugin.mm import tools
from attncnn_plugin.mm.tools import one_line

OPTIONS = ' '.join(f'{phase}_dataloader.dataset.data_root=FOLDER' for phase in ('train', 'val', 'test'))


@pytest.fixture
def no_network(monkeypatch):
    def fail(url, *args, **kwargs):
        raise URLError('Name or service not known')

    monkeypatch.setattr(utils, 'download_url_to_file', fail)


@pytest.mark.parametrize('name', ['train.py', 'test.py'])
def test_data_set_that_cannot_be_downloaded(name, tool, no_network, repository, tmp_path, monkeypatch):
    """The option for its folder; mmpretrain prints which files it is, and where they were to go."""
    config = str(repository / 'configs/cmhsa5_cifar100.py')
    checkpoint = [] if name == 'train.py' else ['nothing.pth']
    small = ['model.backbone.num_layers=1', 'train_dataloader.num_workers=0']
    small += ['train_dataloader.persistent_workers=False']
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        tool(name, config, *checkpoint, '--work-dir', 'out', '--cfg-options', *small)
    assert end.value.code == (
        'a data set is not there and cannot be downloaded (URLError: <urlopen error Name or service not known>): '
        f'name its folder: --cfg-options {OPTIONS}'
    )


@pytest.mark.parametrize(
    'name, arguments', [('train.py', []), ('test.py', ['x.pth']), ('mmpretrain_tool.py', ['--not-show'])]
)
def test_config_that_is_not_there(name, arguments, tool, tmp_path, monkeypatch):
    first = ['visualization/vis_scheduler.py'] if name == 'mmpretrain_tool.py' else []
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        tool(name, *first, 'configs/sa_quadratik_digits.py', *arguments)
    assert end.value.code.endswith("No such file or directory: 'configs/sa_quadratik_digits.py'")


def test_other_errors_of_data_sets(no_network, tmp_path):
    """Those that say already what is missing stay as they are."""
    with pytest.raises(RuntimeError) as caught:
        DATASETS.build(dict(type='CIFAR10', data_root=str(tmp_path), download=False))
    assert one_line(caught.value).startswith('RuntimeError: Cannot find CIFAR10 dataset in')


def test_the_name_of_a_config():
    with pytest.raises(FileNotFoundError, match="name='sa_nonsense.py' is no config of attncnn_plugin, which .*sa_q"):
        attncnn_plugin.config_path('sa_nonsense.py')
    assert tools.read_config('sa_quadratic_digits.py').model.backbone.type == 'SAQuadratic'  # its name is enough


@pytest.mark.parametrize(
    'module, reason', [('mmpretrain.models', 'mmpretrain.models'), ('mmpretrain', 'import of mmpretrain halted')]
)
def test_mmpretrain_that_cannot_be_imported(module, reason, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(frameworks, 'has_mmpretrain', lambda: True)
    problem = frameworks.import_problem()
    assert problem.startswith('mmpretrain does not work with the versions that are installed (')
    assert reason in problem and 'mmcv-lite>=2.0,<2.4' in problem and len(problem.splitlines()) == 1
    with pytest.raises(ImportError, match='mmpretrain does not work with the versions'):
        importlib.reload(mm)


def test_mmpretrain_that_is_missing(monkeypatch):
    monkeypatch.setattr(frameworks, 'has_mmpretrain', lambda: False)
    assert frameworks.import_problem().startswith('mmpretrain is not installed: pip install mmpretrain')
    with pytest.raises(ImportError, match='mmpretrain is not installed'):
        importlib.reload(mm)


def test_mmengine_without_setuptools(monkeypatch):
    def no_pkg_resources(package):
        raise ModuleNotFoundError("No module named 'pkg_resources'")

    monkeypatch.setattr(mmengine.utils, 'get_installed_path', no_pkg_resources)
    problem = frameworks.import_problem()
    assert "installed (No module named 'pkg_resources'): pip" in problem and problem.endswith('"setuptools<82"')


@pytest.mark.parametrize(
    'out_type, parts, said',
    [
        ('avg_featmap', dict(neck=dict(type='mmpretrain.GlobalAveragePooling')), 'the features are pooled already: '),
        ('featmap', {}, 'the head does not fit: without a neck, write out_type="avg_featmap" in backbone; or in_ch'),
    ],
)
def test_pooled_twice_or_never(out_type, parts, said):
    """As of a config of a ResNet, or of a ConvNeXt, that another one inherits from."""
    arch = dict(embed_dims=12, num_layers=1, num_heads=3, feedforward_channels=12)
    backbone = dict(type='mmpretrain.SAQuadratic', arch=arch, out_type=out_type)
    head = dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=12)
    model = MODELS.build(dict(type='mmpretrain.ImageClassifier', backbone=backbone, head=head, **parts))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        model(torch.rand(1, 3, 8, 8))
    assert f'; {said}' in one_line(caught.value)


@pytest.mark.parametrize(
    'name, settings, message',
    [
        (
            'PhaseTransitionHook',
            dict(epoch=-1),
            'epoch=-1 of PhaseTransitionHook must be whole numbers, counted from 0',
        ),
        ('PhaseTransitionHook', dict(epoch=1.5), 'epoch=1.5 of PhaseTransitionHook must be'),
        ('PhaseTransitionHook', dict(iter='3'), "iter='3' of PhaseTransitionHook must be whole numbers"),
        ('PhaseTransitionHook', dict(epoch=[1, 2]), r'epoch=\[1, 2\] of PhaseTransitionHook must be whole'),
        ('PhaseTransitionHook', {}, 'PhaseTransitionHook: give one, the end of'),
        ('PhaseTransitionHook', dict(epoch=1, iter=2), 'epoch=1 and iter=2 of PhaseTransitionHook: give one'),
        ('HeadPruningHook', dict(epochs=[-1]), r'epoch=\[-1\] of PruneHeads must be whole numbers, counted'),
        ('HeadPruningHook', dict(num_batches=0), 'num_batches=0 of HeadPruningHook must be at least 1'),
        ('AttentionVisualizationHook', dict(interval=0), 'interval=0 of AttentionVisualizationHook must be'),
        ('AttentionVisualizationHook', dict(interval=1.5), 'interval=1.5 of AttentionVisualizationHook must'),
    ],
)
def test_wrong_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        HOOKS.build(dict(type=f'mmpretrain.{name}', **settings))


@pytest.mark.parametrize(
    'name, settings',
    [
        ('PhaseTransitionHook', dict(epoch=2)),
        ('PhaseTransitionHook', dict(iter=3)),
        ('HeadPruningHook', dict(epochs=[0])),
        ('AttentionVisualizationHook', {}),
    ],
)
def test_a_loop_that_counts_something_else(name, settings, repository, tmp_path):
    config = small_config(repository, tmp_path, 'sa_quadratic_digits')
    config.custom_hooks, config.param_scheduler = [dict(type=name, **settings)], None
    unit, loop = ('iterations', 'EpochBasedTrainLoop') if 'iter' in settings else ('epochs', 'IterBasedTrainLoop')
    if unit == 'epochs':
        config.train_cfg = dict(type=loop, max_iters=4, val_interval=4)
    with pytest.raises(TypeError, match=f'{name} counts {unit}, but the loop is a {loop}'):
        run(config)
