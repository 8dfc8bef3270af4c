"""Probabilities below 2⁻¹⁰⁰ are 0 in every layer, and nothing that a layer computes has another bit."""

import pytest
import torch
import torch.nn.functional as F
from helpers.layers import LAYERS, takes_images
from hypothesis import given
from hypothesis import strategies as st

from attncnn_plugin.attention.softmax import LEAST, softmax

PRECISIONS = {
    'float32': (torch.float32, None),
    'float64': (torch.float64, None),
    'bfloat16': (torch.bfloat16, None),
    'autocast float16': (torch.float32, torch.float16),
    'autocast bfloat16': (torch.float32, torch.bfloat16),
}


@given(st.sampled_from([torch.float32, torch.float64]), st.floats(1, 1000), st.integers(1, 40), st.integers(0, 2**31))
def test_softmax(dtype, spread, keys, seed):
    scores = spread * torch.randn(3, keys, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    probs, exact = softmax(scores), scores.double().softmax(-1)
    assert ((probs == 0) == (scores.softmax(-1) <= LEAST)).all()
    assert (probs - exact).abs().max() <= (1e-12 if dtype == torch.float64 else 1e-6)


def random_layer(name, alpha, centers):
    """A layer with random parameters, Gaussian heads of width alpha, and centres so far away."""
    layer = LAYERS[name]()
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            parameter.normal_()
            if key.endswith('center'):
                parameter.mul_(centers).round_().add_(0.25 * torch.randn(parameter.shape))
            elif key.endswith('sqrt_precision'):
                width = torch.full(parameter.shape, (2 * alpha) ** 0.5)
                parameter.copy_(width if parameter.ndim == 1 else torch.diag_embed(width[:, 0]) + 0.1 * parameter)
    return layer


# α, how far away centres are, and the grid: soft heads, far centres, trained ones, hard ones, one token alone.
CASES = [(0.5, 2, (16, 12)), (2, 30, (9, 9)), (6, 2, (3, 4)), (46, 2, (8, 8)), (800, 9, (6, 5)), (2, 3, (1, 1))]


def outputs_and_gradients(layer, x, autocast):
    with torch.autocast('cpu', autocast, enabled=autocast is not None):
        output = layer(x)
    loss = (output.float() * torch.linspace(1, 2, output.numel()).view(output.shape)).sum()
    return [output, *torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True)]


@pytest.mark.parametrize('precision', PRECISIONS)
@pytest.mark.parametrize('name', LAYERS)
def test_same_bits(name, precision, monkeypatch):
    """But for gradients of next to nothing: those of heads that attend to one pixel alone."""
    dtype, autocast = PRECISIONS[precision]
    for alpha, centers, size in CASES:
        layer = random_layer(name, alpha, centers).to(dtype)
        x = torch.randn((2, 4, *size) if takes_images(name) else (2, *size, 4), dtype=dtype, requires_grad=True)
        flushed = outputs_and_gradients(layer, x, autocast)
        with monkeypatch.context() as inside:
            inside.setattr(F, 'threshold', lambda probs, *_: probs)
            plain = outputs_and_gradients(layer, x, autocast)
        for own, other in zip(flushed, plain):
            if own is None or other is None:
                assert own is other
                continue
            assert (own - other).abs().max() <= 1e-24
            counts = other.abs() >= (1e-8 if dtype == torch.float64 else 1e-16)  # whose last bit is more than that
            assert torch.equal(own[counts], other[counts])


@pytest.mark.parametrize('name', ['quadratic', 'hard_image', 'generalized', 'content_image', 'patches_grid'])
def test_zeros_are_there(name):
    """In each family of layers, with heads that have probabilities down to e⁻¹⁰³."""
    layer = random_layer(name, 2, 0)
    if name == 'patches_grid':
        with torch.no_grad():
            layer.position.table.mul_(30)
    probs = layer.position_probs((16, 12))
    assert (probs == 0).any() and (probs[probs > 0] >= LEAST).all()
