"""Layers that have lost all heads: they give the bias of their output, and whatever tells of heads tells of none."""

import copy

import pytest
import torch
from helpers.convolutions import CONVOLUTIONS, is_regular
from helpers.layers import LAYERS, takes_images
from torch import nn

from attncnn_plugin.analysis import head_report
from attncnn_plugin.attention import AttentionLayer
from attncnn_plugin.convert import conv_to_mhsa

IMAGE_HEADS = {
    'quadratic': {},
    'table': dict(position='table'),
    'additive': dict(content='additive'),
    'gated': dict(content='gated'),
    'additive, near': dict(content='additive', window_size=5),
    'gated, table': dict(content='gated', position='table'),
}
ATTENTION = {name: make for name, make in LAYERS.items() if isinstance(make(), AttentionLayer)}


def without_heads(module):
    """The module without heads, and itself with output weights of zero."""
    pruned = copy.deepcopy(module)
    pruned_attention, attention = (getattr(copied, 'attention', copied) for copied in (pruned, module))
    nn.init.zeros_(attention.output.weight)
    pruned_attention.prune_heads(range(attention.num_heads), allow_empty=True)
    return pruned, module


def check_outputs(pruned, expected, x):
    for training in (True, False):
        pruned.train(training)
        images = x.clone().requires_grad_()
        output, reference = pruned(images), expected(images)
        assert torch.equal(output, reference) and is_regular(output)
        output.sum().backward()
        assert not images.grad.any()
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(pruned(x), expected(x))
    loaded = copy.deepcopy(expected)
    loaded.load_state_dict(pruned.state_dict())
    for copied in (loaded, copy.deepcopy(pruned)):
        assert torch.equal(copied(x), expected(x))


@pytest.mark.parametrize('options', IMAGE_HEADS.values(), ids=IMAGE_HEADS)
@pytest.mark.parametrize('groups', [1, 2])
@pytest.mark.parametrize('ndim', CONVOLUTIONS)
def test_in_place_of_a_convolution(ndim, groups, options):
    for stride, padding, padding_mode, bias in ((2, 0, 'zeros', True), (1, 2, 'replicate', False)):
        conv = CONVOLUTIONS[ndim](4, 6, 3, stride, padding, groups=groups, bias=bias, padding_mode=padding_mode)
        pruned, expected = without_heads(conv_to_mhsa(conv, **options)[0])
        for batch in (1, 2):
            x = torch.randn(batch, 4, *([4, 3, 3] if ndim == 3 else [6, 5][:ndim]))
            check_outputs(pruned, expected, x)
        check_heads(pruned, expected, x)


@pytest.mark.parametrize('name', ATTENTION)
def test_layer(name):
    pruned, expected = without_heads(LAYERS[name]())
    shape = (4, 6, 8) if takes_images(name) else (6, 8, 4)
    for batch in (1, 2):
        check_outputs(pruned, expected, torch.randn(batch, *shape))
    x = torch.randn(2, *shape)
    check_heads(pruned, expected, x)
    reports = head_report(pruned, x).layers
    assert {report.summary for report in reports} == {'no heads: the layer is its bias'}
    assert {report.num_heads for report in reports} == {0}
    if hasattr(pruned, 'switch_to_deploy'):
        pruned.switch_to_deploy()
        assert torch.equal(pruned(x), expected(x))


def check_heads(pruned, expected, x):
    """Whatever the layer says of its heads has the shape that it has of some, but for their number."""
    size = x.shape[2:] if pruned.window is not None else x.shape[1:3]
    said = dict(value_matrices=(), position_probs=(size,))
    if pruned.depends_on_content:
        said.update(attention_scores=(x,), content_scores=(x,), position_scores=(x,))
    else:
        said.update(attention_probs=(size,))
    for name, arguments in said.items():
        tensor, other = (getattr(layer, name)(*arguments) for layer in (pruned, expected))
        if other is not None:
            shape = list(other.shape)
            shape[1 if any(argument is x for argument in arguments) else 0] = 0
            assert list(tensor.shape) == shape
    assert pruned.gaussian_heads() is None or len(pruned.gaussian_heads().center) == 0
