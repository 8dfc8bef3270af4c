"""The layers of a model that are meant, and what is refused: an error that names it, and nothing is changed."""

import copy
from operator import attrgetter

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


def put(name, value):
    """Changes a model: what a function makes of it becomes its module, parameter or attribute of that name."""

    def change(model):
        parent, _, attribute = name.rpartition('.')
        setattr(model.get_submodule(parent), attribute, value(model))
        return model

    return change


def hooked(register):
    def change(model):
        attrgetter(register)(model.stage[1].conv1)(lambda *args: None)
        return model

    return change


SHARED = put('stage.1.conv1', lambda model: model.stage[0].conv1)


def ddp(model):
    class Wrapper(nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    return Wrapper(model)


REFUSED = {  # what becomes of the model, the layers that are named, and the message
    'no such name': (None, 'stage.0.conv3', r"'stage\.0\.conv3' matches none of .* stem, stage"),
    'one of several': (None, ['stem', 'layer4.*'], r"'layer4\.\*' matches none"),
    'other modules': (None, '*.bn?', 'matches none of the convolutions in the model, a Sequential: stem, stage'),
    'container': (None, 'stage', r"'stage' matches none .*a glob such as 'layer4\.\*' stands for all"),
    'nothing': (None, [], r'layers=\[\] must be names, .* at least one'),
    'numbers': (None, ['stem', 4], r"layers=\['stem', 4\] must be names, globs"),
    'root': (lambda model: model.stem, '*', 'none of the convolutions in the model, a Conv2d: conv_to_mhsa converts'),
    'transposed': (
        put('stem', lambda model: nn.ConvTranspose2d(3, 4, 3)),
        '*',
        'stem cannot be converted: conv is a ConvTranspose2d',
    ),
    'lazy': (
        put('stem', lambda model: nn.LazyConv2d(4, 3)),
        'stem',
        'stem is a LazyConv2d without weights yet',
    ),
    'shared': (SHARED, 'stage.1.conv1', r'stage\.0\.conv1\.weight and stage\.1\.conv1\.weight are one'),
    'shared block': (
        put('stage.1', lambda model: model.stage[0]),
        'stage.0.*',
        r'stage\.0\.conv1 shares a parameter, stage\.0\.conv1\.weight and stage\.1\.conv1\.weight are one',
    ),
    'weight': (
        put('stage.1.conv1.weight', lambda model: model.stage[0].conv1.weight),
        '*.1.conv1',
        r'stage\.0\.conv1\.weight and stage\.1\.conv1\.weight are one',
    ),
    'bias': (
        put('stage.1.conv2.bias', lambda model: model.stage[0].bn1.bias),
        '*',
        r'stage\.0\.bn1\.bias and stage\.1\.conv2\.bias are one',
    ),
    'reader': (
        put('stem', lambda model: Adapter(model.stem)),
        '*',
        r'stem\.conv shares a parameter, stem\.weight and stem\.conv\.weight are one',
    ),
    'hook': (
        hooked('register_forward_hook'),
        '*',
        r'stage\.1\.conv1 has hooks, parametrizations, a forward of its own or a',
    ),
    'backward hook': (hooked('register_full_backward_hook'), '*', r'stage\.1\.conv1 has hooks'),
    'forward': (put('stage.1.conv1.forward', lambda model: lambda x: x), '*', r'stage\.1\.conv1 .* forward of its own'),
    'tensor hook': (hooked('weight.register_hook'), '*', r'stage\.1\.conv1\.weight has hooks'),
    'weight norm': (
        put('stage.1.conv1', lambda model: nn.utils.parametrizations.weight_norm(model.stage[1].conv1)),
        '*',
        r'stage\.1\.conv1 has hooks, parametrizations.*remove_parametrizations',
    ),
    'wrapped': (ddp, '*', r'model is a Wrapper.*use its \.module'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_refused_and_nothing_is_changed(case):
    change, layers, message = REFUSED[case]
    model = small_cnn()
    model = model if change is None else change(model)
    model.train()
    model.apply(lambda module: module.train(not isinstance(module, nn.BatchNorm2d)))
    modules = dict(model.named_modules(remove_duplicate=False))
    modes = [module.training for module in modules.values()]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {} if case == 'lazy' else copy.deepcopy(model.state_dict())
    error = TypeError if case in ('transposed', 'wrapped') else ValueError
    with pytest.raises(error, match=message):
        convs_to_attention(model, layers)
    assert dict(model.named_modules(remove_duplicate=False)) == modules
    assert [module.training for module in modules.values()] == modes
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == parameters.keys() and all(found[name] is parameters[name] for name in found)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())


def by_content(model):
    attention_to_convs(model)
    convs_to_attention(model, '*', content='additive')
    torch.nn.init.normal_(model.stem.query.weight)
    return model


def widened(model):
    nn.init.ones_(model.stage[0].conv1.encoding.sqrt_precision)
    return model


BACK = {
    'nothing': (lambda model: small_cnn(), 'Sequential without attention inside that was a convolution'),
    'root': (lambda model: model.stem, 'without attention inside .*mhsa_to_conv converts a bare one'),
    'moved': (widened, r'1 of 6 layers are no convolution .*tolerance=1e-06: stage\.0\.conv1; the'),
    'shared': (SHARED, r'stage\.0\.conv1 shares a parameter'),
    'hooks': (hooked('register_forward_hook'), r'stage\.1\.conv1 has hooks'),
    'content': (
        by_content,
        'stem cannot be converted: the probabilities of ContentImageAttention.*depend on the input',
    ),
}


@pytest.mark.parametrize('case', BACK)
def test_what_does_not_go_back(case):
    change, message = BACK[case]
    model = small_cnn()
    convs_to_attention(model, '*')
    model = change(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    with pytest.raises(ValueError, match=message):
        attention_to_convs(model)
    assert dict(model.named_modules(remove_duplicate=False)) == modules
