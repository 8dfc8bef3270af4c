"""Convolutions of any class: what they compute is what becomes attention, and what comes back is what was there."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers.convolutions import relative_error
from helpers.small import refused
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d
from timm.layers.std_conv import StdConv2dSame
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode

from attncnn_plugin.convert import attention_to_convs, back, conv_to_mhsa, convs_to_attention, mhsa_to_conv
from attncnn_plugin.convert.convolutions import computed


class Standardized(nn.Conv2d):
    """Computes weights of a parameter of its own too."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)
        self.register_buffer('count', torch.tensor(3))

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, self.gain * weight / weight.std(), bias)


class Masked(nn.Conv2d):
    """Changes its weight and its bias as it runs, as PixelCNN's and EEGNet's."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer('mask', torch.ones_like(self.weight))
        self.mask[:, :, 1, 1:] = self.mask[:, :, 2:] = 0

    def forward(self, x):
        self.weight.data = self.weight.data * self.mask
        self.bias.data.clamp_(max=0.5)
        return super().forward(x)


class Labelled(nn.Conv2d):
    """Computes what ``nn.Conv2d`` does."""

    def __init__(self, *args, label='a', **options):
        super().__init__(*args, **options)
        self.label, self.notes = label, {'seen': [1, 2]}

    def forward(self, input):
        return F.conv2d(
            input, weight=self.weight, bias=self.bias, stride=self.stride, padding=self.padding, groups=self.groups
        )


def of(module, name, *args, **options):
    def build():
        return getattr(pytest.importorskip(module), name)(*args, **options)

    return build


def plain(**options):
    return lambda: nn.Conv2d(4, 8, 3, **options)


def changed(conv, **attributes):
    def build():
        built = conv()
        for name, value in attributes.items():
            setattr(built, name, value)
        return built

    return build


WS = 'mmcv.cnn.bricks.conv_ws'
KINDS = {
    **{
        kind.__name__: lambda kind=kind: kind(4, 8, 3, stride=2, groups=2)
        for kind in (Conv2dSame, StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, Standardized, Labelled)
    },
    'Masked': lambda: Masked(4, 8, 3, padding=1),
    'ConvWS2d': of(WS, 'ConvWS2d', 4, 8, 3, padding=1),
    'ConvAWS2d': of(WS, 'ConvAWS2d', 4, 8, 3, stride=2),
    'mmcv Conv2d': of('mmcv.cnn.bricks.wrappers', 'Conv2d', 4, 8, 3, padding=2, dilation=2),
    'Conv2dAdaptivePadding': of('mmcv.cnn.bricks.conv2d_adaptive_padding', 'Conv2dAdaptivePadding', 4, 8, 3, stride=3),
    'BiT': of('transformers.models.bit.modeling_bit', 'WeightStandardizedConv2d', 4, 8, 3, stride=2),
    'Perceiver': of('transformers.models.perceiver.modeling_perceiver', 'Conv2dSamePadding', 4, 8, 3, padding='valid'),
    'stride': changed(plain(), stride=1),
    'padding': changed(plain(stride=2), padding=2),
    'padding_mode': changed(plain(padding=1), padding_mode='circular'),
    'dilation': changed(plain(padding='valid', padding_mode='reflect'), dilation=(1, 2)),
    'valid': plain(padding='valid'),
    'same': lambda: nn.Conv2d(4, 8, (3, 4), padding='same', dilation=(1, 2), bias=False),
    'channels last': lambda: nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last),
    'attributes': changed(plain(), note=[1], layer_id=torch.tensor(2)),
}
OTHER_PADDING = 'Perceiver'  # which its attributes do not say


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind != OTHER_PADDING])
def test_there_and_back(kind, dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(KINDS[kind]().to(dtype)).eval(), torch.randn(2, 4, 14, 15, dtype=dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    old = model[0]
    for name, parameter in old.named_parameters():
        parameter.requires_grad_(name == 'bias')
    old.weight.decay = 0.5
    stored = copy.deepcopy(model)  # with weights of which nothing has run
    expected, state = model(x), copy.deepcopy(model.state_dict())
    random = torch.random.get_rng_state()
    convs_to_attention(stored, '0')
    assert relative_error(stored(x), expected) < (1e-12 if dtype == torch.float64 else 1e-5)
    convs_to_attention(model, '0')
    assert relative_error(model(x), expected) < (1e-12 if dtype == torch.float64 else 1e-5)
    if kind == 'channels last':
        model = copy.deepcopy(model)  # as an average is
    attention_to_convs(model)
    new = model[0]
    assert type(new) is type(old) and vars(new).keys() == vars(old).keys() and torch.equal(model(x), expected)
    assert all(str(value) == str(vars(new)[name]) for name, value in vars(old).items())
    for name, parameter in old.named_parameters():
        own = new.get_parameter(name)
        assert own.stride() == parameter.stride() and own.requires_grad == parameter.requires_grad
        assert vars(own) == vars(parameter) or kind == 'channels last'  # PyTorch copies no attributes of parameters
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert torch.equal(random, torch.random.get_rng_state())
    model.load_state_dict(state)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize('kind', ['StdConv2d', 'ScaledStdConv2dSame', 'ConvAWS2d', 'Standardized', 'Labelled'])
def test_what_was_trained_meanwhile(kind):
    """A kernel that the class cannot have is refused, and the model stays as it was."""
    model, x = nn.Sequential(KINDS[kind]().double()), torch.randn(1, 4, 8, 9).double()
    convs_to_attention(model, '0')
    nn.init.normal_(model.eval()[0].value.weight).requires_grad_(False)
    attention, expected = model[0], model(x)
    if kind == 'Labelled':
        attention_to_convs(model)
        assert type(model[0]) is Labelled and relative_error(model(x), expected) < 1e-12
        assert not model[0].training and not model[0].weight.requires_grad and model[0].bias.requires_grad
        return
    with refused(model, f'1 of 1 layers are no convolution any more, of the class .* 0, a {kind}, is'):
        attention_to_convs(model)
    assert model[0] is attention


def asymmetric(self, x, weight, bias):
    """Of diffusers: only columns wrap around."""
    return F.conv2d(F.pad(F.pad(x, (1, 1, 0, 0), mode='circular'), (0, 0, 1, 1)), weight, bias)


class Called(nn.Conv2d):
    def __call__(self, x):
        return super().__call__(x) * 2


class Residual(Conv2dSame):
    def forward(self, x):
        return super().forward(x) + x


class ByImage(nn.Conv2d):
    """Has weights that depend on the image."""

    def forward(self, x):
        return self._conv_forward(x, self.weight * x.mean(), self.bias)


class Noisy(nn.Conv2d):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class DropConnect(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, F.dropout(weight, 0.1, self.training), bias)


class Adapted(nn.Conv2d):
    """Trains only a product of two small matrices, beside a frozen weight."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.zeros(2, 36))

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight + (self.down @ self.up).view_as(weight), bias)


