"""The one mechanism for state dicts of another structure, with modules that are none of the package's networks."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from attncnn_plugin.layers import QuadraticAttention, Restructurable, StructureError, follow_state_dict


class Slot(Restructurable):
    """A linear layer that checkpoints can replace by a product of two, but not the other way round."""

    def __init__(self, dim):
        super().__init__()
        self.map = nn.Linear(dim, dim, bias=False)
        self._follow_state_dicts()

    def forward(self, x):
        return self.map(x)

    @property
    def structure(self):
        return 'one' if isinstance(self.map, nn.Linear) else len(self.map[0].weight)

    def structure_in(self, state_dict, prefix):
        if f'{prefix}map.0.weight' in state_dict:
            if state_dict[f'{prefix}map.0.weight'].shape[1] != 4:
                raise StructureError(f'{prefix}map.0.weight is of another width')
            return len(state_dict[f'{prefix}map.0.weight'])
        return 'one' if f'{prefix}map.weight' in state_dict else None

    def can_take(self, structure):
        return structure != 'one'

    def take_structure(self, structure):
        self.map = nn.Sequential(nn.Linear(4, structure, bias=False), nn.Linear(structure, 4, bias=False))

    def convert_state_dict(self, state_dict, prefix):
        rank = len(self.map[0].weight)
        left, singular, right = torch.linalg.svd(state_dict.pop(f'{prefix}map.weight'))
        state_dict[f'{prefix}map.0.weight'] = (singular[:, None] * right)[:rank]
        state_dict[f'{prefix}map.1.weight'] = left[:, :rank]

    def training_advice(self, structure):
        return f'a map of rank {structure}'


def model(*ranks):
    """Two slots, one of them deep inside."""
    slots = [Slot(4), Slot(4)]
    for slot, rank in zip(slots, ranks):
        slot.take_structure(rank)
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


def test_it_survives_copies():
    theirs, x = model(2, 3), torch.randn(5, 4)
    for ours in (copy.deepcopy(model()), pickle.loads(pickle.dumps(model()))):
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours(x), theirs(x))


def test_refused_like_a_wrong_shape():
    state = model(2, 3).state_dict()
    state['1.1.map.0.weight'] = torch.zeros(3, 5)
    with pytest.raises(RuntimeError, match=r'1\.1\.map\.0\.weight is of another width'):
        model().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'1\.1\.map\.0\.weight is of another width'):
        model().load_state_dict(state, strict=False)
    with pytest.raises(StructureError, match='another width'):
        follow_state_dict(model(), state)


def test_missing_keys_are_missing_keys():
    state = model(2, 3).state_dict()
    del state['0.map.0.weight'], state['0.map.1.weight']
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.map\.weight"'):
        model().load_state_dict(state)


def test_followed_before_it_is_loaded():
    theirs, ours = model(2, 3), model()
    assert follow_state_dict(ours, theirs.state_dict()) and not follow_state_dict(ours, theirs.state_dict())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    assert {id(p) for p in ours.parameters()} == {id(p) for p in optimizer.param_groups[0]['params']}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        ours.train()  # whoever follows knows of it
    wrapped = {f'module.{name}': value for name, value in theirs.state_dict().items()}
    assert follow_state_dict(model(), wrapped, 'module.')
    assert not follow_state_dict(model(2, 3), model().state_dict())  # what cannot be taken is left to loading


def test_heads_are_counted_by_every_parameter():
    layer = QuadraticAttention(4, 3)
    layer.prune_heads([1])
    state = layer.state_dict()
    state['encoding.center'] = torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match='different numbers of heads'):
        QuadraticAttention(4, 3).load_state_dict(state)
