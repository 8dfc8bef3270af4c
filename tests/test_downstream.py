"""Configs for mmdetection and mmsegmentation: what they build fits together, with these packages and without them."""

import importlib.util
import pprint
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.convolutions import relative_error
from helpers.schedules import weight_decays
from mmengine.config import Config
from mmengine.registry import HOOKS, DefaultScope
from mmpretrain.registry import MODELS

from attncnn_plugin import config_path

CONFIGS = Path(__file__).parents[1] / 'configs/downstream'
NAMES = sorted(path.stem for path in CONFIGS.glob('*.py'))
# What the configs inherit, as far as it has to fit.
OPTIMIZATION = dict(
    optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=1e-4)),
    param_scheduler=[],
)
BASES = {
    'mmdet': dict(
        OPTIMIZATION,
        model=dict(
            backbone=dict(type='ResNet', depth=50),
            neck=dict(type='FPN', in_channels=[256, 512, 1024, 2048], start_level=1, num_outs=5),
            bbox_head=dict(
                type='RetinaHead',
                anchor_generator=dict(type='AnchorGenerator', octave_base_scale=4, strides=[8, 16, 32, 64, 128]),
            ),
        ),
        train_cfg=dict(type='EpochBasedTrainLoop', max_epochs=12),
    ),
    'mmseg': dict(
        OPTIMIZATION,
        model=dict(
            pretrained='open-mmlab://resnet50_v1c',
            data_preprocessor=dict(type='SegDataPreProcessor'),
            backbone=dict(type='ResNetV1c', depth=50),
            decode_head=dict(type='UPerHead', in_channels=[256, 512, 1024, 2048], in_index=[0, 1, 2, 3]),
            auxiliary_head=dict(type='FCNHead', in_channels=1024, in_index=2),
        ),
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=160000),
    ),
}


INSTALLED = {package: importlib.util.find_spec(package) is not None for package in BASES}


def package_of(name):
    return 'mmdet' if name.startswith('retinanet') else 'mmseg'


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Reads a config, with stand-ins for what it inherits where a package is not installed."""
    find = Config._get_cfg_path

    def find_or_stand_in(path, filename):
        package = 'mmdet' if path.startswith('mmdet::') else 'mmseg' if '/mmseg/' in path else None
        if package is None or INSTALLED[package]:
            return find(path, filename)
        stand_in = tmp_path / f'{package}.py'
        stand_in.write_text('\n'.join(f'{key} = {pprint.pformat(value)}' for key, value in BASES[package].items()))
        return str(stand_in), package

    monkeypatch.setattr(Config, '_get_cfg_path', staticmethod(find_or_stand_in))
    if not INSTALLED['mmseg']:
        monkeypatch.setitem(sys.modules, 'mmseg', SimpleNamespace(__path__=['/mmseg']))
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        yield lambda name: Config.fromfile(CONFIGS / f'{name}.py')


def backbone_of(config):
    """It as the config has it, but for the weights that would be downloaded."""
    settings = config.model.backbone
    if 'backbone' in settings:
        settings.backbone.init_cfg = None
    return MODELS.build(settings)


def test_they_come_with_the_package():
    assert len(NAMES) == 6
    for name in NAMES:
        assert Path(config_path(f'downstream/{name}.py')).samefile(CONFIGS / f'{name}.py')


@pytest.mark.parametrize('name', NAMES)
def test_feature_maps_fit(name, read):
    """Channels and strides are those that neck and heads expect, for images of a size that the run makes."""
    config = read(name)
    divisor = (
        32 if package_of(name) == 'mmdet' else config.model.data_preprocessor.get('test_cfg', {}).get('size_divisor', 1)
    )
    height, width = (-(-n // divisor) * divisor for n in (90, 131))
    backbone = backbone_of(config)
    backbone.eval()  # mmpretrain's ResNet does not return itself
    with torch.no_grad():
        features = backbone(torch.rand(1, 3, height, width))
    channels = [feature.shape[1] for feature in features]
    strides = [height / feature.shape[2] for feature in features]
    neck = config.model.get('neck')
    if package_of(name) == 'mmdet':
        assert channels == neck.in_channels
        levels = config.model.bbox_head.anchor_generator.strides
        used = strides[neck.start_level :]
        assert used == levels[: len(used)] and len(levels) == neck.num_outs
        assert all(after == 2 * before for before, after in zip(levels, levels[1:]))
        assert config.model.bbox_head.anchor_generator.octave_base_scale * levels[0] == 32  # the smallest anchor
        return
    if neck is not None:
        assert set(channels) == {neck.embed_dim} and len(channels) == len(neck.rescales)
        strides = [stride / scale for stride, scale in zip(strides, neck.rescales)]
    assert channels == config.model.decode_head.in_channels
    assert channels[config.model.auxiliary_head.in_index] == config.model.auxiliary_head.in_channels
    assert all(abs(stride / expected - 1) < 0.15 for stride, expected in zip(strides, (4, 8, 16, 32)))
    assert config.model.pretrained is None


@pytest.mark.parametrize('name', NAMES)
def test_positions_have_no_weight_decay(name, read):
    config = read(name)
    backbone = backbone_of(config)
    if getattr(backbone, 'phase', None) == 'conv':
        backbone.to_attention()
    model = torch.nn.ModuleDict(dict(backbone=backbone))
    decays = weight_decays(model, config.optim_wrapper)  # not of what is frozen
    positions = ('encoding.center', 'encoding.sqrt_precision', 'position.table')
    assert any(part.endswith(positions) for part in decays)
    for part, decay in decays.items():
        if part.endswith(positions):
            assert decay == 0, part
        elif model.get_parameter(part).ndim > 1:
            assert decay > 0, part


@pytest.mark.parametrize('name', [name for name in NAMES if 'cmhsa' in name])
def test_halves(name, read):
    """The transition is in the middle, and the first phase's schedule ends there."""
    config = read(name)
    (settings,) = config.custom_hooks
    hook = HOOKS.build(settings)
    train_cfg, by_epoch = config.train_cfg, package_of(name) == 'mmdet'
    assert hook.unit == ('epoch' if by_epoch else 'iter')
    assert 2 * hook.times[0] == (train_cfg.max_epochs if by_epoch else train_cfg.max_iters)
    assert config.param_scheduler[-1].end == hook.times[0] and 'end' not in hook.param_scheduler[-1]