def computed_weight():
    conv = nn.Conv2d(4, 8, 3)
    weight = conv.weight.detach().requires_grad_()
    del conv.weight
    conv.weight = weight
    return conv


class Twice(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) + super().forward(x)


def closed_over(conv):
    forward = conv.forward
    conv._conv_forward = lambda x, weight, bias: forward(x)
    return conv


def bound(conv):
    conv._conv_forward = asymmetric.__get__(conv)
    return conv


SOMETHING_ELSE = 'computes something else than the convolution of its attributes, in .*, stride=.*padding='
OTHERS = {
    'bound': (lambda: bound(nn.Conv2d(4, 8, 3, padding=1)), SOMETHING_ELSE),
    'lambda': (changed(plain(padding=1), _conv_forward=lambda *args: asymmetric(None, *args)), SOMETHING_ELSE),
    'closed over': (lambda: closed_over(nn.Conv2d(4, 4, 3)), 'computes no single convolution .*: '),
    'zeros': (
        lambda: nn.init.zeros_((conv := Twice(4, 8, 3)).weight) is None or conv,
        'computes no single convolution',
    ),
    'called': (lambda: Called(4, 8, 3), SOMETHING_ELSE),
    'residual': (lambda: Residual(4, 4, 3), SOMETHING_ELSE),
    'noise in training': (lambda: Noisy(4, 8, 3).eval(), SOMETHING_ELSE),
    'weights in training': (lambda: DropConnect(4, 8, 3), SOMETHING_ELSE),
    'spectral norm': (lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 8, 3)).eval(), SOMETHING_ELSE),
    'adapter': (lambda: Adapted(4, 8, 3), 'Adapted with a frozen weight, but down is trained: merge it into'),
    'by image': (lambda: ByImage(4, 8, 3), SOMETHING_ELSE),
    'stale padding': (changed(plain(padding=1, padding_mode='circular'), padding=(2, 2)), SOMETHING_ELSE),
    'own padding': (KINDS[OTHER_PADDING], None),
}


