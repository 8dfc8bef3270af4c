"""Heads removed from attention of timm and mmpretrain: the same as their outputs at zero, whatever the attention is."""

import copy
import pickle

import pytest
import timm
import torch
from helpers.adapter import Adapter
from helpers.small import numbers, refused, small_timm
from helpers.versions import hugging_face_library
from helpers.vits import OF_TIMM, SETTINGS, SIZE, map_of_outputs, not_small, output_of, small_vit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured as unstructured

from attncnn_plugin import follow_state_dict
from attncnn_plugin.analysis.layer_maps import layer_labels
from attncnn_plugin.attention import StructureError
from attncnn_plugin.heads.sizes import RECORD
from attncnn_plugin.pruning import head_costs, head_importance, prunable_heads, prune_heads
from attncnn_plugin.training import PruneHeads

OLD_TORCH = tuple(map(int, torch.__version__.split('.')[:2])) < (2, 7)
VITS = [name for name in SETTINGS if name != 'cait_xxs24_224']  # whose heads mix
GONE = ([1], [0, 2], [2])  # of the layers, in turn
VIT, BEIT, SWIN = 'vit_tiny_patch16_224', 'beit_base_patch16_224', 'swin_tiny_patch4_window7_224'


def heads_to_remove(model):
    return {name: GONE[i % len(GONE)] for i, name in enumerate(prunable_heads(model))}


def pruned_vit(name, **changes):
    model = small_vit(name, **changes)
    prune_heads(model, heads_to_remove(model))
    return model


def mask_heads(model, heads, num_heads=3):
    """Sets the columns of heads in the map that takes them to zero."""
    for name, indices in heads.items():
        with torch.no_grad():
            map_of_outputs(model, name).weight.unflatten(1, (num_heads, -1))[:, indices] = 0
    return model


def load(model, state_dict, **options):
    follow_state_dict(model, state_dict)
    return model.load_state_dict(state_dict, **options)


@pytest.mark.parametrize(
    'name, fused', [*((name, True) for name in VITS), *((name, False) for name in VITS if timm.is_model(name))]
)
def test_removed_heads_are_heads_at_zero(name, fused):
    """Some, and others of what is left in a copy or a pickle; one head stays."""
    torch.manual_seed(0)
    model = small_vit(name).double()
    layers, whole = prunable_heads(model), copy.deepcopy(model)
    if 'swin' not in name.lower():  # the number of the block, whatever a library calls its layers
        assert list(layer_labels(layers).values()) == ['block 0', 'block 1']
    modules = {name: model.get_submodule(name) for name in layers}
    for module in modules.values():
        if hasattr(module, 'fused_attn'):
            module.fused_attn = fused
    images, heads = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64), heads_to_remove(model)
    masked = output_of(mask_heads(copy.deepcopy(model), heads), images)
    scales = {name: getattr(module, 'scale', None) for name, module in modules.items()}
    change = prune_heads(model, heads)
    pruned = output_of(model, images)
    assert (pruned - masked).abs().max() <= 1e-12 * masked.abs().max() and change.difference < 1e-12
    assert (pruned - output_of(whole, images)).abs().max() > 1e-3 * pruned.abs().max()
    assert change.parameters_after == sum(p.numel() for p in model.parameters()) < change.parameters_before
    assert numbers(model) == [3 - len(heads[layer_name]) for layer_name in layers]
    for layer_name, module in modules.items():
        width = map_of_outputs(whole, layer_name).in_features // 3 * (3 - len(heads[layer_name]))
        assert map_of_outputs(model, layer_name).in_features == width == getattr(module, 'attn_dim', width)
        assert getattr(module, 'scale', None) == scales[layer_name]
        assert getattr(module, 'fused_attn', fused) == fused
    first = next(iter(layers))
    others = [copy.deepcopy(model)]
    if name != 'ViTEVA02':  # whose patch embedding cannot be pickled
        others.append(pickle.loads(pickle.dumps(model)))
    for other in others:
        assert torch.equal(output_of(other, images), pruned)
        assert [type(x) for x in other.modules()] == [type(x) for x in whole.modules()]
        with pytest.raises(ValueError, match='all heads of .*: keep one'):
            prune_heads(other, {first: [0, 1]})
        prune_heads(other, {first: [1]})
        masked = output_of(mask_heads(copy.deepcopy(whole), {**heads, first: [1, 2]}), images)
        torch.testing.assert_close(output_of(other, images), masked, rtol=1e-12, atol=1e-12)
    assert torch.equal(output_of(model, images), pruned)  # no copy computes with the modules of the other


