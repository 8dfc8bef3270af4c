"""Attention over patches: position biases, null key, heads of their own widths, and the structure of state dicts."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.adapter import Adapter
from helpers.convolutions import relative_error
from helpers.layers import with_outputs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.attention import GridBias, PatchAttention
from attncnn_plugin.attention.patches import image_to_patches, patches_to_image
from attncnn_plugin.attention.shifts import resize_shift_table
from attncnn_plugin.pruning import prune_heads


def random_attention(widths, null_key=True, dim=5, **kwargs):
    attention = PatchAttention(dim, len(widths), GridBias(len(widths), (3, 2), null_key), **kwargs).double()
    attention.take_structure((attention.qk_dim, tuple(widths), null_key))
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    return attention


@given(st.data())
def test_patches(data):
    patch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    shape = 2, data.draw(st.integers(1, 3)), *(p * data.draw(st.integers(1, 3)) for p in patch)
    image = torch.randn(shape)
    patches = image_to_patches(image, patch)
    unfolded = F.unfold(image, patch, stride=patch).transpose(1, 2)
    assert torch.equal(patches.flatten(1, 2), unfolded)
    assert torch.equal(patches_to_image(patches, patch), image)


@given(st.data())
def test_bias_by_the_equation(data):
    """b of every key, and log Σ exp(b) over the shifts that lead out of the grid, one by one."""
    height, width = (data.draw(st.integers(1, 4)) for _ in range(2))
    position = GridBias(2, (height, width), dtype=torch.float64)
    nn.init.normal_(position.table, std=3)
    bias = position((height, width)).reshape(2, height, width, -1)
    assert bias.shape[-1] == height * width + 1
    for head in range(2):
        for q1 in range(height):
            for q2 in range(width):
                expected, outside = torch.zeros(height * width), []
                for i in range(2 * height - 1):
                    for j in range(2 * width - 1):
                        k1, k2 = q1 + i - (height - 1), q2 + j - (width - 1)
                        value = position.table[head, i, j].item()
                        if 0 <= k1 < height and 0 <= k2 < width:
                            expected[k1 * width + k2] = math.exp(value)
                        else:
                            outside.append(value)
                actual = bias[head, q1, q2].exp()
                assert torch.allclose(actual[:-1], expected.double())
                assert math.isclose(actual[-1].item(), sum(map(math.exp, outside)), rel_tol=1e-9, abs_tol=1e-12)


def test_bias_has_gradients_where_nothing_leads_out():
    position = GridBias(1, (1, 1))
    position((1, 1)).softmax(-1)[..., 0].sum().backward()
    assert torch.isfinite(position.table.grad).all()


@given(st.data())
def test_attention_by_the_equation(data):
    """softmax(q·k/√D_k + b) v of every head, with widths of its own, with and without a null key, whose value is 0."""
    widths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    qk_dim, null_key = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    height, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    head_dim = widths[0] if len(set(widths)) == 1 and data.draw(st.booleans()) else widths
    grid = data.draw(st.sampled_from([(height, width), (2, 2)]))
    position = GridBias(len(widths), grid, null_key)
    attention = PatchAttention(5, len(widths), position, head_dim=head_dim, qk_dim=qk_dim)
    attention = with_outputs(attention, 3).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, height, width, 5, dtype=torch.float64)
    tokens, output, start = x.flatten(1, 2), attention.out.bias, 0
    for head, head_dim in enumerate(widths):
        query, key = (
            tokens @ linear.weight[qk_dim * head : qk_dim * (head + 1)].T for linear in (attention.query, attention.key)
        )
        value = tokens @ attention.value.weight[start : start + head_dim].T
        scores = query @ key.transpose(1, 2) / qk_dim**0.5
        if null_key:
            scores = torch.cat([scores, scores.new_zeros(2, height * width, 1)], -1)
            value = torch.cat([value, value.new_zeros(2, 1, head_dim)], 1)
        weights = (scores + attention.position((height, width))[head]).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        output = output + weights @ value @ attention.out.weight[:, start : start + head_dim].T
        start += head_dim
    expected = output.unflatten(1, (height, width))
    assert relative_error(attention(x), expected) < 1e-12
    scores = attention.attention_scores(x)
    assert scores.shape[-1] == height * width + null_key
    matrices = attention.value_matrices()
    by_matrices = (scores.softmax(-1)[..., : height * width] @ tokens[:, None]) @ matrices.transpose(1, 2)
    assert relative_error(by_matrices.sum(1) + attention.out.bias, expected.flatten(1, 2)) < 1e-12
    assert relative_error(attention.float()(x.float()).double(), expected) < 1e-4


def test_biases_keep_their_digits_under_autocast():
    """bfloat16 has three: 9.99 and 10.01 would be the same."""
    attention = PatchAttention(2, 1, GridBias(1, (1, 2), null_key=False), qk_dim=1)
    with torch.no_grad():
        attention.query.weight.zero_()
        attention.value.weight.copy_(torch.eye(2)), attention.out.weight.copy_(torch.eye(2))
        attention.position.table.copy_(torch.tensor([[[0.0, 9.99, 10.01]]]))
    x = torch.eye(2)[None, None]  # (1, 1, 2, 2): the outputs are the probabilities
    with torch.autocast('cpu', torch.bfloat16):
        output = attention(x)
    assert output[0, 0, 0, 1] > output[0, 0, 0, 0]


@pytest.mark.parametrize('size', [(2, 3), (4, 4), (5, 9)])
def test_other_grids(size):
    """Near shifts keep their biases; the result is that of a table made for the grid and loaded from this one."""
    attention = PatchAttention(4, 2, GridBias(2, (4, 4)))
    nn.init.normal_(attention.position.table)
    x = torch.randn(1, *size, 4)
    resized = PatchAttention(4, 2, GridBias(2, size))
    resized.load_state_dict(attention.state_dict())
    assert torch.allclose(attention(x), resized(x), atol=1e-6)
    center, own = [n - 1 for n in size], attention.position.table[:, 3, 3]
    assert torch.allclose(resized.position.table[:, center[0], center[1]], own)
    near = resized.position.table[:, center[0], center[1] + 1]
    assert torch.allclose(near, attention.position.table[:, 3, 4])
    assert resize_shift_table(attention.position.table, {1: 7, 2: 7}) is attention.position.table


@pytest.mark.parametrize('name', ['query', 'key', 'value', 'out'])
def test_what_stands_in_for_a_matrix_is_called(name):
    attention = PatchAttention(4, 2, GridBias(2, (4, 4)))
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 4, 4, 4)
    expected = attention(x)
    adapter = Adapter(getattr(attention, name))
    setattr(attention, name, adapter)
    nn.init.zeros_(adapter.up.weight)
    assert torch.allclose(attention(x), expected, atol=1e-4)
    nn.init.ones_(adapter.up.weight)
    assert not torch.allclose(attention(x), expected, atol=1e-3)


@given(st.data())
def test_heads_are_removed(data):
    """The output without heads is that with their output weights at 0, and the state dict carries what is left."""
    widths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    removed = data.draw(st.sets(st.integers(0, len(widths) - 1), max_size=len(widths) - 1))
    attention = random_attention(widths, null_key=data.draw(st.booleans()), qk_dim=3)
    x = torch.randn(2, 3, 2, 5, dtype=torch.float64)
    kept = attention.out.weight.detach().clone()
    with torch.no_grad():
        parts = attention.out.weight.split(attention.head_dims, dim=1)
        for head in removed:
            parts[head].zero_()
        expected = attention(x)
        attention.out.weight.copy_(kept)
    prune_heads(attention, {'': sorted(removed)})
    assert relative_error(attention(x), expected) < 1e-12
    assert attention.head_dims == tuple(width for head, width in enumerate(widths) if head not in removed)
    for head_dim, qk_dim, null_key in ((None, 3, True), (2, 1, True), (widths, None, False)):
        position = GridBias(len(widths), (3, 2), null_key)
        other = PatchAttention(5, len(widths), position, head_dim=head_dim, qk_dim=qk_dim).double()
        other.load_state_dict(attention.state_dict())
        assert torch.equal(other.get_extra_state(), attention.get_extra_state()) and torch.equal(other(x), attention(x))


def damaged(**changes):
    """The structure of two heads of 1 and 3 channels, changed."""
    structure = {'qk_dim': 2, 'head_dims': [1, 3], 'null_key': True, **changes}
    return torch.tensor(list(json.dumps(structure).encode()), dtype=torch.uint8)


DAMAGED = 'layer._extra_state of the state dict is damaged: '


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(_extra_state=damaged(head_dims=[1, 2])), DAMAGED + r'.* have \(4, 4\) rows, which .*\[1, 2\].* does not'),
        (dict(_extra_state=damaged(qk_dim=None)), DAMAGED),
        (dict(_extra_state=damaged()[:-1]), DAMAGED),
        (dict(_extra_state=damaged()[:0]), DAMAGED),
        (dict(surplus=torch.zeros(1)), 'Unexpected key'),
        ({'query.weight': torch.zeros(4, 7)}, 'size mismatch for layer.query.weight'),
    ],
)
def test_refused_loads_leave_the_layer_as_it_was(change, message):
    loaded, layer = random_attention([1, 3], qk_dim=2), random_attention([2, 2], qk_dim=3, null_key=False)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    entries = {f'layer.{name}': value for name, value in {**loaded.state_dict(), **change}.items()}
    with pytest.raises(RuntimeError, match=message):
        nn.ModuleDict({'layer': copy.deepcopy(layer)}).load_state_dict(entries)
    with pytest.raises(RuntimeError, match=message.replace('layer.', '')):
        layer.load_state_dict({**loaded.state_dict(), **change})
    assert (layer.qk_dim, layer.head_dims, layer.position.null_key) == (3, (2, 2), False)
    after = layer.state_dict()
    assert all(value.shape == before[name].shape for name, value in after.items())
    assert torch.equal(after['query.weight'], before['query.weight'])  # by then PyTorch has loaded what fits


def test_too_many_heads():
    with pytest.raises(RuntimeError, match='has 3 heads in the state dict, but num_heads=2 in the model'):
        random_attention([2, 2]).load_state_dict(random_attention([2, 2, 2]).state_dict())


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(head_dim=0), 'head_dim=0 must be at least 1'),
        (dict(head_dim=(1, 2, 3)), r'head_dim=\(1, 2, 3\) must be .* one for each of the 2'),
        (dict(qk_dim=0), 'qk_dim=0 must be at least 1'),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        PatchAttention(4, 2, GridBias(2, (1, 1)), **kwargs)