@pytest.mark.parametrize('case', OTHERS)
def test_what_computes_something_else(case):
    """Only what it computes is asked; where that is the same as of attributes of other names, it is right."""
    build, message = OTHERS[case]
    model = nn.Sequential(build())
    if message is None:  # the same as padding='same'
        x = torch.randn(1, 4, 8, 9)
        assert relative_error(conv_to_mhsa(model[0])[0](x), model(x)) < 1e-5
        return
    conv, attributes = model[0], dict(vars(model[0]))
    with refused(model, message, TypeError):
        conv_to_mhsa(conv)
    with refused(model, '^0 (cannot be converted: conv is a|has hooks, param.* forward of)', (TypeError, ValueError)):
        convs_to_attention(model, '0')
    assert model[0] is conv and vars(conv) == attributes


def test_a_method_of_the_class_that_was_replaced(monkeypatch):
    conv = nn.Conv2d(4, 8, 3, padding=1)
    monkeypatch.setattr(nn.Conv2d, '_conv_forward', asymmetric)
    with pytest.raises(TypeError, match=SOMETHING_ELSE):
        conv_to_mhsa(conv)


@pytest.mark.parametrize('build', [lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 3)), computed_weight])
def test_weights_that_are_no_parameters(build):
    """Converted by itself, as what it computes; in a model, which would lose it, refused."""
    conv, x = build().eval(), torch.randn(1, 4, 8, 8).double()
    if 'weight' not in vars(conv):
        attention = conv_to_mhsa(conv.double())[0]
        assert relative_error(attention(x), conv(x)) < 1e-12 and attention.value.weight.requires_grad
    with pytest.raises(ValueError, match='0 has hooks, parametrizations, .* or a weight that is no parameter'):
        convs_to_attention(nn.Sequential(conv), '0')


def test_it_runs_on_other_devices_under_autocast_and_in_any_mode():
    """Nothing is computed where the convolution is, and no random number is drawn."""
    conv = ScaledStdConv2d(4, 8, 3, stride=2).train()
    with torch.device('meta'), torch.autocast('cpu', torch.bfloat16), torch.inference_mode():
        found = computed(copy.deepcopy(conv))
    assert found.weight.dtype == torch.float32 and not found.own and found.weight.device.type == 'cpu'
    assert computed(conv.to('meta')).weight.is_meta


def big(scale=1e38, **options):
    conv = nn.Conv2d(3, 4, 3, **options)
    conv.weight.data = scale * torch.empty_like(conv.weight).uniform_(-1, 1)
    return conv


UNCLEAR = {
    'meta': (plain(device='meta'), {}, '0 cannot be converted: conv is on the meta device, without values: load its'),
    'negative': (
        changed(plain(), padding=(1, -1)),
        {},
        r'0 cannot be converted: padding=\(1, -1\) must be an integer of at least 0',
    ),
    'no stride': (changed(plain(), stride=0), {}, '0 cannot be converted: stride=0 must be a positive integer'),
    'axes': (changed(plain(), dilation=(1, 1, 1)), {}, r'dilation=\(1, 1, 1\) must .* or one for each of 2 axes'),
    'layers': (plain(), dict(layers=None), 'layers=None must be names, globs'),
}


@pytest.mark.parametrize('case', UNCLEAR)
def test_errors_name_layer_argument_and_value(case):
    build, options, message = UNCLEAR[case]
    model = nn.Sequential(build())
    conv = model[0]
    with pytest.raises((TypeError, ValueError), match=message):
        convs_to_attention(model, **{'layers': '0', **options})
    assert model[0] is conv


