"""The last line of a tool's output: what is missing, and what would do."""

import runpy
import sys
from urllib.error import URLError

import pytest
from mmengine.config import Config
from mmpretrain.datasets import utils
from mmpretrain.registry import MODELS

import attncnn_plugin
from attncnn_plugin import installation as frameworks
from attncnn_plugin.mm import tools
from attncnn_plugin.mm.tools import one_line

OPTIONS = ' '.join(f'{phase}_dataloader.dataset.data_root=FOLDER' for phase in ('train', 'val', 'test'))


@pytest.fixture
def no_network(monkeypatch):
    def fail(url, *args, **kwargs):
        raise URLError('Name or service not known')

    monkeypatch.setattr(utils, 'download_url_to_file', fail)


def test_data_set_that_cannot_be_downloaded(no_network, repository, tmp_path, monkeypatch):
    """The data set, its folder, and the option for another."""
    config = str(repository / 'configs/cmhsa5_cifar100.py')
    small = [
        'model.backbone.num_layers=1',
        'train_dataloader.num_workers=0',
        'train_dataloader.persistent_workers=False',
    ]
    arguments = [config, '--work-dir', 'out', '--cfg-options', *small]
    monkeypatch.setattr(sys, 'argv', ['train.py', *arguments])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(repository / 'tools/train.py'), run_name='__main__')
    assert end.value.code == (
        'https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz cannot be downloaded (URLError: <urlopen error Name '
        'or service not known>): put cifar-100-python.tar.gz into data/cifar100/, or name another folder: '
        f'--cfg-options {OPTIONS}'
    )


@pytest.mark.parametrize(
    'tool, arguments',
    [
        ('train.py', []),
        ('test.py', ['x.pth']),
        ('mmpretrain_tool.py', ['--not-show']),
        ('analysis_tools/analyze_heads.py', ['x.pth']),
        ('visualization/plot_attention.py', ['x.pth', '--figure', 'centers', '--out', 'x.png']),
        ('visualization/attention_explorer.py', ['x.pth', '3']),
        ('model_converters/prune_heads.py', ['x.pth', 'y.pth', '--heads', '{0: [1]}']),
        ('model_converters/conv_to_attention.py', ['x.pth', 'y.pth']),
    ],
)
def test_config_that_is_not_there(tool, arguments, repository, tmp_path, monkeypatch):
    first = ['visualization/vis_scheduler.py'] if tool == 'mmpretrain_tool.py' else []
    monkeypatch.setattr(sys, 'argv', [tool, *first, 'configs/sa_quadratik_digits.py', *arguments])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(repository / 'tools' / tool), run_name='__main__')
    assert end.value.code.endswith("No such file or directory: 'configs/sa_quadratik_digits.py'")


def test_a_config_that_inherits(tmp_path):
    (tmp_path / 'user.py').write_text(
        "_base_ = __import__('attncnn_plugin').config_path('sa_quadratic_digits.py')\n"
        "model = dict(backbone=dict(arch='base'))\n"
    )
    backbone = Config.fromfile(tmp_path / 'user.py').model.backbone
    assert (backbone.type, backbone.arch) == ('SAQuadratic', 'base')


def test_a_config_that_is_not_there():
    with pytest.raises(
        FileNotFoundError, match="name='sa_nonsense.py' is no config of attncnn_plugin, which are in .*configs"
    ):
        attncnn_plugin.config_path('sa_nonsense.py')


def test_here_all_is_well():
    assert frameworks.import_problem() is None and tools.config_problem() is None


@pytest.mark.parametrize(
    'module, reason', [('mmpretrain.models', 'mmpretrain.models'), ('mmpretrain', 'import of mmpretrain halted')]
)
def test_mmpretrain_that_cannot_be_imported(module, reason, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(frameworks, 'has_mmpretrain', lambda: True)
    problem = frameworks.import_problem()
    assert problem.startswith('mmpretrain cannot be imported with the versions that are installed (')
    assert reason in problem and 'mmcv-lite>=2.0,<2.4' in problem and len(problem.splitlines()) == 1


def test_mmpretrain_that_is_missing(monkeypatch):
    monkeypatch.setattr(frameworks, 'has_mmpretrain', lambda: False)
    assert frameworks.import_problem().startswith('mmpretrain is not installed: pip install mmpretrain')


def test_mmengine_without_setuptools(monkeypatch):
    def no_pkg_resources(package):
        raise ModuleNotFoundError("No module named 'pkg_resources'")

    monkeypatch.setattr(tools, 'get_installed_path', no_pkg_resources)
    problem = tools.config_problem()
    assert problem.startswith("mmengine cannot find the configs of packages (No module named 'pkg_resources'")
    assert problem.endswith('pip install "setuptools<82"')


@pytest.mark.parametrize(
    'config, said',
    [
        (dict(type='SAQuadratic', drop_rat=0.1), 'SAQuadratic has no argument drop_rat: write _delete_=True'),
        (
            dict(
                type='SALearned',
                content=True,
                arch=dict(embed_dims=64, num_layers=1, num_heads=0, feedforward_channels=64),
            ),
            'num_heads=0',
        ),
        (dict(type='CMHSA', img_size=32, patch_size=5), 'ValueError: img_size=32 must be a multiple of patch_size=5'),
        (dict(type='Nonsense'), 'KeyError: Nonsense is not in the mmpretrain::model registry'),
    ],
)
def test_mistaken_backbone(config, said):
    with pytest.raises((KeyError, TypeError, ValueError)) as error:
        MODELS.build(config)
    assert said in one_line(error.value)
