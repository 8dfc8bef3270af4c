"""State dicts both ways: a CNN takes the attention of one, and attention converts the kernels of one."""

import copy
import importlib.util
import io
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.cnns import CONVOLUTIONS, small_cnn
from helpers.convolutions import relative_error
from helpers.small import refused
from timm.layers import Attention, Conv2dSame, ScaledStdConv2d, StdConv2d
from torch import nn

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention import QuadraticImageAttention, StructureError
from attncnn_plugin.attention.images import ImageAttention
from attncnn_plugin.attention.state_dicts import write_extra_state
from attncnn_plugin.attention.window import Window
from attncnn_plugin.convert import attention_to_convs, conv_to_mhsa, convs_to_attention
from attncnn_plugin.pruning import prune_heads

KINDS = {
    'positions': {},
    'soft': dict(alpha=6.0),
    'table': dict(position='table'),
    'additive': dict(content='additive'),
    'gated': dict(content='gated', alpha=6.0),
    'windowed': dict(content='additive', window_size=5, qk_dim=3),
}


def images():
    return torch.randn(2, 3, 12, 13, dtype=torch.float64)


def attention(kind, seed=0):
    """A CNN with attention in the place of some convolutions, trained on."""
    model = small_cnn(seed=seed)
    convs_to_attention(model, ['stem', 'stage.1.*', 'down'], **KINDS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def load(model, state_dict, **options):
    follow_state_dict(model, state_dict)
    return model.load_state_dict(state_dict, **options)


def kinds(model):
    return [(type(module), module.extra_repr()) for module in model.modules() if isinstance(module, ImageAttention)]


@pytest.mark.parametrize('kind', KINDS)
def test_a_cnn_takes_the_attention_of_a_state_dict(kind):
    """From a file, with the settings of the conversion: the kernels of another state dict are converted alike."""
    theirs, ours, x, file = attention(kind), small_cnn(seed=1).train(), images(), io.BytesIO()
    torch.save(theirs.state_dict(), file)
    ours.stem.eval()
    ours.stem.weight.requires_grad_(False)
    random = torch.random.get_rng_state()
    assert not any(load(ours, torch.load(io.BytesIO(file.getvalue()), weights_only=True)))
    assert torch.equal(torch.random.get_rng_state(), random)
    assert ours.training and not ours.stem.training and ours.down.training
    frozen = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    assert frozen == {f'stem.{name}' for name, _ in ours.stem.named_parameters()} - {'stem.value.bias'}
    assert relative_error(ours.eval()(x), theirs(x)) < 1e-12 and kinds(ours) == kinds(theirs)
    assert isinstance(ours.stage[0].conv1, nn.Conv2d)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for model in (theirs, ours):
        model.load_state_dict(small_cnn(seed=2).state_dict())
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize(
    'kernel_size, settings, message',
    [
        (3, dict(position='table'), 'position=table in the state dict, but position=gaussian in'),
        (3, dict(content='additive', qk_dim=3), 'content=additive, .*qk_dim=3 in the state dict, but content=None, '),
        (5, {}, 'num_heads=9 in the state dict, but num_heads=25 in the model: build it alike'),
    ],
)
def test_attention_of_another_kind_is_refused(kernel_size, settings, message):
    """Fewer heads are those of a smaller kernel, or were removed. A convolution takes any kind."""
    theirs, ours = (nn.Sequential(nn.Conv2d(3, 4, n, padding=1)) for n in (3, kernel_size))
    convs_to_attention(theirs, '0', **settings)
    convs_to_attention(ours, '0')
    with refused(ours, message, RuntimeError):
        ours[0].load_state_dict(theirs[0].state_dict())
    with refused(ours, message, RuntimeError):
        follow_state_dict(ours, theirs.state_dict())
    attention_to_convs(ours)
    if kernel_size == 3:
        load(ours, theirs.state_dict())
        x = torch.randn(1, 3, 6, 7)
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize('kind', KINDS)
def test_attention_converts_the_kernels_of_a_state_dict(kind):
    ours, cnn, x = attention(kind), small_cnn(seed=1), images()
    for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        before = kinds(model)
        model.load_state_dict(cnn.state_dict())
        assert kinds(model) == before
        expected = small_cnn(seed=1)
        convs_to_attention(expected, ['stem', 'stage.1.*', 'down'], **KINDS[kind])
        assert relative_error(model(x), expected(x)) < 1e-12
        assert relative_error(model(x), cnn(x)) < (0.2 if 'alpha' in KINDS[kind] else 1e-12)
        if 'content' in KINDS[kind]:  # layers have keys of their own
            assert not torch.equal(model.stage[1].conv1.key.weight[:4, :4], model.stage[1].conv2.key.weight[:4, :4])
    again = attention(kind, seed=2)
    again.load_state_dict(cnn.state_dict())  # random keys are those of every rank
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize('kind', ['soft', 'table', 'gated', 'windowed'])
def test_heads_that_were_removed(kind):
    theirs, x = attention(kind), images()
    prune_heads(theirs, {'stem': [0, 4]})
    for ours in (small_cnn(seed=1), attention('positions' if kind == 'soft' else kind, seed=1)):  # of any α
        load(ours, theirs.state_dict())
        assert torch.equal(ours(x), theirs(x)) and ours.stem.num_heads == 7
    theirs.load_state_dict(small_cnn().state_dict())  # all heads again
    assert theirs.stem.num_heads == 9
    assert relative_error(theirs(x), small_cnn()(x)) < 0.2


def test_a_layer_of_its_own():
    """Whatever made it: conv_to_mhsa alone, or its constructor, whose state dict says no convolution."""
    conv, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    model, fresh = nn.Sequential(conv_to_mhsa(conv)[0]), nn.Sequential(nn.Conv2d(3, 4, 3))
    load(fresh, model.state_dict())
    for ours in (model, fresh):
        ours.load_state_dict(nn.Sequential(other).state_dict())
        attention_to_convs(ours)
        assert torch.equal(ours[0].weight, other.weight)
    built = nn.Sequential(QuadraticImageAttention(3, 4, 9, Window.of(conv)))
    with pytest.raises(RuntimeError, match='0 is attention that was not made from a convolution'):
        built.load_state_dict(nn.Sequential(conv).state_dict())
    fresh = nn.Sequential(conv)
    load(fresh, built.state_dict())
    x = torch.randn(1, 3, 6, 7)
    assert torch.equal(fresh(x), built(x))


@pytest.mark.parametrize('kind', [Conv2dSame, StdConv2d, ScaledStdConv2d])
def test_convolutions_of_timm(kind):
    """By what they compute: a state dict has the weights before their standardization, and so has what comes back."""
    models = [nn.Sequential(kind(3, 4, 3, stride=2, bias=True), nn.BatchNorm2d(4)).eval() for _ in range(3)]
    x = torch.randn(2, 3, 9, 10)
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    expected, state = models[0](x), copy.deepcopy(models[0].state_dict())
    for model in models[:2]:
        convs_to_attention(model, '0')
    models[1].load_state_dict(state)
    load(models[2], models[0].state_dict())
    for model in models:
        assert torch.allclose(model(x), expected, atol=1e-5)
    for model in models[:2]:  # made of a convolution, or of the state dict of one
        attention_to_convs(model)
        assert type(model[0]) is kind and torch.equal(model(x), expected)
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    if kind is not Conv2dSame:  # whose own weights are not in the state dict of attention
        with pytest.raises(ValueError, match=f'no convolution any more, of the class .* of 0, a {kind.__name__}, is'):
            attention_to_convs(models[2])


def test_followed_before_an_optimizer_is_built():
    theirs, ours = attention('additive'), small_cnn()
    prune_heads(theirs, {'stem': [1]})
    assert follow_state_dict(ours, theirs.state_dict()) and not follow_state_dict(ours, theirs.state_dict())
    parameters = list(ours.parameters())
    ours.load_state_dict(theirs.state_dict())
    assert all(one is other for one, other in zip(parameters, ours.parameters()))
    ours.train()  # without a warning
    averaged = torch.optim.swa_utils.AveragedModel(small_cnn())
    load(averaged, torch.optim.swa_utils.AveragedModel(theirs).state_dict())
    assert isinstance(averaged.module.stem, ImageAttention)


@pytest.mark.parametrize('call', ['not strict', 'assign', 'meta', 'compiled'])
def test_every_way_to_load(call):
    theirs, ours, x = attention('gated'), small_cnn(seed=1), images()
    state = theirs.state_dict()
    if call == 'not strict':
        load(ours, state, strict=False)
    elif call == 'compiled':
        load(torch.compile(ours, backend='eager'), {f'_orig_mod.{k}': v for k, v in state.items()})
    else:
        ours = ours.to('meta') if call == 'meta' else ours
        load(ours, state, assign=True)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(
    'layer, message',
    [
        (nn.Conv2d(3, 4, 1), r'cannot replace 0 \(1×1 kernel\): num_heads=9 must be 1, the positions'),
        (nn.ConvTranspose2d(3, 4, 3), r'Unexpected key.*0\.value\.weight'),
        (nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)), 'attention of the state dict cannot replace 0 \\(.*hooks'),
    ],
)
def test_attention_that_does_not_fit(layer, message):
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    convs_to_attention(model, '0')
    ours = nn.Sequential(layer)
    with pytest.raises(StructureError, match=message):
        follow_state_dict(ours, model.state_dict())
    assert ours[0] is layer


