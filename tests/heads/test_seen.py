"""Attention seen at PyTorch's functions: against its equation, and nothing else changed."""

import copy
import sys
import threading
import types
import warnings
from contextlib import nullcontext
from functools import partial

import hypothesis.strategies as st
import pytest
import timm
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from attncnn_plugin.heads.kernels import KERNELS
from attncnn_plugin.heads.seen import watching, watching_outputs

PRECISION = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)


class Call(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def seen(model, *args, **kwargs):
    """Returns (name, probabilities) of what runs in a model, whose output keeps every bit.

    The product of each attention, with the probabilities seen, is its output.
    """
    model, maps, wrong = model if isinstance(model, nn.Module) else Call(model), [], []

    def recomputed(attention, output):
        product = attention.product(attention.probs.to(output.dtype))
        wrong.append((product - output).abs().max() > 10 * PRECISION[output.dtype])
        in_order = attention.in_order(product)
        assert in_order.shape[-2] == attention.probs.shape[-2]
        return output

    expected = model(*args, **kwargs)
    with watching(model, lambda name, probs, places: maps.append((name, probs))):
        output = model(*args, **kwargs)
    assert torch.equal(first(output), first(expected))
    touched = []
    with watching(model, lambda name, probs, places: touched.append(name), touch=recomputed):
        model(*args, **kwargs)
    assert not any(wrong) and len(wrong) == len(touched) == len(maps)
    return maps


def first(output):
    return output[0] if isinstance(output, tuple) else output


def close(one, other, dtype=None):
    torch.testing.assert_close(one, other, rtol=0, atol=PRECISION[dtype or one.dtype], check_dtype=False)


def softmax_of(scores):
    """Softmax by its definition, 0 where a query sees no key."""
    exp = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e9)).exp()
    return exp / exp.sum(-1, keepdim=True).clamp(min=1e-300)


def joined(output):
    """``(…, N_h, N, D_h)`` as ``(…, N, N_h·D_h)``, as the next linear map takes it."""
    return output.transpose(-3, -2).flatten(-2)


@DTYPES
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 5),
    windows=st.integers(0, 2),
    mask=st.sampled_from(['none', 'bool', 'float', 'causal']),
    scale=st.sampled_from([None, 0.7]),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_scaled_dot_products(dtype, sizes, windows, mask, scale, groups, seed):
    torch.manual_seed(seed)
    images, heads, queries, keys, channels = sizes
    batch = [images] + [3] * (windows > 0)
    q = torch.randn(*batch, heads * groups, queries, channels, dtype=dtype)
    k, v = torch.randn(2, *batch, heads, keys, channels, dtype=dtype)
    options = dict(scale=scale, enable_gqa=True) if groups > 1 else dict(scale=scale)
    scores = q.double() @ k.double().repeat_interleave(groups, -3).mT * (channels**-0.5 if scale is None else scale)
    if mask == 'causal':
        options['is_causal'] = True
        scores = scores + torch.full((queries, keys), -torch.inf).triu(1)
    elif mask == 'bool':
        options['attn_mask'] = torch.rand(queries, keys) < 0.5
        scores = scores.masked_fill(~options['attn_mask'], -torch.inf)
    elif mask == 'float':
        options['attn_mask'] = torch.randn(queries, keys, dtype=dtype)
        scores = scores + options['attn_mask']
    ((name, probs),) = seen(lambda q, k, v: joined(F.scaled_dot_product_attention(q, k, value=v, **options)), q, k, v)
    assert name == '' and probs.dtype == dtype
    close(probs, softmax_of(scores).reshape(-1, heads * groups, queries, keys), dtype)


Q, K, V = (torch.randn(2, 3, own, 4, dtype=torch.float64) for own in (5, 6, 6))
FOLD = partial(torch.flatten, start_dim=0, end_dim=1)
HEADS_FIRST = lambda own: own.transpose(0, 1).flatten(0, 1)  # noqa: E731
KV = K.float(), V.float()
KEPT = torch.tensor([3, 1]).view(1, 1, 2, 1).expand(2, 3, 2, 6)
MAP = nn.Linear(6, 4).requires_grad_(False)
MIX = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))


def scores(q=Q, k=K):
    return q @ k.mT


def by_hand(scores):
    """Softmax as many write it."""
    exp = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    exp /= exp.sum(dim=-1, keepdim=True)
    return exp