@pytest.mark.parametrize(  # test_supported.py has the others
    'name',
    [
        *(VIT, BEIT, SWIN, 'vit_relpos_small_patch16_224', 'eva02_base_patch14_224', 'swinv2_tiny_window8_256'),
        *('deit_tiny_distilled_patch16_224', 'vit_small_patch16_rope_224', 'BEiTViT'),
        *('transformers.ViT', 'transformers.Swin', 'torchvision.VisionTransformer'),
    ],
)
def test_state_dict_carries_the_heads(name):
    """A fresh model takes them, and all too; an optimizer that was built before holds its parameters."""
    model, images = pruned_vit(name), torch.randn(2, 3, SIZE, SIZE)
    prune_heads(model, {next(iter(prunable_heads(model))): [0]})
    fresh = small_vit(name)
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    load(fresh, model.state_dict())
    torch.testing.assert_close(output_of(fresh, images), output_of(model, images), rtol=0, atol=0)
    assert {id(p) for g in optimizer.param_groups for p in g['params']} == {id(p) for p in fresh.parameters()}
    output_of(fresh, images).square().mean().backward()
    optimizer.step()
    whole = small_vit(name)
    load(model, whole.state_dict())
    torch.testing.assert_close(output_of(model, images), output_of(whole, images), rtol=1e-4, atol=1e-4)
    assert not follow_state_dict(model, whole.state_dict())


def test_hooks_stay():
    model, seen = small_vit(VIT), []
    attention = model.blocks[0].attn
    for module in (attention, attention.qkv):
        module.register_forward_hook(lambda module, *_: seen.append(module))
        module.register_forward_pre_hook(lambda module, *_, **__: seen.append(module), with_kwargs=True)
    prune_heads(model, {'blocks.0.attn': [0]})
    seen.clear()  # of the images that it ran on
    model(torch.randn(1, 3, SIZE, SIZE))
    assert seen == [attention, attention.qkv, attention.qkv, attention]


@pytest.mark.parametrize('name', [VIT, BEIT])
def test_state_dicts_of_parts(name):
    """Heads follow where all of a layer's parameters are there; else the others would be 0."""
    model, pruned = small_vit(name), small_vit(name)
    prune_heads(pruned, {0: [1]})
    part = {'blocks.0.attn.proj.weight': pruned.state_dict()['blocks.0.attn.proj.weight']}
    assert not follow_state_dict(model, part, strict=False)
    with refused(model, 'size mismatch', RuntimeError):
        model.load_state_dict(part, strict=False)
    attention, x = model.blocks[0].attn, torch.randn(2, 17, 24)
    load(attention, pruned.blocks[0].attn.state_dict())
    assert attention.num_heads == 2 and torch.equal(attention(x), pruned.blocks[0].attn(x))


def test_class_attention():
    """CaiT's class token attends in layers of their own; its other heads are mixed."""
    model, images = small_vit('cait_xxs24_224').double(), torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    name = 'blocks_token_only.0.attn'
    masked = mask_heads(copy.deepcopy(model), {name: [0, 2]})(images)
    prune_heads(model, {name: [0, 2]})
    torch.testing.assert_close(model(images), masked, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match='heads of blocks.0.attn cannot be removed: a TalkingHeadAttn cannot run with'):
        prune_heads(model, {'blocks.0.attn': [0]})


