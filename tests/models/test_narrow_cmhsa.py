"""CMHSA with heads of other widths, and with or without a null key."""

import pytest
import timm
import torch
from helpers.convolutions import relative_error
from helpers.small import BACKENDS, SMALL_CMHSA, small_cmhsa, trained_like
from torch.utils.flop_counter import FlopCounterMode

from attncnn_plugin.models import CMHSANetwork
from attncnn_plugin.pruning import prune_heads

KINDS = {
    'full': {},
    'exact': dict(head_dim='exact', qk_dim=4),
    'wider': dict(head_dim='exact', min_head_dim=5, qk_dim=3),
}


def network(kind, phase='attn', **kwargs):
    return small_cmhsa(phase, **{**KINDS[kind], **kwargs})


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('kernel_size', [3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_output_does_not_move(kind, kernel_size, dtype, tolerance):
    model = network(kind, 'conv', kernel_size=kernel_size, attn_bias_init=40.0)
    trained_like(model.to(dtype)).eval()
    x = torch.randn(2, 3, 16, 12, dtype=dtype)
    before = model(x)
    transition = model.to_attention()
    assert relative_error(model(x), before) < tolerance
    assert transition.head_dims == model.blocks[0].attn.head_dims
    assert transition.parameters_after == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize('kind', KINDS)
def test_every_parameter_moves(kind):
    """Further heads and channels too, though the function does not see them at first."""
    model = trained_like(network(kind, 'conv'))
    model.to_attention(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 16, 16)).square().sum().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, start[name]), name


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('into', ['conv', 'full', 'exact'])
def test_state_dicts_carry_their_widths(kind, into):
    model = trained_like(network(kind)).eval()
    settings = KINDS['exact'] if into == 'exact' else {}
    loaded = trained_like(small_cmhsa('conv' if into == 'conv' else 'attn', **settings)).eval()
    loaded.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 16, 16)
    assert loaded.blocks[1].attn.head_dims == model.blocks[1].attn.head_dims
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize('kind', KINDS)
def test_convolutions_load_into_narrow_heads(kind):
    model = trained_like(small_cmhsa('conv')).eval()
    loaded = network(kind, attn_bias_init=40.0).eval()
    loaded.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 16, 16)
    assert relative_error(loaded(x), model(x)) < 1e-4
    assert loaded.blocks[0].attn.position.null_key  # without it the border would not be the convolution's


def test_the_null_key_is_carried():
    """On from a convolution, off from scratch, as it is in the state dict that is loaded."""
    x = torch.randn(2, 3, 16, 16)
    models = {}
    for null_key in (True, False):
        models[null_key] = trained_like(small_cmhsa('attn', null_key=null_key)).eval()
        assert models[null_key].blocks[0].attn.position.null_key == null_key
    assert not small_cmhsa('attn').blocks[0].attn.position.null_key
    for built in (True, False, None):
        for saved, model in models.items():
            for phase in ('attn', 'conv'):
                loaded = small_cmhsa(phase, null_key=built).eval()
                loaded.load_state_dict(model.state_dict())
                assert loaded.blocks[1].attn.position.null_key == saved
                assert relative_error(loaded(x), model(x)) < 1e-4
    models[False].load_state_dict(models[True].state_dict())
    assert torch.equal(models[False](x), models[True](x))
    larger = small_cmhsa('attn', img_size=24, null_key=True)  # another grid and another kind of key at once
    larger.load_state_dict(small_cmhsa('attn').state_dict())
    assert not larger.blocks[0].attn.position.null_key


def test_without_a_null_key_the_border_moves():
    """As in L21, whose attention is unmodified."""
    model = trained_like(small_cmhsa('conv', null_key=False, attn_bias_init=40.0)).eval()
    x = torch.randn(1, 3, 16, 16)
    before = model.forward_features(x)
    model.to_attention()
    assert relative_error(model.forward_features(x), before) > 1e-2


def test_null_key_at_random_initialization():
    """With biases of 0 the null key takes most of the attention: 73% on a grid of 14x14 tokens."""
    attention = small_cmhsa('attn', img_size=28, null_key=True).blocks[0].attn
    assert 1 - attention.position_probs((14, 14)).sum(-1).mean().item() == pytest.approx(0.731, abs=1e-3)
    attention = small_cmhsa('attn', img_size=28).blocks[0].attn
    assert torch.allclose(attention.position_probs((14, 14)).sum(-1), torch.ones(()))