@pytest.mark.parametrize(
    'function',
    [
        lambda q, k, v: joined(scores(q, k).softmax(-1) @ v),
        lambda q, k, v: joined(torch.matmul(input=F.softmax(input=scores(q, k), dim=-1), other=v)),
        lambda q, k, v: joined((v.mT @ torch.softmax(scores(q, k), -1).mT).mT),
        lambda q, k, v: joined(scores(k, q).softmax(-2).mT @ v),
        lambda q, k, v: joined(torch.Tensor.__rmatmul__(v, torch.special.softmax(scores(q, k), -1))),
        lambda q, k, v: joined(torch.bmm(FOLD(scores(q, k)).softmax(-1), FOLD(v)).unflatten(0, (2, 3))),
        lambda q, k, v: joined(
            (torch.baddbmm(FOLD(scores(q, k)), FOLD(q), FOLD(k).mT, alpha=0).softmax(-1) @ FOLD(v)).view(2, 3, 5, 4)
        ),
        lambda q, k, v: torch.einsum('bhqk,bhkd->bqhd', scores(q, k).softmax(-1), v).flatten(2),
        lambda q, k, v: torch.einsum('bhkd, bhqk -> bqhd', v, scores(q, k).softmax(-1)).flatten(2),
        lambda q, k, v: joined(torch.einsum('...qk,...kd->...qd', scores(q, k).softmax(-1), v)),
        lambda q, k, v: joined(torch.einsum('...ij,...jk', scores(q, k).softmax(-1), v)),
        lambda q, k, v: joined(F.dropout(scores(q, k).softmax(-1), 0.5, False).to(v).reshape(2, 3, 5, 6) @ v),
        lambda q, k, v: joined(torch.cat(scores(q, k).softmax(-1).chunk(2, 1), 1) @ v),
        lambda q, k, v: joined(nn.Softmax(dim=-1)(scores(q, k)) @ v),
        lambda q, k, v: joined(scores(q, k).softmax(-1).contiguous().view(2, 3, 5, 6).expand(2, 3, 5, 6) @ v),
        lambda q, k, v: joined(torch.linalg.matmul(scores(q, k).softmax(-1), v)),
        lambda q, k, v: joined(by_hand(scores(q, k)) @ v),
        lambda q, k, v: joined(torch.div(scores(q, k).exp(), scores(q, k).exp().sum(-1, keepdim=True)) @ v),
        lambda q, k, v: joined(F.log_softmax(scores(q, k), -1).exp() @ v),
        lambda q, k, v: joined(torch.einsum('bhqk,bkd->bhqd', scores(q, k).softmax(-1), v[:, 0])),
        lambda q, k, v: joined(torch.einsum('bkd,bhqk->bhqd', v[:, 0], scores(q, k).softmax(-1))),
    ],
)
def test_spellings(function):
    ((_, probs),) = seen(function, Q, K, V)
    close(probs, softmax_of(scores()))


OUT = torch.randn(3, 4, 7, dtype=torch.float64)


def heads_first(q, k, v):
    """Attention ``(N_h, B, Q, D_h)``."""
    return scores(q.transpose(0, 1), k.transpose(0, 1)).softmax(-1) @ v.transpose(0, 1)


@pytest.mark.parametrize(
    'function',
    [
        lambda q, k, v: torch.cat((scores(q, k).softmax(-1) @ v).unbind(1), -1),
        lambda q, k, v: torch.cat([own.squeeze(1) for own in (scores(q, k).softmax(-1) @ v).split(1, 1)], -1),
        lambda q, k, v: (lambda output: torch.cat([output[:, head] for head in range(3)], -1))(
            scores(q, k).softmax(-1) @ v
        ),
        lambda q, k, v: torch.cat(
            list(scores(q.transpose(0, 1), k.transpose(0, 1)).softmax(-1) @ v.transpose(0, 1)), -1
        ),
        lambda q, k, v: torch.cat((scores(HEADS_FIRST(q), HEADS_FIRST(k)).softmax(-1) @ HEADS_FIRST(v)).split(2, 0), 2),
        lambda q, k, v: torch.stack((scores(q, k).softmax(-1) @ v).unbind(1), -2).flatten(-2),
        lambda q, k, v: torch.einsum('bhqd,hdc->bqc', scores(q, k).softmax(-1) @ v, OUT),
        lambda q, k, v: (heads_first(q, k, v) @ OUT[:, None]).sum(0),
        lambda q, k, v: torch.bmm(heads_first(q, k, v).flatten(1, 2), OUT).sum(dim=0).unflatten(0, (2, 5)),
    ],
)
def test_heads_that_no_view_joins(function):
    """They are followed through parts and what joins these, and to the sum over heads and channels."""
    ((_, probs),) = seen(function, Q, K, V)
    close(probs, softmax_of(scores()))


def several(kind, q, k, v):
    """Attention in several pieces."""
    heads = (scores(q, k)[:, head].softmax(-1) @ v[:, head] for head in range(3))
    if kind == 'joined':
        return torch.cat([*heads], -1)
    if kind == 'stacked':
        return torch.stack([*heads], 2).flatten(2)
    if kind == 'heads first':
        return torch.stack([*heads]).permute(1, 2, 0, 3).flatten(2)
    if kind == 'two kinds':
        pairs = zip(scores(q, k).split(2, 1), v.split(2, 1))
        return joined(torch.cat([own.softmax(-1) @ value for own, value in pairs], 1))
    if kind in ('written', 'two kinds, written'):
        output = torch.empty_like(q)
        for some in [[0], [1], [2]] if kind == 'written' else [[0, 1], [2]]:
            output[:, some] = scores(q, k)[:, some].softmax(-1) @ v[:, some]
        return joined(output)
    if kind.startswith('four heads'):
        twice, output = [own[:, [0, 1, 2, 0]] for own in (q, k, v)], torch.zeros(2, 5, 16).to(q)
        if kind == 'four heads, in pairs, stacked':
            pairs = zip(*(own.split(2, 1) for own in twice))
            return joined(
                torch.stack([scores(own, key).softmax(-1) @ value for own, key, value in pairs], 1).flatten(1, 2)
            )
        if kind == 'four heads, in pairs, projected':
            pairs = zip(*(own.split(2, 1) for own in twice))
            return sum(
                joined(scores(own, key).softmax(-1) @ value) @ OUT[:2].flatten(0, 1) for own, key, value in pairs
            )
        for channels, (own, key, value) in zip((slice(8), slice(8, 16)), zip(*(each.split(2, 1) for each in twice))):
            output[..., channels] = joined(scores(own, key).softmax(-1) @ value)
        return output
    if kind == 'projected':
        return sum(own @ of_head for own, of_head in zip(heads, OUT))
    if kind == 'values projected':
        return sum(scores(q, k)[:, head].softmax(-1) @ (v[:, head] @ OUT[head]) for head in range(3))
    if kind == 'one softmax':
        probs = scores(q, k).softmax(-1)
        return sum(F.linear(probs[:, head] @ v[:, head], OUT[head].mT) for head in range(3))
    if kind == 'queries':
        return joined(torch.cat([scores(own, k).softmax(-1) @ v for own in q.split(2, 2)], 2))
    if kind == 'queries, written':
        output = torch.empty_like(q).mT
        for some in (slice(0, 2), slice(2, 5)):
            output[..., some] = v.mT @ scores(q[:, :, some], k).softmax(-1).mT
        return output.flatten(1, 2).mT
    if kind == 'sources':
        return joined(scores(q, k).softmax(-1) @ v + scores(q, v).softmax(-1) @ k)
    parts = zip(scores(q, k).softmax(-1).split(4, -1), v.split(4, -2))
    return joined(sum(own @ value for own, value in parts))


