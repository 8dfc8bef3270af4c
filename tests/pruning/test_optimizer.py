"""An optimizer goes on when convolutions become attention, and when they come back."""

import copy

import pytest
import torch
from helpers.cnns import small_cnn
from helpers.convolutions import relative_error
from timm.layers import StdConv2d
from torch import nn

from attncnn_plugin.convert import attention_to_convs, convs_to_attention
from attncnn_plugin.pruning import replace_parameters

OPTIMIZERS = {
    'sgd': lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    'adam': lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    'adamw_foreach': lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0, foreach=True),
    'adamw_fused': lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),  # state has its parameter's strides
}


def train(model, optimizer, steps=3):
    torch.manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 12, 13, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


def groups(model):
    """Weights and all others, as recipes without weight decay for biases have it."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [dict(params=weights), dict(params=others, lr=0.02)]


@pytest.mark.parametrize('kind', OPTIMIZERS)
def test_the_training_goes_on_as_that_of_the_convolutions(kind):
    """Hard heads have no gradients, so that the values move as the kernels would: there, and back."""
    model = small_cnn()
    optimizer = OPTIMIZERS[kind](groups(model))
    train(model, optimizer)
    cnn = copy.deepcopy(model)
    other = OPTIMIZERS[kind](groups(cnn))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    x = torch.randn(2, 3, 12, 13, dtype=torch.float64)
    for convert in (lambda: convs_to_attention(model, '*'), lambda: attention_to_convs(model)):
        replace_parameters(optimizer, convert())
        held = [parameter for group in optimizer.param_groups for parameter in group['params']]
        assert {*map(id, held)} == {*map(id, model.parameters())} and len(held) == len(list(model.parameters()))
        assert set(optimizer.state) <= set(held)
        train(model, optimizer)
        train(cnn, other)
        assert relative_error(model(x), cnn(x)) < 1e-9
    for parameter, expected in zip(model.parameters(), cnn.parameters()):
        assert relative_error(parameter, expected) < 1e-9
    for name, value in other.state_dict()['state'].items():
        for key, tensor in value.items():
            assert torch.allclose(optimizer.state_dict()['state'][name][key], tensor, rtol=1e-6), (name, key)


def test_groups_and_names():
    """Whatever takes the place of a weight joins its group, values' biases that of the bias."""
    model = small_cnn()
    weights = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    others = [(name, p) for name, p in model.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD([dict(params=weights, weight_decay=0.1), dict(params=others)], lr=0.1)
    report = convs_to_attention(model, 'stem', content='additive', alpha=6.0)
    replace_parameters(optimizer, report)
    weights, others = optimizer.param_groups
    new = {f'stem.{name}' for name, _ in model.stem.named_parameters()}
    assert new - {'stem.value.bias'} <= {*weights['param_names']} and 'stem.value.bias' in others['param_names']
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        assert [id(named[name]) for name in group['param_names']] == [*map(id, group['params'])]
    assert (weights['weight_decay'], others['weight_decay']) == (0.1, 0) and len(optimizer.param_groups) == 2


def test_parameters_that_the_optimizer_does_not_have():
    model = small_cnn()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    before = copy.copy(optimizer.param_groups[0]['params'])
    replace_parameters(optimizer, convs_to_attention(model, '*'))
    assert all(one is other for one, other in zip(before, optimizer.param_groups[0]['params']))


@pytest.mark.parametrize('conv, settings', [(nn.Conv2d, dict(num_heads=4)), (StdConv2d, {})])
def test_new_parameters_without_old_entries_begin_without_state(conv, settings):
    """With fewer heads than kernel positions no value is a kernel's entry, nor is one of a standardized kernel."""
    model = nn.Sequential(conv(3, 4, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    replace_parameters(optimizer, convs_to_attention(model, '0', **settings))
    assert not optimizer.state
    model(torch.randn(1, 3, 5, 5)).square().sum().backward()
    before = model[0].value.weight.clone()
    optimizer.step()
    assert not torch.equal(model[0].value.weight, before)