def test_from_scratch_the_patch_projection_is_random():
    torch.manual_seed(0)
    model = small_cmhsa('attn', patch_size=8)
    assert abs(model.stem.proj.weight.std() - 0.02) < 0.002
    converted = small_cmhsa('conv', patch_size=8)
    converted.to_attention()
    assert torch.equal(converted.stem.proj.weight, torch.eye(192))


def test_sizes_of_narrow_heads():
    """Millions of parameters, and thousand million multiply-adds an image of 224 pixels; made without memory."""
    expected = {
        (3, 1): (43.2, 8.8),
        (5, 1): (45.3, 9.3),
        (7, 1): (47.6, 9.8),
        (3, 64): (46.0, 9.5),
        (5, 64): (47.2, 9.7),
        (7, 64): (49.0, 10.1),
    }
    for (kernel_size, min_head_dim), (parameters, multiply_adds) in expected.items():
        with torch.device('meta'):
            kwargs = dict(kernel_size=kernel_size, head_dim='exact', min_head_dim=min_head_dim, qk_dim=64)
            model = timm.create_model('cmhsa3_patch16_224', num_classes=0, **kwargs)
            assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(parameters, abs=0.1)
            with FlopCounterMode(display=False) as counter:
                model(torch.empty(1, 3, 224, 224))
        assert counter.get_total_flops() / 2e9 == pytest.approx(multiply_adds, abs=0.1)


@pytest.mark.parametrize('kind', KINDS)
def test_heads_are_removed(kind):
    """As if their output weights were 0; a network as it was built loads what is left."""
    model = trained_like(network(kind)).eval()
    x = torch.randn(2, 3, 16, 12)
    with torch.no_grad():
        kept = model.blocks[1].attn.out.weight.clone()
        parts = model.blocks[1].attn.out.weight.split(model.blocks[1].attn.head_dims, dim=1)
        parts[0].zero_(), parts[4].zero_()
        expected = model(x)
        model.blocks[1].attn.out.weight.copy_(kept)
    prune_heads(model, {1: [0, 4]})
    assert relative_error(model(x), expected) < 1e-5
    loaded = network(kind).eval()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(x), model(x)) and loaded.blocks[0].attn.num_heads == loaded.blocks[1].attn.num_heads + 2
    with pytest.raises(ValueError, match='heads of 0 are to be removed, but there are 0 attention layers'):
        prune_heads(network(kind, 'conv'), {0: [1]})


@pytest.mark.parametrize('kind', ['exact', pytest.param('wider', marks=pytest.mark.slow)])
@pytest.mark.parametrize('backend', BACKENDS)
def test_compiled_and_in_other_precisions(kind, backend):
    model = trained_like(network(kind, 'conv', depth=1)).eval()
    model.to_attention()
    x = torch.randn(2, 3, 16, 16)
    assert relative_error(torch.compile(model, fullgraph=True, backend=backend)(x), model(x)) < 1e-4
    with torch.autocast('cpu', torch.bfloat16):
        assert relative_error(model(x).float(), model(x)) < 0.1
    exported = torch.export.export(model, (x,)).module()
    assert relative_error(exported(x), model(x)) < 1e-5


@pytest.mark.parametrize('kind', KINDS)
def test_backbone(kind):
    """The same arguments in mmpretrain, and weights from timm's model."""
    registry = pytest.importorskip('mmpretrain.registry')
    backbone = registry.MODELS.build(dict(SMALL_CMHSA, **KINDS[kind])).eval()
    model = network(kind).eval()
    missing, unexpected = backbone.load_state_dict(model.state_dict(), strict=False)
    assert not missing and all(name.startswith('head.') for name in unexpected)
    x = torch.randn(1, 3, 16, 16)
    (features,) = backbone(x)
    assert relative_error(features, model.forward_features(x).permute(0, 3, 1, 2)) < 1e-6
    assert features.shape[1] == backbone.embed_dims


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(head_dim='wide'), "head_dim='wide' is unknown"),
        (dict(min_head_dim=4), "min_head_dim=4 must be at least 1, and is for head_dim='exact' alone"),
        (dict(min_head_dim=0, head_dim='exact'), 'min_head_dim=0 must be at least 1'),
        (dict(qk_dim=0), 'qk_dim=0 must be at least 1'),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CMHSANetwork(img_size=16, patch_size=2, depth=1, **kwargs)
