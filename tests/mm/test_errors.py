"""The last line of a tool's output."""

import runpy
import sys
from urllib.error import URLError

import pytest
import torch
from mmpretrain.datasets import utils
from mmpretrain.registry import DATASETS, MODELS

from attncnn_plugin.mm.tools import one_line

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
        ('learning_rates.py', ['--lr', '1']),
    ],
)
def test_config_that_is_not_there(tool, arguments, repository, tmp_path, monkeypatch):
    first = ['visualization/vis_scheduler.py'] if tool == 'mmpretrain_tool.py' else []
    monkeypatch.setattr(sys, 'argv', [tool, *first, 'configs/sa_quadratik_digits.py', *arguments])
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').mkdir()
    (tmp_path / 'configs/sa_quadratic_digits.py').write_text('')
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(repository / 'tools' / tool), run_name='__main__')
    assert end.value.code == 'configs/sa_quadratik_digits.py is not there: did you mean sa_quadratic_digits.py?'


def test_features_that_are_averaged_twice():
    model = MODELS.build(
        dict(
            type='ImageClassifier',
            backbone=dict(type='SAQuadratic', arch='tiny', out_type='avg_featmap'),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=2, in_channels=64),
        )
    )
    with pytest.raises(ValueError, match='Input dimension should be at least 3') as caught:
        model(torch.rand(1, 3, 8, 8))
    assert one_line(caught.value) == (
        'the neck GlobalAveragePooling got features that are averaged already, (B, C): write neck=None in model, or '
        "leave out out_type='avg_featmap' of its backbone"
    )
    with pytest.raises(TypeError) as caught:  # of no features at all
        model.neck(3)
    assert 'averaged' not in one_line(caught.value)


def test_other_errors_of_data_sets(no_network, tmp_path):
    """Those that say already what is missing stay as they are."""
    with pytest.raises(RuntimeError) as caught:
        DATASETS.build(dict(type='CIFAR10', data_root=str(tmp_path), download=False))
    assert one_line(caught.value).startswith('RuntimeError: Cannot find CIFAR10 dataset in')
    with pytest.raises(URLError) as caught:
        utils.download_and_extract_archive('http://a/b.zip', str(tmp_path))
    assert one_line(caught.value) == 'URLError: <urlopen error Name or service not known>'
