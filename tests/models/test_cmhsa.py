"""CMHSA: the same output in both phases, and checkpoints that carry their structure."""

import warnings

import pytest
import timm
import timm.optim
import torch
from helpers.convolutions import relative_error
from helpers.small import small_cmhsa, trained_like
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention.patches import image_to_patches
from attncnn_plugin.models.cmhsa import PatchConvolution
from attncnn_plugin.pruning import replace_parameters

PHASES = ['conv', 'attn']
WIDTHS = {
    'full': {},
    'exact': dict(head_dim='exact', qk_dim=4),
    'wider': dict(head_dim='exact', min_head_dim=5, qk_dim=3),
}


def of_width(widths, phase='attn', **kwargs):
    return small_cmhsa(phase, **{**WIDTHS[widths], **kwargs})


@pytest.mark.parametrize(
    'kernel_size, dtype, tolerance', [(3, torch.float32, 1e-4), *((size, torch.float64, 1e-10) for size in (3, 5, 7))]
)
@pytest.mark.parametrize(
    'widths, patch_size, img_size',
    [
        *(('full', *sizes) for sizes in [(4, 20), (4, (12, 8)), (8, 24), (2, 8), (1, 7)]),
        pytest.param('full', 16, 48, marks=pytest.mark.slow),
        *((widths, 2, (16, 12)) for widths in ('exact', 'wider')),
    ],
)
def test_output_does_not_move(widths, kernel_size, patch_size, img_size, dtype, tolerance):
    settings = dict(kernel_size=kernel_size, patch_size=patch_size, img_size=img_size, attn_bias_init=40.0)
    model = trained_like(of_width(widths, 'conv', **settings).to(dtype)).eval()
    x = torch.randn(2, 3, *(img_size if isinstance(img_size, tuple) else (img_size, img_size)), dtype=dtype)
    before = model(x), model.forward_features(x)
    change = model.to_attention()
    after = model(x), model.forward_features(x)
    assert model.phase == 'attn' and not any(isinstance(m, nn.Conv2d) for m in model.modules())
    for old, new in zip(before, after):
        assert relative_error(new, old) < tolerance
    heads = (2 * -(-(kernel_size - 1) // (2 * patch_size)) + 1) ** 2
    assert [layer.after for layer in change.layers] == [f'{heads} heads'] * 2
    assert change.parameters_after == sum(p.numel() for p in model.parameters())
    if (patch_size, kernel_size) == (2, 3):
        head_dims, least = model.blocks[0].attn.head_dims, {'full': 12, 'exact': 3, 'wider': 5}[widths]
        assert (min(head_dims), max(head_dims)) == (least, 12)


def test_change_of_the_transition():
    """Its table, and an optimizer that trains on with every parameter, biases among biases."""
    model = small_cmhsa('conv')
    matrices = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.SGD([dict(params=matrices, weight_decay=0.1), dict(params=biases)], lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    change = model.to_attention()
    assert str(change).splitlines()[:2] == [
        'layer          before      after    parameters',
        'blocks.0.attn  3×3 kernel  9 heads  84 → 7,221',
    ]
    replace_parameters(optimizer, change)
    decayed, others = ({id(p) for p in group['params']} for group in optimizer.param_groups)
    assert decayed == {id(p) for p in model.parameters() if p.ndim == 2}
    assert others == {id(p) for p in model.parameters() if p.ndim != 2}
    optimizer.step()


@pytest.mark.parametrize('channels, kernel_size, patch_size', [(3, 5, 4), (1, 3, 2), (2, 4, 3)])
def test_convolution_of_patches(channels, kernel_size, patch_size):
    """That of the image, and its gradients, whatever the layout in memory."""
    layer = PatchConvolution(channels, kernel_size, patch_size)
    image = torch.randn(2, channels, 4 * patch_size, 3 * patch_size)
    size = (patch_size, patch_size)
    results = []
    for function in (lambda x: image_to_patches(layer.conv(x), size), lambda x: layer(image_to_patches(x, size))):
        x = image.clone().requires_grad_()
        output = function(x)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        results.append([output, x.grad, layer.conv.weight.grad, layer.conv.bias.grad])
        layer.zero_grad()
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(*results))
    patches = image_to_patches(image, size)
    assert relative_error(torch.func.vmap(layer)(patches[:, None])[:, 0], layer(patches)) < 1e-5


@pytest.mark.parametrize(
    'widths, weight_decay, steps', [('full', 0.05, 1), ('full', 0.0, 2), ('exact', 0.0, 3), ('wider', 0.0, 3)]
)
def test_every_parameter_moves(widths, weight_decay, steps):
    """W^Q gets a gradient at once, W^K as soon as W^Q is not zero; b is not saturated by the default M.

    Further channels of a head move too, though the function does not see them at first.
    """
    model = trained_like(of_width(widths, 'conv'))
    model.to_attention(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=weight_decay)
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 16, 16)).square().sum().backward()
        for name, parameter in model.named_parameters():
            first_key = name.endswith('key.weight') and step == 0
            assert first_key or parameter.grad.abs().max() > 1e-7, name
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, start[name]), name