def test_a_refused_state_dict_leaves_the_model_as_it_was():
    """The first convolution and the heads of the transformer could take what the state dict has; the last cannot."""

    def model(kernel_size):
        return nn.Sequential(nn.Conv2d(3, 4, 3), Attention(8, num_heads=2), nn.Conv2d(4, 4, kernel_size))

    theirs, ours, follows = model(5), model(3), model(5)
    convs_to_attention(theirs, '*')
    prune_heads(theirs[1], {'': [0]}, torch.randn(1, 5, 8))
    modules = list(ours)
    for strict in (True, False):
        with refused(ours, r'replace 2 \(3×3 kernel\): num_heads=25 must be 9, the', StructureError):
            follow_state_dict(ours, theirs.state_dict(), strict)
        assert list(ours) == modules and ours[1].num_heads == 2 and type(ours[1]) is Attention
    load(follows, theirs.state_dict())
    assert isinstance(follows[0], ImageAttention) and follows[1].num_heads == 1


def test_kernels_that_do_not_fit():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    convs_to_attention(model, '0')
    for other, message in (
        (nn.Conv2d(3, 4, 5), 'convolution 0 of the state dict cannot be converted: .*size mismatch'),
        (nn.Conv2d(3, 4, 3, bias=False), 'cannot be converted: .*Missing key.*"bias"'),
    ):
        with refused(model, f'(?s){message}', RuntimeError):
            model.load_state_dict(nn.Sequential(other).state_dict())
        with refused(model, '', StructureError):
            model[0].convert_state_dict(dict(nn.Sequential(other).state_dict()), '0.')


