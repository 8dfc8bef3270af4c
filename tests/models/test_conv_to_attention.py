"""Any backbone whose convolutions become attention, in mmpretrain's registry: transparent to what is around it."""

import copy

import mmpretrain
import pytest
import torch
from helpers.convolutions import relative_error
from mmengine.config import Config
from mmengine.model import ExponentialMovingAverage, convert_sync_batchnorm, revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from mmengine.runner import load_checkpoint
from mmpretrain.models import ResNet
from mmpretrain.registry import MODELS
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention.images import ImageAttention

RESNET = dict(type='ResNet', depth=50, base_channels=4, stem_channels=4, out_indices=(1, 3))
CONVNEXT = dict(
    type='ConvNeXt',
    arch=dict(depths=[1, 1, 2, 1], channels=[4, 8, 12, 16]),
    out_indices=(0, 1, 2, 3),
    gap_before_final_norm=False,
)
VAN = dict(  # whose convolutions are mmcv's
    type='VAN', arch=dict(embed_dims=[4, 8, 8, 8], depths=[1, 1, 1, 1], ffn_ratios=[2, 2, 2, 2]), out_indices=(0, 3)
)
STAGE = 'layer4.*.conv2'


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        yield


def build(backbone=None, layers=STAGE, **settings):
    backbone = RESNET if backbone is None else backbone
    return MODELS.build(dict(type='ConvToAttention', backbone=backbone, layers=layers, **settings))


def classifier(backbone=RESNET, **settings):
    head = dict(type='LinearClsHead', num_classes=3, in_channels=128)
    own = dict(type='ConvToAttention', backbone=backbone, layers=STAGE, **settings) if settings else backbone
    return dict(type='ImageClassifier', backbone=own, neck=dict(type='GlobalAveragePooling'), head=head)


def pair(backbone, layers, **settings):
    """A backbone and the same as it comes, with equal weights, as after some training."""
    plain, ours = MODELS.build(backbone), build(backbone, layers, **settings)
    plain(torch.randn(4, 3, 64, 64))  # running statistics
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def images():
    return torch.randn(2, 3, 64, 64)


def attention_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, ImageAttention)]


@pytest.mark.parametrize(
    'backbone, layers',
    [
        (RESNET, STAGE),
        (dict(RESNET, frozen_stages=4, norm_eval=True), ('layer1.*.conv2', STAGE)),
        (CONVNEXT, 'stages.*.depthwise_conv'),
        (VAN, 'blocks[34].*DW_conv'),
    ],
    ids=['ResNet', 'frozen', 'ConvNeXt', 'VAN'],
)
def test_transparent(backbone, layers):
    """Features, modes, what is frozen and names are those of the backbone, in either phase."""
    plain, ours = pair(backbone, layers, content='additive')
    x = images()
    assert isinstance(ours, type(plain)) and list(ours.state_dict()) == list(plain.state_dict())
    for mode in (True, False):
        plain.train(mode), ours.train(mode)
        assert all(torch.equal(a, b) for a, b in zip(ours(x), plain(x)))
        assert [m.training for m in ours.modules()] == [m.training for m in plain.modules()]
        assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in plain.parameters()]
    ours.to_attention()
    expected, outputs = plain(x), ours(x)
    assert len(outputs) == len(expected) == len(backbone['out_indices'])
    assert all(relative_error(a, b) < 1e-4 for a, b in zip(outputs, expected))
    for mode in (True, False):
        plain.train(mode), ours.train(mode)
        for name, module in plain.named_modules():
            other = ours.get_submodule(name)
            assert other.training == module.training, name
            if isinstance(other, ImageAttention):
                assert {p.requires_grad for p in other.parameters()} == {module.weight.requires_grad}
            else:
                assert [p.requires_grad for p in other.parameters(False)] == [
                    p.requires_grad for p in module.parameters(False)
                ]