ONE_AFTER_ANOTHER = ['joined', 'stacked', 'heads first', 'two kinds', 'two kinds, written', 'four heads, in pairs']
ONE_AFTER_ANOTHER += [
    'four heads, in pairs, projected',
    'four heads, in pairs, stacked',
    'written',
    'projected',
    'values projected',
    'one softmax',
]


@pytest.mark.parametrize('kind', ONE_AFTER_ANOTHER)
def test_heads_one_after_another(kind):
    """Each run is attention of some heads, for maps; what counts heads says that it cannot."""
    model, maps = Call(partial(several, kind)), []
    with watching(model, lambda name, probs, places: maps.append(probs)):
        model(Q, K, V)
    expected = softmax_of(scores())
    close(torch.cat(maps, 1), expected[:, [0, 1, 2, 0]] if kind.startswith('four') else expected)
    for options in (dict(touch=lambda attention, output: output), dict(one=True)):
        refused = pytest.raises(ValueError, match=r'computes [2-4] attentions in a run, .* a module for each')
        with refused, watching(model, **options):
            model(Q, K, V)


def test_a_module_that_runs_twice():
    """It has the same heads each time, whatever joins its outputs."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Call(lambda x: (x @ x.mT).softmax(-1) @ x)

        def forward(self, x):
            return torch.cat([self.attention(x), self.attention(x.flip(1))], -1)

    assert [name for name, _ in seen(Twice(), torch.randn(2, 5, 4))] == ['attention', 'attention#2']


@pytest.mark.parametrize('kind', ['queries', 'queries, written', 'keys', 'sources'])
def test_parts_of_queries_and_keys(kind):
    """They have the same heads, as those that attend to two sources do."""
    outputs = []
    model = Call(partial(several, kind))
    with watching_outputs(model, lambda name, attention, output: outputs.append(attention.num_heads)):
        model(Q, K, V)
    assert outputs == [3] * len(outputs) and len(outputs) > 1


def test_probabilities_that_multiply_twice():
    """As with relative values (Shaw et al. 2018): one attention, whose two outputs have the same heads."""
    table, outputs = torch.randn(5, 6, 4, dtype=torch.float64), []

    def relative(first, q, k, v):
        probs = scores(q, k).softmax(-1)
        first, second = (lambda: probs @ v, lambda: torch.einsum('bhqk,qkd->bhqd', probs, table))[:: 1 if first else -1]
        return joined(first() + second())

    for first in (True, False):
        model, maps = Call(partial(relative, first)), []
        with watching(model, lambda *own: maps.append(own)):
            model(Q, K, V)
        ((name, probs, _),) = maps
        close(probs, softmax_of(scores()))
        outputs.clear()
        with watching_outputs(model, lambda *own: outputs.append(own)):
            expected = model(Q, K, V)
        assert [(own[0], own[1].num_heads) for own in outputs] == [('', 3), ('', 3)]
        heads = [torch.stack([*attention.of_heads(output)], 1) for _, attention, output in outputs]
        close(joined(sum(heads)), expected)


@pytest.mark.parametrize('first', [True, False])
def test_probabilities_in_another_order_of_axes(first):
    """They are no second attention; what counts heads, and maps that the other order would give, say what to do."""
    table = torch.randn(5, 6, 4, dtype=torch.float64)

    def relative(q, k, v):
        probs = scores(q, k).softmax(-1)
        values = probs @ v if first else None
        of_places = F.dropout(probs, 0.5, False).permute(2, 0, 1, 3).flatten(1, 2) @ table
        values = probs @ v if values is None else values
        return joined(values + of_places.unflatten(1, (2, 3)).permute(1, 2, 0, 3))

    model, maps, refused = (
        Call(relative),
        [],
        pytest.raises(ValueError, match='in two orders of their axes, .* use torch.einsum'),
    )
    with nullcontext() if first else refused, watching(model, lambda name, probs, places: maps.append(probs)):
        model(Q, K, V)
    if first:
        assert len(maps) == 1
        close(maps[0], softmax_of(scores()))
    with refused, watching(model, touch=lambda attention, output: output):
        model(Q, K, V)


def test_heads_by_parts_that_maps_take():
    """One softmax, of whose output a map takes each head: these are heads, not images."""
    outs = [nn.Linear(4, 7).double() for _ in range(3)]
    with torch.no_grad():
        ((_, probs),) = seen(
            lambda q, k, v: sum(own(of_head) for own, of_head in zip(outs, (scores(q, k).softmax(-1) @ v).unbind(1))),
            *(Q, K, V),
        )
    close(probs, softmax_of(scores()))


def test_attention_inside_vmap():
    """It runs as it does, and is not seen."""
    run = torch.vmap(lambda q, k, v: scores(q, k).softmax(-1) @ v)
    assert not seen(lambda q, k, v: joined(run(q, k, v)), Q, K, V)


@pytest.mark.parametrize('summed', [True, False])
def test_heads_behind_frames(summed):
    """Of ``(B, T, N_h, N, D_h)`` the third axis is heads where they are summed; a guess says that it is one."""
    frames = [own[:, None].repeat(1, 2, 1, 1, 1) for own in (Q, K, V)]
    end = partial(torch.einsum, 'bthqd,hdc->btqc') if summed else lambda output, _: output.mean(2)
    with nullcontext() if summed else pytest.warns(UserWarning, match=r'of sizes \[2, 2, 3\] before .* is not seen'):
        ((_, probs),) = seen(lambda q, k, v: end(scores(q, k).softmax(-1) @ v, OUT), *frames)
    if summed:
        close(probs, softmax_of(scores()).repeat_interleave(2, 0))


def test_two_axes_of_which_nothing_shows_heads():
    """The second is taken in silence where the first is images."""
    with pytest.warns(UserWarning, match=r'of sizes \[3, 2\] before .* is not seen'):
        seen(lambda q, k, v: heads_first(q, k, v).mean(0), Q, K, V)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        ((_, probs),) = seen(lambda q, k, v: (scores(q, k).softmax(-1) @ v).mean(1), Q, K, V)
    close(probs, softmax_of(scores()))


@pytest.mark.parametrize(
    'mixed',
    [
        lambda p: torch.einsum('bhqk,hg->bgqk', p, MIX),
        lambda p: F.linear(p.permute(0, 2, 3, 1), MIX.mT).permute(0, 3, 1, 2),
    ],
)
def test_mixed_heads(mixed):
    """The map is what multiplies the values."""
    ((_, probs),) = seen(lambda q, k, v: joined(mixed(scores(q, k).softmax(-1)) @ v), Q, K, V)
    close(probs, torch.einsum('bhqk,hg->bgqk', softmax_of(scores()), MIX))


@pytest.mark.parametrize(
    ('function', 'expected'),
    [
        (lambda q, k, v: torch.einsum('hqk,hkd->hqd', scores(q, k)[0].softmax(-1), v[0]), lambda p: p[0][:, None]),
        (lambda q, k, v: scores(q, k)[0, 0].softmax(-1) @ v[0, 0], lambda p: p[:1, :1]),
        (lambda q, k, v: (scores(q[:, :, :1], k).softmax(-1) @ v).flatten(1), lambda p: p[:, :, :1]),
        (lambda q, k, v: scores(q[:1].repeat(2, 1, 1, 1), k).softmax(-1) @ v, None),
        (lambda q, k, v: joined(scores(q, k).softmax(-1)[:, :, [3, 1]] @ v), lambda p: p[:, :, [3, 1]]),
        (lambda q, k, v: joined(scores(q, k).softmax(-1).gather(2, KEPT) @ v), lambda p: p[:, :, [3, 1]]),
    ],
    ids=['folded and never joined', 'one head, unbatched', 'pooling', 'of its own queries', 'chosen', 'gathered'],
)
def test_other_shapes(function, expected):
    ((_, probs),) = seen(function, Q, K, V)
    whole = softmax_of(scores())
    close(probs, softmax_of(scores(Q[:1])) if expected is None else expected(whole))


@pytest.mark.parametrize(
    'function',
    [
        lambda x: (x.softmax(-1)[..., None] * torch.randn(2, 3, 6, 4)).sum(-2),  # a mixture of experts
        lambda x: x * x.mean(-1, keepdim=True).softmax(1),  # a gate of channels
        lambda x: (x.unflatten(1, (-1, 1)).softmax(1) * x[:, :, None]).sum(1),  # split attention
        lambda x: x.softmax(-1) @ torch.arange(6.0),  # the mean of a distribution over distances
        lambda x: x.softmax(-1) @ nn.Parameter(torch.randn(6, 4)),  # a codebook
        lambda x: F.cross_entropy(x.flatten(1), torch.tensor([0, 1])),
        lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1)),
        lambda x: x[0].softmax(-1) @ nn.Parameter(torch.randn(6, 4)),
        lambda x: x.sigmoid() @ x.mT,
        lambda x: F.linear(x.softmax(-1), torch.randn(6, 6)) @ x.mT,  # a gate, and then what no softmax weighs
        lambda x: (x.exp() / x.exp().norm()) @ x.mT,  # exponentials that add up to nothing
        lambda x: x.exp() @ x.mT / x.exp().sum(-1, keepdim=True),
        lambda x: MAP(x).softmax(-1) @ (MAP(x).softmax(-2).mT @ x),  # linear attention
        lambda x: ((MAP(x).softmax(-2).mT @ x).mT @ MAP(x).softmax(-1).mT).mT,
        lambda x: torch.einsum('bnc,bcd->bnd', MAP(x).softmax(-1), torch.einsum('bnc,bnd->bcd', MAP(x).softmax(1), x)),
    ],
)
def test_no_attention(function):
    torch.manual_seed(0)
    module, maps = Call(function), []
    with watching(module, lambda *own: maps.append(own)), watching_outputs(module, lambda *own: maps.append(own)):
        module(torch.randn(2, 3, 6))
    assert not maps


def test_attention_of_channels():
    """Of maps that are no probabilities, products with what softmax gave the channels; CoaT and lambda layers."""
    maps = seen(lambda x: MAP(x) @ (MAP(x).softmax(-2).mT @ x), torch.randn(2, 7, 6))
    assert [tuple(probs.shape) for _, probs in maps] == [(2, 1, 4, 7)]


def test_attention_to_what_attention_pooled():
    """Agents that look at all tokens, and all tokens at these: two attentions, as their scores are products."""
    x, agents = (MAP(torch.randn(2, number, 6)).unflatten(2, (2, 2)).transpose(1, 2) for number in (7, 3))
    attend = lambda x, agents: joined(scores(x, agents).softmax(-1) @ (scores(agents, x).softmax(-1) @ x))  # noqa: E731
    assert sorted(tuple(probs.shape) for _, probs in seen(attend, x, agents)) == [(2, 2, 3, 7), (2, 2, 7, 3)]


def test_router_of_images():
    """A product with what experts make of each patch mixes experts, not tokens."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.gate = nn.Conv2d(3, 4, 2, 2), nn.Linear(4, 3)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.stem(x).flatten(2).mT
            return (self.gate(x).softmax(-1)[:, :, None] @ torch.stack([own(x) for own in self.experts], 2))[:, :, 0]

    assert not seen(Router(), torch.randn(2, 3, 4, 4))