@pytest.fixture(scope='session')
def imagenet(tmp_path_factory):
    """A checkpoint as of mmpretrain's model zoo, of a narrow ResNet-50."""
    backbone = dict(type='mmpretrain.ResNet', depth=50, stem_channels=4, base_channels=4, zero_init_residual=False)
    head = dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=128)
    model = MODELS.build(dict(type='mmpretrain.ImageClassifier', backbone=backbone, head=head))
    model.init_weights()
    path = tmp_path_factory.mktemp('zoo') / 'resnet50.pth'
    torch.save(dict(state_dict=model.state_dict()), path)
    return path


@pytest.mark.parametrize('name', [name for name in NAMES if 'resnet50' in name])
def test_weights_of_the_model_zoo(name, imagenet, read):
    """They are loaded by ``init_cfg`` as they are, and what the config freezes is frozen."""
    config = read(name)
    inner = config.model.backbone.backbone
    inner.update(stem_channels=4, base_channels=4)
    inner.init_cfg.checkpoint = str(imagenet)
    model = MODELS.build(config.model.backbone)
    assert model.phase == 'attn' and model.conversion['layers'] == [f'layer4.{i}.conv2' for i in range(3)]
    model.init_weights()
    cnn = MODELS.build(inner)
    cnn.init_weights()
    weights = torch.load(imagenet)['state_dict']
    assert torch.equal(model.layer4[1].conv1.weight, weights['backbone.layer4.1.conv1.weight'])
    model.eval(), cnn.eval()
    images = torch.rand(1, 3, 96, 160)
    for feature, expected in zip(model(images), cnn(images)):
        assert relative_error(feature, expected) < 0.05  # alpha=6
    model.train()
    frozen = inner.get('frozen_stages', -1)
    assert all(p.requires_grad != (frozen >= 1) for p in model.layer1.parameters())
    assert all(p.requires_grad for p in model.layer4.parameters())
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    assert {norm.training for norm in norms} == {not inner.get('norm_eval', False)}
