"""A ResNet of mmpretrain's zoo whose checkpoint has attention, with the tools: no hook of the plugin in its config."""

import pytest
import torch
from helpers.processes import run
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmpretrain.registry import MODELS

import attncnn_plugin.mm.safe_loading  # noqa: F401
from attncnn_plugin.convert import convs_to_attention

CONFIG = """
_base_ = '{base}'
model = dict(
    backbone=dict(
        _delete_=True, type='ResNet', depth=18, in_channels=1, stem_channels=4, base_channels=4, strides=(1, 2, 2, 1)
    ),
    head=dict(in_channels=32),
)
train_dataloader = dict(batch_size=8, dataset=dict(indices=8))
test_dataloader = dict(dataset=dict(indices=8))
train_cfg = dict(max_epochs=1)
custom_hooks = []
"""


@pytest.fixture(scope='module')
def files(tmp_path_factory, repository):
    """The config, and a checkpoint with attention."""
    folder = tmp_path_factory.mktemp('resnet')
    config, checkpoint = folder / 'config.py', folder / 'attention.pth'
    config.write_text(CONFIG.format(base=repository / 'configs/resnet18_to_attention_digits.py'))
    init_default_scope('mmpretrain')
    model = MODELS.build(Config.fromfile(config).model)
    convs_to_attention(model, 'backbone.layer4.*')
    torch.save(dict(state_dict=model.state_dict(), meta={}), checkpoint)
    return config, checkpoint


@pytest.mark.parametrize('options', [[], ['--tta'], ['--cfg-options', 'default_hooks.average.type=EMAHook']])
def test_tested(options, files, repository, tmp_path):
    log = run('python', repository / 'tools/test.py', *files, '--work-dir', tmp_path, *options, folder=tmp_path)
    assert 'accuracy/top1' in log and 'do not match' not in log


def test_mmpretrains_other_tool_with_a_runner(files, repository, tmp_path):
    tool = repository / 'tools/mmpretrain_tool.py'
    log = run('python', tool, 'analysis_tools/confusion_matrix.py', *files, folder=tmp_path)
    assert 'do not match' not in log and 'confusion_matrix' in log


def test_reported(files, repository, tmp_path):
    options = ('--cfg-options', 'test_dataloader.dataset.pipeline.0.scale=64')
    log = run('python', repository / 'tools/analysis_tools/analyze_heads.py', *files, *options, folder=tmp_path)
    assert 'layer4.1.conv2' in log


def test_no_training_without_its_parameters(files, repository, tmp_path):
    """The optimizer of the run was built before the checkpoint was loaded."""
    config, checkpoint = files
    options = ('--work-dir', tmp_path, '--cfg-options', f'load_from={checkpoint}')
    log = run('python', repository / 'tools/train.py', config, *options, folder=tmp_path, expected=1)
    assert 'the optimizer was built before the model took the structure of the checkpoint' in log.splitlines()[-1]
    assert "phase='attn' of CMHSA or of the backbone ConvToAttention" in log.splitlines()[-1]