def test_chosen_layers_and_phases():
    model = build(content='gated', alpha=6.0, qk_dim=4, window_size=5)
    assert model.phase == 'conv' and attention_names(model) == []
    others = {id(p) for name, p in model.named_parameters() if not (name.startswith('layer4') and 'conv2' in name)}
    models = [copy.deepcopy(model) for _ in range(2)]
    for one in models:
        one.to_attention(torch.Generator().manual_seed(0))
    keys = [one.layer4[0].conv2.key.weight for one in models]
    assert torch.equal(*keys)
    report = model.to_attention()
    names = [f'layer4.{i}.conv2' for i in range(3)]
    assert model.phase == 'attn' and attention_names(model) == names == [layer.name for layer in report.layers]
    assert others <= {id(p) for p in model.parameters()}
    layer = model.layer4[0].conv2
    assert (layer.qk_dim, layer.window_size, layer.gate is not None) == (4, [5, 5], True)
    assert all(line.split()[0] in ('layer', 'model', *names) for line in str(report).splitlines())


@pytest.mark.parametrize('phase', ['conv', 'attn'])
def test_copies(phase):
    model, x = build(phase=phase, content='additive'), images()
    model.eval()  # mmpretrain's ResNet does not return itself
    for other in (copy.deepcopy(model), ExponentialMovingAverage(model).module):
        other.eval()
        assert type(other) is type(model) and isinstance(other, ResNet) and other.phase == phase
        assert all(torch.equal(a, b) for a, b in zip(other(x), model(x)))
        if phase == 'conv':
            other.to_attention()
            assert (other.phase, model.phase) == ('attn', 'conv')


@pytest.mark.parametrize('phase', ['conv', 'attn'])
def test_checkpoints_of_the_cnn(phase, tmp_path):
    """The model zoo's: ``init_cfg`` with a prefix, ``load_checkpoint``, ``get_model``."""
    cnn = MODELS.build(classifier()).eval()
    path = str(tmp_path / 'cnn.pth')
    torch.save(dict(state_dict=cnn.state_dict()), path)
    x = images()

    pretrained = dict(type='Pretrained', checkpoint=path, prefix='backbone.')
    model = build(dict(RESNET, init_cfg=pretrained), phase=phase)
    model.eval()
    before = list(model.parameters())
    model.init_weights()
    assert all(a is b for a, b in zip(before, model.parameters())) and model.phase == phase
    assert relative_error(model(x)[1], cnn.backbone(x)[1]) < 1e-4

    ours = classifier(phase=phase)
    model = MODELS.build(ours).eval()
    load_checkpoint(model, path, strict=True)
    assert relative_error(model(x), cnn(x)) < 1e-4

    model = mmpretrain.get_model(Config(dict(model=ours)), pretrained=path)
    assert relative_error(model(x), cnn(x)) < 1e-4 and model.backbone.phase == phase


def test_checkpoints_of_attention(tmp_path):
    """They load into either phase of the same settings, and into convolutions whatever these were to become."""
    theirs, x = build(content='additive', alpha=6.0), images()
    theirs.to_attention()
    theirs.eval()
    torch.save(theirs.state_dict(), tmp_path / 'attn.pth')
    pretrained = dict(RESNET, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'attn.pth')))
    initialized = [build(pretrained, phase=phase, content='additive', alpha=6.0) for phase in ('conv', 'attn')]
    loaded = [build(content='additive', alpha=6.0), build(layers='layer4.0.conv1')]
    for ours in (*initialized, *loaded):
        ours.init_weights() if ours in initialized else ours.load_state_dict(theirs.state_dict())
        ours.eval()
        assert all(torch.equal(a, b) for a, b in zip(ours(x), theirs(x)))
    model = build(content='additive')
    assert follow_state_dict(model, theirs.state_dict()) and model.phase == 'attn'


@pytest.mark.parametrize('phase', ['conv', 'attn'])
def test_initial_weights(phase):
    """Attention begins as the convolutions of the backbone's own initialization."""
    model = MODELS.build(classifier(dict(RESNET, zero_init_residual=True), phase=phase))
    before = {id(p) for p in model.parameters()}
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.fill_(7.0)
    model.init_weights()
    assert {id(p) for p in model.parameters()} == before and model.backbone.phase == phase
    assert all((block.bn3.weight == 0).all() for block in model.backbone.layer4)
    conv = model.backbone.layer4[0].conv2
    values = conv.weight if phase == 'conv' else conv.value.weight
    fan_out = 9 * 32
    assert abs(values.std() / (2 / fan_out) ** 0.5 - 1) < 0.05  # Kaiming's
    if phase == 'attn':
        centers = {tuple(center) for center in conv.encoding.center.tolist()}
        assert centers == {(float(i), float(j)) for i in (-1, 0, 1) for j in (-1, 0, 1)}


