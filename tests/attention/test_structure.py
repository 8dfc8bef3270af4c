"""State dicts of another structure: what is refused leaves the network as it was, and what is not explained."""

import copy
from functools import partial

import pytest
import torch
from helpers.small import small_cmhsa, small_timm

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention import StructureError
from attncnn_plugin.pruning import prune_heads


def pruned():
    model = small_timm('sa_quadratic_cifar')
    prune_heads(model, {0: [1]})
    return model


PAIRS = {
    'heads': (lambda: small_timm('sa_quadratic_cifar'), pruned),
    'phase': (lambda: small_cmhsa('conv'), lambda: small_cmhsa('attn')),
}


@pytest.mark.parametrize(
    'name, value',
    [('head.fc.weight', torch.zeros(7, 7)), ('head.fc.weight', None), ('extra', torch.zeros(1))],
    ids=['shape', 'missing', 'extra'],
)
@pytest.mark.parametrize('pair', PAIRS)
def test_a_refused_load_gives_back_the_structure_and_its_values(pair, name, value):
    """With resized parameters, new modules, frozen ones, and in training mode."""
    ours, theirs = (make() for make in PAIRS[pair])
    ours.blocks[1].attn.requires_grad_(False)
    state, before = theirs.state_dict(), copy.deepcopy(ours.state_dict())
    state[name] = value
    if value is None:
        del state[name]
    parameters, modules = list(ours.parameters()), list(ours.modules())
    trained = [parameter.requires_grad for parameter in parameters]
    for load, error in ((ours.load_state_dict, RuntimeError), (partial(follow_state_dict, ours), StructureError)):
        with pytest.raises(error, match=name):
            load(state)
        assert ours.training and all(a is b for a, b in zip(modules, ours.modules()))
        assert all(a is b for a, b in zip(parameters, ours.parameters()))
        assert [parameter.requires_grad for parameter in ours.parameters()] == trained
        assert ours.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[key]) for key, value in ours.state_dict().items())
    assert follow_state_dict(ours, state, strict=False)
    assert {key: value.shape for key, value in ours.blocks.state_dict().items()} == {
        key: value.shape for key, value in theirs.blocks.state_dict().items()
    }


def test_heads_are_counted_by_every_parameter():
    """Where no structure explains the entries, strict or not, the load is refused; following can pass over them."""
    model, state = small_timm('sa_quadratic_cifar'), pruned().state_dict()
    state['blocks.1.attn.encoding.center'] = torch.zeros(2, 2)
    for load in (
        model.load_state_dict,
        partial(model.load_state_dict, strict=False),
        partial(follow_state_dict, model),
    ):
        with pytest.raises(RuntimeError, match='blocks.1.attn.*different numbers of heads'):
            load(state)
        assert [block.attn.num_heads for block in model.blocks] == [3, 3]
    assert follow_state_dict(model, state, strict=False)
    assert [block.attn.num_heads for block in model.blocks] == [2, 3]


@pytest.mark.parametrize('grown', [(1, 0), (0, 1), None], ids=['outputs', 'inputs', 'axes'])
def test_a_shape_that_no_number_of_heads_explains(grown):
    model = small_timm('sa_quadratic_cifar')
    name, shape = 'blocks.1.attn.value.weight', model.blocks[1].attn.value.weight.shape
    wrong = torch.zeros(shape.numel()) if grown is None else torch.zeros(shape[0] + grown[0], shape[1] + grown[1])
    with pytest.raises(StructureError, match=f'{name} of the state dict has shape .*: no number of heads explains it'):
        model.load_state_dict({**model.state_dict(), name: wrong})


def test_a_module_that_keeps_its_output():
    """As a hook does that looks at features; such a tensor cannot be copied."""
    model = small_timm('sa_quadratic_cifar')
    model.blocks[0].register_forward_hook(lambda block, args, output: setattr(block, 'output', output))
    model(torch.randn(1, 3, 8, 8))
    model.load_state_dict(pruned().state_dict())
    assert model.blocks[0].attn.num_heads == 2 and model.blocks[0].output.grad_fn is not None
