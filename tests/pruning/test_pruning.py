"""Heads removed: the same function without them, the optimizer's state, the bias, and state dicts that carry them."""

import copy
import pickle

import numpy as np
import pytest
import torch
from helpers.adapter import Adapter
from helpers.layers import TOKENS, with_outputs
from helpers.small import TIMM_KINDS, refused, small_cmhsa, small_model, small_timm
from helpers.vits import SIZE, output_map, output_of, small_classifier, small_vit
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention import (
    GeneralizedQuadraticAttention,
    GridBias,
    PatchAttention,
    QuadraticAttention,
)
from attncnn_plugin.attention.state_dicts import StructureError, write_extra_state
from attncnn_plugin.convert import conv_to_mhsa, convs_to_attention
from attncnn_plugin.heads.sizes import RECORD
from attncnn_plugin.pruning import (
    find_degenerate_heads,
    head_importance,
    prunable_heads,
    prune_heads,
    replace_parameters,
)
from attncnn_plugin.pruning.means import fold_into_bias, head_means, merge_duplicate
from attncnn_plugin.training import PruneHeads


def zeroed(layer, heads):
    """The same layer with the values of some heads at zero."""
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        for head in heads:
            layer.value.weight[:, head * layer.dim : (head + 1) * layer.dim] = 0
    return layer


@pytest.mark.parametrize('kind', TOKENS)
@given(data=st.data())
def test_removed_is_zeroed(kind, data):
    num_heads = data.draw(st.integers(1, 5))
    heads = data.draw(st.lists(st.integers(0, num_heads - 1), unique=True, max_size=num_heads - 1))
    layer = TOKENS[kind](4, num_heads, dtype=torch.float64)
    x = torch.randn(2, 5, 4, 4, dtype=torch.float64)
    expected = zeroed(layer, heads)(x)
    prune_heads(layer, {'': heads})
    assert layer.num_heads == num_heads - len(heads)
    assert torch.allclose(layer(x), expected, atol=1e-12, rtol=0)
    fresh = TOKENS[kind](4, num_heads, dtype=torch.float64)
    fresh.load_state_dict(layer.state_dict())
    assert fresh.num_heads == layer.num_heads and torch.equal(fresh(x), layer(x))
    if heads:
        layer(x).sum().backward()
        assert all(p.grad is not None for p in layer.parameters() if p.numel())
    assert str(layer.num_heads) in repr(layer)


@pytest.mark.parametrize('name', TIMM_KINDS)
def test_networks(name):
    model = small_timm(name, depth=3).double().eval()
    x = torch.randn(2, 3, 8, 8).double()
    heads = {0: [1], 2: [0, 2]}
    expected = copy.deepcopy(model)
    for block, indices in heads.items():
        expected.blocks[block].attn = zeroed(expected.blocks[block].attn, indices)
    before = sum(p.numel() for p in model.parameters())
    change = prune_heads(model, heads)
    assert torch.allclose(model(x), expected(x), atol=1e-12, rtol=0)
    assert [block.attn.num_heads for block in model.blocks] == [2, 3, 1]
    after = sum(p.numel() for p in model.parameters())
    assert after <= before - 3 * 16 * 16 and (change.parameters_before, change.parameters_after) == (before, after)
    assert [(layer.name, layer.before, layer.after) for layer in change.layers] == [
        ('blocks.0.attn', '3 heads', '2 heads'),
        ('blocks.2.attn', '3 heads', '1 head'),
    ]
    named = {name: parameter for own in change.replaced.values() for name, parameter in own.parameters.items()}
    assert named and all(model.get_parameter(name) is parameter for name, parameter in named.items())
    assert not prune_heads(model, {0: []})


def low_rank(layer):
    layer.value = Adapter(layer.value)