@pytest.mark.parametrize('options', [{}, dict(alpha=6.0), dict(content='gated')])
def test_weights_near_the_largest_number(options):
    torch.manual_seed(0)
    model, x = nn.Sequential(big(3e38)), 1e-3 * torch.randn(1, 3, 8, 8)
    weight, expected = model[0].weight, model(x)
    report = convs_to_attention(model, '0', inputs=x, **options)
    assert report.drift < (0.05 if 'alpha' in options else 1e-5)
    assert relative_error(model(x).double(), expected.double()).item() == pytest.approx(report.drift, abs=1e-6)
    if 'alpha' not in options:
        attention_to_convs(model)
        assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize('content', [None, 'additive'])
@pytest.mark.parametrize('conv', [nn.Conv1d(4, 8, 3, 2, groups=2), nn.Conv2d(4, 8, (3, 4), padding='same')])
def test_sizes_that_other_code_reads(conv, content):
    attention = conv_to_mhsa(conv, content=content)[0]
    for name in (
        'in_channels',
        'out_channels',
        'kernel_size',
        'stride',
        'padding',
        'dilation',
        'groups',
        'padding_mode',
    ):
        assert getattr(attention, name) == getattr(conv, name), name
    with pytest.raises(AttributeError):  # it would change nothing
        attention.stride = (2, 2)
    for name in ('weight', 'bias'):
        assert not hasattr(attention, name)
        with pytest.raises(AttributeError, match=f"has no '{name}', but value.{name}, .* after attention_to_convs"):
            getattr(attention, name)
    assert not hasattr(conv_to_mhsa(Conv2dSame(4, 8, 3))[0], 'padding')  # it has none for all images
    with pytest.raises(AttributeError, match='has no attribute .other'):
        _ = attention.other


def of_mmpretrain(**config):
    return pytest.importorskip('mmpretrain').registry.MODELS.build(config)


REPVGG = dict(num_blocks=[1] * 4, width_factor=[0.25] * 4, group_layer_map=None, se_cfg=None, stem_channels=16)
FUSED = {  # a model, what is converted, and what fuses its convolutions with their batch norms
    'timm': (lambda: timm.create_model('repvgg_a0', num_classes=3), 'stages.3.*', reparameterize_model),
    'torch': (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        '0',
        lambda model: fuse_conv_bn_eval(model[0], model[1]),
    ),
    'mmpretrain': (
        lambda: of_mmpretrain(type='mmpretrain.RepVGG', arch=REPVGG),
        'stage_4.*',
        lambda model: copy.deepcopy(model).switch_to_deploy(),
    ),
}


@pytest.mark.parametrize('library', FUSED)
def test_fusing_is_refused_and_works_after_the_way_back(library):
    build, layers, fuse = FUSED[library]
    model = build()
    model.eval()
    convs_to_attention(model, layers)
    with refused(model, 'what needs a kernel, such as fusing batch norms, comes before', AttributeError):
        fuse(model)
    attention_to_convs(model)
    fuse(model)


class Largest(TorchDispatchMode):
    """Notes the number of entries of the largest tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.entries = max(self.entries, tensor.numel())
        return result


@pytest.mark.parametrize('options', [{}, dict(content='additive', window_size=7), dict(position='table')])
def test_the_way_back_of_large_kernels_needs_little_memory(options, monkeypatch):
    """As much as the maps of some heads, whatever the number of heads, and the result is that of all heads at once."""
    conv = nn.Conv2d(6, 6, 7, padding=3, groups=6)
    attention = conv_to_mhsa(conv, **options)[0]
    maps, bound = 49 * 16**4, 3 * 16**4  # of all 49 heads on 16×16 pixels; of those of 3
    monkeypatch.setattr(back, 'MAP_ELEMENTS', bound)
    with Largest() as largest:
        some, fit = mhsa_to_conv(attention, 7)
    assert largest.entries <= 2 * bound < maps / 8  # a padded image for each pixel, the largest, has 22×22
    monkeypatch.setattr(back, 'MAP_ELEMENTS', maps)
    whole, other = mhsa_to_conv(attention, 7)
    assert torch.equal(some.weight, whole.weight) and torch.equal(some.weight, conv.weight)
    assert fit.bound == other.bound < 1e-12 and torch.equal(fit.residual, other.residual)
    assert torch.equal(fit.coefficients, other.coefficients)