def test_keys_are_drawn():
    """W^Q is 0, so that the output does not move; W^K is not, so that W^Q can."""
    model, other = small_cmhsa('conv'), small_cmhsa('conv')
    for network in (model, other):
        network.to_attention(torch.Generator().manual_seed(0))
    attention = model.blocks[0].attn
    assert attention.query.weight.abs().max() == 0 and abs(attention.key.weight.std() - 0.02) < 0.002
    assert torch.equal(other.blocks[1].attn.key.weight, model.blocks[1].attn.key.weight)
    with pytest.raises(RuntimeError, match="in phase='attn' already"):
        model.to_attention()


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(phase='vit'), "phase='vit' is unknown: choose one of"),
        (dict(img_size=15), 'img_size=15 must be a multiple of patch_size=2'),
        (dict(img_size=0), 'img_size=0 must be a multiple'),
        (dict(kernel_size=0), 'kernel_size=0 must be at least 1'),
        (dict(qk_dim=0), 'qk_dim=0 must be at least 1'),
        (dict(head_dim='wide'), "head_dim='wide' is unknown"),
        (dict(min_head_dim=4), "min_head_dim=4 must be at least 1, and is only for head_dim='exact'"),
        (dict(min_head_dim=0, head_dim='exact'), 'min_head_dim=0 must be at least 1'),
        (dict(drop_path_rate=1.0), 'drop_path_rate=1.0 must be from 0'),
        (dict(attn_bias_init=0.0), 'attn_bias_init=0.0 must be positive and finite'),
        (dict(attn_bias_init=float('inf')), 'attn_bias_init=inf must be positive and finite'),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        small_cmhsa(kwargs.pop('phase', 'conv'), **kwargs)


def test_sizes_of_the_paper():
    """D = 16·16·3 = 768, 9 heads of 768, 6 layers; made without memory."""
    for name, kernel in [('cmhsa3_patch16_224', 3), ('cmhsa5_patch16_224', 5)]:
        with torch.device('meta'):
            model, conv = timm.create_model(name), timm.create_model(name, phase='conv')
        assert model.phase == 'attn' and len(model.blocks) == 6 and model.blocks[0].mlp.fc1.out_features == 3072
        attention = model.blocks[0].attn
        assert attention.query.weight.shape == (9 * 768, 768) and attention.out.weight.shape == (768, 9 * 768)
        assert attention.position.table.shape == (9, 27, 27)
        assert conv.blocks[0].attn.conv.weight.shape == (3, 3, kernel, kernel)
        assert sum(p.numel() for p in conv.stem.parameters()) == 0  # the patch projection is the identity


@pytest.mark.parametrize(
    'kernel_size, min_head_dim, parameters, multiply_adds',
    [(3, 1, 43.2, 8.8), (7, 1, 47.6, 9.8), (5, 64, 47.2, 9.7)],
)
def test_sizes_of_narrow_heads(kernel_size, min_head_dim, parameters, multiply_adds):
    """Millions of parameters, and thousand million multiply-adds an image of 224 pixels; made without memory."""
    with torch.device('meta'):
        kwargs = dict(kernel_size=kernel_size, head_dim='exact', min_head_dim=min_head_dim, qk_dim=64)
        model = timm.create_model('cmhsa3_patch16_224', num_classes=0, **kwargs)
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(parameters, abs=0.1)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 224, 224))
    assert counter.get_total_flops() / 2e9 == pytest.approx(multiply_adds, abs=0.1)
    assert max(small_cmhsa('attn', head_dim='exact', min_head_dim=99).blocks[0].attn.head_dims) == 12  # a token's


