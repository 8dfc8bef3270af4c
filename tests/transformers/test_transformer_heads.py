"""Heads removed from attention of timm and mmpretrain: the same as their outputs at zero, whatever the attention is."""

import copy
import pickle

import pytest
import timm
import torch
from helpers.starts import NAMES
from helpers.vits import OF_MMPRETRAIN, OF_TIMM, SIZE, output_of, small_vit
from torch import nn

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention import StructureError
from attncnn_plugin.pruning import prunable_heads, prune_heads, replace_parameters
from attncnn_plugin.transformers.adapters import rotated
from attncnn_plugin.transformers.heads import TransformerHeads, transformer_heads

VITS = [*OF_TIMM, *OF_MMPRETRAIN]
GONE = ([1], [0, 2], [2])  # of the layers, in turn


def heads_to_remove(model):
    return {name: GONE[i % len(GONE)] for i, name in enumerate(prunable_heads(model))}


def mask_heads(model, heads):
    """Sets the outputs of heads to zero before the map that takes them."""
    for name, indices in heads.items():
        module = model.get_submodule(name)

        def keep(_, args, width=module.proj.in_features // module.num_heads, indices=indices):
            heads = args[0].unflatten(-1, (-1, width)).clone()
            heads[..., indices, :] = 0
            return heads.flatten(-2)

        module.proj.register_forward_pre_hook(keep)
    return model


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('name', VITS)
def test_removed_heads_are_heads_at_zero(name, fused):
    torch.manual_seed(0)
    model = small_vit(name).double()
    layers = prunable_heads(model)
    assert len(layers) == (4 if 'swin' in name.lower() else 2)
    for layer in layers.values():
        if hasattr(layer.module, 'fused_attn'):
            layer.module.fused_attn = fused
    images = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    heads = heads_to_remove(model)
    whole = output_of(model, images)
    masked = output_of(mask_heads(copy.deepcopy(model), heads), images)
    before = {name: getattr(layer.module, 'scale', None) for name, layer in layers.items()}
    weights = sum(parameter.numel() for parameter in model.parameters())
    prune_heads(model, heads)
    pruned = output_of(model, images)
    assert (pruned - masked).abs().max() <= 1e-12 * masked.abs().max()
    assert (pruned - whole).abs().max() > 1e-3 * whole.abs().max()
    assert sum(parameter.numel() for parameter in model.parameters()) < weights
    for layer_name, layer in layers.items():
        module = layer.module
        width = 4 if 'swin' in name.lower() and '0.blocks' in layer_name else 8
        assert layer.num_heads == module.num_heads == 3 - len(heads[layer_name])
        assert (
            module.proj.in_features == module.num_heads * width and getattr(module, 'scale', None) == before[layer_name]
        )
        assert getattr(module, 'attn_dim', module.proj.in_features) == module.proj.in_features
        assert getattr(module, 'fused_attn', fused) == fused
        table = getattr(module, 'relative_position_bias_table', None)
        assert table is None or table.shape[1] == module.num_heads


def load(model, state_dict, **options):
    follow_state_dict(model, state_dict)
    return model.load_state_dict(state_dict, **options)


@pytest.mark.parametrize('name', VITS)
def test_state_dict_carries_the_heads(name):
    """A fresh model takes them; an optimizer that was built before holds its parameters."""
    model, images = small_vit(name), torch.randn(2, 3, SIZE, SIZE)
    prune_heads(model, heads_to_remove(model))
    fresh = small_vit(name)
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    load(fresh, model.state_dict())
    torch.testing.assert_close(output_of(fresh, images), output_of(model, images), rtol=0, atol=0)
    assert {id(p) for g in optimizer.param_groups for p in g['params']} == {id(p) for p in fresh.parameters()}
    output_of(fresh, images).square().mean().backward()
    optimizer.step()
    # … and back: the unpruned state dict into the pruned model.
    whole = small_vit(name)
    load(model, whole.state_dict())
    torch.testing.assert_close(output_of(model, images), output_of(whole, images), rtol=1e-4, atol=1e-4)
    assert not follow_state_dict(model, whole.state_dict())


@pytest.mark.parametrize('name', VITS)
def test_copies_and_pickles(name):
    model, images = small_vit(name), torch.randn(2, 3, SIZE, SIZE)
    prune_heads(model, heads_to_remove(model))
    expected = output_of(model, images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output_of(other, images), expected)
        assert [type(x) for x in other.modules()] == [type(x) for x in model.modules()]
    prune_heads(model, {list(prunable_heads(model))[0]: [0]})  # a second time
    assert list(prunable_heads(model).values())[0].num_heads == 1


@pytest.mark.parametrize('name', VITS)
def test_without_any_heads_the_bias_of_the_output_stays(name):
    model, images = small_vit(name), torch.randn(2, 3, SIZE, SIZE)
    first = next(iter(prunable_heads(model)))
    with pytest.raises(ValueError, match='all heads of the layer: keep one'):
        prune_heads(model, {first: [0, 1, 2]})
    masked = output_of(mask_heads(copy.deepcopy(model), {first: [0, 1, 2]}), images)
    prune_heads(model, {first: [0, 1, 2]}, allow_empty=True)
    torch.testing.assert_close(output_of(model, images), masked)
    fresh = small_vit(name)
    load(fresh, model.state_dict())
    torch.testing.assert_close(output_of(fresh, images), masked)


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'beit_base_patch16_224', 'swin_tiny_patch4_window7_224'])
def test_optimizer_goes_on(name):
    """With the state and gradients of the entries that are left, as of one that trains the masked model."""
    torch.manual_seed(0)
    model, images = small_vit(name), torch.randn(4, 3, SIZE, SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    output_of(model, images).square().mean().backward()
    optimizer.step()
    layer = next(iter(prunable_heads(model).values()))
    momentum = optimizer.state[layer.module.qkv.weight]['exp_avg']
    width = layer.module.proj.in_features // 3
    expected = momentum.view(3, 3, width, -1)[:, [0, 2]].flatten(0, 2)
    replaced = prune_heads(model, {next(iter(prunable_heads(model))): [1]})
    replace_parameters(optimizer, replaced)
    assert torch.equal(optimizer.state[layer.module.qkv.weight]['exp_avg'], expected)
    assert {id(p) for g in optimizer.param_groups for p in g['params']} == {id(p) for p in model.parameters()}
    optimizer.zero_grad()
    output_of(model, images).square().mean().backward()
    optimizer.step()


def test_hooks_see_no_trials(monkeypatch):
    """Whether heads can go is tried on copies, once, without the hooks of the module."""
    model, seen, trials = small_vit('vit_tiny_patch16_224'), [], []
    attention = model.blocks[0].attn
    for module in (attention, attention.qkv):
        module.register_forward_hook(lambda module, *_: seen.append(module))
        module.register_forward_pre_hook(lambda module, *_, **__: seen.append(module), with_kwargs=True)
    is_equal = TransformerHeads._is_equal_in
    monkeypatch.setattr(TransformerHeads, '_is_equal_in', lambda *args: trials.append(args) or is_equal(*args))
    prune_heads(model, {'blocks.1.attn': [0]})
    own, trials[:] = len(trials), []
    prune_heads(model, {'blocks.0.attn': [0]})
    assert not seen and len(trials) == own == len({cls for _, cls, _ in trials})
    model(torch.randn(1, 3, SIZE, SIZE))
    assert seen == [attention, attention.qkv, attention.qkv, attention]
    assert len(attention._forward_hooks) == 1


def test_a_state_dict_without_some_of_the_parameters():
    """Heads follow where all are there; else the others would be 0."""
    model, pruned = small_vit('vit_tiny_patch16_224'), small_vit('vit_tiny_patch16_224')
    prune_heads(pruned, {0: [1]})
    before, name = copy.deepcopy(model.state_dict()), 'blocks.0.attn.proj.weight'
    assert not follow_state_dict(model, {name: pruned.state_dict()[name]}, strict=False)
    with pytest.raises(RuntimeError, match='size mismatch'):
        model.load_state_dict({name: pruned.state_dict()[name]}, strict=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'beit_base_patch16_224'])