@pytest.mark.parametrize(
    'name, changes, message',
    [
        ('vit_srelpos_small_patch16_224', {}, 'a RelPosAttention cannot run with fewer'),  # all share biases
        ('vit_small_patch16_rope_mixed_224', {}, 'a AttentionRope cannot run with fewer'),  # all share rotations
        (VIT, dict(scale_attn_norm=True), 'a Attention cannot run with fewer'),  # a norm over all heads
        ('vit_base_patch16_sapiens2', dict(num_kv_heads=(3, 1)), 'a AttentionRope cannot run'),  # one key for all
    ],
)
def test_refused(name, changes, message):
    if not timm.is_model(name):
        pytest.skip(f'timm {timm.__version__} has no such model')
    model = timm.create_model(name, **{**OF_TIMM[VIT], **changes})
    with refused(model, f'heads of blocks.1.attn cannot be removed: {message}', TypeError):
        prune_heads(model, {'blocks.1.attn': [0]})


class InParts(nn.Module):
    """Attention with other names, whose maps are in modules inside, and a dropout of its output alone."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleDict({name: nn.Linear(24, 12) for name in 'abc'})
        self.inside.number_of_heads = 3
        self.last = nn.Linear(12, 24)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens):
        sizes = self.inside.number_of_heads, 4
        query, key, value = (self.inside[name](tokens).unflatten(-1, sizes).transpose(1, 2) for name in 'abc')
        heads = (query @ key.mT / 2).softmax(-1) @ value
        return self.last(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    'build',
    [
        lambda attention: InParts(),
        lambda attention: attention(24, 3, gated=True),
        lambda attention: attention(24, 3, attn_head_dim=5, proj_bias=False),
        lambda attention: attention(24, 3, qk_norm=True, norm_layer=nn.LayerNorm, qkv_bias=True),
    ],
)
def test_attention_alone(build):
    """Of a class of one's own, and with what timm's attention can have besides."""
    try:
        module = build(pytest.importorskip('timm.layers').Attention).double().eval()
    except TypeError:
        pytest.skip(f'timm {timm.__version__} has no such option')
    x, masked = torch.randn(2, 5, 24, dtype=torch.float64), copy.deepcopy(module)
    output, other = (getattr(own, 'proj', None) or own.last for own in (module, masked))
    width = output.in_features // 3
    other.weight.data[:, width : 2 * width] = 0
    prune_heads(module, {'': [1]}, x)
    assert prunable_heads(module, x)[''].num_heads == 2 and output.in_features == 2 * width
    torch.testing.assert_close(module(x), masked(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.train()(x), masked(x), rtol=1e-12, atol=1e-12)


class Hidden(nn.Module):
    """Norms after its maps, units that no token reaches, biases that it keeps for evaluation, keys that it returns."""

    def __init__(self):
        super().__init__()
        maps = (nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)) for _ in 'qkv')
        self.maps, self.proj, self.num_heads, self.kept = nn.ModuleList(maps), nn.Linear(24, 24), 3, None
        self.biases = nn.Parameter(torch.randn(3, 2, 2))

    def train(self, mode=True):
        self.kept = None
        return super().train(mode)

    def forward(self, x):
        query, key, value = (own(x.flatten(0, 1)).view(1, 2, self.num_heads, 8).transpose(1, 2) for own in self.maps)
        if self.kept is None:
            with torch.no_grad():
                self.kept = self.biases.clone()
        heads = (query @ key.mT + self.kept).softmax(-1) @ value
        return self.proj(heads.transpose(1, 2).flatten(2).relu()), key


def test_hidden_heads():
    model, x = not_small(Hidden()).double(), torch.randn(1, 2, 24, dtype=torch.float64)
    masked = mask_heads(copy.deepcopy(model), {'': [1]})
    prune_heads(model, {'': [1]}, x)
    fresh = not_small(Hidden()).double()
    load(fresh, model.state_dict())
    for other in (model, fresh.train().eval()):
        for images in (x, torch.randn_like(x)):
            torch.testing.assert_close(other(images)[0], masked(images)[0], rtol=1e-12, atol=1e-12)
        assert other(x)[1].shape[1] == 2


@pytest.mark.parametrize(
    'name, changes',
    [
        (BEIT, dict(num_heads=4, embed_dim=32)),  # as many heads as a window has rows
        ('transformers.GPT2', dict(n_embd=24, n_layer=2, n_head=3, vocab_size=9)),  # maps that are transposed
    ],
)
def test_sizes_that_look_like_others(name, changes):
    if name == BEIT:
        model, inputs = small_vit(name, **changes), torch.randn(2, 3, SIZE, SIZE)
        masked = mask_heads(copy.deepcopy(model), {'blocks.0.attn': [1]}, num_heads=4)
        prune_heads(model, {0: [1]})
    else:
        transformers = hugging_face_library()
        model, inputs = not_small(transformers.GPT2Model(transformers.GPT2Config(**changes))), torch.arange(5)[None]
        masked = copy.deepcopy(model)
        with torch.no_grad():
            masked.h[0].attn.c_proj.weight[8:16] = 0
        prune_heads(model, {'h.0.attn': [1], 'h.1.attn': []}, inputs)
    torch.testing.assert_close(output_of(model, inputs), output_of(masked, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('gone', [[1], [1, 2]])
@pytest.mark.parametrize('padded', [False, True])
@pytest.mark.parametrize('layers', [1, 3])
def test_encoders_of_pytorch(layers, padded, gone):
    """Where nothing is trained their layers do not call the attention, and they cut padding off."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, layers).eval()
    masked, name = copy.deepcopy(model), f'layers.{layers // 2}.self_attn'
    with torch.no_grad():
        masked.get_submodule(name).out_proj.weight.unflatten(1, (4, 6))[:, gone] = 0
    x, mask = torch.randn(2, 5, 24, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = padded
    inputs = dict(src=x, src_key_padding_mask=mask) if padded else dict(src=x)
    expected = masked(**inputs)
    fresh = copy.deepcopy(model)
    prune_heads(model, {name: gone}, inputs)
    load(fresh, model.state_dict())
    for other in (model, fresh, pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(**inputs)[~mask], expected[~mask], rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(other(**inputs)[~mask], expected[~mask], rtol=1e-12, atol=1e-12)


class OfTokens(nn.Module):
    """Attention of PyTorch that a model calls by names."""

    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3, batch_first=batch_first, dtype=torch.float64)

    def forward(self, x, shift=None):
        x = x if self.attention.batch_first else x.transpose(0, 1)
        key = x if shift is None else x + shift
        x = self.attention(key=key, value=key, query=x, need_weights=False)[0]
        return x if self.attention.batch_first else x.transpose(0, 1)


@pytest.mark.parametrize('batch_first', [False, True])
def test_attention_that_is_called_by_names(batch_first):
    model, x = OfTokens(batch_first), torch.randn(2, 5, 24, dtype=torch.float64)
    masked = mask_heads(copy.deepcopy(model), {'attention': [1]})
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    assert head_importance(model, [x], loss)['attention'].norm() > 0
    prune_heads(model, {'attention': [1]}, x)
    for shift in (None, 1):
        torch.testing.assert_close(model(x, shift), masked(x, shift), rtol=1e-12, atol=1e-12)


def test_decoders():
    layer = nn.TransformerDecoderLayer(24, 3, 32, dtype=torch.float64).eval()
    heads, tokens = {'self_attn': [0], 'multihead_attn': [0, 2]}, torch.randn(2, 2, 24, dtype=torch.float64)
    expected, memory = mask_heads(copy.deepcopy(layer), heads), torch.randn(3, 2, 24, dtype=torch.float64)
    prune_heads(layer, heads, (tokens, memory), call=lambda model, inputs: model(*inputs))
    torch.testing.assert_close(layer(tokens, memory), expected(tokens, memory), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('batch_first', [False, True])
@pytest.mark.parametrize('gone', [[1], [0, 2]])
def test_attention_of_pytorch(gone, batch_first):
    """Of other keys and values than queries too, as in pooling; with and without a batch, masks and weights."""
    attention = nn.MultiheadAttention(24, 3, batch_first=batch_first, dtype=torch.float64).eval()
    masked = mask_heads(nn.ModuleDict({'own': copy.deepcopy(attention)}), {'own': gone})['own']
    x = torch.randn(2, 5, 24)
    prune_heads(attention, {'': gone}, x, call=lambda model, x: model(x.double(), x.double(), x.double()))
    kept = [head for head in range(3) if head not in gone]
    for size in ((), (2,)):
        query, key, value = (torch.randn(*size, n, 24, dtype=torch.float64) for n in (5, 4, 4))
        hidden = torch.arange(4).expand(*size, 4) > 2
        for inputs, settings in (
            ((query, query, query), {}),
            ((query, key, key), dict(key_padding_mask=hidden)),
            ((query, key, value), dict(attn_mask=torch.randn(5, 4, dtype=torch.float64))),
            ((query, key, value), dict(need_weights=False)),
        ):
            if size and not batch_first:
                inputs = [{id(x): x.transpose(0, 1) for x in inputs}[id(x)] for x in inputs]
            (output, weights), (expected, of_all) = (
                own(*inputs, **settings, average_attn_weights=False) for own in (attention, masked)
            )
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
            assert (weights is None) == (of_all is None)
            if weights is not None:
                torch.testing.assert_close(weights, of_all[..., kept, :, :], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('settings', [dict(add_zero_attn=True), dict(add_bias_kv=True)])
def test_refused_keys(settings):
    layer = nn.MultiheadAttention(24, 3, **settings)
    with pytest.raises(TypeError, match='add_bias_kv or add_zero_attn needs all of its heads'):
        prune_heads(layer, {'': [1]}, torch.rand(2, 5, 24), call=lambda model, x: model(x, x, x))


@pytest.mark.parametrize(
    'change',
    [
        lambda attention: unstructured(attention.proj, 'weight', amount=0.3),
        lambda attention: weight_norm(attention.qkv),
        lambda attention: setattr(attention, 'qkv', nn.Sequential(attention.qkv)),
        lambda attention: setattr(attention, 'qkv', Adapter(attention.qkv)),
    ],
)
def test_weights_that_something_computes(change):
    """By masks, a parametrization, another module around, or an adapter: its parts lose the heads."""
    images, keep = torch.randn(2, 3, SIZE, SIZE).double(), torch.ones(24).double().index_fill(0, torch.arange(8, 16), 0)
    model, masked, fresh = (small_vit(VIT).double() for _ in range(3))
    for own in (model, masked, fresh):
        change(own.blocks[1].attn)
    masked.load_state_dict(model.state_dict())
    masked.blocks[1].attn.proj.register_forward_pre_hook(lambda _, args: args[0] * keep)
    prune_heads(model, {1: [1]})
    load(fresh, model.state_dict())
    for other in (model, fresh):
        torch.testing.assert_close(other(images), masked(images), rtol=1e-12, atol=1e-12)


BATCH = torch.zeros(2, 3, SIZE, SIZE), torch.tensor([0, 1])


def tie(model, name):
    setattr(model.blocks[1].attn.qkv, name, getattr(model.blocks[0].attn.qkv, name))


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda model: tie(model, 'weight'), r'blocks.0.attn.qkv.weight and blocks.1.attn.qkv.weight are one'),
        (lambda model: tie(model, 'bias'), r'blocks.0.attn.qkv.bias and blocks.1.attn.qkv.bias are one'),
        (lambda model: setattr(model.blocks[1].attn, 'qkv', model.blocks[0].attn.qkv), ''),
    ],
)
def test_refused_parameters(change, message):
    """Those of several layers."""
    model, images = small_vit(VIT), torch.randn(2, 3, SIZE, SIZE)
    change(model)
    expected = model(images)
    for pruning in (lambda: prune_heads(model, {1: [1]}), lambda: PruneHeads(batches=[BATCH], keep=3).check(model)):
        with pytest.raises((TypeError, ValueError), match=f'cannot be removed.*{message}'):
            pruning()
    assert torch.equal(model(images), expected)
    importance = head_importance(model, [images], lambda model, batch: model(batch).square().mean())
    assert all(own.norm() > 0 for own in importance.values())
    assert all((own > 0).all() for own in head_costs(model, lambda: model(images))[1].values())


