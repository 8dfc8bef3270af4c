"""The last line of a tool's output."""

import runpy
import sys
from urllib.error import URLError

import pytest
from mmpretrain.datasets import utils
from mmpretrain.registry import DATASETS

from attncnn_plugin.utils.errors import one_line

OPTIONS = ' '.join(f'{phase}_dataloader.dataset.data_root=FOLDER' for phase in ('train', 'val', 'test'))


@pytest.fixture
def no_network(monkeypatch):
    def fail(url, *args, **kwargs):
        raise URLError('Name or service not known')

    monkeypatch.setattr(utils, 'download_url_to_file', fail)


@pytest.mark.parametrize('tool', ['train.py', 'test.py'])
def test_data_set_that_cannot_be_downloaded(tool, no_network, repository, tmp_path, monkeypatch):
    """The data set, its folder, and the option for another."""
    config = str(repository / 'configs/cmhsa5_cifar100.py')
    checkpoint = [] if tool == 'train.py' else ['nothing.pth']
    small = [
        'model.backbone.num_layers=1',
        'train_dataloader.num_workers=0',
        'train_dataloader.persistent_workers=False',
    ]
    arguments = [config, *checkpoint, '--work-dir', 'out', '--cfg-options', *small]
    monkeypatch.setattr(sys, 'argv', [tool, *arguments])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(repository / 'tools' / tool), run_name='__main__')
    assert end.value.code == (
        'CIFAR100 is not in data/cifar100/ and cannot be downloaded (URLError: <urlopen error Name or service not '
        'known>): put cifar-100-python.tar.gz there, from https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz, or '
        f'name another folder: --cfg-options {OPTIONS}'
    )


def test_other_errors_of_data_sets(no_network, tmp_path):
    """Those that say already what is missing stay as they are."""
    with pytest.raises(RuntimeError) as caught:
        DATASETS.build(dict(type='CIFAR10', data_root=str(tmp_path), download=False))
    assert one_line(caught.value).startswith('RuntimeError: Cannot find CIFAR10 dataset in')
    with pytest.raises(URLError) as caught:
        utils.download_and_extract_archive('http://a/b.zip', str(tmp_path))
    assert one_line(caught.value) == 'URLError: <urlopen error Name or service not known>'