@pytest.mark.parametrize('kind', ['sa_quadratic_cifar', 'cmhsa_attn'])
@pytest.mark.parametrize('compute', [lambda layer: weight_norm(layer.value), low_rank])
def test_weights_that_something_computes(compute, kind):
    """Heads are judged and weights are loaded, but no heads go, of the other layers neither."""
    model = small_model(kind).eval()
    plain = copy.deepcopy(model.state_dict())
    compute(model.blocks[1].attn)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert 'blocks.1.attn.value.weight' in model.load_state_dict(plain, strict=False).unexpected_keys
    batch = torch.randn(2, 3, 16, 16), torch.arange(2)
    importance = head_importance(model, [batch], lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    assert importance['blocks.1.attn'].all()
    parameters = list(model.parameters())
    with pytest.raises(
        TypeError, match='blocks.1.attn.value.weight is no parameter of its own: remove the parametrization'
    ):
        prune_heads(model, {0: [1], 1: [0]})
    assert all(a is b for a, b in zip(parameters, model.parameters()))


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'vit_tiny_patch16_224'])
def test_numbers_of_other_libraries(name):
    """Such as those of argsort."""
    model = small_classifier(name)[0]
    for index, (block, heads) in enumerate(((0, np.array([1])), (np.int64(0), torch.tensor([0])))):
        prune_heads(model, {block: heads})
        assert model.blocks[0].attn.num_heads == 2 - index
    for wrong in (np.array([0.0]), ['0'], [None]):
        with pytest.raises(ValueError, match='must be different heads from 0 to'):
            prune_heads(model, {1: wrong})


def test_numbers_of_the_paper():
    """C20, appendix E: [2, 4, 1, 2, 6, 0] heads pruned, 12.1M parameters to 9.7M."""
    import timm

    model = timm.create_model('sa_generalized_cifar')
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 12.1
    prune_heads(model, {block: list(range(n)) for block, n in enumerate([2, 4, 1, 2, 6, 0])})
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 9.7
    assert [block.attn.num_heads for block in model.blocks] == [7, 5, 8, 7, 3, 9]
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 10)


@pytest.mark.parametrize(
    'heads, message',
    [
        ({0: [0, 0]}, r'heads=\[0, 0\] must be different heads from 0 to 2'),
        ({0: [-1]}, r'heads=\[-1\] must be'),
        ({2: [0]}, 'heads of 2 were given, but there are 0 attention layers of that name or block'),
        ({0: [1], 1: [0, 1, 2]}, r'heads=\[0, 1, 2\] are all heads of blocks.1.attn: keep one'),
    ],
)
def test_what_cannot_be_removed(heads, message):
    model = small_timm('sa_quadratic_cifar')
    with pytest.raises(ValueError, match=message):
        prune_heads(model, heads)
    assert [block.attn.num_heads for block in model.blocks] == [3, 3]


class Wrapper(nn.parallel.DistributedDataParallel):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


def test_a_wrapped_model():
    """Whose gradients would not be those of all ranks any more."""
    model = small_timm('sa_quadratic_cifar')
    with pytest.raises(TypeError, match=r'^model is a Wrapper.*use its \.module instead, and build a new wrapper'):
        prune_heads(Wrapper(model), {0: [1]})
    with pytest.raises(TypeError, match=r'^0 is a Wrapper'):  # at once, also a part of a model
        PruneHeads(keep=3).check(nn.Sequential(Wrapper(model)))
    assert model.blocks[0].attn.num_heads == 3


OPTIMIZERS = {
    'sgd': lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    'sgd_foreach': lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
    'sgd_fused': lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
    'adamw': lambda groups: torch.optim.AdamW(groups, lr=0.1),
    'adamw_foreach': lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True, amsgrad=True),
    'adamw_fused': lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
}