def test_state_dict_of_an_attention_alone(name):
    model, pruned = small_vit(name), small_vit(name)
    prune_heads(pruned, {0: [1]})
    attention, x = model.blocks[0].attn, torch.randn(2, 17, 24)
    load(attention, pruned.blocks[0].attn.state_dict())
    assert attention.num_heads == 2 and torch.equal(attention(x), pruned.blocks[0].attn(x))


def test_class_attention():
    """CaiT's class token attends in layers of their own; its other heads are mixed."""
    model = timm.create_model('cait_xxs24_224', img_size=SIZE, patch_size=8, embed_dim=24, depth=1, num_heads=3)
    model = model.double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    images, name = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64), 'blocks_token_only.0.attn'
    masked = mask_heads(copy.deepcopy(model), {name: [0, 2]})(images)
    prune_heads(model, {name: [0, 2]})
    torch.testing.assert_close(model(images), masked, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match='heads cannot be removed from a TalkingHeadAttn'):
        prune_heads(model, {'blocks.0.attn': [0]})


@pytest.mark.parametrize(
    'name, changes, error, message',
    [
        ('vit_srelpos_small_patch16_224', {}, ValueError, 'has shared_rel_pos, which all layers share'),
        ('vit_small_patch16_rope_mixed_224', {}, ValueError, 'has rope, which all layers share'),
        ('vit_tiny_patch16_224', dict(scale_attn_norm=True), TypeError, 'heads cannot be removed from a Attention'),
        ('xcit_nano_12_p16_224', dict(patch_size=16), TypeError, 'heads cannot be removed from a XCA'),
    ],
)
def test_refused(name, changes, error, message):
    model = timm.create_model(name, **{**OF_TIMM['vit_tiny_patch16_224'], **changes})
    before = copy.deepcopy(model.state_dict())
    first = next(iter(prunable_heads(model)))
    with pytest.raises(error, match=message):
        prune_heads(model, {first: [0]})
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_refused_as_a_whole():
    """A mistake in the second layer leaves the first as it is."""
    model = small_vit('vit_tiny_patch16_224')
    for heads, message in (
        ({'blocks.0.attn': [0], 'blocks.1.attn': [3]}, 'different heads from 0 to 2'),
        ({'blocks.0.attn': [0], 'blocks.1.mlp': [0]}, "heads of 'blocks.1.mlp' are to be removed, but there are 0"),
        ({0: [0], 'blocks.0.attn': [1]}, 'names a layer twice'),
    ):
        with pytest.raises(ValueError, match=message):
            prune_heads(model, heads)
    assert [layer.num_heads for layer in prunable_heads(model).values()] == [3, 3]
    prune_heads(model, {1: [0]})
    assert [layer.num_heads for layer in prunable_heads(model).values()] == [3, 2]


