"""An optimizer goes on when heads go, and when convolutions become attention and come back."""

import copy
import inspect
import re
from types import SimpleNamespace

import pytest
import timm
import torch
from helpers import optimizers as of
from helpers.cnns import small_cnn
from helpers.convolutions import relative_error
from timm.layers import StdConv2d
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from attncnn_plugin.convert import attention_to_convs, convs_to_attention
from attncnn_plugin.pruning import prune_heads, replace_parameters

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


@pytest.mark.parametrize('kind', ['CNN', 'CMHSA'])
def test_a_new_optimizer_takes_the_state(kind):
    """States are loaded by the order of parameters: groups get that of the model, but what no layer replaced stays."""
    options = dict(phase='conv', img_size=8, patch_size=4, depth=2, num_classes=3)
    network = small_cnn() if kind == 'CNN' else timm.create_model('cmhsa3_patch16_224', **options)
    model, other = nn.Sequential(nn.Linear(2, 2), network, nn.Linear(2, 2)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([dict(params=[*model[1:].parameters(), other]), dict(params=model[0].parameters())])
    optimizer.param_groups[1]['params'].reverse()
    replace_parameters(optimizer, convs_to_attention(model, '*') if kind == 'CNN' else network.to_attention())
    new = [*map(id, model[1:].parameters()), id(other)], [id(model[0].bias), id(model[0].weight)]
    assert new == tuple([*map(id, group['params'])] for group in optimizer.param_groups)


def test_parameters_that_the_optimizer_does_not_have():
    model = small_cnn()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    before = copy.copy(optimizer.param_groups[0]['params'])
    replace_parameters(optimizer, convs_to_attention(model, '*'))
    assert all(one is other for one, other in zip(before, optimizer.param_groups[0]['params']))


def test_new_parameters_without_old_entries_begin_without_state():
    """No value is an entry of a kernel that is standardized."""
    model = nn.Sequential(StdConv2d(3, 4, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    replace_parameters(optimizer, convs_to_attention(model, '0'))
    assert not optimizer.state
    model(torch.randn(1, 3, 5, 5)).square().sum().backward()
    before = model[0].value.weight.clone()
    optimizer.step()
    assert not torch.equal(model[0].value.weight, before)


IMAGES = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
HEAD = 8  # channels
# They take norms or means of whole matrices, those of removed heads among them, or the sign of a gradient of 0.
BY_NORMS = r'lamb|lars|larc|muon|novograd|(adam|sgd)p$|mars|^c|rprop'


def vit():
    torch.manual_seed(0)
    sizes = dict(img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3, mlp_ratio=1, num_classes=4)
    model = timm.create_model('vit_tiny_patch16_224', **sizes, qkv_bias=False)  # gradients of keys' biases are rounding
    model.blocks[0].attn.fused_attn = False  # which has no second derivatives
    return model.double()


def backward(model, optimizer):
    optimizer.zero_grad()
    model(IMAGES).square().mean().backward(create_graph=getattr(optimizer, 'is_second_order', False))
    if isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in model.parameters():
            parameter.grad = parameter.grad.to_sparse()


def step(model, optimizer, number=1):
    for _ in range(number):
        torch.manual_seed(1)  # Adahessian draws
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(lambda: backward(model, optimizer) or model(IMAGES).square().mean())
        else:
            backward(model, optimizer)
            optimizer.step()


def kept(name, x):
    """The entries of heads 0 and 2 of the first block, if x has entries of heads."""
    x = x.detach()
    if name.startswith('blocks.0.attn.qkv'):
        return x.unflatten(0, (3, 3, HEAD))[:, [0, 2]].flatten(0, 2)
    return x.unflatten(1, (3, HEAD))[:, [0, 2]].flatten(1, 2) if name == 'blocks.0.attn.proj.weight' else x


def everything(model, optimizer):
    """What a refusal leaves as it was: parameters, and all tensors that the optimizer holds."""
    values = [*model.parameters(), *model.buffers()]
    values += [own for own in of.reachable(optimizer).values() if isinstance(own, torch.Tensor)]
    return {id(own): (own, own.detach().clone()) for own in values}


def sliced(optimizer, model):
    """The state dict of an optimizer, with the entries of the heads that stay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group['params']]
    state = copy.deepcopy(optimizer.state_dict())
    for number, own in state['state'].items():
        shape = model.get_parameter(order[number]).shape
        for key, value in own.items():
            own[key] = kept(order[number], value) if getattr(value, 'shape', None) == shape else value
    return state


def assert_goes_on(build, by_gate=True, by_state_dict=False):
    """The next step is that of the whole model with the head's gate at 0; returns False where it is refused."""
    (model, optimizer), (whole, other) = ((own, build(own)) for own in (vit(), vit()))
    for own in ((model, optimizer), (whole, other)):
        step(*own, 2)
    keep = torch.ones(24, dtype=torch.float64).index_fill(0, torch.arange(HEAD, 2 * HEAD), 0)
    whole.blocks[0].attn.proj.register_forward_pre_hook(lambda _, args: args[0] * keep)
    change = prune_heads(model, {0: [1]})
    before = everything(model, optimizer)
    try:
        replace_parameters(optimizer, change)
    except ValueError as error:
        assert f'a {type(optimizer).__name__} ' in str(error) and 'build a new optimizer' in str(error)
        now = everything(model, optimizer)
        assert now.keys() == before.keys() and all(torch.equal(before[key][1], now[key][1]) for key in now)
        return False
    held = of.reachable(optimizer)
    assert not any(id(old) in held for old in change.replaced)
    listed = [id(parameter) for group in optimizer.param_groups for parameter in group['params']]
    assert sorted(listed) == sorted(map(id, model.parameters()))
    if by_state_dict:
        again = copy.deepcopy(model)
        loaded = build(again)
        loaded.load_state_dict(sliced(other, whole))
        step(again, loaded)
    step(model, optimizer)
    step(whole, other)
    for name, parameter in model.named_parameters():
        if by_state_dict:
            torch.testing.assert_close(parameter, again.get_parameter(name), rtol=1e-7, atol=1e-9)  # NAdam casts some
        if by_gate:
            torch.testing.assert_close(parameter.detach(), kept(name, whole.get_parameter(name)), rtol=1e-9, atol=1e-9)
    return True


OF_TORCH = [
    name
    for name, own in vars(torch.optim).items()
    if inspect.isclass(own) and issubclass(own, torch.optim.Optimizer) and own is not torch.optim.Optimizer
]
OF_TIMM = [name for name in list_optimizers() if not name.startswith(('bnb', 'fused', 'kron'))]  # of other packages
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ('kron', 'kronc', 'kronw')]


@pytest.mark.parametrize('name', [*OF_TORCH, *OF_TIMM, *SLOW, 'lookahead_adamw', 'lookahead_sgd'])
def test_every_optimizer(name):
    """Each goes on as one that loaded a state dict with the entries that are left, or is refused."""

    def build(model):
        if name not in OF_TORCH:
            return create_optimizer_v2(model, name, lr=1e-3, weight_decay=0.05)
        return getattr(torch.optim, name)(model.parameters(), lr=1e-3)

    if name == 'Muon':
        pytest.skip('only for matrices')
    refused = re.search('adafactor|kron|lbfgs', name.lower()) is not None
    by_gate, draws = not re.search(BY_NORMS, name.lower()), name == 'adahessian'  # as many numbers as it has entries
    assert assert_goes_on(build, by_gate and not draws, by_state_dict=not draws) is not refused


def wrapped_by_mmengine(params):
    return pytest.importorskip('mmengine.optim').OptimWrapper(of.ADAMW(params))


def several_of_mmengine(params):
    optim, params = pytest.importorskip('mmengine.optim'), list(params)
    return optim.OptimWrapperDict(**{str(i): optim.OptimWrapper(of.ADAMW(params[i::2])) for i in range(2)})


def wrapped_by_accelerate(params):
    return pytest.importorskip('accelerate').Accelerator(cpu=True).prepare(of.ADAMW(params))


def wrapped_by_lightning(params):
    optimizer = pytest.importorskip('lightning.pytorch.core.optimizer').LightningOptimizer(of.ADAMW(params))
    data, run = torch.randn(5), lambda own, *_: own.step()  # a trainer has a model, and data
    optimizer._strategy = SimpleNamespace(model=nn.Linear(1, 1), data=data, optimizer_step=run)
    return optimizer


def of_zero(params):
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3)


def scheduled(params):
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 5)  # which wraps its step
    return optimizer


