"""Strides that a convolution has too, and right gradients between batch norms, for a batch of one image as well.

PyTorch's batch norms compute wrong gradients on CPUs where their input has the strides (C, 1, W·C, C) and the gradient
that comes in is contiguous, or the other way round.
"""

import pytest
import torch
from helpers.convolutions import CHANNELS_LAST, content_settings, convolutions, is_regular
from helpers.layers import LAYERS
from helpers.small import KINDS, small_model
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.convert import conv_to_mhsa, convs_to_attention

NORMS = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class Equation(nn.Module):
    """A batch norm in evaluation mode, from its equation."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        shape = [-1] + [1] * (x.ndim - 2)
        normed = (x - self.norm.running_mean.view(shape)) / (self.norm.running_var.view(shape) + self.norm.eps).sqrt()
        return normed * self.norm.weight.view(shape) + self.norm.bias.view(shape)


def batch_norm(channels, ndim, training):
    norm = NORMS[ndim](channels).train(training)
    for tensor in (norm.weight, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2)
    nn.init.normal_(norm.running_mean)
    return norm


def with_strides(x, channels_last):
    return x.contiguous(memory_format=CHANNELS_LAST[x.ndim]) if channels_last and x.ndim > 3 else x


def gradients(module, x, grad, parameters):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(module(x), [x, *parameters], grad)


@given(convolutions(), st.data())
def test_strides_are_those_of_the_convolution(case, data):
    """So that a ``view`` of an output works as that of the convolution, and dropout draws the same."""
    conv, (batch, *shape) = case
    ndim = len(shape) - 1
    # PyTorch computes other types and single images of three axes with slow kernels, which are always contiguous.
    dtype = torch.float32 if ndim == 3 else data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    batch, conv = 2 if ndim == 3 else batch, conv.to(dtype)
    options = data.draw(st.sampled_from([{}, dict(position='table')]) | content_settings(conv))
    channels_last = CHANNELS_LAST.get(ndim + 2, torch.contiguous_format)
    weights = data.draw(st.sampled_from(['contiguous', 'channels last', 'turned later']))
    modules = [conv.to(memory_format=channels_last) if weights == 'channels last' else conv]
    modules.append(conv_to_mhsa(conv, **options)[0])
    if weights == 'turned later':
        modules = [module.to(memory_format=channels_last) for module in modules]
    x = torch.randn(batch, *shape, dtype=dtype)
    kind = data.draw(st.sampled_from(['contiguous', 'channels last', 'permuted', 'sliced', 'one image']))
    if kind == 'channels last':
        x = x.contiguous(memory_format=channels_last)
    elif kind == 'permuted':
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    elif kind == 'sliced':
        x = torch.cat([x, x], dim=1).contiguous(memory_format=channels_last)[:, : shape[0]]
    elif kind == 'one image':
        x = x[0]
    x.requires_grad_(data.draw(st.booleans()))
    with torch.autocast('cpu', torch.bfloat16, enabled=data.draw(st.booleans())):
        expected, actual = (module(x) for module in modules)
    assume(ndim < 3 or not expected.is_contiguous() or weights == kind == 'contiguous')
    assume(conv.groups == 1 or dtype == torch.float32)  # so do groups in slow kernels

    def strides(y):
        return [stride for n, stride in zip(y.shape, y.stride()) if n > 1]

    assert strides(actual) == strides(expected)
    masks = []
    for y in (expected, actual):
        torch.manual_seed(0)
        masks.append(nn.functional.dropout(torch.ones_like(y)))
    assert torch.equal(*masks)


class Tutorial(nn.Module):
    """The network of PyTorch's tutorial "Training a classifier", whose ``view`` needs contiguous outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 6, 5), nn.Linear(6 * 14 * 14, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv(x).relu(), 2)
        return self.fc(x.view(len(x), -1))


def test_view_behind_a_converted_layer():
    model, x = Tutorial(), torch.rand(2, 3, 32, 32)
    expected = model(x)
    convs_to_attention(model, 'conv')
    assert torch.allclose(model(x), expected, atol=1e-5)


@given(convolutions(), st.data())
def test_convolution_between_batch_norms(case, data):
    conv, shape = case
    options = data.draw(st.sampled_from([{}, dict(position='table')]) | content_settings(conv))
    dtype, tolerance = data.draw(st.sampled_from([(torch.float64, 1e-8), (torch.float32, 1e-3)]))
    attention = conv_to_mhsa(conv, **options)[0]
    modules = [module.to(dtype) for module in (conv, attention)]
    images, strides = torch.randn(shape, dtype=dtype), data.draw(st.tuples(st.booleans(), st.booleans()))
    grad = with_strides(torch.randn_like(conv(images)), strides[1])
    images = with_strides(images, strides[0])
    training = data.draw(st.booleans())
    assume(not training or grad[:, 0].numel() >= 8)  # of few numbers the gradient is the rounding error of zero

    x = images.clone().requires_grad_()
    hooked, seen = x.view_as(x), []
    hooked.register_hook(seen.append)
    output = attention(hooked)
    output.backward(grad)
    assert is_regular(output) and (len(x) > 1 or is_regular(seen[0]))

    norms = [batch_norm(n, conv.weight.ndim, training).to(dtype) for n in (conv.in_channels, conv.out_channels)]
    of_norms = [parameter for norm in norms for parameter in norm.parameters()]
    expected, actual = (
        gradients(nn.Sequential(norms[0], module, norms[1]), images, grad, [*of_norms, weight])
        for module, weight in zip(modules, (conv.weight, attention.value.weight))
    )
    *expected, kernel = expected
    expected.append(kernel.flatten(2).transpose(1, 2).flatten(1))  # head after head
    torch.testing.assert_close(actual, tuple(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('size', [(8, 6), (2, 2)])
@pytest.mark.parametrize('name', KINDS)
def test_features_of_one_image(name, size):
    """Those of a block behind a batch norm of the image, in front of another one."""
    model = small_model(name, depth=1).double()
    x = torch.randn(1, 3, *size, dtype=torch.float64)

    def features(x):
        return model.forward_intermediates(x, intermediates_only=True)[-1]

    output = features(x)
    assert is_regular(output)
    norms = [batch_norm(n, 4, False).double() for n in (3, output.shape[1])]
    actual, expected = (
        gradients(lambda x, pair=pair: pair[1](features(pair[0](x))), x, torch.ones_like(output), norms[0].parameters())
        for pair in (norms, [Equation(norm) for norm in norms])
    )
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize('name', ['hard_image', 'soft_image', 'content_image', 'content_image_near'])
def test_outputs_are_changed_in_place(name):
    """As by ``nn.ReLU(inplace=True)``, which comes after many convolutions."""
    layer, x = LAYERS[name](), torch.randn(1, 4, 6, 5)
    expected, actual = (
        torch.autograd.grad(nn.functional.relu(layer(x), inplace).sum(), layer.value.weight)
        for inplace in (False, True)
    )
    assert torch.equal(*expected, *actual)


def test_second_derivatives_of_one_image():
    """By forward-mode derivatives of the gradient, as ``torch.func.hessian`` takes them."""
    conv = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    expected, actual = (
        torch.func.hessian(lambda x, layer=layer: layer(x).sin().sum())(x) for layer in (conv, conv_to_mhsa(conv)[0])
    )
    torch.testing.assert_close(actual, expected)
