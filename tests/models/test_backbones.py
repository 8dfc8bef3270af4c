"""mmpretrain's interface, and the same weights in both frameworks."""

import copy
import pickle

import pytest
import torch
from helpers.convolutions import relative_error
from helpers.small import CMHSA_KINDS, SMALL_ARCH, SMALL_CMHSA, small_cmhsa, small_model, trained_like
from mmengine.config import Config
from mmengine.registry import MODELS as ROOT
from mmpretrain.models import build_classifier
from mmpretrain.registry import MODELS

KINDS = {
    'sa_quadratic_cifar': dict(type='SAQuadratic', arch=SMALL_ARCH),
    'sa_generalized_cifar': dict(type='SAGeneralized', arch=SMALL_ARCH),
    'sa_learned_cifar': dict(type='SALearned', arch=SMALL_ARCH),
    'sa_learned_content_cifar': dict(type='SALearned', content=True, arch=SMALL_ARCH),
    **{kind: dict(SMALL_CMHSA, **settings) for kind, settings in CMHSA_KINDS.items()},
}
SA = 'sa_quadratic_cifar'


def backbone(kind=SA, **kwargs):
    return MODELS.build({**KINDS[kind], **kwargs})


def classifier(kind=SA, **options):
    own = dict(KINDS[kind], out_type='avg_featmap', **options)
    head = dict(type='LinearClsHead', num_classes=10, in_channels=12 if 'cmhsa' in kind else 16)
    return build_classifier(dict(type='ImageClassifier', backbone=own, head=head))


@pytest.mark.parametrize('kind', KINDS)
def test_outputs(kind):
    """The last feature map is normed; maps and their averages in copies too."""
    model, x = trained_like(backbone(kind, out_indices=(0, -1))).eval(), torch.randn(2, 3, 16, 8)
    features, dim = model(x), 12 if 'cmhsa' in kind else 16
    assert isinstance(features, tuple) and dim == model.embed_dims
    assert [feature.shape for feature in features] == [(2, dim, 8, 4)] * 2
    last, intermediates = model.forward_intermediates(x, indices=[0, 1], output_fmt='NHWC')
    assert torch.equal(features[0].permute(0, 2, 3, 1), intermediates[0])
    assert torch.equal(features[1].permute(0, 2, 3, 1), last)
    averages = backbone(kind, out_type='avg_featmap').eval()
    averages.load_state_dict(model.state_dict())
    assert torch.allclose(averages(x)[0], features[1].mean((2, 3)))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(other(x), features))
    assert backbone(kind, in_channels=1)(torch.randn(1, 1, 8, 8))[0].shape[2:] == (4, 4)


def test_backbone_of_timm():
    """Where a map has as many rows as channels, nothing but the values shows which axes were pooled."""
    x, settings = torch.randn(2, 3, 32, 32), dict(embed_dim=16, depth=2, num_heads=3, mlp_dim=24)
    gap = MODELS.build(dict(type='GlobalAveragePooling'))
    timm_backbone = dict(type='TIMMBackbone', model_name='sa_quadratic_cifar', **settings)
    whole = MODELS.build(timm_backbone)
    channels_first = MODELS.build(dict(timm_backbone, features_only=True, out_indices=[-1]))
    channels_first.timm_model.model.load_state_dict(whole.timm_model.state_dict(), strict=False)
    own = backbone(out_type='avg_featmap')
    own.load_state_dict(whole.timm_model.state_dict())
    (last,), expected = whole(x), own(x)[0]
    assert last.shape == (2, 16, 16, 16) and not torch.allclose(gap((last,))[0], expected, atol=1e-3)
    assert torch.allclose(last.mean((1, 2)), expected, atol=1e-6)
    assert torch.allclose(gap(channels_first(x))[0], expected, atol=1e-6)


@pytest.mark.parametrize('kind', ['SAQuadratic', 'CMHSA', 'ConvToAttention'])
def test_settings_of_another_backbone(kind, repository, tmp_path):
    """Of a config that inherits a ResNet, without and with ``_delete_``."""
    small = dict(
        SAQuadratic=f', arch={SMALL_ARCH}',
        CMHSA=', patch_size=4, img_size=32, num_layers=1',
        ConvToAttention=", backbone=dict(type='ResNet', depth=18), layers='layer4.*.conv2'",
    )
    for delete in ('', ', _delete_=True'):
        (tmp_path / 'own.py').write_text(
            f"_base_ = '{repository}/configs/resnet18_cifar10.py'\n"
            f"model = dict(backbone=dict(type='{kind}'{small[kind]}{delete}))\n"
        )
        config = Config.fromfile(tmp_path / 'own.py').model.backbone
        if delete:
            assert MODELS.build(config)(torch.rand(2, 3, 32, 32))
            return
        message = r'\w+ has no argument depth, .*style: write _delete_=True in backbone if the config inherits them'
        with pytest.raises(TypeError, match=message):
            MODELS.build(config)