def test_parameters_in_a_state_dict_stay_as_they_are():
    """Those of a model that trains on, and has some frozen."""
    cnn, model = small_cnn(seed=1), attention('positions')
    for ours, theirs in ((model, cnn), (small_cnn(), model), (small_cnn(), cnn)):
        theirs.stem.requires_grad_(False)
        trained = [parameter.requires_grad for parameter in theirs.parameters()]
        load(ours, theirs.state_dict(keep_vars=True))
        assert [parameter.requires_grad for parameter in theirs.parameters()] == trained and any(trained)


def test_structure_in_files(tmp_path):
    """The extra state is one small tensor: safetensors and mmengine keep it, as torch.save does."""
    model = small_cnn()
    convs_to_attention(model, CONVOLUTIONS, content='gated', window_size=[5, 5], qk_dim=np.int64(3))
    names = {name[len('stem.') :] for name in model.state_dict() if name.startswith('stem.')}
    assert names == {
        *('value.weight', 'value.bias', 'query.weight', 'key.weight', 'gate', '_extra_state'),
        *('encoding.center', 'encoding.sqrt_precision'),
    }
    safetensors.torch.save_file(model.state_dict(), tmp_path / 'model.safetensors')
    cases = [(safetensors.torch.load_file(tmp_path / 'model.safetensors'), nn.Module.load_state_dict)]
    if importlib.util.find_spec('mmengine'):
        from mmengine.runner import save_checkpoint
        from mmengine.runner.checkpoint import get_state_dict, load_state_dict

        save_checkpoint({'state_dict': get_state_dict(model)}, str(tmp_path / 'model.pth'))
        cases.append((torch.load(tmp_path / 'model.pth', weights_only=True)['state_dict'], load_state_dict))
    for state, load_into in cases:
        ours, x = small_cnn(seed=1), images()
        follow_state_dict(ours, state)
        load_into(ours, state, strict=True)
        assert torch.equal(ours(x), model(x)) and kinds(ours) == kinds(model)


def test_a_damaged_structure_is_refused():
    model = small_cnn()
    convs_to_attention(model, 'stem')
    for damaged in (torch.tensor([123, 1], dtype=torch.uint8), torch.zeros(2), 'text'):
        state = {**model.state_dict(), 'stem._extra_state': damaged}
        for ours in (small_cnn(seed=1), copy.deepcopy(model)):
            with pytest.raises(RuntimeError, match=r'stem\._extra_state of the state dict is damaged'):
                follow_state_dict(ours, state)
    state = {**model.state_dict(), 'stem._extra_state': write_extra_state({'position': 'gaussian', 'num_heads': 4})}
    with pytest.raises(StructureError, match='replace stem .* num_heads=4 must be 9, the positions'):
        follow_state_dict(small_cnn(seed=1), state)
