"""The table of a conversion, and what running the model on an example says; the model stays as it was."""

import copy

import pytest
import torch
from helpers.cnns import CONVOLUTIONS, small_cnn
from helpers.convolutions import relative_error
from torch import nn

from attncnn_plugin.attention.images import ImageAttention
from attncnn_plugin.convert import conv_to_mhsa, convs_to_attention


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_report_without_an_example():
    model = small_cnn()
    alone = conv_to_mhsa(model.stem, alpha=6.0)[1]
    before, of_layer = count(model), {name: count(model.get_submodule(name)) for name in CONVOLUTIONS}
    report = convs_to_attention(model, '*', alpha=6.0)
    assert (report.parameters_before, report.parameters_after) == (before, count(model)) and report.drift is None
    for layer in report.layers:
        attention = model.get_submodule(layer.name)
        assert layer.parameters_before == of_layer[layer.name] and layer.parameters_after == count(attention)
    assert report.layers[0].report == alone and alone.relative_error > 0.005
    lines = str(report).splitlines()
    assert lines[0].split() == ['layer', 'before', 'after', 'parameters']
    assert ' '.join(lines[6].split()).startswith('down 3×2 kernel, stride 2×1 6 heads 78 → 96 error 0.01')
    assert lines[7].split()[0] == 'model' and len(lines) == 8
    assert ' 1 head ' in str(convs_to_attention(nn.Sequential(nn.Conv2d(2, 2, 1)), '*'))


@pytest.mark.parametrize('arguments', [{}, dict(alpha=6.0), dict(content='additive', alpha=6.0, window_size=5)])
def test_drift(arguments):
    model, x = small_cnn().train(), torch.randn(2, 3, 12, 13, dtype=torch.float64)
    original = copy.deepcopy(model).eval()
    report = convs_to_attention(model, '*', inputs=x, **arguments)
    attention = copy.deepcopy(model).eval()
    assert report.drift == pytest.approx(relative_error(attention(x), original(x)).item(), rel=1e-6, abs=1e-12)
    assert str(report).endswith(f'  drift {report.drift:.2g}')


class Stateful(nn.Module):
    """A module that draws random numbers, counts its calls and changes its mode's buffers in every pass."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.unused = nn.Conv2d(3, 4, 3)
        self.register_buffer('calls', torch.zeros(()))
        self.register_buffer('last', None)

    def forward(self, x):
        self.calls += 1
        self.last = x.mean()
        return {'features': [self.conv(x), self.conv(input=2 * x)], 'labels': torch.randint(9, (3,)), 'name': 'x'}


def test_the_model_stays_as_it_was():
    model, x = nn.Sequential(Stateful(), nn.Identity()).train(), torch.randn(1, 3, 8, 8)
    model[1].eval()
    model[0].kept = model[0].conv(x)  # as some layers keep their outputs
    state, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    report = convs_to_attention(model, '0.*', alpha=6.0, inputs=x)
    assert 1e-3 < report.drift < 0.1
    assert model.training and model[0].training and not model[1].training and model[0].last is None
    assert torch.equal(model[0].calls, state['0.calls'])
    assert model[0].conv.training and not any(module._forward_hooks for module in model.modules())
    assert isinstance(model[0].conv, ImageAttention) and torch.equal(torch.random.get_rng_state(), random)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.convs = [self.conv]

    def forward(self, x):
        return self.convs[0](x)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x.to(self.conv.weight.dtype))


@pytest.mark.parametrize(
    'model, channels, error, message',
    [
        (Hidden(), 3, ValueError, 'conv is still called after attention has replaced it'),
        (Reader(), 3, AttributeError, "attention instead of a convolution has no 'weight', but value.weight"),
        (Reader(), 2, RuntimeError, 'channels'),
    ],
)
def test_an_error_in_a_run_leaves_the_model_as_it_was(model, channels, error, message):
    conv = model.conv
    with pytest.raises(error, match=message):
        convs_to_attention(model.train(), 'conv', content='additive', inputs=torch.zeros(1, channels, 8, 8))
    assert model.conv is conv and model.training and conv.training and not conv._forward_pre_hooks


class Choosing(nn.Module):
    """A convolution whose outputs are chosen otherwise in each pass, as a detector chooses boxes by their scores."""

    def __init__(self, *choices):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.choices = list(choices)

    def forward(self, x):
        return (self.choices.pop(0) if self.choices else lambda y: y)(self.conv(x))


@pytest.mark.parametrize(
    'before, after',
    [
        (lambda y: y.flatten()[:5], lambda y: y.flatten()[:7]),
        (lambda y: [y, y], lambda y: [y]),
        (lambda y: y.argmax(1), lambda y: y.argmax(1)),
    ],
    ids=['more', 'fewer tensors', 'no floating numbers'],
)
def test_outputs_that_depend_on_values_have_no_drift(before, after):
    with pytest.warns(UserWarning, match='drift of the model is not known: .* no floating numbers, or other shapes'):
        report = convs_to_attention(Choosing(before, after), 'conv', inputs=torch.randn(1, 3, 8, 8), alpha=6.0)
    assert report.drift is None and 'drift' not in str(report)