def test_attention_that_is_used_twice():
    model, images = small_vit(VIT).double(), torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    model.blocks[1].attn = model.blocks[0].attn
    masked = mask_heads(copy.deepcopy(model), {'blocks.0.attn': [1]})
    prune_heads(model, {0: [1]})
    torch.testing.assert_close(model(images), masked(images), rtol=1e-12, atol=1e-12)


def test_refused_as_a_whole():
    """A mistake in the second layer leaves the first as it is."""
    model = small_vit(VIT)
    for heads, message in (
        ({'blocks.0.attn': [0], 'blocks.1.attn': [3]}, 'different heads from 0 to 2'),
        ({'blocks.0.attn': [0], 'blocks.1.mlp': [0]}, "heads of 'blocks.1.mlp' were given, but there are 0"),
        ({0: [0], 'blocks.0.attn': [1]}, 'names a layer twice'),
    ):
        with pytest.raises(ValueError, match=message):
            prune_heads(model, heads)
    model = small_vit(BEIT)
    attention = model.blocks[1].attn
    attention.forward = lambda x, **kwargs: type(attention).forward(attention, x, **kwargs)
    with pytest.raises(TypeError, match='something else has replaced the forward pass of a Attention'):
        prune_heads(model, {0: [0], 1: [0]})
    assert numbers(model) == [3, 3]


