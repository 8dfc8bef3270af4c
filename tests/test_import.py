"""Importing the plugin registers names and does nothing else; stock models keep PyTorch's contract."""

import subprocess
import sys

import pytest
import timm
import torch
from torch import nn
from torchvision.models import resnet18

import attncnn_plugin
from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention import ImageAttention, StructureError
from attncnn_plugin.convert import convs_to_attention
from attncnn_plugin.pruning import prune_heads

# All public functions, classes and methods of these libraries, by name, before and after the import.
IDENTITIES = """
import inspect, sys, warnings
warnings.simplefilter('ignore')
{blocked}
import timm, torch
modules = ['torch', 'timm']
try:
    import mmengine, mmengine.runner, mmengine.hooks, mmengine.model, mmengine.runner.checkpoint, mmpretrain
    import mmpretrain.models, mmpretrain.datasets
    modules += ['mmengine', 'mmpretrain']
except ImportError:
    pass

def objects():
    found = dict()
    for name, module in list(sys.modules.items()):
        if name.partition('.')[0] in modules and module is not None:
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[name, key] = value
                if inspect.isclass(value):
                    for attribute, member in list(vars(value).items()):
                        if callable(member) or isinstance(member, (classmethod, staticmethod, property)):
                            found[name, key, attribute] = member
    return found

def tables():
    table = dict(safe=set(map(str, torch.serialization.get_safe_globals())))
    if 'mmengine' in modules:
        table['loaders'] = dict(mmengine.runner.checkpoint.CheckpointLoader._schemes)
    return table

before, of_before, count = objects(), tables(), len(modules)
import attncnn_plugin
after, of_after = objects(), tables()
changed = [name for name in before if after.get(name) is not before[name]]
new = set(of_after.pop('loaders', dict())) - set(of_before.get('loaders', dict()))
kept = all(mmengine.runner.checkpoint.CheckpointLoader._schemes[name] is loader
           for name, loader in of_before.pop('loaders', dict()).items())
print(count, len(before) > 5000, changed, sorted(new), kept, of_after == of_before,
      bool(torch.nn.modules.module._global_forward_hooks or torch.nn.modules.module._global_module_registration_hooks))
"""
BLOCKED = "sys.modules.update(dict.fromkeys(['mmengine', 'mmcv', 'mmpretrain']))"


@pytest.mark.parametrize('with_mmpretrain', [True, False])
def test_every_function_of_other_libraries_is_the_one_of_before(with_mmpretrain):
    if with_mmpretrain:
        pytest.importorskip('mmpretrain')
    script = IDENTITIES.format(blocked='' if with_mmpretrain else BLOCKED)
    run = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True)
    expected = "4 True [] ['attncnn://'] True True False" if with_mmpretrain else '2 True [] [] True True False'
    assert run.stdout.splitlines()[-1] == expected


def test_the_docstring_lists_what_importing_does():
    for name in ('timm', 'registries', 'model index', "'atomic'", 'attncnn://', 'attncnn_plugin.mm.safe_loading'):
        assert name in attncnn_plugin.__doc__


def narrow_vit():
    """Two heads of 64 channels of three, which the state dict alone says."""
    model = timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=5)
    prune_heads(model, {0: [1]})
    return model


def attention_resnet(model):
    convs_to_attention(model, 'layer4.*')
    return model


def classifier():
    MODELS = pytest.importorskip('mmpretrain').registry.MODELS
    backbone = dict(type='ResNet', depth=18, base_channels=4, stem_channels=4)
    head = dict(type='LinearClsHead', num_classes=3, in_channels=32)
    neck = dict(type='GlobalAveragePooling')
    with_scope = dict(type='mmpretrain.ImageClassifier', backbone=backbone, neck=neck, head=head)
    return MODELS.build(with_scope)


def attention_classifier():
    model = classifier()
    convs_to_attention(model, 'backbone.layer4.*')
    return model


STOCK = {
    'timm ViT': (
        lambda: timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=5),
        narrow_vit,
        r'size mismatch for blocks\.0\.attn\.qkv\.weight',
    ),
    'timm ResNet': (
        lambda: timm.create_model('test_resnet', num_classes=4),
        lambda: attention_resnet(timm.create_model('test_resnet', num_classes=4)),
        r'Missing key.*layer4\.0\.conv1\.weight',
    ),
    'torchvision ResNet': (
        lambda: resnet18(num_classes=4),
        lambda: attention_resnet(resnet18(num_classes=4)),
        r'Missing key.*layer4\.0\.conv1\.weight',
    ),
    'mmpretrain classifier': (classifier, attention_classifier, r'Missing key.*backbone\.layer4\.0\.conv1\.weight'),
}


@pytest.mark.parametrize('name', STOCK)
def test_a_stock_model_refuses_another_structure_as_pytorch_does(name):
    stock, changed, message = STOCK[name]
    model, state = stock(), changed().state_dict()
    types = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)
    assert [type(module) for module in model.modules()] == types
    assert follow_state_dict(model, state) and not follow_state_dict(model, state)
    assert str(model.load_state_dict(state)) == '<All keys matched successfully>'


@pytest.mark.parametrize('name', STOCK)
def test_loading_a_stock_model_calls_nothing_of_the_plugin(name):
    model = STOCK[name][0]()
    state, called, folder = model.state_dict(), [], attncnn_plugin.__path__[0]

    def profile(frame, event, argument):
        if event == 'call' and frame.f_code.co_filename.startswith(folder):
            called.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        model.load_state_dict(state)
    finally:
        sys.setprofile(None)
    assert not called


@pytest.mark.parametrize('change', ['missing', 'too many', 'another shape'])
def test_a_state_dict_that_would_be_refused_changes_nothing(change):
    """A converted ResNet-18 with a classifier of another number of classes, for instance."""
    model, state = resnet18(num_classes=4), attention_resnet(resnet18(num_classes=4)).state_dict()
    parameters, modules = list(model.parameters()), list(model.modules())
    if change == 'missing':
        del state['fc.weight']
    elif change == 'too many':
        state['fc.extra'] = torch.zeros(1)
    else:
        state['fc.weight'] = torch.zeros(5, 512)
    with pytest.raises(StructureError, match=r'fc\.extra' if change == 'too many' else r'fc\.weight'):
        follow_state_dict(model, state)
    assert all(a is b for a, b in zip(model.modules(), modules))
    assert all(a is b for a, b in zip(model.parameters(), parameters))
    assert follow_state_dict(model, state, strict=False)
    assert isinstance(model.layer4[0].conv1, ImageAttention) and isinstance(model.layer3[0].conv1, nn.Conv2d)


def test_following_draws_no_random_number_and_copies_no_value():
    model, state = resnet18(num_classes=4), attention_resnet(resnet18(num_classes=4)).state_dict()
    before, random = model.fc.weight.clone(), torch.random.get_rng_state()
    follow_state_dict(model, state)
    assert torch.equal(torch.random.get_rng_state(), random) and torch.equal(model.fc.weight, before)
    assert not torch.equal(model.fc.weight, state['fc.weight'])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict(state)
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]['params']}