@pytest.mark.parametrize('grid, larger, change', [(2, 4, 0.18), (3, 6, 0.018), (4, 8, 0.0013), (3, 3, 8e-5)])
def test_attention_on_larger_images(grid, larger, change):
    """Its tables are spread: behind its own key, a head that has two tokens more than its shift sees little more."""
    torch.manual_seed(0)
    model = timm.create_model('cmhsa3_patch16_224', img_size=8 * grid, patch_size=8, depth=2, phase='conv').eval()
    x = torch.randn(2, 3, 8 * larger, 8 * larger)
    expected = model.forward_features(x)
    model.to_attention()
    error = (model.forward_features(x) - expected).norm() / expected.norm()
    assert change / 1.5 < error < change * 1.5


def test_start_from_scratch():
    """Without a null key, which would take 73% of the attention of a 14x14 grid, and with a random patch projection."""
    torch.manual_seed(0)
    model = small_cmhsa('attn', patch_size=8)
    assert abs(model.stem.proj.weight.std() - 0.02) < 0.002
    converted = small_cmhsa('conv', patch_size=8)
    converted.to_attention()
    assert torch.equal(converted.stem.proj.weight, torch.eye(192))
    attention = small_cmhsa('attn', img_size=28, null_key=True).blocks[0].attn
    assert 1 - attention.position_probs((14, 14)).sum(-1).mean().item() == pytest.approx(0.731, abs=1e-3)
    attention = small_cmhsa('attn', img_size=28).blocks[0].attn
    assert torch.allclose(attention.position_probs((14, 14)).sum(-1), torch.ones(()))


@pytest.mark.parametrize('name, phase', [('cmhsa3_patch16_224', 'conv'), ('cmhsa5_patch16_224', 'attn')])
@pytest.mark.parametrize('into', PHASES)
def test_state_dicts_carry_their_phase(name, phase, into):
    model = trained_like(small_cmhsa(phase, name, attn_bias_init=40.0)).eval()
    x = torch.randn(2, 3, 16, 16)
    loaded = trained_like(small_cmhsa(into, name, attn_bias_init=40.0)).eval()  # nothing of it must be left
    state = model.state_dict()
    keys = set(state)
    loaded.load_state_dict(state, strict=True)
    with torch.device('meta'):
        without_memory = small_cmhsa(into, name, attn_bias_init=40.0).eval()
    without_memory.load_state_dict(state, assign=True)
    assert loaded.phase == without_memory.phase == ('conv' if phase == into == 'conv' else 'attn')
    assert relative_error(loaded(x), model(x)) < (1e-4 if phase != into else 1e-9)
    assert relative_error(without_memory(x), loaded(x)) < 1e-6
    assert set(state) == keys  # the caller's is not changed
    assert not any(module.training for module in loaded.modules())


def test_other_shapes_of_state_dicts():
    with pytest.raises(RuntimeError, match='size mismatch for blocks.0.attn.conv.weight'):
        small_cmhsa('conv').load_state_dict(small_cmhsa('conv', kernel_size=5).state_dict())
    for other in (dict(kernel_size=5), dict(in_chans=1)):
        with pytest.raises(RuntimeError, match=r'blocks.0.attn.conv.weight of the state dict: .*\n.*size mismatch'):
            small_cmhsa('attn').load_state_dict(small_cmhsa('conv', **other).state_dict())
    for missing in ('weight', 'bias'):
        state = small_cmhsa('conv').state_dict()
        del state[f'blocks.1.attn.conv.{missing}']
        with pytest.raises(RuntimeError, match='Missing key.* "blocks.1.attn.position.table"'):
            small_cmhsa('attn').load_state_dict(state)