@pytest.mark.parametrize('kind', OPTIMIZERS)
@pytest.mark.parametrize('layer_kind', ['generalized', 'learned', 'content'])
def test_optimizer_goes_on(kind, layer_kind):
    """As an optimizer that only ever saw the kept entries: the gradients of both are given."""
    layer = TOKENS[layer_kind](4, 5)
    kept_from_the_start = copy.deepcopy(layer)
    prune_heads(kept_from_the_start, {'': [0, 3]})

    def groups(layer):
        named = dict(layer.named_parameters())
        value = [named.pop('value.weight')]
        return [dict(params=list(named.values())), dict(params=value, weight_decay=0.3, lr=0.05)]

    optimizer, expected = OPTIMIZERS[kind](groups(layer)), OPTIMIZERS[kind](groups(kept_from_the_start))
    kept = [1, 2, 4]

    def step():
        for name, parameter in layer.named_parameters():
            other = kept_from_the_start.get_parameter(name)
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient
            if gradient.shape != other.shape:
                dim, entries = layer.head_parameters()[name]
                per_head = gradient.unflatten(dim, (5, entries)).index_select(dim, torch.tensor(kept))
                gradient = per_head.flatten(dim, dim + 1)
            other.grad = gradient.clone()
        optimizer.step()
        expected.step()

    for _ in range(3):
        step()
    replace_parameters(optimizer, prune_heads(layer, {'': [0, 3]}))
    assert set(optimizer.state) == set(layer.parameters())
    for _ in range(3):
        for name, parameter in layer.named_parameters():
            other = kept_from_the_start.get_parameter(name)
            # Fused steps round the last entries of a tensor in another way.
            assert torch.allclose(parameter, other, atol=1e-6), name
            for key, value in expected.state[other].items():
                assert torch.allclose(optimizer.state[parameter][key], value, atol=1e-6), (name, key)
        step()
    ours, theirs = optimizer.state_dict()['param_groups'], expected.state_dict()['param_groups']
    assert ours == theirs
    expected.load_state_dict(optimizer.state_dict())


def test_gradients_go_along():
    layer = GeneralizedQuadraticAttention(4, 3)
    layer(torch.randn(1, 3, 3, 4)).sum().backward()
    gradient, center = layer.value.weight.grad, layer.encoding.center.grad
    prune_heads(layer, {'': [1]})
    assert torch.equal(layer.value.weight.grad, torch.cat([gradient[:, :4], gradient[:, 8:]], 1))
    assert torch.equal(layer.encoding.center.grad, center[[0, 2]])
    layer.value.requires_grad_(False)
    prune_heads(layer, {'': [0]})
    assert not layer.value.weight.requires_grad and layer.encoding.center.requires_grad


@pytest.mark.parametrize('build', [lambda: small_timm('sa_quadratic_cifar'), lambda: small_vit('vit_tiny_patch16_224')])
@pytest.mark.parametrize('change', [lambda model: prune_heads(model, {0: [1]}), 'load'])
def test_hooks_and_attributes_of_parameters_go_along(build, change):
    """As of clipping, layer-wise rates and weight decay; the handles of hooks still end them."""
    model, less, seen = build(), build(), []
    prune_heads(less, {0: [0]})
    names = ['blocks.0.attn.value.weight', 'blocks.0.attn.encoding.center']
    if 'blocks.0.attn.value' not in dict(model.named_modules()):
        names = [f'blocks.0.attn.{name}' for name in ('qkv.weight', 'qkv.bias', 'proj.weight')]
    before = [model.get_parameter(name) for name in names]
    handles = []
    for parameter in before:
        parameter.no_weight_decay, parameter.mask = True, torch.ones_like(parameter)
        handles.append(parameter.register_hook(lambda gradient: gradient.clamp(-1e-6, 1e-6)))
        handles.append(parameter.register_post_accumulate_grad_hook(lambda own: seen.append(own)))
    if callable(change):
        change(model)
    else:
        follow_state_dict(model, less.state_dict())
        model.load_state_dict(less.state_dict())
    after = [model.get_parameter(name) for name in names]
    images = torch.randn(2, 3, SIZE, SIZE)
    model(images).square().sum().backward()
    for old, parameter in zip(before, after):
        assert callable(change) is (old is not parameter)
        assert parameter.no_weight_decay and parameter.grad.abs().max() <= 1e-6
        assert not callable(change) or torch.equal(parameter.mask, torch.ones_like(parameter))
    assert {*map(id, seen)} == {*map(id, after)}
    seen.clear()
    for handle in handles:
        handle.remove()
    model(images).square().sum().backward()
    assert not seen and max(parameter.grad.abs().max() for parameter in after) > 1e-5


