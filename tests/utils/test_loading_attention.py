"""A CNN of mmpretrain's zoo takes the attention of a checkpoint, whichever of mmengine's functions loads it."""

import copy

import mmpretrain
import pytest
import torch
from mmengine import runner
from mmengine.config import Config, ConfigDict
from mmengine.model import BaseModule, BaseTTAModel, ExponentialMovingAverage
from mmengine.runner import checkpoint, load_checkpoint
from torch import nn

import attncnn_plugin
from attncnn_plugin.convert import convs_to_attention
from attncnn_plugin.layers import ImageAttention
from attncnn_plugin.utils.mmengine_patches import patch_load_state_dict

RESNET = dict(type='ResNet', depth=18, base_channels=4, stem_channels=4)
CLASSIFIER = dict(
    type='ImageClassifier',
    backbone=RESNET,
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=3, in_channels=32),
)


def build(config):
    return mmpretrain.registry.MODELS.build(ConfigDict(copy.deepcopy(config)))


@pytest.fixture
def trained(tmp_path):
    """A classifier with attention in its last stage, its output for an image, and its checkpoint."""
    model = build(CLASSIFIER)
    convs_to_attention(model, 'backbone.layer4.*', content='additive', alpha=6.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval()
    x = torch.randn(1, 3, 64, 64)
    file = str(tmp_path / 'epoch_1.pth')
    torch.save(dict(state_dict=model.state_dict(), meta={}), file)
    return model, x, file


def by_function(file):
    model = build(CLASSIFIER)
    runner.load_state_dict(model, torch.load(file)['state_dict'], strict=True)
    return model


def by_keywords(file):
    model = build(CLASSIFIER)
    checkpoint.load_state_dict(strict=True, state_dict=torch.load(file)['state_dict'], module=model)
    return model


def by_load_checkpoint(file):
    model = build(CLASSIFIER)
    load_checkpoint(model, file, strict=True)
    return model


def by_initialization(file):
    config = dict(RESNET, init_cfg=dict(type='Pretrained', checkpoint=file, prefix='backbone.'))
    model = build(dict(CLASSIFIER, backbone=config))
    model.init_weights()
    rest = {name: value for name, value in torch.load(file)['state_dict'].items() if name.startswith('head')}
    model.load_state_dict(rest, strict=False)
    return model


class Wrapped(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        pass


def under_augmentation(file):
    wrapper = Wrapped(build(CLASSIFIER))
    load_checkpoint(wrapper, file, strict=True)
    return wrapper.module


class Distributed(nn.parallel.DistributedDataParallel):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


def in_a_wrapper(file):
    wrapper = Distributed(build(CLASSIFIER))
    load_checkpoint(wrapper, file, strict=True)
    return wrapper.module


def by_average(file):
    averaged = ExponentialMovingAverage(build(CLASSIFIER))
    averaged.load_state_dict({f'module.{k}': v for k, v in torch.load(file)['state_dict'].items()}, strict=False)
    return averaged.module


WAYS = dict(
    function=by_function,
    keywords=by_keywords,
    load_checkpoint=by_load_checkpoint,
    initialization=by_initialization,
    augmentation=under_augmentation,
    wrapper=in_a_wrapper,
    average=by_average,
    get_model=lambda file: mmpretrain.get_model(Config(dict(model=CLASSIFIER)), file),
    inferencer=lambda file: (
        mmpretrain.ImageClassificationInferencer(
            Config(dict(model=CLASSIFIER, test_dataloader=dict(dataset=dict(type='Digits', pipeline=[])))), file
        ).model
    ),
)


@pytest.mark.parametrize('way', WAYS)
def test_a_cnn_takes_attention(way, trained):
    model, x, file = trained
    loaded = WAYS[way](file)
    loaded.eval()
    assert way == 'average' or torch.equal(loaded(x), model(x))
    assert sum(isinstance(module, ImageAttention) for module in loaded.modules()) == 5


def test_weights_of_the_zoo_load_into_attention(trained, tmp_path):
    attention, x, _ = trained
    cnn = build(CLASSIFIER)
    cnn.eval()
    torch.save(dict(state_dict=cnn.state_dict()), tmp_path / 'cnn.pth')
    load_checkpoint(attention, str(tmp_path / 'cnn.pth'), strict=True)
    assert isinstance(attention.backbone.layer4[0].conv1, ImageAttention)
    assert 1e-6 < (attention(x) - cnn(x)).norm() / cnn(x).norm() < 0.1


def test_it_is_done_once():
    before = checkpoint.load_state_dict
    patch_load_state_dict(lambda model, state_dict: None)
    assert checkpoint.load_state_dict is before is runner.load_state_dict
    assert before.__doc__ == before.__wrapped__.__doc__
    for word in ('load_state_dict', 'structure_loading'):
        assert word in attncnn_plugin.__doc__


def test_other_state_dicts_are_loaded_as_ever(capsys):
    model = BaseModule()
    model.linear = nn.Linear(2, 2)
    linear = model.linear
    runner.load_state_dict(model, {'linear.weight': torch.eye(2), 'other': torch.zeros(1)})
    assert model.linear is linear and torch.equal(linear.weight, torch.eye(2))
    assert 'unexpected key in source state_dict: other' in capsys.readouterr().out
