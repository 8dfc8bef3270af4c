"""mmpretrain's interface, and the same weights in both frameworks."""

import copy
import pickle

import mmpretrain
import pytest
import torch
from helpers.small import SMALL_ARCH, small_timm
from mmengine.config import Config, ConfigDict
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS as ROOT
from mmpretrain.models import build_classifier
from mmpretrain.registry import MODELS

KINDS = {
    'quadratic': dict(type='SAQuadratic'),
    'generalized': dict(type='SAGeneralized'),
    'learned': dict(type='SALearned'),
    'learned_content': dict(type='SALearned', content=True),
}


def backbone(kind='quadratic', **kwargs):
    return MODELS.build({**KINDS[kind], 'arch': SMALL_ARCH, **kwargs})


def classifier(kind='quadratic', **options):
    head = dict(type='LinearClsHead', num_classes=10, in_channels=16)
    own = dict(**KINDS[kind], arch=SMALL_ARCH, out_type='avg_featmap', **options)
    return build_classifier(dict(type='ImageClassifier', backbone=own, head=head))


@pytest.mark.parametrize('kind', KINDS)
def test_outputs(kind):
    x = torch.randn(2, 3, 16, 8)
    model = backbone(kind, out_indices=(0, -1))
    features = model(x)
    assert isinstance(features, tuple) and [f.shape for f in features] == [(2, 16, 8, 4)] * 2
    averages = backbone(kind, out_type='avg_featmap')
    averages.load_state_dict(model.state_dict())
    assert torch.allclose(averages(x)[0], features[1].mean((2, 3)))
    assert backbone(kind, in_channels=1)(torch.randn(1, 1, 8, 8))[0].shape == (1, 16, 4, 4)


def test_backbone_of_timm():
    """Where a map has as many rows as channels, nothing but the values shows which axes were pooled."""
    x, settings = torch.randn(2, 3, 32, 32), dict(embed_dim=16, depth=2, num_heads=3, mlp_dim=24)
    gap = MODELS.build(dict(type='GlobalAveragePooling'))
    timm_backbone = dict(type='TIMMBackbone', model_name='sa_quadratic_cifar', **settings)
    whole = MODELS.build(timm_backbone)
    channels_first = MODELS.build(dict(timm_backbone, features_only=True, out_indices=[-1]))
    channels_first.timm_model.model.load_state_dict(whole.timm_model.state_dict(), strict=False)
    own = backbone('quadratic', out_type='avg_featmap')
    own.load_state_dict(whole.timm_model.state_dict())
    (last,), expected = whole(x), own(x)[0]
    assert last.shape == (2, 16, 16, 16) and not torch.allclose(gap((last,))[0], expected, atol=1e-3)
    assert torch.allclose(last.mean((1, 2)), expected, atol=1e-6)
    assert torch.allclose(gap(channels_first(x))[0], expected, atol=1e-6)


@pytest.mark.parametrize('kind', ['SAQuadratic', 'CMHSA', 'ConvToAttention'])
def test_settings_of_another_backbone(kind, repository, tmp_path):
    """Of a config that inherits a ResNet, without and with ``_delete_``."""
    own = ", backbone=dict(type='ResNet', depth=18), layers='layer4.*.conv2'" if kind == 'ConvToAttention' else ''
    for delete in ('', ', _delete_=True'):
        (tmp_path / 'own.py').write_text(
            f"_base_ = '{repository}/configs/resnet18_cifar10.py'\n"
            f"model = dict(backbone=dict(type='{kind}'{own}{delete}))\n"
        )
        config = Config.fromfile(tmp_path / 'own.py').model.backbone
        if delete:
            assert MODELS.build(config)(torch.rand(2, 3, 32, 32))
            return
        message = r'\w+ has no argument depth, .*style: write _delete_=True in backbone if these come from the config'
        with pytest.raises(TypeError, match=message):
            MODELS.build(config)


def test_only_the_wanted_blocks_run():
    model = backbone(out_indices=0)
    model.blocks[1] = None
    assert len(model(torch.randn(1, 3, 8, 8))) == 1