GOES_ON = {
    'SAM': of.Sharpness,
    'schedule': scheduled,
    'Lookahead of others': of.SlowByParameter,
    'optimizer': of.Around,
    'base': lambda params: of.Around(params, 'base'),
    'dict of tensors': of.Momenta,
    'several': of.Several,
    'accelerate': wrapped_by_accelerate,
    'lightning': wrapped_by_lightning,
}
IS_REFUSED = {
    'slow weights in lists': (of.SlowInLists, r'slow_weights\[0\]\[\d+\], beside its groups and states'),
    'half precision': (of.Halves, r'fp16_groups\[0\]\[\d+\], beside'),
    'flat buffer': (of.Flat, r"optimizer.param_groups\[0\]\['params'\]\[0\], beside"),
    'flat momenta': (of.FlatMomenta, 'momenta, beside'),
    'ranks': (of.ranked, 'ranks, beside'),
    'hook': (of.hooked, 'beside'),
    'squares': (lambda params: of.Squares(params, lr=0.1), 'precond_0 of a Squares has shape'),
    'lists': (lambda params: of.Lists(params, lr=0.1), 'Q of a Lists has several tensors'),
    'objects': (lambda params: of.Objects(params, lr=0.1), 'state, beside'),
}


@pytest.mark.parametrize('build', GOES_ON.values(), ids=GOES_ON)
def test_optimizers_around_optimizers(build):
    assert assert_goes_on(lambda model: build(model.parameters()))


