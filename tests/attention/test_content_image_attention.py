"""Attention by content in the place of a convolution, against the equations in float64 and torch's convolutions."""

import copy
import itertools
from unittest.mock import patch

import pytest
import torch
from helpers.convolutions import content_settings, convolutions, joined, randomize, relative_error
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention.neighbourhoods import AxisTiles
from attncnn_plugin.convert import conv_to_mhsa
from attncnn_plugin.pruning import prune_heads


@st.composite
def cases(draw):
    conv, shape = draw(convolutions())
    return conv, shape, draw(content_settings(conv))


def probabilities(attention, x):
    """Those of every query for every pixel of the padded image, from the equations; and the padded image."""
    window, padded = attention.window, attention.window.pad(x)
    pixels = torch.tensor(list(itertools.product(*map(range, padded.shape[2:]))))
    axes = zip(padded.shape[2:], window.kernel_size, window.stride, window.dilation)
    queries = [[d * (k - 1) // 2 + o for o in range(0, n - d * (k - 1), s)] for n, k, s, d in axes]
    queries = torch.tensor(list(itertools.product(*queries)))
    delta = pixels - queries[:, None]  # (Q, K, ndim)
    flat, at_queries = padded.flatten(2), padded[(slice(None), slice(None), *queries.T)]
    weights = [getattr(attention, name).weight.unflatten(0, (attention.num_heads, -1)) for name in ('query', 'key')]
    query, key = (torch.einsum('hdc,bcn->bhnd', w, tokens) for w, tokens in zip(weights, (at_queries, flat)))
    content = torch.einsum('bhqd,bhkd->bhqk', query, key) / query.shape[-1] ** 0.5
    alpha = attention.encoding.sqrt_precision.square() / 2
    position = -alpha[:, None, None] * (delta - attention.encoding.center[:, None, None]).square().sum(-1)
    if attention.window_size is not None:
        far = (delta.abs() > torch.tensor(attention.window_size) // 2).any(-1)
        content, position = content.masked_fill(far, -torch.inf), position.masked_fill(far, -torch.inf)
    if attention.gate is None:
        finite = position if attention.window_size is None else position.masked_fill(far, 0)
        return (content + finite).softmax(-1), padded
    gate = attention.gate.sigmoid()[:, None, None]
    return (1 - gate) * content.softmax(-1) + gate * position.softmax(-1), padded


def output(attention, x):
    """The output, from the equations."""
    probs, padded = probabilities(attention, x)
    heads = torch.einsum('bhqk,bck->bhqc', probs, padded.flatten(2))
    result = torch.einsum('bhqc,hoc->boq', heads, attention.value_matrices())
    if attention.value.bias is not None:
        result = result + attention.value.bias[:, None]
    return result.unflatten(2, [attention.window.num_queries(axis, n) for axis, n in enumerate(x.shape[2:])])


@given(cases(), st.integers(0, 99))
def test_begins_as_the_convolution_and_stays_it_while_heads_are_hard(case, seed):
    conv, shape, options = case
    x = torch.randn(shape, dtype=torch.float64)
    attention, report = conv_to_mhsa(conv, **options)
    assert report.relative_error <= 1e-12 and not attention.query.weight.any()
    assert attention(x).shape == conv(x).shape
    assert relative_error(attention(x), conv(x)) <= 1e-10
    nn.init.normal_(attention.query.weight, generator=torch.Generator().manual_seed(seed))  # content on
    assert relative_error(attention(x), conv(x)) <= 1e-10
    attention.float()
    assert relative_error(attention(x.float()).double(), conv(x)) <= 1e-4


@given(cases(), st.integers(0, 99))
def test_is_the_equations(case, seed):
    """Whole images and neighbourhoods, which are whole images with the scores outside masked."""
    conv, shape, options = case
    x = torch.randn(shape, dtype=torch.float64)
    attention = conv_to_mhsa(conv, **options)[0]
    randomize(attention, seed)
    with torch.no_grad():
        expected = output(attention, x)
        assert relative_error(attention(x), expected) <= 1e-10
        with patch.object(AxisTiles, 'scores', 0):  # neighbourhoods by tiles, however small the image is
            assert relative_error(attention(x), expected) <= 1e-10
        probs = attention.attention_scores(x).softmax(-1)
        pixels = torch.cat([x.flatten(2), torch.zeros_like(x.flatten(2)[..., :1])], dim=-1)  # the null key, the last
        assert relative_error(joined(attention, probs, pixels), attention(x).flatten(2)) <= 1e-10
        # Without content the probabilities are those of position.
        attention.query.weight.zero_()
        if attention.gate is None:
            assert torch.allclose(
                attention.attention_scores(x).softmax(-1)[0, ..., :-1], attention.position_probs(x.shape[2:])
            )


@pytest.mark.parametrize('content', ['additive', 'gated'])
@pytest.mark.parametrize('window_size', [None, 5])
@pytest.mark.parametrize('conv', [nn.Conv2d(2, 2, 3, padding=1, stride=2, groups=2), nn.Conv1d(2, 3, 2, padding=2)])
def test_gradients(conv, content, window_size):
    attention = conv_to_mhsa(conv.double(), content=content, window_size=window_size, qk_dim=2)[0]
    randomize(attention)
    x = torch.randn(1, 2, *[5, 4][: conv.weight.ndim - 2], dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*attention.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(attention, dict(zip(names, values)), x)

    assert torch.autograd.gradcheck(function, (x, *parameters))


@pytest.mark.parametrize('content', ['additive', 'gated'])
@pytest.mark.parametrize('alpha', [1.0, 6.0])
@pytest.mark.parametrize('window_size', [None, 3, 7])
def test_the_report_of_soft_heads(content, alpha, window_size):
    """The deviation is eq. 9's share."""
    conv = nn.Conv2d(3, 4, 3, padding=1).double()
    attention, report = conv_to_mhsa(conv, alpha=alpha, content=content, window_size=window_size)
    reach = 9 if window_size is None else window_size // 2
    keys = torch.cartesian_prod(*[torch.arange(-reach, reach + 1)] * 2)
    squares = (keys - torch.tensor([[[0, 0]], [[0, 1]], [[1, 1]]])).square().sum(-1)  # δ − Δ of all kinds of positions
    own = 1 / (-alpha * squares).double().exp().sum(1)
    by_position = attention.gate[0].sigmoid() if content == 'gated' else 1  # all that content gives can be elsewhere
    assert report.deviation == pytest.approx(1 - (by_position * own).min().item()) and 0 < report.relative_error < 1


def test_values_without_a_weight():
    """As a quantized linear layer is."""
    attention, x = conv_to_mhsa(nn.Conv2d(4, 6, 3, padding=1), content='additive')[0], torch.randn(2, 4, 9, 8)
    expected = attention(x)
    attention.value = nn.Sequential(attention.value)
    assert torch.equal(attention(x), expected)


@pytest.mark.parametrize('own, other', [(None, 5), (5, None), (5, 7)])
def test_another_neighbourhood_is_refused(own, other):
    """A state dict of one would be another function: it is no silent change of a buffer."""
    conv = nn.Conv2d(2, 2, 3, padding=1)
    layer, loaded = (conv_to_mhsa(conv, content='additive', window_size=size)[0] for size in (own, other))
    with pytest.raises(RuntimeError, match='window_size=.* in the state dict, but .*window_size='):
        layer.load_state_dict(loaded.state_dict())


@pytest.mark.parametrize(
    'options',
    [dict(content='additive'), dict(content='gated', window_size=5)],
)
class TestUses:
    @pytest.fixture
    def attention(self, options):
        torch.manual_seed(0)
        attention = conv_to_mhsa(nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2), qk_dim=3, **options)[0]
        randomize(attention)
        return attention

    @pytest.fixture
    def x(self):
        return torch.randn(2, 4, 9, 8)

    def test_pruned(self, attention, x):
        """As with the heads' values at 0; a layer takes the heads of a state dict."""
        heads, whole = [0, 3], copy.deepcopy(attention)
        with torch.no_grad():
            attention.value.weight.unflatten(1, (attention.num_heads, -1))[:, heads] = 0
        expected = attention(x)
        replaced = prune_heads(attention, {'': heads}).replaced
        assert all(parameter not in replaced for parameter in attention.parameters())
        assert torch.allclose(attention(x), expected, atol=1e-5)
        whole.load_state_dict(attention.state_dict())
        assert torch.equal(whole(x), attention(x))
        assert not follow_state_dict(whole, whole.state_dict())

    @pytest.mark.slow
    def test_compiled_by_inductor(self, attention, x):
        expected = attention(x)
        assert torch.allclose(torch.compile(attention, fullgraph=True)(x), expected, atol=1e-4)

    @pytest.mark.slow
    def test_onnx_and_other_batches(self, attention, x, tmp_path):
        """Exported once for any number of images."""
        onnxruntime = pytest.importorskip('onnxruntime')
        pytest.importorskip('onnxscript')
        pytest.importorskip('torch', minversion='2.7', reason='torch 2.6 cannot export a batch of any size to ONNX')
        attention.eval()
        path, batch = str(tmp_path / 'model.onnx'), torch.export.Dim('batch', min=1, max=64)
        exported = torch.export.export(attention, (x,), dynamic_shapes=({0: batch},)).module()
        torch.onnx.export(attention, (x,), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
        session = onnxruntime.InferenceSession(path)
        (name,) = (value.name for value in session.get_inputs())
        for n in (1, 2, 5):
            images = torch.randn(n, *x.shape[1:])
            (output,) = session.run(None, {name: images.numpy()})
            assert relative_error(torch.from_numpy(output), attention(images)) < 1e-4
            assert relative_error(exported(images), attention(images)) < 1e-4

    def test_parts_of_the_scores(self, attention, x):
        content, position = attention.content_scores(x), attention.position_scores(x)
        assert content.shape == position.shape == (2, attention.num_heads, 20, 73)
        assert torch.allclose(position[0].exp()[..., :-1], attention.position_probs((9, 8)), atol=1e-6)
        with pytest.raises(ValueError, match='depend on the input'):
            attention.attention_probs((9, 8))

    def test_content_alone(self, attention, x):
        """The heads of a layer whose positions are all alike, the keys that it sees besides."""
        expected = copy.deepcopy(attention)
        nn.init.zeros_(expected.encoding.sqrt_precision)
        if expected.gate is not None:
            nn.init.constant_(expected.gate, -100)  # no position
        content = attention.content_scores(x).exp()
        assert torch.allclose(content, expected.attention_scores(x).exp(), atol=1e-6)
        assert torch.allclose(content.sum(-1), torch.ones(()))


@pytest.mark.parametrize('options', [dict(), dict(stride=7)])
@pytest.mark.parametrize('window_size', [None, 5])
def test_images_with_many_scores_and_far_queries(window_size, options):
    """An image alone has more scores than are computed at once, and no query is in the neighbourhood of another."""
    conv = nn.Conv2d(2, 3, 3, padding=1, **options).double()
    attention, _ = conv_to_mhsa(conv, content='additive', window_size=window_size)
    x = torch.randn(3, 2, 17, 18, dtype=torch.float64)
    assert relative_error(attention(x), conv(x)) < 1e-12