def test_other_state_dicts_are_refused():
    """More heads than were built, and other widths, as PyTorch refuses them."""
    model, wide = small_vit(VIT), small_vit(VIT, num_heads=6, embed_dim=48)
    state = model.state_dict()
    state['blocks.0.attn.qkv.weight'] = state['blocks.0.attn.qkv.weight'][:48]  # 2 heads, but proj of 3
    for other in (wide.state_dict(), state):
        with pytest.raises(StructureError, match='size mismatch'):
            load(model, other)
    assert numbers(model) == [3, 3]


def test_swin_resizes_and_loads_its_tables(tmp_path):
    model, images = pruned_vit(SWIN), torch.randn(2, 3, SIZE, SIZE)
    torch.save(model.state_dict(), tmp_path / 'pruned.pth')
    loaded = timm.create_model(SWIN, **OF_TIMM[SWIN])
    load(loaded, timm.models.load_state_dict(tmp_path / 'pruned.pth', weights_only=True))
    assert torch.equal(loaded.eval()(images), model(images))
    model.set_input_size((64, 64), window_size=(8, 8))
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    assert model.layers[0].blocks[0].attn.relative_position_bias_table.shape == (15 * 15, 2)


def test_meta_device_takes_the_heads():
    pruned = pruned_vit(BEIT)
    with torch.device('meta'):
        model = timm.create_model(BEIT, **OF_TIMM[BEIT])
    load(model, pruned.state_dict(), assign=True)
    assert [block.attn.num_heads for block in model.blocks] == [2, 1]