def test_an_optimizer_that_holds_the_model():
    assert assert_goes_on(lambda model: of.OfModel(model.parameters(), model))


@pytest.mark.parametrize('build', [wrapped_by_mmengine, several_of_mmengine])
def test_wrappers_of_mmengine(build):
    """Whose groups can be a dict; they step by a method of their own."""
    model = vit()
    wrapper = build(model.parameters())
    backward(model, wrapper)
    inner = [own.optimizer for own in (wrapper.values() if hasattr(wrapper, 'values') else [wrapper])]
    for optimizer in inner:
        optimizer.step()
    change = prune_heads(model, {0: [1]})
    replace_parameters(wrapper, change)
    states = {parameter: state for optimizer in inner for parameter, state in optimizer.state.items()}
    listed = [parameter for optimizer in inner for parameter in optimizer.param_groups[0]['params']]
    assert states.keys() == set(listed) == set(model.parameters()) and len(states) == len(listed)
    assert all(state['exp_avg'].shape == parameter.shape for parameter, state in states.items())


@pytest.mark.parametrize('build, message', IS_REFUSED.values(), ids=IS_REFUSED)
def test_refused_optimizers(build, message):
    assert assert_goes_on(lambda model: build(model.parameters())) is False
    model = vit()
    optimizer = build(model.parameters())
    step(model, optimizer)
    with pytest.raises(ValueError, match=message):
        replace_parameters(optimizer, prune_heads(model, {0: [1]}))


def test_no_optimizer():
    with pytest.raises(TypeError, match='a str has no param_groups: give an optimizer, or what holds one'):
        replace_parameters('adam', {})


def test_a_partition_of_the_parameters(tmp_path):
    """Of ZeRO, as it is with one rank too."""
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/meeting', rank=0, world_size=1)
    try:
        assert assert_goes_on(lambda model: of_zero(model.parameters())) is False
    finally:
        torch.distributed.destroy_process_group()
