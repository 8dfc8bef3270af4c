"""State dicts of another structure, with modules that are none of the package's networks."""

import copy
import warnings

import pytest
import torch
from torch import nn

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention import QuadraticAttention, StructureError
from attncnn_plugin.attention.state_dicts import Restructurable, without_prefix


class Slot(Restructurable):
    """A linear layer that checkpoints can replace by a product of two, but not the other way round."""

    def __init__(self, dim):
        super().__init__()
        self.map = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        return self.map(x)

    @property
    def structure(self):
        return 'one' if isinstance(self.map, nn.Linear) else len(self.map[0].weight)

    def split(self, rank):
        self.map = nn.Sequential(nn.Linear(4, rank, bias=False), nn.Linear(rank, 4, bias=False))

    def follow(self, state_dict, prefix):
        factor = state_dict.get(f'{prefix}map.0.weight')
        if factor is None or len(factor) == self.structure:
            return False
        if factor.shape[1] != 4:
            raise StructureError(f'{prefix}map.0.weight is of another width')
        self.split(len(factor))
        self.training_advice = f'a map of rank {len(factor)}'
        return True

    def convert_state_dict(self, state_dict, prefix):
        if f'{prefix}map.weight' not in state_dict or self.structure == 'one':
            return
        rank = len(self.map[0].weight)
        left, singular, right = torch.linalg.svd(state_dict.pop(f'{prefix}map.weight'))
        state_dict[f'{prefix}map.0.weight'] = (singular[:, None] * right)[:rank]
        state_dict[f'{prefix}map.1.weight'] = left[:, :rank]


def model(*ranks):
    """Two slots, one of them deep inside."""
    slots = [Slot(4), Slot(4)]
    for slot, rank in zip(slots, ranks):
        slot.split(rank)
    return nn.Sequential(slots[0], nn.Sequential(nn.ReLU(), slots[1]))


def test_a_module_takes_the_structure_of_a_state_dict():
    theirs, ours, x = model(2, 3), model(), torch.randn(5, 4)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x), theirs(x)) and [ours[0].structure, ours[1][1].structure] == [2, 3]
    with pytest.warns(UserWarning, match='a map of rank 2'):
        ours.train()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        ours.train()  # once is enough


def test_a_module_converts_what_it_cannot_take():
    theirs, ours, x = model(), model(4, 4), torch.randn(5, 4)
    ours.load_state_dict(theirs.state_dict())
    assert torch.allclose(ours(x), theirs(x), atol=1e-5) and ours[0].structure == 4


def test_refused_like_a_wrong_shape():
    state = model(2, 3).state_dict()
    state['1.1.map.0.weight'] = torch.zeros(3, 5)
    with pytest.raises(RuntimeError, match=r'1\.1\.map\.0\.weight is of another width'):
        model().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'1\.1\.map\.0\.weight is of another width'):
        model().load_state_dict(state, strict=False)
    ours = model()
    with pytest.raises(StructureError, match='another width'):
        follow_state_dict(ours, state)
    assert ours[0].structure == 'one'
    follow_state_dict(ours, state, strict=False)
    assert [ours[0].structure, ours[1][1].structure] == [2, 'one']  # the loading refuses the other


def test_missing_keys_are_missing_keys():
    state = model(2, 3).state_dict()
    del state['0.map.0.weight'], state['0.map.1.weight']
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.map\.weight"'):
        model().load_state_dict(state)


def test_heads_are_counted_by_every_parameter():
    layer = QuadraticAttention(4, 3)
    layer.prune_heads([1])
    state = layer.state_dict()
    state['encoding.center'] = torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match='different numbers of heads'):
        QuadraticAttention(4, 3).load_state_dict(state)


def test_a_refused_load_gives_back_the_structure_and_its_values():
    """Of a module of the package itself: with resized parameters, new modules, frozen ones, and in training mode."""
    network = Slot(4)
    network.inner = QuadraticAttention(4, 3)
    network.inner.value.bias.requires_grad_(False)
    before, parameters, modules = (
        copy.deepcopy(network.state_dict()),
        list(network.parameters()),
        list(network.modules()),
    )
    theirs = copy.deepcopy(network)
    theirs.split(2)
    theirs.inner.prune_heads([1])
    for change in ({'extra': torch.zeros(1)}, {'inner.value.bias': torch.zeros(5)}):
        with pytest.raises(RuntimeError, match='extra|size mismatch'):
            network.load_state_dict({**theirs.state_dict(), **change})
        with pytest.raises(StructureError, match='extra|size mismatch'):
            follow_state_dict(network, {**theirs.state_dict(), **change})
        assert network.structure == 'one' and network.inner.num_heads == 3 and network.training
        assert all(a is b for a, b in zip(network.modules(), modules)) and not network.inner.value.bias.requires_grad
        assert all(a is b for a, b in zip(network.parameters(), parameters))
        for name in ('map.weight', 'inner.encoding.center', 'inner.value.weight'):
            assert torch.equal(network.state_dict()[name], before[name]), name
    assert follow_state_dict(network, {**theirs.state_dict(), 'extra': torch.zeros(1)}, strict=False)
    assert network.structure == 2 and network.inner.num_heads == 2


def test_names_without_their_prefix():
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    renamed = without_prefix(state, '0.')
    assert list(renamed) == [name[2:] for name in state] and renamed._metadata[''] == state._metadata['0']
    with pytest.raises(StructureError, match=r'both weight and 0\.weight'):
        without_prefix({**state, 'weight': state['0.weight']}, '0.')