MASK = torch.rand(72, 24)


@pytest.mark.parametrize(
    'change',
    [
        lambda weight: weight.register_hook(lambda gradient: gradient * MASK),
        lambda weight, mask=MASK: weight.register_post_accumulate_grad_hook(lambda own: own.grad.mul_(mask)),
        lambda weight: setattr(weight, 'rows', torch.rand(72)),
        lambda weight: setattr(weight, 'optimizer', torch.optim.SGD([weight], lr=0.1)),
    ],
)
def test_hooks_and_attributes_that_may_not_fit(change):
    """In the second layer: the first keeps its heads too."""
    model = small_vit('vit_tiny_patch16_224')
    change(model.blocks[1].attn.qkv.weight)
    before = list(model.parameters())
    with pytest.raises(
        ValueError, match=r'parameter of shape \(72, 24\) in the place of blocks.1.attn.qkv.weight has .* remove'
    ):
        prune_heads(model, {0: [0], 1: [0]})
    assert all(one is other for one, other in zip(before, model.parameters()))
    assert [layer.num_heads for layer in prunable_heads(model).values()] == [3, 3]
    assert model.blocks[0].attn.num_heads == 3 and RECORD not in model.blocks[0].attn._buffers


def test_attributes_of_kernels():
    """All that takes their places has them, as it joins their groups."""
    cnn, network = nn.Sequential(nn.Conv2d(3, 4, 3)), small_cmhsa('conv')
    for weight in (cnn[0].weight, network.blocks[0].attn.conv.weight):
        weight.no_weight_decay = True
    marked = cnn[0].weight, network.blocks[0].attn.conv.weight
    changes = convs_to_attention(cnn, '0', content='additive', alpha=6), network.to_attention()
    for old, change in zip(marked, changes):
        new = change.replaced[old].parameters.values()
        assert len(new) > 1 and all(parameter.no_weight_decay for parameter in new)
    network = small_cmhsa('conv')
    network.blocks[1].attn.conv.weight.register_hook(lambda gradient: gradient)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ValueError, match='in the place of blocks.1.attn.* has hooks'):
        network.to_attention()
    assert network.phase == 'conv' and before.keys() == network.state_dict().keys()


def test_mean_outputs_of_heads():
    layer = QuadraticAttention(4, 3, dtype=torch.float64)
    images = [torch.randn(2, 5, 4, 4, dtype=torch.float64) + 3 for _ in range(2)]
    with head_means(layer) as found:
        for image in images:
            layer(image)
    layer(images[0])  # no longer counted
    means = found['']
    heads = torch.einsum('hqk,bkc->bqhc', layer.attention_probs((5, 4)), torch.cat(images).flatten(1, 2))
    assert torch.allclose(torch.stack(means.mean), heads.mean((0, 1)))
    with head_means(layer) as found, pytest.raises(ValueError, match='mean output of the heads is not finite'):
        layer(images[0][:0])
        fold_into_bias(prunable_heads(layer)[''], [1], found[''].mean)
    with pytest.raises(ValueError, match='has no bias'):
        fold_into_bias(prunable_heads(with_outputs(QuadraticAttention(4, 3), 4, bias=False))[''], [1], means.mean)


@pytest.mark.parametrize('groups', [1, 2])
@pytest.mark.parametrize('size', [(14, 14), (11, 15)])
def test_means_without_queries_that_fill_up_a_tile(size, groups):
    """Against the same heads over the whole image."""
    conv = nn.Conv2d(4, 6, 3, padding=1, groups=groups, dtype=torch.float64)
    layer, _ = conv_to_mhsa(conv, content='additive', window_size=5, alpha=0.2)
    with torch.no_grad():
        layer.query.weight.normal_()
    images = torch.randn(3, 4, *size, dtype=torch.float64)
    assert layer.tiles(size) is not None
    with head_means(layer) as found:
        layer(images)
        layer(images[0])
    means = found['']
    probs = layer.attention_scores(images).softmax(-1)[..., :-1]
    heads = (probs @ images.flatten(2).mT[:, None]).mean(2)  # (B, N_h, C)
    expected = (heads.sum(0) + heads[0]) / 4
    assert int(means.count) == 4 * size[0] * size[1] and layer.grid_of(images[0]) == size
    torch.testing.assert_close(torch.stack(means.mean), expected)