def test_layer_wise_decay():
    """``get_layer_depth`` is that of the backbone, for parameters of attention too."""
    model = MODELS.build(classifier(phase='attn', content='additive'))
    settings = dict(
        optimizer=dict(type='SGD', lr=1.0, weight_decay=0.1),
        constructor='LearningRateDecayOptimWrapperConstructor',
        paramwise_cfg=dict(layer_decay_rate=0.5),
    )
    optimizer = build_optim_wrapper(model, settings).optimizer
    rates = {id(p): group['lr'] for group in optimizer.param_groups for p in group['params']}
    assert rates[id(model.backbone.layer4[0].conv2.key.weight)] == rates[id(model.backbone.layer4[0].conv1.weight)]
    assert rates[id(model.backbone.conv1.weight)] < rates[id(model.head.fc.weight)]


@pytest.mark.parametrize('content', [None, 'additive'])
def test_batch_norms_of_several_processes(content, tmp_path):
    """``sync_bn='torch'`` puts other norms in the place of those in the model, again at each new wrapper."""
    _, model = pair(RESNET, STAGE, content=content)
    model.eval()
    x, keys = images(), list(model.state_dict())
    with torch.no_grad():
        expected = model(x)[-1]
    model = convert_sync_batchnorm(model, 'torch')
    assert list(model.state_dict()) == keys and model.phase == 'conv'
    model.to_attention()
    parameters = list(model.parameters())
    model = convert_sync_batchnorm(model, 'torch')
    assert model.phase == 'attn' and all(a is b for a, b in zip(model.parameters(), parameters))
    assert {type(m) for m in model.modules() if isinstance(m, _BatchNorm)} == {nn.SyncBatchNorm}
    torch.save(model.state_dict(), tmp_path / 'model.pth')
    one_process = build(content=content)
    load_checkpoint(one_process, str(tmp_path / 'model.pth'), strict=True)
    for other in (model, revert_sync_batchnorm(copy.deepcopy(model)), one_process):
        other.eval()  # new norms are in training mode
        with torch.no_grad():
            assert attention_names(other) and relative_error(other(x)[-1], expected) < 1e-4
    with pytest.raises(ValueError, match=r'layers=\[\] must be names, globs .* at least one'):
        model.to_attention()
    model.load_state_dict(build().state_dict())  # a CNN's
    assert model.phase == 'attn'


@MODELS.register_module(force=True)
class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 4, 2)
        self.shared = self.again = nn.Conv2d(4, 4, 1)


@pytest.mark.parametrize(
    'settings, error, message',
    [
        (dict(backbone='ResNet'), TypeError, 'cfg should be a dict, ConfigDict or Config, but got'),
        (dict(phase='attention'), ValueError, "phase='attention' is unknown: choose one of"),
        (dict(layers='layer5.*'), ValueError, r"layers='layer5.\*' matches none of the convolutions"),
        (dict(content='both'), ValueError, "layer4.0.conv2 cannot be converted: content='both' is"),
        (dict(alhpa=6), TypeError, 'ConvToAttention has no argument alhpa'),
        (dict(backbone=dict(type='CMHSA', phase='conv'), layers='*'), ValueError, 'CMHSA turns to attention by itself'),
        (dict(backbone=dict(type='Transposed'), layers='up'), TypeError, 'up cannot be converted'),
        (dict(backbone=dict(type='Transposed'), layers='again'), ValueError, 'again shares a parameter, shared'),
    ],
)
def test_what_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        build(**settings)


@pytest.mark.parametrize('phase', ['conv', 'attn'])
def test_on_another_device(phase):
    """What is left on the CPU fails."""
    model = build(phase=phase, content='gated', alpha=6.0).to('meta')
    assert all(feature.is_meta for feature in model(torch.empty(2, 3, 64, 64, device='meta')))
