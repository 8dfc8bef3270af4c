"""The last line of a tool's output: what is missing, and what would do."""

import sys
from urllib.error import URLError

import pytest
from mmpretrain.datasets import utils
from mmpretrain.registry import DATASETS

import attncnn_plugin
from attncnn_plugin import installation as frameworks
from attncnn_plugin.mm import tools
from attncnn_plugin.mm.tools import missing_file, one_line, read_config

OPTIONS = ' '.join(f'{phase}_dataloader.dataset.data_root=FOLDER' for phase in ('train', 'val', 'test'))


@pytest.fixture
def no_network(monkeypatch):
    def fail(url, *args, **kwargs):
        raise URLError('Name or service not known')

    monkeypatch.setattr(utils, 'download_url_to_file', fail)


def test_data_set_that_cannot_be_downloaded(no_network, tool, repository, tmp_path, monkeypatch):
    """The data set, its folder, and the option for another."""
    config = str(repository / 'configs/cmhsa5_cifar100.py')
    small = ['model.backbone.num_layers=1', 'train_dataloader.num_workers=0']
    arguments = [config, '--work-dir', 'out', '--cfg-options', *small, 'train_dataloader.persistent_workers=False']
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        tool('train.py', *arguments)
    assert end.value.code == (
        'CIFAR100 is not in data/cifar100/ and cannot be downloaded (URLError: <urlopen error Name or service not '
        'known>): put cifar-100-python.tar.gz there, from https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz, or '
        f'name another folder: --cfg-options {OPTIONS}'
    )


@pytest.mark.parametrize(
    'path, arguments',
    [
        ('train.py', []),
        ('mmpretrain_tool.py', ['--not-show']),
        ('visualization/attention_explorer.py', ['x.pth', '3']),
        ('model_converters/prune_heads.py', ['x.pth', 'y.pth', '--heads', '{0: [1]}']),
        ('model_converters/conv_to_attention.py', ['x.pth', 'y.pth']),
    ],
)
def test_config_that_is_not_there(path, arguments, tool, tmp_path, monkeypatch):
    first = ['visualization/vis_scheduler.py'] if path == 'mmpretrain_tool.py' else []
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').mkdir()
    (tmp_path / 'configs/sa_quadratic_digits.py').write_text('')
    with pytest.raises(SystemExit) as end:
        tool(path, *first, 'configs/sa_quadratik_digits.py', *arguments)
    assert end.value.code == 'configs/sa_quadratik_digits.py is not there: did you mean sa_quadratic_digits.py?'


def test_other_errors_of_data_sets(no_network, tmp_path):
    """Those that say already what is missing stay as they are."""
    with pytest.raises(RuntimeError) as caught:
        DATASETS.build(dict(type='CIFAR10', data_root=str(tmp_path), download=False))
    assert one_line(caught.value).startswith('RuntimeError: Cannot find CIFAR10 dataset in')
    with pytest.raises(URLError) as caught:
        utils.download_and_extract_archive('http://a/b.zip', str(tmp_path))
    assert one_line(caught.value) == 'URLError: <urlopen error Name or service not known>'
    for error in (FileNotFoundError('a.pth can not be found.'), PermissionError(13, 'Permission denied', 'a.py')):
        assert missing_file(error) is None


def test_a_config_that_is_not_there():
    with pytest.raises(
        FileNotFoundError, match="name='sa_nonsense.py' is no config of attncnn_plugin, which are .*sa_q"
    ):
        attncnn_plugin.config_path('sa_nonsense.py')


def test_similar_configs(tmp_path):
    """In the folder of the config, or of the one that it inherits from."""
    folder = tmp_path / 'configs'
    folder.mkdir()
    (folder / 'my_resnet.py').write_text("_base_ = './nothing_here.py'\n")
    cases = {
        folder / 'my_resnett.py': 'my_resnett.py is not there: did you mean my_resnet.py?',
        folder / 'my_resnet': 'my_resnet is not there: did you mean my_resnet.py?',
        folder / 'vit.py': 'vit.py is not there',
        folder / 'my_resnet.py': 'nothing_here.py is not there',
        tmp_path / 'config/vit.py': f'vit.py is not there: there is no folder {tmp_path}/config',
    }
    for path, message in cases.items():
        with pytest.raises(FileNotFoundError) as error:
            read_config(str(path))
        assert str(error.value).startswith(str(tmp_path)) and str(error.value).endswith(message)


def test_here_all_is_well():
    assert frameworks.import_problem() is None and tools.config_problem() is None
    frameworks.require_mmpretrain()


@pytest.mark.parametrize('module', ['mmpretrain.models', 'mmpretrain'])
def test_mmpretrain_that_cannot_be_imported(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(frameworks, 'has_mmpretrain', lambda: True)
    problem = frameworks.import_problem()
    assert problem.startswith('mmpretrain cannot be imported with the versions that are installed (')
    assert module in problem and 'mmcv-lite>=2.0,<2.4' in problem and len(problem.splitlines()) == 1
    monkeypatch.setattr(frameworks, 'has_mmpretrain', lambda: False)
    with pytest.raises(ImportError, match='^mmpretrain is not installed: pip install mmpretrain'):
        frameworks.require_mmpretrain()


def test_mmengine_without_setuptools(monkeypatch):
    def no_pkg_resources(package):
        raise ModuleNotFoundError("No module named 'pkg_resources'")

    monkeypatch.setattr(tools, 'get_installed_path', no_pkg_resources)
    problem = tools.config_problem()
    assert problem.startswith("mmengine cannot find the configs of packages (No module named 'pkg_resources'")
    assert problem.endswith('pip install "setuptools<82"')