@pytest.mark.parametrize(
    'name, changes',
    [
        ('swin_tiny_patch4_window7_224', dict(img_size=(40, 56))),
        ('SwinTransformer', {}),
        ('transformers.Swin', dict(image_size=(40, 56))),
        ('torchvision.SwinTransformer', {}),
    ],
)
def test_means_without_padding_of_windows(name, changes):
    """Through the output's weight they are the mean of what the block adds to its tokens, but for the bias."""
    torch.manual_seed(0)
    model, added = small_vit(name, **changes).double(), []
    name = list(prunable_heads(model))[1]  # with shifted windows
    block, layer = (model.get_submodule(own) for own in (name.rpartition('.')[0], name))
    after = getattr(block, 'drop_path1', getattr(block, 'drop_path', layer if hasattr(block, 'mlp') else block))
    after.register_forward_hook(lambda module, args, output: added.append(output))
    with torch.no_grad(), head_means(model, lambda own: own == name) as means:
        output_of(model, torch.randn(2, 3, 40, 56, dtype=torch.float64))
    assert list(means) == [name] and int(means[name].count) == 2 * 10 * 14
    output = output_map(model, name, 0)[0]
    expected = added[0].flatten(0, -2).mean(0) - output.bias
    torch.testing.assert_close(output.weight @ torch.cat(means[name].mean), expected)


@pytest.mark.parametrize('name', TIMM_KINDS)
def test_state_dicts_carry_their_heads(name, tmp_path):
    pruned = small_timm(name).eval()
    prune_heads(pruned, {0: [1], 1: [0, 2]})
    x = torch.randn(2, 3, 8, 8)
    original = small_timm(name).eval()
    original.load_state_dict(pruned.state_dict(), strict=True)
    assert torch.equal(original(x), pruned(x)) and original.blocks[1].attn.num_heads == 1
    torch.save(pruned.state_dict(), tmp_path / 'pruned.pth')
    loaded = small_timm(name, checkpoint_path=str(tmp_path / 'pruned.pth')).eval()
    for other in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.allclose(other(x), pruned(x), atol=1e-6)
    whole = small_timm(name).eval()
    parameters = list(pruned.parameters())
    pruned.load_state_dict(whole.state_dict())  # back again
    assert torch.equal(pruned(x), whole(x))
    assert all(a is b for a, b in zip(parameters, pruned.parameters()))


@pytest.mark.parametrize(
    'name', [TIMM_KINDS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TIMM_KINDS[1:])]
)
def test_compiled_without_some_heads(name):
    pruned = small_timm(name).eval()
    prune_heads(pruned, {0: [1], 1: [0, 2]})
    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(pruned, fullgraph=True, backend='aot_eager')
    assert torch.allclose(compiled(x), pruned(x), atol=1e-6)


@pytest.mark.parametrize(
    'other, message',
    [
        (dict(embed_dim=12), r'weight of the state dict has shape \(12, 36\), that of the model \(16, 48\): .*width'),
        (dict(num_heads=4), 'blocks.0.attn has 4 heads in the state dict, but num_heads=3 in the model'),
    ],
)
def test_what_cannot_be_loaded(other, message):
    with pytest.raises(RuntimeError, match=message):
        small_timm('sa_quadratic_cifar').load_state_dict(small_timm('sa_quadratic_cifar', **other).state_dict())


