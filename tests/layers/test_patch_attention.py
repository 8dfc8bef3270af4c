"""Attention over patches with a null key, and convolutions on the image as such attention (L21, Theorem 1)."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.adapter import Adapter
from helpers.convolutions import relative_error
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.convert import conv_to_patch_mhsa, min_heads
from attncnn_plugin.layers import GridBias, PatchAttention, WindowBias
from attncnn_plugin.layers.patches import image_to_patches, patches_to_image
from attncnn_plugin.layers.shifts import resize_shift_table


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


@st.composite
def patch_convolutions(draw):
    """A convolution of one output patch for each patch, the patch size, and the shape of an image."""
    groups, patch, stride, kernel, dilation, padding = draw(st.integers(1, 2)), [], [], [], [], []
    same = draw(st.booleans())
    for _ in range(2):
        stride.append(1 if same else draw(st.integers(1, 2)))
        patch.append(stride[-1] * draw(st.integers(1, 3)))
        dilation.append(draw(st.integers(1, 3)))
        kernel.append(draw(st.integers(1, 7)))
        extent = dilation[-1] * (kernel[-1] - 1) + 1
        if not same and extent % 2 == 0 and stride[-1] == 1:
            kernel[-1] += 1  # an even window cannot be padded alike on both sides
            extent = dilation[-1] * (kernel[-1] - 1) + 1
            if extent % 2 == 0:
                dilation[-1] *= 2
                extent = dilation[-1] * (kernel[-1] - 1) + 1
        padding.append(-(-(extent - stride[-1]) // 2) if extent > stride[-1] else 0)
        if extent < stride[-1]:
            kernel[-1], dilation[-1] = stride[-1], 1
    conv = nn.Conv2d(
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        dilation=dilation,
        padding='same' if same else tuple(padding),
        groups=groups,
        bias=draw(st.booleans()),
        dtype=torch.float64,
    )
    torch.manual_seed(draw(st.integers(0, 2**16)))
    conv.reset_parameters()
    return conv, tuple(patch), (1, conv.in_channels, *(p * draw(st.integers(1, 4)) for p in patch))


@given(patch_convolutions())
def test_equals_the_convolution(case):
    conv, patch, shape = case
    attention = conv_to_patch_mhsa(conv, patch)[0]
    x = torch.randn(shape, dtype=torch.float64)
    if any(
        n + 2 * (p if conv.padding != 'same' else d * (k - 1)) < d * (k - 1) + 1
        for n, p, d, k in zip(
            shape[2:], conv.padding if conv.padding != 'same' else (0, 0), conv.dilation, conv.kernel_size
        )
    ):
        return  # torch refuses an image smaller than the window
    expected = conv(x)
    assert attention(x).shape == expected.shape
    assert relative_error(attention(x), expected) <= 1e-10
    assert relative_error(attention.float()(x.float()).double(), expected) <= 1e-4


@pytest.mark.parametrize('kernel, patch', [(3, 4), (5, 16), (7, 4), (9, 4), (11, 4), (5, 1), (9, 2), (1, 4)])
def test_number_of_heads(kernel, patch):
    conv = nn.Conv2d(1, 1, kernel, padding=kernel // 2)
    heads = conv_to_patch_mhsa(conv, patch)[0].attention.num_heads
    assert heads == (2 * math.ceil((kernel - 1) / (2 * patch)) + 1) ** 2 == min_heads(kernel, patch)


def test_construction_of_the_paper_fails_at_the_border():
    """Without the null key a head that finds no key at its shift spreads over the whole image."""
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    module = conv_to_patch_mhsa(conv, 4)[0]
    x = torch.randn(1, 2, 16, 16).double()
    with torch.no_grad():
        bias = module.attention.position((4, 4))[..., :-1]
        tokens = image_to_patches(x, (4, 4)).flatten(1, 2)
        heads = bias.softmax(-1) @ module.attention.value(tokens).unflatten(2, (9, -1)).transpose(1, 2)
        literal = module.attention.out(heads.transpose(1, 2).flatten(2)).unflatten(1, (4, 4))
        error = (patches_to_image(literal, (4, 4)) - conv(x)).abs()
    assert error[..., 4:-4, 4:-4].max() < 1e-12
    assert error[..., 0, :].min() > 1e-4 and error[..., :, -1].max() > 1e-2


def test_small_bias_is_seen():
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    module = conv_to_patch_mhsa(conv, 4)[0]
    x = torch.randn(1, 2, 16, 16).double()
    with torch.no_grad():
        module.attention.position.table.mul_(10 / 40)
    assert 1e-5 < relative_error(module(x), conv(x)) < 1e-2


def test_both_projections_can_learn():
    """W^Q = 0 and W^K random: were both zero, neither gradient would ever be anything else."""
    module = conv_to_patch_mhsa(nn.Conv2d(1, 1, 3, padding=1), 2)[0]
    assert module.attention.query.weight.abs().max() == 0 < module.attention.key.weight.abs().min()
    with torch.no_grad():
        module.attention.position.table.mul_(0.1)
    module(torch.randn(2, 1, 8, 8)).square().sum().backward()
    assert module.attention.query.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    'conv, patch, message',
    [
        (nn.Conv2d(1, 1, 3, padding=1, stride=2), 3, 'stride=2 of conv does not divide patch_size=3'),
        (nn.Conv2d(1, 1, 3), 4, 'padding of 0 and 0 pixels around a window of 3 with stride 1'),
        (nn.Conv2d(1, 1, 3, padding=2), 4, 'padding of 2 and 2 pixels'),
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode='reflect'), 4, "padding_mode='reflect'"),
        (nn.Conv2d(1, 1, 3, padding=1), 0, 'patch_size=0 must be a positive integer, or one for each of 2 axes'),
        (nn.Conv2d(1, 1, 3, padding=1), 4.0, 'patch_size=4.0 must be'),
        (nn.Conv2d(1, 1, 3, padding=1), (2, 2, 2), r'patch_size=\(2, 2, 2\) must be'),
    ],
)
def test_what_cannot_be_converted(conv, patch, message):
    with pytest.raises(ValueError, match=message):
        conv_to_patch_mhsa(conv, patch)[0]


@pytest.mark.parametrize('conv', [nn.Conv1d(1, 1, 3), nn.ConvTranspose2d(1, 1, 3)])
def test_other_modules(conv):
    with pytest.raises(TypeError, match='only nn.Conv2d can become attention over patches'):
        conv_to_patch_mhsa(conv, 2)[0]


def test_wrong_images():
    module = conv_to_patch_mhsa(nn.Conv2d(3, 3, 3, padding=1), 4)[0]
    with pytest.raises(ValueError, match=r'image of 6x8 pixels cannot be cut into patches of 4x4'):
        module(torch.zeros(1, 3, 6, 8))
    with pytest.raises(ValueError, match=r'\(B, 3, H, W\) or \(3, H, W\) is expected'):
        module(torch.zeros(1, 2, 8, 8))
    assert module(torch.zeros(3, 8, 8)).shape == (3, 8, 8)
    assert module(torch.zeros(0, 3, 8, 8)).shape == (0, 3, 8, 8)


@pytest.mark.parametrize('name', ['query', 'key', 'value', 'out'])
def test_what_stands_in_for_a_matrix_is_called(name):
    attention = PatchAttention(4, 2, GridBias(2, (4, 4)))
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 4, 4, 4)  # as many tokens as make products of the matrices cheaper
    assert attention._merges(16)
    expected = attention(x)
    adapter = Adapter(getattr(attention, name))
    setattr(attention, name, adapter)
    nn.init.zeros_(adapter.up.weight)
    assert torch.allclose(attention(x), expected, atol=1e-4)
    nn.init.ones_(adapter.up.weight)
    assert not torch.allclose(attention(x), expected, atol=1e-3)