@pytest.mark.parametrize('name', ['eva02_tiny_patch14_224', BEIT])
def test_compiled(name):
    """In one graph, as before."""
    model, images = pruned_vit(name), torch.randn(2, 3, SIZE, SIZE)
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', ['swinv2_tiny_window8_256', 'BEiTViT'])
def test_autocast_and_half_precision(name):
    model, images = pruned_vit(name), torch.randn(2, 3, SIZE, SIZE)
    expected = output_of(model, images)
    with torch.autocast('cpu', torch.bfloat16):
        near = [output_of(model, images).float()]
    near.append(output_of(model.bfloat16(), images.bfloat16()).float())
    for other in near:
        assert (other - expected).abs().mean() < 0.2 * expected.abs().mean()


def test_nested_tokens_of_others():
    """Are what they are alone."""
    attention = torch.nn.MultiheadAttention(24, 3, batch_first=True).eval()
    prune_heads(attention, {'': [1]}, torch.randn(2, 5, 24), call=lambda model, x: model(x, x, x))
    rows = [[torch.randn(n, 24) for n in sizes] for sizes in ((2, 3), (4, 5))]
    queries, keys = map(torch.nested.nested_tensor, rows)
    with torch.no_grad():
        outputs = attention(queries, keys, keys)[0].unbind()
        for output, query, key in zip(outputs, *rows):
            torch.testing.assert_close(output, attention(query, key, key)[0])