@pytest.mark.parametrize('widths', WIDTHS)
@pytest.mark.parametrize('into', ['conv', 'full', 'exact'])
def test_state_dicts_carry_their_widths(widths, into):
    model = trained_like(of_width(widths)).eval()
    loaded = trained_like(small_cmhsa('conv') if into == 'conv' else of_width(into)).eval()
    loaded.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 16, 16)
    assert loaded.blocks[1].attn.head_dims == model.blocks[1].attn.head_dims
    assert torch.equal(loaded(x), model(x))
    convolutions = trained_like(small_cmhsa('conv')).eval()
    loaded = of_width(widths, attn_bias_init=40.0).eval()
    loaded.load_state_dict(convolutions.state_dict())
    assert relative_error(loaded(x), convolutions(x)) < 1e-4
    assert loaded.blocks[0].attn.position.null_key  # without it the border would not be the convolution's


def test_state_dicts_carry_the_null_key():
    """Off from scratch, as it is in the state dict that is loaded, also for another size of the image."""
    assert not small_cmhsa('attn').blocks[0].attn.position.null_key
    for saved in (True, False):
        converted = small_cmhsa('conv', null_key=saved)
        converted.to_attention()
        assert converted.blocks[0].attn.position.null_key == saved  # without it, as L21's, the border moves
        model = trained_like(small_cmhsa('attn', null_key=saved)).eval()
        for phase, null_key, size in (('conv', None, 16), ('conv', not saved, 16), ('attn', not saved, 24)):
            loaded = small_cmhsa(phase, null_key=null_key, img_size=size).eval()
            loaded.load_state_dict(model.state_dict())
            assert loaded.blocks[1].attn.position.null_key == saved
            x = torch.randn(2, 3, size, size)
            assert relative_error(loaded(x), model(x)) < 1e-4
    assert loaded.blocks[0].attn.position.table.shape == (9, 23, 23)


def test_converted_alike_on_every_rank():
    """Whatever the state of the random number generator."""
    state = small_cmhsa('conv').state_dict()
    keys = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = small_cmhsa('attn')
        model.load_state_dict(state)
        keys.append([block.attn.key.weight for block in model.blocks])
    assert torch.equal(keys[0][0], keys[1][0]) and torch.equal(keys[0][1], keys[1][1])
    assert not torch.equal(keys[0][0], keys[0][1]) and abs(keys[0][0].std() - 0.02) < 0.002


def test_training_on_after_a_turn_by_loading_warns():
    """An optimizer may have been built before, as mmengine's runner does."""
    model = small_cmhsa('conv')
    model.load_state_dict(small_cmhsa('attn').state_dict())
    model.eval()
    with pytest.warns(
        UserWarning, match="To train it further, build it with phase='attn', or call .*follow_state_dict"
    ):
        model.train()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model.train()
        other = small_cmhsa('conv')
        other.to_attention()
        other.train()


def test_frozen_stays_frozen():
    model = small_cmhsa('conv').requires_grad_(False)
    model.load_state_dict(small_cmhsa('attn').state_dict())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model = small_cmhsa('conv')
    model.blocks[0].requires_grad_(False)
    model.to_attention()
    assert not any(p.requires_grad for p in model.blocks[0].parameters())
    assert all(p.requires_grad for p in model.blocks[1].parameters())


def test_following_says_what_became_of_the_parameters():
    """An optimizer that has them trains what the state dict made of the network."""
    model, second = (small_cmhsa(phase=phase, head_dim='exact') for phase in ('conv', 'attn'))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    change = follow_state_dict(model, second.state_dict())
    assert [layer.name for layer in change.layers] == [f'blocks.{i}.attn' for i in range(len(model.blocks))]
    assert change.layers[0].parameters_after == sum(p.numel() for p in model.blocks[0].attn.parameters())
    assert change.parameters_after == sum(p.numel() for p in second.parameters())
    replace_parameters(optimizer, change)
    assert {id(p) for group in optimizer.param_groups for p in group['params']} == {id(p) for p in model.parameters()}
    named = {name: p for successor in change.replaced.values() for name, p in successor.parameters.items()}
    assert all(model.get_parameter(name) is p for name, p in named.items())


def test_transition_without_memory():
    """W^K is drawn where its generator is, on the CPU, whatever the default device is."""
    with torch.device('meta'):
        model = small_cmhsa(phase='conv')
        model.to_attention(torch.Generator(device='cpu'))
    assert model.phase == 'attn' and all(p.is_meta for p in model.parameters())
