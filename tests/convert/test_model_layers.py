"""The layers of a model that are meant, and what is refused: an error that names it, and nothing is changed."""

import copy

import pytest
import torch
from helpers.cnns import CONVOLUTIONS, small_cnn
from torch import nn

from attncnn_plugin.attention.images import ImageAttention
from attncnn_plugin.convert import attention_to_convs, convs_to_attention


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, ImageAttention)]


@pytest.mark.parametrize(
    'layers, expected',
    [
        ('stem', ['stem']),
        ('stage.*.conv1', ['stage.0.conv1', 'stage.1.conv1']),
        ('stage.*', CONVOLUTIONS[1:5]),  # batch norms are not meant
        ('*', CONVOLUTIONS),
        ('stage.[1-9].conv?', ['stage.1.conv1', 'stage.1.conv2']),
        (['down', 'stage.0.*'], ['stage.0.conv1', 'stage.0.conv2', 'down']),
        ((name for name in ('stem', 'stem')), ['stem']),
        (lambda name, module: name.startswith('stage.1'), ['stage.1.conv1', 'stage.1.conv2']),
        (lambda name, module: getattr(module, 'groups', 1) > 1, ['stage.0.conv1', 'stage.1.conv1', 'down']),
    ],
)
def test_the_layers_that_are_meant(layers, expected):
    model = small_cnn()
    report = convs_to_attention(model, layers)
    assert converted(model) == expected == [layer.name for layer in report.layers]