def test_only_the_wanted_blocks_run():
    model = backbone(out_indices=0, with_cp=True)
    assert model.grad_checkpointing and not backbone().grad_checkpointing
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
        (dict(arch='huge'), "arch='huge' must be one of .*'base-16heads', 'tiny'"),
        (dict(arch=dict(embed_dims=8)), r"arch=\{'embed_dims': 8\} must be one of .*\['embed_dims'"),
        (dict(out_type='cls_token'), "out_type='cls_token' is unknown: choose one of"),
        (dict(out_indices=2), 'out_indices=2 must name different blocks, from -2 to 1'),
        (dict(out_indices=(-3,)), r'out_indices=\(-3,\) must name'),
        (dict(out_indices=(1, -1)), r'out_indices=\(1, -1\) must name'),
        (dict(out_indices=(0.5,)), r'out_indices=\(0.5,\) must name'),
        (dict(out_indices=()), r'out_indices=\(\) must name'),
        (dict(out_indices='01'), "out_indices='01' must name"),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        backbone(**kwargs)


def test_a_config_cannot_set_what_the_backbone_decides():
    own = dict(
        sa_learned_cifar=['attn_layer', 'embed_dim', 'max_size'], cmhsa_attn=['mlp_dim', 'drop_rate', 'in_chans']
    )
    for kind, names in own.items():
        for name in (*names, 'num_classes', 'global_pool'):
            with pytest.raises(TypeError, match=f'{KINDS[kind]["type"]} has no argument {name}'):
                backbone(kind, **{name: 3})


@pytest.mark.parametrize(
    'kind, options',
    [
        *((kind, {}) for kind in KINDS),
        (SA, dict(reduction=4)),
        ('sa_learned_cifar', dict(img_size=(32, 64))),
    ],
    ids=str,
)
def test_weights_go_both_ways_between_the_frameworks(kind, options):
    ours, other = (trained_like(small_model(kind, **options)).double().eval() for _ in range(2))
    theirs, x = classifier(kind, **options).double().eval(), torch.randn(2, 3, 32, 32).double()
    names = {n if n.startswith('head.') else f'backbone.{n}': v for n, v in ours.state_dict().items()}
    theirs.load_state_dict(names, strict=True)
    assert relative_error(theirs(x), ours(x)) < 1e-12 and relative_error(other(x), theirs(x)) > 0.1
    assert not any(hasattr(module, 'num_classes') for module in theirs.backbone.modules())  # for ClassNumCheckHook
    other.load_state_dict(theirs.state_dict(), strict=True)  # by mmpretrain's names
    assert relative_error(other(x), theirs(x)) < 1e-12


@pytest.mark.parametrize('phase', ['conv', 'attn'])
@pytest.mark.parametrize('into', ['conv', 'attn'])
def test_pretrained(phase, into, tmp_path):
    """Checkpoints of either phase by mmengine's init_cfg, by timm's pretrained weights and its checkpoint_path."""
    x, path = torch.randn(2, 3, 16, 16), str(tmp_path / 'pretrained.pth')
    theirs = trained_like(classifier(f'cmhsa_{phase}', attn_bias_init=40.0)).eval()
    torch.save(dict(state_dict=theirs.state_dict(), meta={}), path)
    init_cfg = dict(type='Pretrained', checkpoint=path, prefix='backbone.')
    model = classifier(f'cmhsa_{into}', attn_bias_init=40.0, init_cfg=init_cfg)
    model.init_weights()
    features, expected = model.eval().extract_feat(x)[0], theirs.extract_feat(x)[0]
    assert relative_error(features, expected) < 1e-4
    overlay = dict(pretrained=True, pretrained_cfg_overlay=dict(file=path, num_classes=10))
    for how in (overlay, dict(checkpoint_path=path)):
        ours = small_cmhsa(into, attn_bias_init=40.0, **how).eval()
        assert ours.phase == ('conv' if phase == into == 'conv' else 'attn')
        assert relative_error(ours(x), theirs(x)) < 1e-4