def test_other_state_dicts_are_refused():
    """More heads than were built, and other widths, as PyTorch refuses them."""
    model, wide = small_vit('vit_tiny_patch16_224'), small_vit('vit_tiny_patch16_224', num_heads=6, embed_dim=48)
    with pytest.raises(StructureError, match='size mismatch'):
        load(model, wide.state_dict())
    state = model.state_dict()
    state['blocks.0.attn.qkv.weight'] = state['blocks.0.attn.qkv.weight'][:48]  # 2 heads, but proj of 3
    with pytest.raises(StructureError, match='size mismatch'):
        load(model, state)
    assert transformer_heads(model.blocks[0].attn).num_heads == 3


def test_load_pruned_checkpoint_by_timm(tmp_path):
    model, images = small_vit('swin_tiny_patch4_window7_224'), torch.randn(2, 3, SIZE, SIZE)
    prune_heads(model, heads_to_remove(model))
    torch.save(model.state_dict(), tmp_path / 'pruned.pth')
    arguments = OF_TIMM['swin_tiny_patch4_window7_224']
    loaded = timm.create_model('swin_tiny_patch4_window7_224', **arguments)
    load(loaded, timm.models.load_state_dict(tmp_path / 'pruned.pth', weights_only=True))
    assert torch.equal(loaded.eval()(images), model(images))


def test_meta_device_takes_the_heads():
    pruned = small_vit('beit_base_patch16_224')
    prune_heads(pruned, heads_to_remove(pruned))
    with torch.device('meta'):
        model = timm.create_model('beit_base_patch16_224', **OF_TIMM['beit_base_patch16_224'])
    load(model, pruned.state_dict(), assign=True)
    assert [layer.num_heads for layer in prunable_heads(model).values()] == [2, 1]


def test_other_image_sizes():
    """Of timm's Swin, which resizes its tables."""
    model = small_vit('swin_tiny_patch4_window7_224')
    prune_heads(model, heads_to_remove(model))
    model.set_input_size((64, 64), window_size=(8, 8))
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    assert model.layers[0].blocks[0].attn.relative_position_bias_table.shape == (15 * 15, 2)


@pytest.mark.parametrize('name', ['vit_relpos_small_patch16_224', 'eva02_tiny_patch14_224', 'beit_base_patch16_224'])
def test_compiled(name):
    """In one graph, as before."""
    model, images = small_vit(name), torch.randn(2, 3, SIZE, SIZE)
    prune_heads(model, heads_to_remove(model))
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('half', [False, True])
def test_rotations_are_those_of_timm(half):
    layers = pytest.importorskip('timm.layers')
    x, rope = torch.randn(2, 3, 5, 8), torch.randn(5, 16)
    torch.testing.assert_close(rotated(x, rope, half), layers.apply_rot_embed_cat(x, rope, half=half))


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_whole_models_of_timm(name):
    """Pruned, trained a step, saved and loaded, as they are."""
    model = timm.create_model(name, num_classes=5)
    images = torch.randn(1, *model.default_cfg['input_size'])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(images).sum().backward()
    optimizer.step()
    heads = {name: [0] for name in prunable_heads(model)}
    replace_parameters(optimizer, prune_heads(model, heads))
    model(images).sum().backward()
    optimizer.step()
    fresh = timm.create_model(name, num_classes=5)
    load(fresh, model.state_dict())
    assert torch.equal(fresh.eval()(images), model.eval()(images))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['VisionTransformer', 'BEiTViT', 'SwinTransformer'])
def test_whole_models_of_mmpretrain(name):
    registry = pytest.importorskip('mmpretrain').registry
    arch = dict(VisionTransformer='deit-tiny', BEiTViT='base', SwinTransformer='tiny')[name]
    model, fresh = (registry.MODELS.build(dict(type=f'mmpretrain.{name}', arch=arch, img_size=224)) for _ in range(2))
    images = torch.randn(1, 3, 224, 224)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    output_of(model, images).sum().backward()
    optimizer.step()
    replace_parameters(optimizer, prune_heads(model, {name: [0] for name in prunable_heads(model)}))
    output_of(model, images).sum().backward()
    optimizer.step()
    load(fresh, model.state_dict())
    fresh.eval(), model.eval()
    assert torch.equal(output_of(fresh, images), output_of(model, images))
