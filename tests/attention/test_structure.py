"""State dicts of another structure: what is refused leaves the network as it was, and what is not explained."""

import copy
import os
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.convolutions import relative_error
from helpers.small import small_cmhsa, small_timm
from torch import nn
from torch.nn.utils import parametrizations

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
        with pytest.raises(RuntimeError, match='size mismatch for blocks.1.attn'):
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


class Held(nn.Module):
    """A module of somebody else: its extra state and its hooks change what it holds, and what it loads."""

    def __init__(self):
        super().__init__()
        self.weight, self.told, self.box = nn.Parameter(torch.ones(2)), [], SimpleNamespace(told=[])
        self.register_load_state_dict_pre_hook(lambda module, *args: module.told.append('before'))
        self.register_load_state_dict_post_hook(Held.forget)
        self._register_load_state_dict_pre_hook(self.rename)

    def rename(self, state_dict, prefix, *args):
        self.told.append('bound')
        if f'{prefix}old' in state_dict:
            state_dict[f'{prefix}weight'] = state_dict.pop(f'{prefix}old')

    def forget(self, keys):
        self.told.append('after')
        keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if not key.endswith('ignored')]

    def get_extra_state(self):
        return {}

    def set_extra_state(self, state):
        self.box.told.append(state)


def keep_output(model):
    """As a hook does that looks at features: a tensor with a graph, and a hook that holds a lock."""
    model.features, lock = {}, threading.Lock()
    hook = partial(lambda lock, block, args, output: model.features.update(output=output), lock)
    model.blocks[0].register_forward_hook(hook)
    model(torch.randn(1, 3, 8, 8))


class Watcher:
    """Of a trainer, say: it cannot be copied, nor hashed."""

    __hash__ = None

    def __init__(self):
        self.lock = threading.Lock()

    def look(self, *args):
        assert not self.lock.locked()


HELD = {
    'output': keep_output,
    'lock': lambda model: setattr(model, 'lock', threading.Lock()),
    'generator': lambda model: setattr(model.blocks, 'numbers', (number for number in range(3))),
    'file': lambda model: setattr(model.head, 'file', open(os.devnull)),  # noqa: SIM115
    'load hook': lambda model: model.register_load_state_dict_pre_hook(Watcher().look),
    'lazy': lambda model: setattr(model, 'lazy', nn.LazyLinear(3)),
    'script': lambda model: setattr(model, 'script', torch.jit.script(nn.Linear(2, 2))),
    'parametrized': lambda model: parametrizations.weight_norm(model.head.fc),
    'others': lambda model: setattr(model, 'others', Held()),
}


@pytest.mark.filterwarnings('ignore:.*torch.jit.script')
@pytest.mark.parametrize('held', HELD)
def test_whatever_a_network_holds(held):
    """It loads, and a refused load does nothing to what the network holds, be it uncopyable or somebody else's."""
    theirs, ours, follows = pruned(), small_timm('sa_quadratic_cifar'), small_timm('sa_quadratic_cifar')
    for model in (theirs, ours, follows):
        HELD[held](model)
    if held == 'lazy':
        theirs.lazy(torch.zeros(1, 4))
    state = theirs.state_dict()
    if held == 'others':
        state['others.old'], state['others.ignored'] = state.pop('others.weight'), torch.ones(1)
    before, metadata = [dict(vars(module)) for module in ours.modules()], copy.deepcopy(state._metadata)
    told = copy.deepcopy(ours.others.told) if held == 'others' else None
    entries = {name: (value, copy.deepcopy(value)) for name, value in ours.state_dict(keep_vars=True).items()}
    for load in (ours.load_state_dict, partial(follow_state_dict, ours)):
        with pytest.raises(RuntimeError, match='extra'):
            load(type(state)({**state, 'extra': torch.zeros(1)}))
        assert all(vars(module) == own for module, own in zip(ours.modules(), before))
        for name, value in ours.state_dict(keep_vars=True).items():
            own, kept = entries[name]
            assert value is own or held == 'script' or name.endswith('_extra_state')
            assert nn.parameter.is_lazy(value) or not isinstance(value, torch.Tensor) or torch.equal(value, kept)
        assert told is None or (ours.others.told, ours.others.box.told) == (told, [])
    assert follow_state_dict(follows, state) and not follow_state_dict(follows, state)
    for model in (ours, follows):
        assert str(model.load_state_dict(state)) == '<All keys matched successfully>'
        assert [block.attn.num_heads for block in model.blocks] == [2, 3]
        own = model.state_dict()
        assert all(torch.equal(own[name], state[name]) for name in own if torch.is_tensor(state.get(name)))
    assert state._metadata == metadata
    assert told is None or (ours.others.told, ours.others.box.told) == (['before', 'bound', 'after'], [{}])


@pytest.mark.parametrize('load', ['load_state_dict', 'follow_state_dict'])
@pytest.mark.parametrize('pair', PAIRS)
def test_loaded_in_inference_mode(pair, load):
    """It trains afterwards."""
    ours, theirs = (make() for make in PAIRS[pair])
    with torch.inference_mode():
        if load == 'follow_state_dict':
            follow_state_dict(ours, theirs.state_dict())
        ours.load_state_dict(theirs.state_dict())
        built = PAIRS[pair][0]()
        built.load_state_dict(theirs.state_dict())
    assert not any(parameter.is_inference() for parameter in ours.parameters())
    assert all(torch.equal(own, ours.state_dict()[name]) for name, own in built.state_dict().items())
    ours(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


@pytest.mark.parametrize('value', ['text', None, 3])
def test_an_entry_that_is_no_tensor(value):
    """As PyTorch refuses it; a layer of this package by its error, not by one of Python."""
    model = small_timm('sa_learned_cifar')
    for name in ('blocks.0.attn.value.weight', 'blocks.0.attn.encoding.tables.row_table', 'head.fc.weight'):
        with pytest.raises(RuntimeError, match=f'parameter named "{name}", expected torch.Tensor'):
            model.load_state_dict({**model.state_dict(), name: value})


@pytest.mark.parametrize('pair', PAIRS)
def test_a_network_in_a_model_of_others(pair):
    """PyTorch loads what fits before it refuses; to follow first checks all before anything changes."""
    ours, theirs = (nn.ModuleList([make(), nn.Linear(2, size)]).eval() for make, size in zip(PAIRS[pair], (2, 3)))
    x, before = torch.randn(2, 3, 16, 16), copy.deepcopy(ours.state_dict())
    expected, state = ours[0](x).detach(), theirs.state_dict()
    with pytest.raises(StructureError, match='size mismatch for 1.weight'):
        follow_state_dict(ours, state)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    with pytest.raises(RuntimeError, match='size mismatch for 1.weight'):
        ours.load_state_dict(state)
    # The known limit. What is left is a whole network, which runs, trains and loads.
    assert torch.equal(ours[0](x), theirs[0](x))
    warned = pytest.warns(UserWarning, match='an optimizer that was built before')
    with warned if pair == 'phase' else nullcontext():
        ours.train()
    ours[0](x).sum().backward()
    assert all(parameter.grad is not None for parameter in ours[0].parameters())
    ours.load_state_dict(before)
    assert relative_error(ours.eval()[0](x), expected) < (1e-2 if pair == 'phase' else 1e-6)  # L21's M is 12
    ours.load_state_dict({**state, '1.weight': before['1.weight'], '1.bias': before['1.bias']})
    assert torch.equal(ours[0](x), theirs[0](x))