def quantized(model):
    return pytest.importorskip('torch.ao.quantization').quantize_dynamic(model, {nn.Linear})


def with_weight(change):
    def changed(model):
        linear = model.blocks[1].attn.qkv
        linear.weight = change(linear.weight)
        return model

    return changed


class Sharded(torch.Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize(
    'change, message',
    [
        (quantized, 'no parameters near it have entries of single heads'),
        (
            with_weight(lambda w: nn.Parameter(w.detach().as_subclass(Sharded))),
            'blocks.1.attn.qkv.weight is a Sharded of torch.float32, not a plain',
        ),
        pytest.param(
            with_weight(lambda w: nn.Parameter(w.detach().to_sparse())),
            'blocks.1.attn.qkv.weight is a Parameter of torch.float32, not a plain',
            marks=pytest.mark.skipif(OLD_TORCH, reason='it has no linear map with sparse weights'),
        ),
    ],
)
def test_weights_that_are_not_plain(change, message):
    """In the second layer: the first keeps its heads too."""
    model = change(small_vit(VIT))
    before = list(model.parameters())
    for wrong in (
        lambda: prune_heads(model, {0: [0], 1: [0]}),
        lambda: PruneHeads(batches=[BATCH], keep=3).check(model),
    ):
        with pytest.raises(TypeError, match=f'heads of blocks.[01].attn cannot be removed: {message}'):
            wrong()
    assert all(one is other for one, other in zip(before, model.parameters())) and numbers(model) == [3, 3]


def test_sharded_models(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/meeting', rank=0, world_size=1)
    try:
        model = fully_shard(small_vit(VIT), mesh=init_device_mesh('cpu', (1,)))
        with pytest.raises(TypeError, match='model is a FSDPVisionTransformer, .*: change the model before it is'):
            prune_heads(model, {0: [0]})
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize('name', [VIT, 'sa_quadratic_cifar'])
def test_in_inference_mode(name):
    model = small_vit(name) if name == VIT else small_timm(name)
    with torch.inference_mode():
        prune_heads(model, {0: [1]})
    model(torch.randn(1, 3, SIZE, SIZE)).sum().backward()


def test_the_loading_of_others_names_the_verb(tmp_path):
    """timm's ``checkpoint_path``, and Lightning's ``load_from_checkpoint``, which takes it in a hook."""
    model, checkpoint, pruned = small_vit(VIT), str(tmp_path / 'pruned.pth'), pruned_vit(VIT)
    torch.save(pruned.state_dict(), checkpoint)
    with pytest.raises(RuntimeError, match=RECORD):
        timm.create_model(VIT, checkpoint_path=checkpoint, **SETTINGS[VIT])
    follow_state_dict(model, checkpoint)
    timm.models.load_checkpoint(model, checkpoint)
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(model(images), pruned(images))
    lightning = pytest.importorskip('lightning.pytorch')

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = small_vit(VIT)

    class Following(Module):
        def on_load_checkpoint(self, checkpoint):
            follow_state_dict(self, checkpoint['state_dict'])

    module = Module()
    prune_heads(module, {0: [1]})
    torch.save({'state_dict': module.state_dict(), 'pytorch-lightning_version': lightning.__version__}, checkpoint)
    with pytest.raises(RuntimeError, match=RECORD):
        Module.load_from_checkpoint(checkpoint)
    loaded = Following.load_from_checkpoint(checkpoint)
    assert torch.equal(loaded.network.eval()(images), module.network(images))
