"""Heads that a mask hides and that are removed: the same function and gradients, in any mode; and all or nothing."""

import copy
import sys
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from helpers.small import numbers, small_model, trained_like
from helpers.versions import hugging_face_library
from helpers.vits import SIZE, output_map, output_of, small_vit
from torch import nn

from attncnn_plugin import AttentionRecorder, follow_state_dict
from attncnn_plugin.attention import QuadraticAttention
from attncnn_plugin.convert import conv_to_mhsa
from attncnn_plugin.heads.sizes import RECORD, WAYS
from attncnn_plugin.pruning import head_ablation, head_importance, masked_heads, prunable_heads, prune, prune_heads

VIT = 'vit_tiny_patch16_224'
IMAGES = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOKENS = IMAGES[:, 0, :6, :12]


class Folded(nn.Module):
    """Attention whose heads are in the batch, as in fairseq."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(0.0)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            own(x).unflatten(2, (self.heads, -1)).transpose(1, 2).flatten(0, 1) for own in (self.q, self.k, self.v)
        )
        heads = torch.bmm(self.drop(torch.bmm(q, k.mT).softmax(-1)), v)
        return self.out(heads.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2))


def encoder():
    return nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)


CASES = {
    'timm': (lambda: small_vit(VIT), IMAGES, {0: [1], 'blocks.1': [2, 0]}),
    'Hugging Face': (lambda: small_vit('transformers.ViT'), IMAGES, {1: [0, 2]}),
    'torch': (encoder, TOKENS, {'self_attn': [1]}),
    'folded': (lambda: nn.Sequential(Folded(), nn.LayerNorm(12), Folded()), TOKENS, {'0': [0], '2': [0, 1]}),
    'positions': (lambda: small_model('sa_generalized_cifar'), IMAGES[..., :16, :16], {0: [1], 1: [0, 2]}),
    'content': (lambda: small_model('cmhsa_narrow'), IMAGES[..., :16, :16], {1: [0, 8]}),
    'convolution': (
        lambda: nn.Sequential(conv_to_mhsa(nn.Conv2d(3, 6, 3, groups=3), content='additive', alpha=2)[0]),
        IMAGES[..., :8, :8],
        {'0': [0, 4]},
    ),
}


def case_of(name):
    torch.manual_seed(0)
    build, inputs, heads = CASES[name]
    return trained_like(build()).double(), inputs, heads


def gradients(model, inputs):
    output = output_of(model, inputs)
    weights = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    parameters = [own for own in model.parameters() if own.requires_grad and own.numel()]
    return output, dict(zip(parameters, torch.autograd.grad((output * weights).sum(), parameters, allow_unused=True)))


@pytest.mark.parametrize('name', CASES)
def test_a_mask_computes_and_trains_as_the_pruned_model(name):
    model, inputs, heads = case_of(name)
    model.train()
    whole = output_of(model, inputs)
    with masked_heads(model, heads):
        expected, masked = gradients(model, inputs)
    assert (expected - whole).abs().max() > 1e-6 and torch.equal(output_of(model, inputs), whole)
    change = prune_heads(model, heads, inputs)
    assert change.difference < 1e-9 and all(module.training for module in model.modules())
    output, left = gradients(model, inputs)
    exact = dict(rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(output, expected, **exact)
    assert set(change.replaced) <= set(masked)
    for parameter, gradient in masked.items():
        own = change.replaced.get(parameter)
        if gradient is not None and own is not None:
            kept = own.inherit(gradient)
            torch.testing.assert_close(kept.abs().sum(), gradient.abs().sum(), **exact)  # those that go have none
            parameter, gradient = own.heir, kept
        if left.get(parameter) is None:
            assert gradient is None or not gradient.numel() or not gradient.any()
        else:
            torch.testing.assert_close(left[parameter], gradient, **exact)


class HeadsFirst(Folded):
    """As ``Folded``, with the images of a head one after the other."""

    def forward(self, x):
        q, k, v = (torch.cat(own(x).chunk(self.heads, 2)) for own in (self.q, self.k, self.v))
        heads = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
        return self.out(torch.cat(heads.chunk(self.heads), 2))


@pytest.mark.parametrize('cls', [Folded, HeadsFirst])
def test_batches_of_other_sizes(cls):
    """In one context, such as the last batch of a loader; so does an ablation."""
    torch.manual_seed(0)
    model, batches = cls().double(), [torch.randn(number, 5, 12, dtype=torch.float64) for number in (4, 2, 3, 1)]
    zeroed = copy.deepcopy(model)
    zeroed.out.weight.data[:, 4:8] = 0
    with masked_heads(model, {'': [1]}):
        for batch in batches:
            torch.testing.assert_close(model(batch), zeroed(batch))
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    changes = [(loss(zeroed, batch) - loss(model, batch)) * len(batch) for batch in batches]
    assert head_ablation(model, batches, loss).zero_loss[''][1].item() == pytest.approx(sum(changes).item() / 10)


def test_a_mask_where_heads_come_in_another_order():
    """With as many images as heads, their axes are as long: the mask is not that of images, in silence."""

    class Either(Folded):
        def forward(self, x, first=False):
            qkv = [own(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for own in (self.q, self.k, self.v)]
            q, k, v = (own.transpose(0, 1) for own in qkv) if first else qkv
            heads = (q @ k.mT).softmax(-1) @ v
            return self.out((heads.transpose(0, 1) if first else heads).transpose(1, 2).flatten(2))

    model, x = Either(), torch.randn(3, 5, 12)
    torch.testing.assert_close(model(x), model(x, first=True))
    with masked_heads(model, {'': [1]}):
        model(x)
        with pytest.raises(ValueError, match=r'batches of sizes \[3, 3\] in two ways'):
            model(x, first=True)


@pytest.mark.parametrize('name', ['timm', 'positions'])
def test_a_mask_on_parts_that_run_by_themselves(name):
    """It is that of a whole pass; and what never ran is named at the end."""
    model, inputs, heads = case_of(name)
    with masked_heads(model, heads):
        model(inputs)
        expected = model.forward_features(inputs)
    assert (model.forward_features(inputs) - expected).abs().max() > 1e-6
    with masked_heads(model, heads):
        assert torch.equal(model.forward_features(inputs), expected)
    with pytest.raises(ValueError, match=r'there are 0 .*: name one of blocks.0'), masked_heads(model, {77: [1]}):
        model.forward_features(inputs)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize('name', ['timm', 'positions'])
def test_a_mask_with_gradient_checkpointing(name):
    """What is computed again has the mask, too."""
    model, inputs, heads = case_of(name)
    found = []
    for checkpointing in (False, True):
        model.train().set_grad_checkpointing(checkpointing)
        with masked_heads(model, heads):
            found.append(gradients(model, inputs)[1])
    for parameter, gradient in found[0].items():
        assert gradient is None or torch.equal(gradient, found[1][parameter])


@pytest.mark.parametrize('name', ['timm', 'folded', 'positions'])
def test_a_mask_in_training_with_dropout(name):
    """It draws what the model draws, and without heads it changes no bit."""
    model, inputs, heads = case_of(name)
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3

    def run(given=None):
        torch.manual_seed(3)
        if given is None:
            output = model(inputs)
        else:
            with masked_heads(model, given):
                output = model(inputs)
        return output, torch.get_rng_state()

    (whole, state), (same, after) = run(), run({key: [] for key in heads})
    assert torch.equal(whole, same) and torch.equal(state, after)
    masked, after = run(heads)
    layers = list(prunable_heads(model, inputs))
    if name == 'timm':
        for layer, gone in zip(layers, heads.values()):
            for head in gone:
                output, columns = output_map(model, layer, head)
                output.weight.data[:, columns] = 0
        torch.testing.assert_close(masked, run()[0], rtol=1e-9, atol=1e-11)
    assert not torch.equal(masked, whole) and torch.equal(state, after)


def test_masks_inside_of_masks_and_of_all_heads():
    model, inputs, _ = case_of('timm')
    with masked_heads(model, {0: [0, 2], 1: [0, 1, 2]}):
        expected = model(inputs)
    masks = [masked_heads(model, heads) for heads in ({0: [0]}, {1: range(3)}, {0: [2]})]
    with AttentionRecorder(model) as recorder, masks[0], masks[1], masks[2]:
        assert torch.equal(model(inputs), expected) and torch.equal(model(inputs), expected)
    assert [list(maps) for maps in recorder.passes] == [['blocks.0.attn', 'blocks.1.attn']] * 2
    with masked_heads(model, {0: [0, 2], 1: range(3)}):
        with pytest.raises(RuntimeError):  # before heads were seen
            model(inputs[:, :1])
        assert torch.equal(model(inputs), expected)
    for layer, heads in (('blocks.0.attn', [0, 2]), ('blocks.1.attn', [0, 1, 2])):
        for head in heads:
            output, columns = output_map(model, layer, head)
            output.weight.data[:, columns] = 0
    torch.testing.assert_close(model(inputs), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    'heads, message',
    [
        ({'blocks.7': [0]}, "heads of 'blocks.7' were given, but there are 0 .*: name one of blocks.0.attn, blocks.1"),
        ({2: [0]}, 'heads of 2 were given, but there are 0'),
        ({'blocks': [0]}, "heads of 'blocks' were given, but there are 2"),
        ({0: [0], 'blocks.0.attn': [1]}, 'names a layer twice'),
        ({0: [3]}, r'heads=\[3\] must be different heads from 0 to 2'),
        ({0: [1, 1]}, 'must be different heads'),
    ],
)
def test_refused_names_and_heads(heads, message):
    """By both verbs; model and hooks are as before."""
    model, inputs, _ = case_of('timm')
    expected, before = model(inputs), [*model.parameters()]
    with masked_heads(model, heads):
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                model(inputs)
    with pytest.raises(ValueError, match=message):
        prune_heads(model, heads)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(a is b for a, b in zip(before, model.parameters())) and torch.equal(model(inputs), expected)


@pytest.mark.parametrize('name', [VIT, 'beit_base_patch16_224', 'torchvision.SwinTransformer', 'transformers.Beit'])
def test_removed_twice(name):
    """Heads are counted among those there are now; what is left computes as if the others were zero."""
    torch.manual_seed(0)
    model = small_vit(name).double()
    masked, fresh = copy.deepcopy(model), small_vit(name).double()
    layer = list(prunable_heads(model))[-1]
    prune_heads(model, {layer: [1]})
    prune_heads(model, {layer: [0]})
    for head in (0, 1):
        output, columns = output_map(masked, layer, head)
        output.weight.data[:, columns] = 0
    expected = output_of(masked, IMAGES)
    torch.testing.assert_close(output_of(model, IMAGES), expected, rtol=1e-9, atol=1e-11)
    assert numbers(model)[-1] == 1
    with pytest.raises(ValueError, match='are all heads of'):  # whose forward pass needs one
        prune_heads(model, {layer: [0]})
    follow_state_dict(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(output_of(fresh, IMAGES), output_of(model, IMAGES))


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_model_in_training(dtype):
    """Modes, frozen parameters, gradients, buffers, random numbers and hooks are as before; each runs as the model."""
    torch.manual_seed(0)
    rates = dict(drop_rate=0.1, attn_drop_rate=0.1, proj_drop_rate=0.1, drop_path_rate=0.1)
    model = nn.Sequential(nn.BatchNorm2d(3), trained_like(small_vit(VIT, **rates))).to(dtype).train()
    vit, images = model[1], IMAGES.to(dtype)
    vit.blocks[1].eval()
    vit.blocks[0].attn.qkv.requires_grad_(False)
    model.register_buffer('table', torch.randn(3, dtype=dtype))
    model(images).sum().backward()
    masked, modes = copy.deepcopy(model), [module.training for module in model.modules()]
    for head in (0, 2):
        output, columns = output_map(masked[1], 'blocks.0.attn', head)
        output.weight.data[:, columns] = 0
    buffers = {name: own.clone() for name, own in model.named_buffers()}
    gradient, ran = vit.blocks[0].attn.proj.weight.grad, dict.fromkeys(model.modules(), 0)

    def count(module, *_):
        ran[module] += 1

    handles = [module.register_forward_hook(count) for module in (model, vit, vit.blocks[0], vit.blocks[0].attn)]
    state = torch.get_rng_state()
    change = prune_heads(model, {'1.blocks.0.attn': [0, 2]}, images)
    assert torch.equal(torch.get_rng_state(), state) and change.difference < torch.finfo(dtype).eps ** 0.6
    assert [module.training for module in model.modules()] == modes and ran[model] > 0
    assert {ran[module] for module in (vit, vit.blocks[0], vit.blocks[0].attn)} == {ran[model]}
    for name, own in model.named_buffers():
        assert name.endswith(RECORD) or torch.equal(own, buffers[name])
    attention = vit.blocks[0].attn
    assert not any(own.requires_grad for own in attention.qkv.parameters()) and attention.proj.weight.requires_grad
    assert torch.equal(attention.proj.weight.grad, gradient[:, 8:16]) and attention.qkv.weight.grad is None
    assert len(attention._forward_hooks) == 1 and not vit.blocks[1].attn._forward_hooks
    for handle in handles:
        handle.remove()
    near = dict(rtol=1e-10, atol=1e-12) if dtype == torch.float64 else dict(rtol=1e-4, atol=1e-4)
    near = dict(rtol=0.1, atol=0.1) if dtype == torch.bfloat16 else near
    torch.testing.assert_close(model.eval()(images), masked.eval()(images), **near)


@pytest.mark.parametrize('batch_first', [False, True])
@pytest.mark.parametrize('gone', [[1], [1, 2, 3]])
def test_unbatched_tokens(gone, batch_first):
    """Of ``nn.MultiheadAttention``, with one head left too; weights are those of the heads that are left."""
    torch.manual_seed(0)
    model = nn.ModuleDict({'a': nn.MultiheadAttention(32, 4, batch_first=batch_first)}).double().eval()
    x, kept = torch.randn(7, 32, dtype=torch.float64), [head for head in range(4) if head not in gone]
    whole = copy.deepcopy(model['a'])
    for head in gone:
        whole.out_proj.weight.data[:, 8 * head : 8 * head + 8] = 0
    call = lambda own, tokens: own['a'](tokens, tokens, tokens)  # noqa: E731
    for tokens in (x, torch.stack([x, 2 * x])):
        less = copy.deepcopy(model)
        prune_heads(less, {'a': gone}, tokens, call=call)
        for own in (x, torch.stack([x, 2 * x])):
            output, weights = less['a'](own, own, own, average_attn_weights=False)
            expected, of_all = whole(own, own, own, average_attn_weights=False)
            torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(weights, of_all[..., kept, :, :], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('sizes', [(6, 10), (12, 10), (10, None)])
def test_keys_and_values_of_other_widths(sizes, bias, dtype):
    """Of ``nn.MultiheadAttention``, as of images that attend to a text."""
    torch.manual_seed(0)
    build = lambda: nn.MultiheadAttention(12, 3, bias=bias, kdim=sizes[0], vdim=sizes[1]).to(dtype)  # noqa: E731
    model, fresh = nn.ModuleDict({'a': trained_like(build())}), nn.ModuleDict({'a': build()})
    whole, call = copy.deepcopy(model['a']), lambda own, tokens: own['a'](*tokens)[0]
    tokens = [torch.randn(7, 2, 12, dtype=dtype), *(torch.randn(5, 2, own or 12, dtype=dtype) for own in sizes)]
    for head, columns in ((1, slice(4, 8)), (0, slice(4))):
        change = prune_heads(model, {'a': [head]}, tokens, call=call)
        whole.out_proj.weight.data[:, columns] = 0
        near = dict(rtol=0, atol=20 * torch.finfo(dtype).eps)
        torch.testing.assert_close(call(model, tokens), whole(*tokens)[0], **near)
        assert change.difference < 1e-5 and model['a'].kdim == sizes[0]
    follow_state_dict(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(call(fresh, tokens), call(model, tokens))


class Stop(BaseException):
    """Nothing may take it for a way that does not fit."""


def everything(model):
    held = [own for module in model.modules() for own in (vars(module), *vars(module).values())]
    shallow = [list(own.items()) for own in held if isinstance(own, dict)]
    values = {name: own.detach().clone() for name, own in model.state_dict(keep_vars=True).items()}
    return [*model.parameters(), *model.buffers()], shallow, values


@pytest.mark.parametrize('way', range(len(WAYS)))
def test_each_way_of_sizes_that_fails_leaves_the_model(way, monkeypatch):
    """By an error after it has changed all sizes, and by a stop; and where none fits, the error says so."""
    model, inputs, _ = case_of('timm')
    before, whole, tried = everything(model), prune.set_sizes, []

    def fails(module, *args):
        whole(module, *args)
        tried.append(args[-2])
        if args[-2] == WAYS[way]:
            raise Stop
        raise ValueError('such a size')

    monkeypatch.setattr(prune, 'set_sizes', fails)
    with pytest.raises(Stop):
        prune_heads(model, {0: [1], 1: [0]}, inputs)
    assert tried == list(WAYS[: way + 1])
    if way == 0:
        monkeypatch.setattr(prune, 'set_sizes', lambda *args: fails(*args[:-2], -1, ()))
        with pytest.raises(TypeError, match=r'of blocks.0.attn, blocks.1.attn cannot be removed: .* such a size'):
            prune_heads(model, {0: [1], 1: [0]}, inputs)
    parameters, shallow, values = everything(model)
    assert all(a is b for a, b in zip(parameters, before[0])) and len(parameters) == len(before[0])
    for now, then in zip(shallow, before[1]):
        assert [key for key, _ in now] == [key for key, _ in then]
        assert all(a is b or a == b for (_, a), (_, b) in zip(now, then) if not isinstance(a, torch.Tensor))
    assert all(torch.equal(values[name], own) for name, own in before[2].items())
    monkeypatch.undo()
    prune_heads(model, {0: [1], 1: [0]}, inputs)
    assert numbers(model) == [2, 2]
    loss = lambda model, images: model(images).square().mean()  # noqa: E731
    assert {len(own) for own in head_importance(model, [inputs], loss).values()} == {2}


class ScaledOwn(QuadraticAttention):
    def forward(self, x):
        return super().forward(x) * self.num_heads


class Scaled(Folded):
    def forward(self, x):
        return super().forward(x) * self.heads


@pytest.mark.parametrize('layer, inputs', [(Scaled(), TOKENS), (ScaledOwn(12, 3), TOKENS[:, None])])
def test_a_failed_comparison(layer, inputs):
    """A model that computes something else with fewer heads is put back, and the error says by how much."""
    model = nn.Sequential(layer).double()
    before, expected = everything(model), model(inputs)
    with pytest.raises(TypeError, match='a Scaled.* cannot run with fewer, or computes something else .*differs by 0.'):
        prune_heads(model, {'0': [1]}, inputs)
    assert all(a is b for a, b in zip(everything(model)[0], before[0])) and torch.equal(model(inputs), expected)
    assert numbers(model) in ([], [3])


SCALE = 1.0


class OneMap(nn.Module):
    """Attention of four heads of 8 channels, whose settings are numbers of heads or widths by chance."""

    def __init__(self, shape='inner', width='window', look_ahead=4, scale='fixed'):
        super().__init__()
        self.num_heads, self.inner, self.width, self.look_ahead, self.scale = 4, 32, width, look_ahead, scale
        setattr(self, width, 32)
        self.shape, self.qkv, self.proj = shape, nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer('index', torch.arange(32).flip(0), persistent=False)

    def forward(self, x):
        if self.shape == 'inner':
            qkv = [own.unflatten(2, (self.num_heads, 8)).transpose(1, 2) for own in self.qkv(x).split(self.inner, 2)]
        else:
            qkv = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, 8).permute(2, 0, 3, 1, 4)
        scale = (x.shape[-1] // self.num_heads) ** -0.5 if self.scale == 'of heads' else SCALE
        number = torch.arange(x.shape[1])
        distance = number[:, None] - number
        sees = (distance < getattr(self, self.width)) & (-distance <= self.look_ahead) & (self.index[number % 32] >= 0)
        heads = (qkv[0] @ qkv[1].mT * scale).masked_fill(~sees, -torch.inf).softmax(-1) @ qkv[2]
        return self.proj(heads.transpose(1, 2).reshape(*x.shape[:2], self.inner if self.shape == 'inner' else -1))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('settings', [{}, dict(width='reach'), dict(shape='fused'), dict(scale='of heads')])
def test_inputs_of_other_sizes_than_the_example(settings, dtype):
    """The example is too short to show a window; and half precision hides another scale of the scores."""
    torch.manual_seed(0)
    model = nn.Sequential(OneMap(**settings))
    trained_like(model)
    model, whole = model.to(dtype), copy.deepcopy(model)
    example, longer = torch.randn(2, 4, 32, dtype=dtype), torch.randn(2, 50, 32)
    model.float().to(dtype)[0].qkv.weight.grad = torch.ones(96, 32, dtype=dtype)
    change = prune_heads(model, {'0': [1]}, example)
    assert change.difference < 1e-6 and {own.dtype for own in model.parameters()} == {dtype}
    assert model[0].qkv.weight.grad.dtype == dtype and {own.dtype for own in change.replaced} == {dtype}
    whole = whole.to(dtype).float()
    with masked_heads(whole, {'0': [1]}):
        expected = whole(longer)
    torch.testing.assert_close(copy.deepcopy(model).float()(longer), expected, rtol=1e-4, atol=1e-4)
    fresh = nn.Sequential(OneMap(**settings)).to(dtype)
    follow_state_dict(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(longer.to(dtype)), model(longer.to(dtype)))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_that_a_model_casts_to(dtype):
    model = small_vit(VIT).to(dtype)
    with pytest.raises(RuntimeError, match='in float32, in which heads are removed, the model cannot run'):
        prune_heads(model, {0: [1]}, IMAGES, call=lambda model, images: model(images.to(dtype)))
    assert {own.dtype for own in model.parameters()} == {dtype}


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_is_left_as_it_was(dtype):
    """Where heads cannot be removed, every bit and every object is."""
    torch.manual_seed(0)
    model, calls = small_vit(VIT).to(dtype), []
    before, state = [*model.parameters()], copy.deepcopy(model.state_dict())

    def call(model, batch):
        calls.append(batch['images'][0].dtype)
        if len(calls) > 5:  # the pruned model
            raise RuntimeError('no more')
        return model(batch['images'][0])

    with pytest.raises((RuntimeError, TypeError), match='no more'):
        prune_heads(model, {0: [1]}, dict(images=[IMAGES.to(dtype)], names=['a']), call=call)
    assert all(one is other for one, other in zip(model.parameters(), before)) and set(calls) == {torch.float32}
    assert all(torch.equal(own, state[name]) for name, own in model.state_dict().items())
    assert all(own.dtype == state[name].dtype for name, own in model.state_dict().items())


class Packed(nn.Module):
    """A weight of queries, keys and values in the module itself; beyond ``reach`` no key is seen."""

    def __init__(self):
        super().__init__()
        self.weight, self.proj = nn.Parameter(torch.randn(96, 32)), nn.Linear(32, 32)
        self.num_heads, self.reach = 4, 96

    def forward(self, x):
        qkv = F.linear(x, self.weight).unflatten(2, (3, self.num_heads, 8)).permute(2, 0, 3, 1, 4)
        number = torch.arange(x.shape[1])
        sees = (number[:, None] - number).abs() < self.reach
        return self.proj(F.scaled_dot_product_attention(*qkv, sees).transpose(1, 2).flatten(2))


class Positions(Packed):
    """Buffers that state dicts leave out: slopes of heads, gains of channels, decays of distances."""

    def __init__(self):
        super().__init__()
        self.register_buffer('slopes', torch.rand(4, 1, 1), persistent=False)
        self.register_buffer('gain', torch.rand(32), persistent=False)
        self.register_buffer('decay', torch.rand(32), persistent=False)

    def forward(self, x):
        q, k, v = F.linear(x, self.weight).unflatten(2, (3, self.num_heads, 8)).permute(2, 0, 3, 1, 4)
        number = torch.arange(x.shape[1])
        distance = (number[:, None] - number).abs()
        scores = q @ k.mT - self.slopes * distance - self.decay[distance]
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2) * self.gain)


def test_buffers_that_state_dicts_leave_out():
    """Those of heads travel with their values, others stay; a refused model has them as before."""
    torch.manual_seed(0)
    model, fresh, x = Positions(), Positions(), torch.randn(2, 5, 32)
    fresh.decay.copy_(model.decay)
    with pytest.raises(TypeError, match='no more'):
        prune_heads(model, {'': [1]}, x, call=lambda model, x: model(x) if len(model.slopes) == 4 else stop())
    assert {*model.state_dict()} == {*fresh.state_dict()}
    with masked_heads(model, {'': [1]}):
        expected = model(x)
    prune_heads(model, {'': [1]}, x)
    torch.testing.assert_close(model(x), expected)
    follow_state_dict(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    longer = torch.randn(2, 30, 32)
    assert torch.equal(fresh(longer), model(longer)) and len(fresh.decay) == 32 and len(fresh.gain) == 24


def stop():
    raise RuntimeError('no more')


class SharedKeys(Folded):
    """Keys and values of one head for four heads of queries; softmax is blind to the bias of keys."""

    def __init__(self):
        super().__init__(32, 4)
        self.k, self.v, self.scale = nn.Linear(32, 8), nn.Linear(32, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        q = (self.q(x) * self.scale).unflatten(2, (self.heads, -1)).transpose(1, 2)
        scores = q @ self.k(x)[:, None].mT
        return self.out((scores.softmax(-1) @ self.v(x)[:, None]).transpose(1, 2).flatten(2))


def test_rounding_errors_are_no_heads():
    """However small the gradient of a bias, it is of all heads that share its map."""
    for seed in range(10, 18):
        torch.manual_seed(seed)
        model, x = SharedKeys(), torch.randn(3, 9, 32)
        for heads in ([1, 3], [0]):
            prune_heads(model, {'': heads}, x)
        assert model.k.bias.shape == (8,) and model.q.weight.shape == (8, 32)


def test_numbers_beside_a_weight():
    model, fresh = Packed(), Packed()
    prune_heads(model, {'': [1]}, torch.randn(1, 5, 32))
    assert follow_state_dict(fresh, model.state_dict())
    assert model.weight.shape == fresh.weight.shape == (72, 32) and model.reach == fresh.reach == 96


def test_a_rewritten_forward_sees_its_module(monkeypatch):
    model, x = nn.Sequential(OneMap(scale='of heads')), TOKENS.float().repeat(1, 1, 3)[..., :32]
    prune_heads(model, {'0': [1]}, x)
    assert 'forward' in vars(model[0])
    before, model[0].scale = model(x), 'fixed'
    monkeypatch.setattr(sys.modules[__name__], 'SCALE', 5.0)
    five = model(x)
    monkeypatch.setattr(sys.modules[__name__], 'SCALE', 8**-0.5)
    assert torch.equal(model(x), before) and not torch.equal(five, before)


def normed():
    model = OneMap()
    torch.nn.utils.parametrizations.spectral_norm(model.proj)
    return model


class Core(Folded):
    def forward(self, x):
        qkv = [own(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for own in (self.q, self.k, self.v)]
        return F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)


def mixed_in_stages():
    block = lambda: nn.Sequential(OrderedDict(core=Core(), norm=nn.LayerNorm(12), proj=nn.Linear(12, 12)))  # noqa: E731
    return nn.Sequential(*[nn.Sequential(nn.Sequential(nn.Identity(), block())) for _ in range(2)])


def shared_keys():
    transformers = hugging_face_library()
    settings = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    return transformers.LlamaModel(transformers.LlamaConfig(**settings, intermediate_size=8, vocab_size=9))


@pytest.mark.parametrize(
    ('build', 'inputs', 'heads', 'message'),
    [
        (
            shared_keys,
            dict(input_ids=torch.arange(5)[None]),
            {0: [1]},
            r'heads \[0, 1\] share entries of .*: remove all',
        ),
        (normed, TOKENS.repeat(1, 1, 3)[..., :32], {'': [0]}, 'proj has a parametrization or a hook'),
        (mixed_in_stages, TOKENS, {'0.0.1.core': [0]}, 'mixes the outputs of heads before a map takes them'),
    ],
)
def test_what_stands_in_the_way(build, inputs, heads, message):
    """It is said after a few passes, however many modules are around the attention."""
    torch.manual_seed(0)
    model, passes = build().eval(), []
    state = copy.deepcopy(model.state_dict())
    model.register_forward_hook(lambda *own: passes.append(own))
    with pytest.raises(TypeError, match=message):
        prune_heads(model, heads, inputs)
    assert len(passes) < 20
    assert all(torch.equal(own, state[name]) for name, own in model.state_dict().items())
