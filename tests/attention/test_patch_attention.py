"""Attention over patches with a null key."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.adapter import Adapter
from helpers.convolutions import relative_error
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.attention import GridBias, PatchAttention, WindowBias
from attncnn_plugin.attention.patches import image_to_patches, patches_to_image
from attncnn_plugin.attention.shifts import resize_shift_table


@given(st.data())
def test_bias_by_the_equation(data):
    """b of every key, and log Σ exp(b) over the shifts that lead out of the grid, one by one."""
    height, width, rows, columns = (data.draw(st.integers(1, 4)) for _ in range(4))
    first = data.draw(st.integers(-5, 2)), data.draw(st.integers(-5, 2))
    position = WindowBias(2, first, (rows, columns), dtype=torch.float64)
    nn.init.normal_(position.table, std=3)
    bias = position((height, width)).reshape(2, height, width, -1)
    assert bias.shape[-1] == height * width + 1
    for head in range(2):
        for q1 in range(height):
            for q2 in range(width):
                expected, outside = torch.zeros(height * width), []
                for i in range(rows):
                    for j in range(columns):
                        k1, k2 = q1 + first[0] + i, q2 + first[1] + j
                        value = position.table[head, i, j].item()
                        if 0 <= k1 < height and 0 <= k2 < width:
                            expected[k1 * width + k2] = math.exp(value)
                        else:
                            outside.append(value)
                actual = bias[head, q1, q2].exp()
                assert torch.allclose(actual[:-1], expected.double())
                assert math.isclose(actual[-1].item(), sum(map(math.exp, outside)), rel_tol=1e-9, abs_tol=1e-12)


def test_bias_has_gradients_where_nothing_leads_out():
    position = WindowBias(1, (0, 0), (1, 1))
    position((3, 3)).softmax(-1)[..., 0].sum().backward()
    assert torch.isfinite(position.table.grad).all()


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_attention_by_the_equation(dtype, tolerance):
    """A softmax over all real keys and the null key, whose value is zero."""
    attention = PatchAttention(6, 3, GridBias(3, (3, 4)), out_dim=5).to(dtype)
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 4, 6, dtype=dtype)
    tokens = x.flatten(1, 2)
    output = attention.out.bias
    bias = attention.position((3, 4))
    for head in range(3):
        query, key, value = (
            tokens @ linear.weight[6 * head : 6 * head + 6].T
            for linear in (attention.query, attention.key, attention.value)
        )
        scores = torch.cat([query @ key.transpose(1, 2) / 6**0.5, query.new_zeros(2, 12, 1)], -1) + bias[head]
        probs = scores.exp() / scores.exp().sum(-1, keepdim=True)
        output = output + probs[..., :-1] @ value @ attention.out.weight[:, 6 * head : 6 * head + 6].T
    assert relative_error(attention(x).flatten(1, 2), output) < tolerance


def test_dropout_of_probabilities():
    attention = PatchAttention(4, 2, GridBias(2, (3, 3)), attn_drop=0.5)
    x = torch.randn(1, 3, 3, 4)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


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
    assert resize_shift_table(attention.position.table, (7, 7)) is attention.position.table


@given(st.data())
def test_patches(data):
    patch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    shape = 2, data.draw(st.integers(1, 3)), *(p * data.draw(st.integers(1, 3)) for p in patch)
    image = torch.randn(shape)
    patches = image_to_patches(image, patch)
    unfolded = F.unfold(image, patch, stride=patch).transpose(1, 2)
    assert torch.equal(patches.flatten(1, 2), unfolded)
    assert torch.equal(patches_to_image(patches, patch), image)
    last = patches_to_image(patches, patch, torch.channels_last)
    assert torch.equal(last, image) and last.is_contiguous(memory_format=torch.channels_last)


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
