"""Narrow heads, wide enough for a convolution on the image (beyond L21, where they are as wide as the token)."""

import numpy as np
import pytest
import torch
from helpers.convolutions import relative_error
from helpers.patch_convolutions import fits, patch_convolutions
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.attention import PatchAttention, WindowBias
from attncnn_plugin.convert import conv_to_patch_mhsa, exact_head_dims


@given(patch_convolutions(), st.integers(1, 5))
def test_exact_heads_are_the_convolution(case, qk_dim):
    conv, patch, shape = case
    module, report = conv_to_patch_mhsa(conv, patch, head_dim='exact', qk_dim=qk_dim)
    attention = module.attention
    assert report.head_dims == attention.head_dims == exact_head_dims(conv, patch)
    assert max(report.head_dims) <= attention.dim and attention.value.out_features == sum(report.head_dims)
    assert attention.query.weight.shape == (attention.num_heads * qk_dim, attention.dim)
    x = torch.randn(shape, dtype=torch.float64)
    if not fits(conv, shape):
        return  # torch refuses an image smaller than the window
    assert relative_error(module(x), conv(x)) <= 1e-10
    assert relative_error(module.float()(x.float()).double(), conv(x)) <= 1e-4


@pytest.mark.parametrize(
    'kernel, total', [(3, 972), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(5, 1200), (7, 1452)])]
)
def test_widths_are_the_ranks(kernel, total):
    """The ranks of L21's matrices W^V W^O for 3 channels and patches of 16 pixels, by numpy."""
    conv = nn.Conv2d(3, 3, kernel, padding=kernel // 2, dtype=torch.float64)
    widths = exact_head_dims(conv, 16)
    assert sum(widths) == total
    full = conv_to_patch_mhsa(conv, 16)[0].attention.value_matrices()
    assert tuple(np.linalg.matrix_rank(matrix.detach().numpy()) for matrix in full) == widths


def test_widths_are_enough_but_can_be_more():
    """An even kernel with dilation on patches of 3×3 pixels, against the ranks by numpy."""
    conv = nn.Conv2d(1, 1, 2, padding='same', dilation=2, dtype=torch.float64)
    full = conv_to_patch_mhsa(conv, 3)[0].attention.value_matrices().detach().numpy()
    assert np.linalg.matrix_rank(full).tolist() == [1, 2, 1, 2, 6, 2, 1, 2, 1]
    assert exact_head_dims(conv, 3) == (1, 3, 1, 3, 9, 3, 1, 3, 1)


def test_widths_of_three_by_three():
    assert exact_head_dims(nn.Conv2d(3, 3, 3, padding=1), 16) == (3, 48, 3, 48, 768, 48, 3, 48, 3)
    assert exact_head_dims(nn.Conv2d(3, 1, 3, padding=1), 16)[4] == 256  # fewer pixels are written than read


@given(st.data())
def test_attention_by_the_equation(data):
    """softmax(q·k/√D_k + b) v of every head, with widths of its own, with and without a null key."""
    widths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    qk_dim, null_key = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    height, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    position = WindowBias(len(widths), (-1, 0), (2, 2), null_key)
    attention = PatchAttention(5, len(widths), position, out_dim=3, head_dim=widths, qk_dim=qk_dim).double()
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
    # Other devices call the fused kernel, a head width at a time.
    assert relative_error(_by_fused_kernel(attention, x), expected) < 1e-12


def _by_fused_kernel(attention, x):
    from unittest import mock

    from attncnn_plugin.attention import biased_attention

    class OtherDevice(torch.Tensor):
        """A tensor that says it is on another device."""

        @property
        def device(self):
            return torch.device('meta')

    original = biased_attention.attend_biased
    with (
        mock.patch.object(
            biased_attention, 'attend_biased', lambda query, *args: original(query.as_subclass(OtherDevice), *args)
        ),
        mock.patch('attncnn_plugin.attention.patch_attention.attend_biased_of_widths') as of_widths,
        mock.patch('attncnn_plugin.attention.patch_attention.attend_biased', biased_attention.attend_biased),
    ):
        of_widths.side_effect = lambda query, *args: biased_attention.attend_biased_of_widths(
            query.as_subclass(OtherDevice), *args
        )
        return attention(x).as_subclass(torch.Tensor)


@given(st.data())
def test_heads_are_removed(data):
    """The output without a head is that with its output weights at 0, and the state dict carries what is left."""
    widths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    removed = data.draw(st.sets(st.integers(0, len(widths) - 1), max_size=len(widths) - 1))
    attention = _attention(5, len(widths), widths, 3)
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 2, 5, dtype=torch.float64)
    starts = np.cumsum([0, *widths])
    with torch.no_grad():
        kept = attention.out.weight.clone()
        for head in removed:
            attention.out.weight[:, starts[head] : starts[head + 1]] = 0
        expected = attention(x)
        attention.out.weight.copy_(kept)
    attention.prune_heads(sorted(removed))
    assert relative_error(attention(x), expected) < 1e-12
    assert attention.head_dims == tuple(width for head, width in enumerate(widths) if head not in removed)
    for other_widths in (None, 2, widths):
        other = _attention(5, len(widths), other_widths)
        other.load_state_dict(attention.state_dict())
        assert other.head_dims == attention.head_dims and torch.equal(other(x), attention(x))


def _attention(dim, num_heads, head_dim, qk_dim=None):
    position = WindowBias(num_heads, (-1, 0), (2, 2))
    return PatchAttention(dim, num_heads, position, head_dim=head_dim, qk_dim=qk_dim).double()


def test_all_heads_removed():
    attention = PatchAttention(4, 2, WindowBias(2, (0, 0), (1, 1)), head_dim=(1, 3), qk_dim=2)
    attention.prune_heads([0, 1], allow_empty=True)
    x = torch.randn(1, 2, 2, 4)
    assert torch.equal(attention(x), attention.out.bias.expand(1, 2, 2, 4))
    other = PatchAttention(4, 2, WindowBias(2, (0, 0), (1, 1)))
    other.load_state_dict(attention.state_dict())
    assert other.num_heads == 0 and torch.equal(other(x), attention(x))


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(head_dim='narrow'), "head_dim='narrow' is unknown: choose 'exact'"),
        (dict(head_dim=4), "head_dim=4 is unknown: choose 'exact'"),
        (dict(qk_dim=0), 'qk_dim=0 must be at least 1'),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        conv_to_patch_mhsa(nn.Conv2d(1, 1, 3, padding=1), 4, **kwargs)


def test_damaged_widths_are_refused():
    attention = PatchAttention(4, 2, WindowBias(2, (0, 0), (1, 1)), head_dim=(1, 3), qk_dim=2)
    state_dict = dict(attention.state_dict(), value_channels=torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match=r'which 2 heads of widths \[1, 2\] do not explain: it is damaged'):
        attention.load_state_dict(state_dict)
    three = PatchAttention(4, 3, WindowBias(3, (0, 0), (1, 1)))
    with pytest.raises(RuntimeError, match='has 3 heads in the state dict, but num_heads=2 in the model'):
        attention.load_state_dict(three.state_dict())