def test_a_layer_keeps_a_head():
    """Of a state dict without any, too."""
    model, narrow = small_timm('sa_quadratic_cifar'), PatchAttention(8, 3, GridBias(3, (2, 2)), head_dim=2)
    for module in (model.blocks[0].attn, narrow):
        state = module.state_dict()
        for key, (dim, _) in module.head_parameters().items():
            state[key] = state[key].narrow(dim, 0, 0)
        if '_extra_state' in state:
            state['_extra_state'] = write_extra_state(dict(qk_dim=8, head_dims=[], null_key=False))
        with pytest.raises(RuntimeError, match='has 0 heads in the state dict, but num_heads=3 in the model'):
            module.load_state_dict(state)
        assert module.num_heads == 3


def test_a_state_dict_without_some_of_the_parameters():
    """Heads follow where all that there is of them is there; else the rest would be 0."""
    model, pruned = small_timm('sa_quadratic_cifar'), small_timm('sa_quadratic_cifar')
    prune_heads(pruned, {0: [1]})
    before, name = copy.deepcopy(model.state_dict()), 'blocks.0.attn.encoding.center'
    with pytest.raises(RuntimeError, match='size mismatch'):
        model.load_state_dict({name: pruned.state_dict()[name]}, strict=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize('groups', [1, 2, 4])
@pytest.mark.parametrize('stride', [1, 2])
def test_heads_in_the_place_of_a_convolution(groups, stride):
    """A uniform head becomes a bias, a duplicate goes to the head that it repeats, and the function stays."""
    conv = nn.Conv2d(4, 8, 3, padding=1, stride=stride, groups=groups, padding_mode='circular')
    layer, _ = conv_to_mhsa(conv.double(), alpha=6)
    with torch.no_grad():
        layer.encoding.sqrt_precision[1] = 0
        layer.encoding.center[2] = layer.encoding.center[0]
    images = torch.randn(3, 4, 6, 8, dtype=torch.float64)
    with head_means(layer) as means:
        expected = layer(images)
    assert int(means[''].count) == expected[:, 0].numel()
    report = find_degenerate_heads(layer, ['uniform', 'duplicate'], inputs=images).reports['']
    assert report.heads == [1, 2] and report.found[1].duplicate_of == 0
    one = images[:1]  # a uniform head has the mean of its image
    with head_means(layer) as of_one:
        expected = layer(one)
    heads = prunable_heads(layer)['']
    fold_into_bias(heads, [1], of_one[''].mean)
    merge_duplicate(heads, 2, 0)
    prune_heads(layer, {'': [1, 2]})
    assert torch.allclose(layer(one), expected, atol=1e-12)


@pytest.mark.parametrize(
    'wrap',
    [
        lambda state: dict(meta={}, state_dict=state),
        lambda state: dict(epoch=3, model_ema=state),
        lambda state: dict(teacher={f'net.{name}': value for name, value in state.items()}, student={}),
        lambda state: {f'module.{name}': value for name, value in state.items()},
        lambda state: {'n_averaged': torch.tensor(2), **{f'module.{name}': value for name, value in state.items()}},
        lambda state: {name: (value + value.double()) / 2 for name, value in state.items()},
    ],
)
@pytest.mark.parametrize('strict', [False, True])
def test_state_dicts_in_other_forms(wrap, strict):
    """As the tool writes them, and of a wrapper."""
    pruned, model = (small_vit('vit_tiny_patch16_224') for _ in range(2))
    prune_heads(pruned, {0: [1]})
    (layer,) = follow_state_dict(model, wrap(pruned.state_dict()), strict).layers
    assert (layer.name, layer.before, layer.after) == ('blocks.0.attn', '3 heads', '2 heads')
    model.load_state_dict(pruned.state_dict())
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(model(images), pruned(images))


@pytest.mark.parametrize('damage', [lambda x: (x + 9999).half(), lambda x: (x + 2**25).float(), lambda x: x[:5]])
def test_a_record_of_heads_that_has_lost_digits(damage):
    pruned, model = (small_vit('vit_tiny_patch16_224') for _ in range(2))
    prune_heads(pruned, {0: [1]})
    name = f'blocks.0.attn.{RECORD}'
    state = pruned.state_dict()
    with refused(model, f'{name} of the state dict is damaged, or has lost digits as torch', StructureError):
        follow_state_dict(model, {**state, name: damage(state[name])})