def test_masks_that_are_no_tensor():
    """Of queries that are the last tokens; and nested tensors, which run as they do and are not seen."""
    q = Q[:, :, :4].float()
    ((_, probs),) = seen(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal_lower_right(4, 6)), q, *KV)
    close(probs, softmax_of((scores(q, KV[0]) / 2).masked_fill(torch.ones(4, 6, dtype=torch.bool).triu(3), -torch.inf)))
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)], layout=torch.jagged)
    run = lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3).transpose(1, 2).values()  # noqa: E731
    assert not seen(run, nested)


@DTYPES
@pytest.mark.parametrize(
    ('settings', 'options'),
    [
        ({}, {}),
        ({}, dict(attn_mask=torch.ones(5, 7, dtype=torch.bool).triu(3))),
        ({}, dict(key_padding_mask=torch.arange(7) > torch.tensor([[2], [5]]))),
        (dict(kdim=4, vdim=6), {}),
        (dict(add_zero_attn=True, add_bias_kv=True), {}),
        (dict(batch_first=False), {}),
    ],
)
@pytest.mark.parametrize('need_weights', [False, True])
def test_multihead_attention(dtype, settings, options, need_weights):
    attention = nn.MultiheadAttention(12, 3, dtype=dtype, **{'batch_first': True, **settings})
    q, k, v = (
        torch.randn(2, 5, 12),
        torch.randn(2, 7, settings.get('kdim', 12)),
        torch.randn(2, 7, settings.get('vdim', 12)),
    )
    if not attention.batch_first:
        q, k, v = (own.transpose(0, 1) for own in (q, k, v))
    q, k, v = (own.to(dtype) for own in (q, k, v))
    ((name, probs),) = seen(attention, q, k, v, need_weights=need_weights, **options)
    close(probs, attention(q, k, v, need_weights=True, average_attn_weights=False, **options)[1])
    if attention.batch_first and not options:  # without images
        ((_, probs),) = seen(attention, q[0], k[0], v[0], need_weights=need_weights)
        close(probs, attention(q[0], k[0], v[0], average_attn_weights=False)[1][None])


