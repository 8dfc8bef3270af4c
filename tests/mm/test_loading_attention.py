"""``ConvToAttention`` takes the attention of a checkpoint, whichever of mmengine's functions loads it."""

import copy

import mmpretrain
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.model import ExponentialMovingAverage
from mmengine.runner import load_checkpoint

from attncnn_plugin.attention.images import ImageAttention
from attncnn_plugin.convert import convs_to_attention

SETTINGS = dict(content='additive', alpha=6.0)
RESNET = dict(type='ResNet', depth=18, base_channels=4, stem_channels=4)
STOCK = dict(
    type='ImageClassifier',
    backbone=RESNET,
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=3, in_channels=32),
)
BACKBONE = dict(type='ConvToAttention', backbone=RESNET, layers='layer4.*', **SETTINGS)
CLASSIFIER = dict(STOCK, backbone=BACKBONE)


def build(config):
    return mmpretrain.registry.MODELS.build(ConfigDict(copy.deepcopy(config)))


@pytest.fixture
def trained(tmp_path):
    """A classifier with attention in its last stage, its output for an image, and its checkpoint."""
    model = build(STOCK)
    convs_to_attention(model, 'backbone.layer4.*', **SETTINGS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval()
    x = torch.randn(1, 3, 64, 64)
    file = str(tmp_path / 'epoch_1.pth')
    torch.save(dict(state_dict=model.state_dict(), meta={}), file)
    return model, x, file


def by_load_checkpoint(file):
    model = build(CLASSIFIER)
    load_checkpoint(model, file, strict=True)
    return model


def by_initialization(file):
    resnet = dict(RESNET, init_cfg=dict(type='Pretrained', checkpoint=file, prefix='backbone.'))
    model = build(dict(CLASSIFIER, backbone=dict(BACKBONE, backbone=resnet)))
    model.init_weights()
    rest = {name: value for name, value in torch.load(file)['state_dict'].items() if name.startswith('head')}
    model.load_state_dict(rest, strict=False)
    return model


def by_average(file):
    averaged = ExponentialMovingAverage(build(CLASSIFIER))
    averaged.load_state_dict({f'module.{k}': v for k, v in torch.load(file)['state_dict'].items()}, strict=False)
    return averaged.module


@pytest.mark.parametrize('way', [by_load_checkpoint, by_initialization, by_average])
def test_the_backbone_takes_attention(way, trained):
    model, x, file = trained
    loaded = way(file)
    loaded.eval()
    assert way is by_average or torch.equal(loaded(x), model(x))
    assert sum(isinstance(module, ImageAttention) for module in loaded.modules()) == 5
    cnn = build(STOCK)
    cnn.eval()
    loaded.load_state_dict(cnn.state_dict())  # with the settings of the backbone, if the metadata is lost
    assert 1e-6 < (loaded(x) - cnn(x)).norm() / cnn(x).norm() < 0.1


def test_the_whole_model_is_initialized_by_a_checkpoint(trained):
    """mmengine's record of initialized parameters has those of the attention."""
    model, x, file = trained
    loaded = build(dict(CLASSIFIER, init_cfg=dict(type='Pretrained', checkpoint=file)))
    loaded.init_weights()
    loaded.eval()
    assert torch.equal(loaded(x), model(x))
    assert not any(hasattr(module, '_params_init_info') for module in loaded.modules())


def test_whoever_trains_the_backbone_is_warned_once(trained, recwarn):
    loaded = by_load_checkpoint(trained[2])
    loaded.train()
    loaded.train()
    (warning,) = (str(warning.message) for warning in recwarn if 'took attention' in str(warning.message))
    assert 'follow_state_dict(model, state_dict) before' in warning


@pytest.mark.parametrize('change', [{'extra': torch.zeros(1)}, {'conv1.weight': torch.zeros(1)}])
def test_a_refused_load_leaves_the_backbone_as_it_was(trained, change):
    backbone = build(BACKBONE)
    modules, parameters = list(backbone.modules()), list(backbone.parameters())
    state = {**trained[0].backbone.state_dict(), **change}
    with pytest.raises(RuntimeError, match='extra|size mismatch'):
        backbone.load_state_dict(state)
    assert backbone.phase == 'conv'
    assert all(a is b for a, b in zip(backbone.modules(), modules))
    assert all(a is b for a, b in zip(backbone.parameters(), parameters))