def test_named_architectures():
    model = MODELS.build(dict(type='mmpretrain.SAQuadratic', arch='base'))
    assert (model.embed_dims, model.num_layers, model.blocks[0].attn.num_heads) == (400, 6, 9)
    assert MODELS.build(dict(type='SAQuadratic', arch='base-16heads')).blocks[0].attn.num_heads == 16
    # In another framework's config, from the registry at the root.
    assert type(ROOT.build(dict(type='mmpretrain.SAQuadratic', arch=SMALL_ARCH))).__name__ == 'SAQuadratic'


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(arch='huge'), 'Arch huge is not in default archs'),
        (dict(arch=dict(embed_dims=8)), 'Custom arch needs a dict with keys'),
        (dict(out_type='cls_token'), 'Unsupported `out_type` cls_token'),
        (dict(out_indices=2), 'Invalid out_indices 2: there are 2 blocks'),
        (dict(out_indices=(-3,)), 'Invalid out_indices -3'),
        (dict(out_indices=(1, -1)), 'names a block twice'),
        (dict(out_indices=()), '`out_indices` must be an int or a sequence'),
        (dict(out_indices=(0.5,)), '`out_indices` must be an int or a sequence'),
        (dict(frozen_stages=0.5), '`frozen_stages` 0.5 must be'),
        (dict(drop_path_rate=1.5), 'drop_path_rate=1.5 must be from 0'),
        (dict(arch=dict(SMALL_ARCH, num_layers=0)), 'depth=0'),
        (dict(kind='learned', img_size=1), 'img_size=1 must be a multiple of reduction=2'),
        (dict(kind='learned', img_size=(8, 9)), r'img_size=\(8, 9\) must be a multiple of reduction=2'),
        (dict(reduction=0), 'reduction=0 must be at least 1'),
        (
            dict(kind='learned', position='relative_quadratic'),
            "position='relative_quadratic' is not for attention with",
        ),
        (dict(frozen_stages=3), '`frozen_stages` 3 must be'),
        (dict(kind='learned', position='fixed'), "position='fixed' is not for"),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        backbone(**kwargs)


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2])
def test_frozen_stages(frozen_stages):
    model = backbone(frozen_stages=frozen_stages, drop_rate=0.1)
    for _ in range(2):
        for i, stage in enumerate([model.stem, *model.blocks]):
            frozen = i <= frozen_stages
            assert all(p.requires_grad != frozen for p in stage.parameters())
            assert all(m.training != frozen for m in stage.modules())
        assert model.train() is model


def test_gradient_checkpointing():
    model, checkpointed = backbone(), backbone(with_cp=True)
    checkpointed.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 8, 8)
    gradients = [torch.autograd.grad(m(x)[0].sin().sum(), list(m.parameters())) for m in (model, checkpointed)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))


def test_layer_depth():
    model = backbone()
    depth = [
        model.get_layer_depth(n, 'backbone.')
        for n in (
            'backbone.stem.proj.weight',
            'backbone.blocks.0.attn.encoding.center',
            'backbone.blocks.1.norm2.bias',
            'head.fc.weight',
        )
    ]
    assert depth == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_init_cfg(tmp_path):
    trained = backbone()
    torch.save(trained.state_dict(), tmp_path / 'trained.pth')
    model = backbone(init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'trained.pth')))
    model.init_weights()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), trained.state_dict().values()))


def test_weight_decay_of_the_configs():
    config = mmpretrain.ModelHub.get('sa_generalized_cifar10').config
    model = classifier('generalized')
    optimizer = build_optim_wrapper(model, config.optim_wrapper).optimizer
    names = {id(p): n for n, p in model.named_parameters()}
    decay = {names[id(p)]: g['weight_decay'] for g in optimizer.param_groups for p in g['params']}
    left_off = {n for n, value in decay.items() if value == 0}
    assert left_off == {
        f'backbone.blocks.{i}.attn.encoding.{p}' for i in range(2) for p in ('center', 'sqrt_precision')
    }
    assert all(value == 1e-4 for n, value in decay.items() if n not in left_off)


@pytest.mark.parametrize(
    'kind, options',
    [
        *((kind, {}) for kind in KINDS),
        ('quadratic', dict(reduction=4)),
        ('learned', dict(position='relative_sinusoidal', img_size=(32, 64))),
        ('learned_content', dict(position='relative_generalized')),
        ('learned_content', dict(position='relative_quadratic')),
    ],
    ids=str,
)
def test_weights_go_both_ways_between_the_frameworks(kind, options):
    theirs = classifier(kind, **options).eval()
    ours = small_timm(f'sa_{kind}_cifar', **options).eval()
    x = torch.randn(2, 3, 32, 32)

    def to_mmpretrain(state):
        return {n if n.startswith('head.') else f'backbone.{n}': v for n, v in state.items()}

    theirs.load_state_dict(to_mmpretrain(ours.state_dict()), strict=True)
    assert torch.equal(theirs(x), ours(x))
    other = small_timm(f'sa_{kind}_cifar', **options).eval()
    assert not torch.equal(other(x), theirs(x))
    other.load_state_dict(theirs.state_dict(), strict=True)  # by mmpretrain's names
    assert torch.equal(other(x), theirs(x))


def test_a_config_cannot_set_what_the_backbone_decides():
    for name in ('attn_layer', 'num_classes', 'embed_dim', 'global_pool', 'max_size'):
        with pytest.raises(TypeError, match=f'has no argument {name}'):
            backbone('learned', **{name: 3})


def test_layer_decay():
    model = classifier()
    wrapper = build_optim_wrapper(
        model,
        ConfigDict(
            optimizer=dict(type='SGD', lr=1.0, weight_decay=1e-4),
            constructor='mmpretrain.LearningRateDecayOptimWrapperConstructor',
            paramwise_cfg=dict(layer_decay_rate=0.5),
        ),
    )
    rate = {group['param_name']: group['lr'] for group in wrapper.optimizer.param_groups}
    assert rate['backbone.stem.proj.weight'] == 0.125 and rate['backbone.blocks.1.proj.bias'] == 0.5
    assert rate['head.fc.weight'] == 1


@torch.no_grad()  # compiled for training: the same networks in test_timm_models.py
@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_copied_compiled_and_exported(kind):
    model = backbone(kind, out_indices=(0, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    exported = torch.export.export(model, (x,)).module()
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        exported,
        torch.compile(model, fullgraph=True, backend='aot_eager'),
    ):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(other(x), expected))