@pytest.mark.parametrize('padded', [False, True])
@pytest.mark.parametrize('number', [1, 2])
def test_fast_path(padded, number):
    """PyTorch's kernel for a whole layer computes the output, to the last bit; the maps are those of its functions."""
    layer = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)  # an odd number of heads has no such kernel
    model = nn.TransformerEncoder(layer, number).eval() if number > 1 else layer.eval()
    x = torch.randn(2, 5, 16)
    mask = torch.arange(5) > torch.tensor([[2], [4]]) if padded else None
    with torch.no_grad():
        maps = seen(model, x, src_key_padding_mask=mask) if number == 1 else []
        kept = []
        expected = model(x, src_key_padding_mask=mask)
        with watching(model, lambda name, probs, places: kept.append((name, probs))):
            assert torch.equal(model(x, src_key_padding_mask=mask), expected)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            for (_, probs), own in zip(kept, model.layers if number > 1 else [model]):
                weights = own.self_attn(x, x, x, key_padding_mask=mask, average_attn_weights=False)[1]
                close(probs[:, :, :3] if padded else probs, weights[:, :, :3] if padded else weights)
                x = own(x, src_key_padding_mask=mask)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert len(kept) == number and (number > 1 or len(maps) == 1)


class WithBuffers(nn.Module):
    """A layer whose forward pass moves buffers: spectral norm, BatchNorm on queries, dropout in the bias."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 8, 8)
        self.qkv = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 36))
        self.norm, self.bias, self.head = (
            nn.BatchNorm1d(12),
            nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)),
            nn.Linear(12, 5),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.stem(x).flatten(2).mT).chunk(3, -1)
        scores = self.norm(q.mT).mT @ k.mT
        return self.head(F.dropout((scores + self.bias(scores[..., None])[..., 0]).softmax(-1), 0.3) @ v).mean(1)


class OnImages(nn.Module):
    """A layer that takes queries, keys and values, on patches."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        x = x.unfold(2, 8, 8).unfold(3, 8, 8)[:, 0].flatten(3).flatten(1, 2)
        return self.layer(x, x, x)[0]


