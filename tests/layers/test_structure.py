"""The one mechanism for state dicts of another structure, with modules that are none of the package's networks."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn

from attncnn_plugin.layers import QuadraticAttention, Restructurable, StructureError, follow_state_dict, structure
from attncnn_plugin.layers.structure import register_replacement
from attncnn_plugin.layers.structure_loading import patch_load_state_dict


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


class Doubled(nn.Linear):
    """What a state dict with entries ``P.twice`` has in the place of a linear layer."""

    def __init__(self, features):
        super().__init__(features, features)
        self.register_buffer('twice', torch.zeros(()))

    def forward(self, x):
        return 2 * super().forward(x)


def doubled(module, state_dict, prefix):
    if type(module) is nn.Linear and f'{prefix}twice' in state_dict:
        if state_dict[f'{prefix}weight'].shape != module.weight.shape:
            raise StructureError(f'{prefix}weight is of another width')
        return Doubled(module.in_features)
    return None


@pytest.fixture
def replacement(monkeypatch):
    monkeypatch.setattr(structure, '_replacements', {})
    asked = []

    def replace(module, state_dict, prefix):
        asked.append(prefix)
        return doubled(module, state_dict, prefix)

    register_replacement(replace, ('.twice',))
    return asked


def linears(kind, width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Sequential(nn.ReLU(), kind(width)))


def test_modules_of_another_kind_are_replaced(replacement):
    theirs, x = linears(Doubled), torch.randn(5, 4)
    for follow in (True, False):
        ours = linears(lambda width: nn.Linear(width, width))
        untouched = ours[0]
        if follow:
            assert follow_state_dict(ours, theirs.state_dict()) and not follow_state_dict(ours, theirs.state_dict())
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours(x), theirs(x)) and ours[0] is untouched and type(ours[1][1]) is Doubled


def test_nothing_is_asked_for_other_state_dicts(replacement):
    ours = linears(lambda width: nn.Linear(width, width))
    modules = list(ours.modules())
    ours.load_state_dict(copy.deepcopy(ours).state_dict())
    follow_state_dict(ours, ours.state_dict())
    assert not replacement and list(ours.modules()) == modules


def test_a_replacement_that_does_not_fit_is_refused_like_a_wrong_shape(replacement):
    ours = linears(lambda width: nn.Linear(width, width), width=3)
    with pytest.raises(RuntimeError, match=r'loading state_dict for Sequential:\s+1\.1\.weight is of another width'):
        ours.load_state_dict(linears(Doubled).state_dict())
    with pytest.raises(StructureError, match=r'1\.1\.weight is of another width'):
        follow_state_dict(ours, linears(Doubled).state_dict())
    assert type(ours[1][1]) is nn.Linear


def test_a_refused_state_dict_leaves_the_model_as_it_was(monkeypatch):
    """The first place fits, with a new module and with a module that changes itself; a later one does not."""
    monkeypatch.setattr(structure, '_replacements', {})

    def replace(module, state_dict, prefix):
        new = doubled(module, state_dict, prefix)
        return functools.partial(setattr, module, 'changed', True) if prefix == '0.' else new

    register_replacement(replace, ('.twice',))
    theirs = nn.Sequential(Doubled(4), Doubled(4), Doubled(4)).state_dict()
    ours = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 3))
    modules = list(ours)
    for load, error in (
        (ours.load_state_dict, RuntimeError),
        (lambda s: follow_state_dict(ours, s), StructureError),
    ):
        with pytest.raises(error, match=r'2\.weight is of another width'):
            load(theirs)
        assert list(ours) == modules and not hasattr(ours[0], 'changed')
    ours[2] = nn.Linear(4, 4)
    assert follow_state_dict(ours, theirs)
    assert [type(module) for module in ours] == [nn.Linear, Doubled, Doubled] and ours[0].changed


def test_loading_is_as_pytorchs():
    assert nn.Module.load_state_dict.__doc__ == nn.Module.load_state_dict.__wrapped__.__doc__
    load = nn.Module.load_state_dict
    patch_load_state_dict()
    assert nn.Module.load_state_dict is load
    with pytest.raises(TypeError, match='dict-like'):
        nn.Linear(2, 2).load_state_dict([1])
    with pytest.raises(RuntimeError, match='Missing key'):
        nn.Linear(2, 2).load_state_dict({})