class Adapter(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv
        self.weight = conv.weight

    def forward(self, x):
        return self.conv(x) + self.weight.sum()


def with_layer(layer, name='stem'):
    model = small_cnn()
    model.set_submodule(name, layer)
    return model


def shared(model):
    model.stage[1].conv1 = model.stage[0].conv1
    return model


def shared_block(model):
    model.stage[1] = model.stage[0]
    return model


def tied(model):
    model.stage[1].conv1.weight = model.stage[0].conv1.weight
    return model


def tied_bias(model):
    model.stage[1].conv2.bias = model.stage[0].bn1.bias
    return model


def hooked(register):
    def change(model):
        getattr(model.stage[1].conv1, register)(lambda *args: None)
        return model

    return change


def tensor_hooked(model):
    model.stage[1].conv1.weight.register_hook(lambda gradient: gradient)
    return model


def own_forward(model):
    model.stage[1].conv1.forward = lambda x: x
    return model


def ddp(model):
    class Wrapper(nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    return Wrapper(model)


def normed(model):
    nn.utils.parametrizations.weight_norm(model.stage[1].conv1)
    return model


REFUSED = {  # what becomes of the model, the layers that are named, the type of the error and its message
    'no such name': (None, 'stage.0.conv3', ValueError, r"'stage\.0\.conv3' matches none of .* stem, stage"),
    'one of several': (None, ['stem', 'layer4.*'], ValueError, r"'layer4\.\*' matches none"),
    'other modules': (None, '*.bn?', ValueError, 'matches none of the convolutions of the model'),
    'predicate': (None, lambda name, module: False, ValueError, 'chooses none of the convolutions of the model'),
    'container': (None, 'stage', ValueError, r"'stage' matches none .*a glob such as 'layer4\.\*' stands for all"),
    'nothing': (None, [], ValueError, 'layers names no layer'),
    'numbers': (None, ['stem', 4], TypeError, r"layers=\['stem', 4\] must be names, globs"),
    'root': (lambda model: model.stem, '*', ValueError, 'Conv2d without convolutions inside: .*conv_to_mhsa converts'),
    'no convolution': (lambda model: model.norm, '*', ValueError, 'BatchNorm2d without convolutions'),
    'transposed': (
        lambda model: with_layer(nn.ConvTranspose2d(3, 4, 3)),
        '*',
        TypeError,
        'stem cannot be converted: conv is a ConvTranspose2d',
    ),
    'lazy': (
        lambda model: with_layer(nn.LazyConv2d(4, 3)),
        'stem',
        ValueError,
        'stem is a LazyConv2d without weights yet',
    ),
    'shared': (shared, 'stage.1.conv1', ValueError, r'stage\.1\.conv1 is the same module as stage\.0\.conv1'),
    'shared block': (shared_block, 'stage.0.*', ValueError, r'stage\.0\.conv1 is the same module as stage\.1\.conv1'),
    'weight': (tied, '*.1.conv1', ValueError, r'stage\.0\.conv1\.weight and stage\.1\.conv1\.weight are one'),
    'bias': (tied_bias, '*', ValueError, r'stage\.0\.bn1\.bias and stage\.1\.conv2\.bias are one'),
    'reader': (
        lambda model: with_layer(Adapter(model.stem)),
        '*',
        ValueError,
        r'stem\.conv shares a parameter, stem\.weight and stem\.conv\.weight are one',
    ),
    'hook': (hooked('register_forward_hook'), '*', ValueError, r'stage\.1\.conv1 has hooks, parametrizations or a'),
    'backward hook': (hooked('register_full_backward_hook'), '*', ValueError, r'stage\.1\.conv1 has hooks'),
    'forward': (own_forward, '*', ValueError, r'stage\.1\.conv1 has hooks, parametrizations or a forward of its own'),
    'tensor hook': (tensor_hooked, '*', ValueError, r'stage\.1\.conv1\.weight has hooks'),
    'weight norm': (normed, '*', ValueError, r'stage\.1\.conv1 has hooks, parametrizations.*remove_parametrizations'),
    'wrapped': (ddp, '*', TypeError, r'model is a Wrapper.*use its \.module'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_refused_and_nothing_is_changed(case):
    change, layers, error, message = REFUSED[case]
    model = small_cnn()
    model = model if change is None else change(model)
    model.train()
    model.apply(lambda module: module.train(not isinstance(module, nn.BatchNorm2d)))
    modules = dict(model.named_modules(remove_duplicate=False))
    modes = [module.training for module in modules.values()]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {} if case == 'lazy' else copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        convs_to_attention(model, layers)
    assert dict(model.named_modules(remove_duplicate=False)) == modules
    assert [module.training for module in modules.values()] == modes
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == parameters.keys() and all(found[name] is parameters[name] for name in found)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())


def no_longer(model):
    with torch.no_grad():
        model.stage[0].conv1.encoding.sqrt_precision.fill_(1)
    return model


def by_content(model):
    attention_to_convs(model)
    convs_to_attention(model, '*', content='additive')
    torch.nn.init.normal_(model.stem.query.weight)
    return model


def without_heads(model):
    layer = model.stem
    layer.num_heads = 0
    return model


BACK = {
    'nothing': (
        lambda model: small_cnn(),
        {},
        ValueError,
        'Sequential without attention inside that was a convolution',
    ),
    'root': (lambda model: model.stem, {}, ValueError, 'without attention inside .*mhsa_to_conv converts a bare one'),
    'tolerance': (None, dict(tolerance=-1), ValueError, 'tolerance=-1 must be at least 0'),
    'moved': (no_longer, {}, ValueError, r'1 of 6 layers are no convolution .*tolerance=1e-06: stage\.0\.conv1; the'),
    'shared': (shared, {}, ValueError, r'stage\.0\.conv1 is the same module as stage\.1\.conv1'),
    'hooks': (hooked('register_forward_hook'), {}, ValueError, r'stage\.1\.conv1 has hooks'),
    'content': (
        by_content,
        {},
        ValueError,
        'stem cannot be converted: the probabilities of layer.*depend on the input',
    ),
    'no heads': (without_heads, {}, ValueError, 'stem cannot be converted: layer has num_heads=0'),
}


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(num_heads=2), r'stage\.0\.conv2 cannot be converted: num_heads=2'),
        (dict(alpha=-1.0), 'stem cannot .*alpha=-1'),
    ],
)
def test_settings_of_a_layer_are_refused(settings, message):
    model = small_cnn()
    with pytest.raises(ValueError, match=message):
        convs_to_attention(model, '*', **settings)
    assert not converted(model)


@pytest.mark.parametrize('case', BACK)
def test_what_does_not_go_back(case):
    change, arguments, error, message = BACK[case]
    model = small_cnn()
    convs_to_attention(model, '*')
    model = model if change is None else change(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    with pytest.raises(error, match=message):
        attention_to_convs(model, **arguments)
    assert dict(model.named_modules(remove_duplicate=False)) == modules