OF_TRAINING = {
    **dict.fromkeys(['vit_tiny_patch16_224', 'beit_base_patch16_224', 'cait_xxs24_224', 'eva02_tiny_patch14_224']),
    **dict.fromkeys(
        ['vit_relpos_small_patch16_224', 'convit_tiny', 'vit_base_patch16_siglip_224', 'xcit_nano_12_p16_224']
    ),
    'swin_tiny_patch4_window7_224': dict(img_size=32, embed_dim=12, depths=(2, 2), num_heads=(3, 3), window_size=4),
    'WithBuffers': WithBuffers,
    'TransformerEncoderLayer': lambda: nn.Sequential(
        nn.Conv2d(3, 12, 8, 8), nn.Flatten(2), nn.TransformerEncoderLayer(16, 4, 8, batch_first=True)
    ),
    'MultiheadAttention': lambda: OnImages(nn.MultiheadAttention(64, 4, dropout=0.3)),
}
VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)


@pytest.mark.parametrize('name', OF_TRAINING)
def test_training_step(name):
    """Every bit of a step: output, gradients, buffers, random state, calls of hooks."""
    build = OF_TRAINING[name]
    if callable(build):
        model, x = build(), torch.randn(2, 3, 32, 32)
    else:
        rates = {} if 'xcit' in name or 'cait' in name else dict(attn_drop_rate=0.2)
        model = timm.create_model(name, num_classes=5, drop_path_rate=0.2, **rates, **(build or VIT))
        x = torch.randn(2, 3, 32, 32)
    results = []
    for watched in (False, True):
        own, calls = copy.deepcopy(model).train(), []
        for module in own.modules():
            module.register_forward_hook(lambda *args: calls.append(1))
        torch.manual_seed(3)
        maps = []
        if watched:
            with watching(own, lambda name, probs, places: maps.append(probs)):
                output = own(x)
            assert maps and not any(probs.requires_grad for probs in maps)
        else:
            output = own(x)
        output.square().mean().backward()
        gradients = [each.grad for each in own.parameters() if each.grad is not None]
        results.append([output, torch.get_rng_state(), *own.buffers(), *gradients, torch.tensor(len(calls))])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(one, other) for one, other in zip(*results))


@DTYPES
def test_before_dropout(dtype):
    """The map is what multiplies the values before dropout, also where dropout is part of the function."""
    q, k, v = (own.to(dtype) for own in (Q, K, V))
    for run in (
        lambda q, k, v: joined(F.dropout(scores(q, k).softmax(-1), 0.5, True) @ v),
        lambda q, k, v: joined(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, scale=1.0)),
    ):
        module, maps = Call(run), []
        with watching(module, lambda name, probs, places: maps.append(probs)):
            module(q, k, v)
        close(maps[0], softmax_of(scores(q, k)))


@pytest.mark.parametrize('use_reentrant', [False, True])
def test_gradient_checkpointing(use_reentrant):
    """What the backward pass computes again is not shown, and changes no gradient."""
    model = timm.create_model('vit_tiny_patch16_224', num_classes=5, **VIT)
    x, gradients, names = torch.randn(2, 3, 32, 32, requires_grad=True), [], []
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    for watched in (False, True):
        model.zero_grad()
        if watched:
            with watching(model, lambda name, probs, places: names.append(name)):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        gradients.append([own.grad.clone() for own in model.parameters()])
    assert names == ['blocks.0.attn', 'blocks.1.attn']
    assert all(torch.equal(one, other) for one, other in zip(*gradients))


def test_autocast():
    model, x = timm.create_model('vit_tiny_patch16_224', num_classes=5, **VIT).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = dict(seen(model, x))
        with torch.autocast('cpu', torch.bfloat16):
            maps = dict(seen(model, x))
    for name, probs in maps.items():
        assert probs.dtype == torch.float32
        close(probs.sum(-1), torch.ones(()).expand(probs.shape[:-1]))
        close(probs, expected[name], torch.bfloat16)


def test_compiled():
    """A compiled model runs uncompiled while it is watched, and compiled again afterwards."""
    model, x, runs = (
        timm.create_model('vit_tiny_patch16_224', num_classes=5, **VIT).eval(),
        torch.randn(2, 3, 32, 32),
        [],
    )
    compiled = torch.compile(model, backend=lambda graph, inputs: runs.append(1) or graph.forward)
    with torch.no_grad():
        expected = seen(model, x)
        compiled(x)
        number = len(runs)
        maps = []
        with watching(model, lambda name, probs, places: maps.append((name, probs))):
            compiled(x)
        assert len(runs) == number > 0
    assert [name for name, _ in maps] == [name for name, _ in expected]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(maps, expected))


def test_threads():
    """A thread sees what runs in it, of copies too, as ``nn.DataParallel`` makes them."""
    model = timm.create_model('vit_tiny_patch16_224', num_classes=5, **VIT).eval()
    inputs, seen_by, errors = torch.randn(2, 2, 3, 32, 32), {0: {}, 1: {}}, []
    with torch.no_grad():
        expected = [dict(seen(model, x)) for x in inputs]
    replicas = [replicated(model), model]

    def visit(name, probs, places):
        seen_by[int(threading.current_thread().name)][name] = probs

    @torch.no_grad()
    def run(number):
        try:
            for _ in range(3):
                replicas[number](inputs[number])
        except Exception as error:
            errors.append(error)

    with watching(model, visit, wanted=lambda name: '#' not in name):
        threads = [threading.Thread(target=run, args=[number], name=str(number)) for number in (0, 1)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not errors
    for number in (0, 1):
        assert seen_by[number].keys() == expected[number].keys()
        assert all(torch.equal(probs, expected[number][name]) for name, probs in seen_by[number].items())


def replicated(module):
    """Returns a copy as ``nn.parallel.replicate`` makes it, with the same parameters."""
    copied = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        if child is not None:
            setattr(copied, name, replicated(child))
    copied._parameters = dict(module._parameters)
    return copied


def test_nested():
    """Two that watch the same model see the same; one that watches a part has the names of the part."""
    model, x = timm.create_model('vit_tiny_patch16_224', num_classes=5, **VIT).eval(), torch.randn(2, 3, 32, 32)
    found = {'outer': [], 'inner': [], 'part': []}
    outer, inner, part = (
        watching(own, lambda name, probs, places, key=key: found[key].append((name, probs)))
        for key, own in zip(found, (model, model, model.blocks[1]))
    )
    with torch.no_grad(), outer, inner, part:
        model(x)
    names = {key: [name for name, _ in maps] for key, maps in found.items()}
    assert names == {'outer': ['blocks.0.attn', 'blocks.1.attn'], 'inner': names['outer'], 'part': ['attn']}
    assert torch.equal(found['part'][0][1], found['outer'][1][1])
    assert torch.equal(found['inner'][1][1], found['outer'][1][1])


@pytest.mark.parametrize('where', ['module', 'visit', 'hook before', 'hook after'])
def test_an_error_leaves_nothing(where):
    model, x = timm.create_model('vit_tiny_patch16_224', num_classes=5, **VIT).eval(), torch.randn(2, 3, 32, 32)

    def fail(*args):
        raise RuntimeError('in the middle')

    layer = model.blocks[1].mlp
    if where == 'module':
        layer.forward = fail
    elif where.startswith('hook'):
        register = layer.register_forward_pre_hook if where == 'hook before' else layer.register_forward_hook
        handle = register(fail)
    hooks = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
    before = [dict(own) for own in hooks]
    with (
        pytest.raises(RuntimeError, match='in the middle'),
        watching(model, fail if where == 'visit' else lambda *own: None),
    ):
        model(x)
    assert not _get_current_function_mode_stack() and [dict(own) for own in hooks] == before
    if where.startswith('hook'):
        handle.remove()
    vars(layer).pop('forward', None)
    assert len(seen(model, x)) == 2


def test_go_on_after_an_error():
    """A forward pass that failed and was caught, inside of the ``with``, does not spoil the next."""
    model, x, names = (
        timm.create_model('vit_tiny_patch16_224', num_classes=5, **VIT).eval(),
        torch.randn(2, 3, 32, 32),
        [],
    )
    with watching(model, lambda name, probs, places: names.append(name)):
        with pytest.raises(AssertionError):
            model(torch.randn(2, 3, 24, 24))
        model(x)
    assert names == ['blocks.0.attn', 'blocks.1.attn']


def test_a_teacher_is_not_shown():
    """A teacher that runs where the student runs, and is no part of it, has no names of the student."""
    build = partial(timm.create_model, 'vit_tiny_patch16_224', num_classes=5, **VIT)
    teacher, student, x = build().eval(), build().eval(), torch.randn(2, 3, 32, 32)

    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teachers = student, [teacher]  # a list hides it, as in most code for distillation

        def forward(self, x):
            return self.student(x) + self.teachers[0](x)

    expected = [probs for _, probs in seen(student, x)]
    maps = seen(Distilled(), x)
    assert [name for name, _ in maps] == ['student.blocks.0.attn', 'student.blocks.1.attn']
    assert all(torch.equal(one, other) for (_, one), other in zip(maps, expected))


def test_a_layer_that_comes_while_the_model_runs():
    """Such as BigBird's, which chooses its kind of attention by the length of the first text."""

    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Identity()

        def forward(self, x):
            if isinstance(self.attention, nn.Identity):
                self.attention = Call(lambda x: (x @ x.mT).softmax(-1) @ x)
            return self.attention(x)

    names = []
    model = Chooses()
    with watching(model, lambda name, probs, places: names.append(name)):
        model(torch.randn(2, 5, 4))
    assert names == ['attention']


@pytest.mark.skipif(torch.__version__ < '2.7', reason='torch 2.6 takes no entries of tensors by index in vmap')
@DTYPES
@pytest.mark.parametrize('groups', [1, 2])
def test_flex_attention(dtype, groups):
    """With scores and a mask that are functions of the place."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, number, 8, dtype=dtype)
        for heads, number in ((4, 16), (4 // groups, 24), (4 // groups, 24))
    )
    slopes = torch.rand(4, dtype=dtype)
    mask = create_block_mask(lambda b, h, i, j: i + 4 * b >= j, 2, None, 16, 24, device='cpu')

    def score(s, b, h, i, j):
        return 3 * torch.tanh(s / 3) - slopes[h] * (i - j).abs()

    with torch.no_grad():
        ((_, probs),) = seen(
            lambda q, k, v: joined(flex_attention(q, k, v, score, mask, enable_gqa=groups > 1)), q, k, v
        )
    image, head, i, j = (torch.arange(own).view(-1, *[1] * left) for own, left in ((2, 3), (4, 2), (16, 1), (24, 0)))
    scores = 3 * torch.tanh(q.double() @ k.double().repeat_interleave(groups, 1).mT / 8**0.5 / 3)
    scores = (scores - slopes[head] * (i - j).abs()).masked_fill(i + 4 * image < j, -torch.inf)
    close(probs, softmax_of(scores), dtype)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None
):
    """A stand-in: what flash_attn's signature says, query by query."""
    output = torch.zeros_like(q)
    shift = k.shape[1] - q.shape[1]
    for head in range(q.shape[2]):
        of_keys = head * k.shape[2] // q.shape[2]
        for query in range(q.shape[1]):
            high = query + shift + 1 if causal else k.shape[1]
            scores = (k[:, :high, of_keys] * q[:, query, None, head]).sum(-1)
            exp = (scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)).exp()
            output[:, query, head] = ((exp / exp.sum(-1, keepdim=True))[..., None] * v[:, :high, of_keys]).sum(1)
    return output


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    """A stand-in of xformers'."""
    bias = (
        attn_bias.materialize((len(query), query.shape[1], key.shape[1]))
        if hasattr(attn_bias, 'materialize')
        else attn_bias
    )
    scores = torch.stack([torch.stack([(key * query[:, i, None]).sum(-1) for i in range(query.shape[1])], 1)])[0]
    scores = scores.movedim(-1, 1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    exp = (scores if bias is None else scores + bias).exp()
    return ((exp / exp.sum(-1, keepdim=True))[..., None] * value.movedim(2, 1)[:, :, None]).sum(3).movedim(1, 2)


class Bias:
    """A mask of xformers, which makes its tensor when asked."""

    def materialize(self, shape, device=None):
        return torch.full(shape[-2:], -torch.inf, dtype=torch.float64).triu(1)


def random(*shapes):
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(
    ('name', 'own', 'args', 'options'),
    [
        ('flash_attn.flash_attn_func', flash_attn_func, random((2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 3)), {}),
        (
            'flash_attn.flash_attn_func',
            flash_attn_func,
            random((2, 5, 2, 3), (2, 7, 2, 3), (2, 7, 2, 3)),
            dict(causal=True, softmax_scale=0.3),
        ),
        ('xformers.ops.memory_efficient_attention', memory_efficient_attention, random(*[(2, 5, 4, 3)] * 3), {}),
        (
            'xformers.ops.memory_efficient_attention',
            memory_efficient_attention,
            random(*[(2, 5, 4, 3)] * 3),
            dict(attn_bias=Bias(), scale=0.4),
        ),
    ],
)
def test_kernels_outside(monkeypatch, name, own, args, options):
    """By the signature of a function: its output is that of the map and the values, and it is itself afterwards."""
    library, _, function = name.rpartition('.')
    module, user = types.ModuleType(library), types.ModuleType('user')
    setattr(module, function, own)
    user.attend = own  # as `from flash_attn import flash_attn_func as attend`
    monkeypatch.setitem(sys.modules, library, module)
    monkeypatch.setitem(sys.modules, 'user', user)
    for attend in (lambda *own: getattr(module, function)(*own, **options), lambda *own: user.attend(*own, **options)):
        ((_, probs),) = seen(attend, *args)
        value = args[2].repeat_interleave(probs.shape[1] // args[2].shape[2], 2)
        close(torch.einsum('bhqk,bkhd->bqhd', probs, value), own(*args, **options))
        close(probs.sum(-1), torch.ones(probs.shape[:-1], dtype=probs.dtype))
    assert getattr(module, function) is user.attend is own and name in KERNELS


@pytest.mark.parametrize('option', [dict(window_size=(2, 1)), dict(softcap=2.0), dict(alibi_slopes=torch.ones(2))])
def test_options_of_language_models_are_refused(option):
    """Their maps would be others."""
    query = torch.ones(1, 2, 2, 3)
    with pytest.raises(NotImplementedError, match='window_size, softcap or alibi_slopes are unknown'):
        KERNELS['flash_attn.flash_attn_func'](query, query, query, **option)


@pytest.mark.parametrize('name', ['xcit_nano_12_p16_224', 'edgenext_xx_small', 'davit_tiny'])
def test_attention_over_channels(name):
    """It has maps ``(B, N_h, C, C)``, and no grid, not even where there are as many channels as places."""
    settings = dict(VIT) if 'xcit' in name else dict(depths=(1, 1, 1, 1))
    model = timm.create_model(name, num_classes=5, **settings).eval()
    over_channels = []

    def visit(name, probs, places):
        if 'cls' not in name and ('xca' in name or name.endswith('.1.attn') or name.startswith('blocks')):
            over_channels.append(probs.shape[-1])
            assert places.queries is None and places.keys is None and probs.shape[-1] == probs.shape[-2]

    with torch.no_grad(), watching(model, visit):
        model(torch.randn(2, 3, 64, 64) if 'xcit' not in name else torch.randn(2, 3, 32, 32))
    assert over_channels


def test_a_part_by_itself():
    model, names = timm.create_model('vit_tiny_patch16_224', **VIT), []
    with torch.no_grad(), watching(model, lambda name, probs, places: names.append(name)):
        model.blocks[1](torch.randn(2, 17, 24))
    assert names == ['blocks.1.attn']
