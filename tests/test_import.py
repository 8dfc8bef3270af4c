"""Importing the plugin registers names and does nothing else; stock models keep PyTorch's contract."""

import subprocess
import sys

import pytest
import timm
import torch
from torchvision.models import resnet18

import attncnn_plugin
from attncnn_plugin import follow_state_dict
from attncnn_plugin.convert import convs_to_attention
from attncnn_plugin.pruning import prune_heads

# Public functions, classes and methods of these libraries by name, and their tables, before and after the import.
IDENTITIES = """
import inspect, sys, warnings
warnings.simplefilter('ignore')
{blocked}
import timm, torch
libraries = ['torch', 'timm']
try:
    import mmengine.hooks, mmengine.model, mmengine.runner, mmpretrain.datasets, mmpretrain.models
    libraries += ['mmengine', 'mmpretrain']
except ImportError:
    pass

def objects():
    found = dict(safe=set(map(str, torch.serialization.get_safe_globals())))
    for name, module in list(sys.modules.items()):
        if name.partition('.')[0] in libraries and module is not None:
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[name, key] = value
                if inspect.isclass(value):
                    found.update(((name, key, part), member) for part, member in list(vars(value).items())
                                 if callable(member) or isinstance(member, (classmethod, staticmethod, property)))
    if 'mmengine' in libraries:
        found.update(mmengine.runner.checkpoint.CheckpointLoader._schemes)
    return found

before = objects()
import attncnn_plugin
after = objects()
hooks = torch.nn.modules.module
print(len(libraries), len(before) > 5000, [name for name in before if after[name] != before[name]],
      sorted(key for key in after.keys() - before.keys() if isinstance(key, str)),
      bool(hooks._global_forward_hooks or hooks._global_module_registration_hooks))
if 'mmengine' in libraries:
    mmengine.runner.checkpoint._safe_torch_load = torch.load  # as onedl-mmengine has it
    before = objects()
    import attncnn_plugin.mm.safe_loading
    after = objects()
    print([name for name in before if after[name] != before[name]],
          before['safe'] < after['safe'] and any('HistoryBuffer' in name for name in after['safe']))
"""
BLOCKED = "sys.modules.update(dict.fromkeys(['mmengine', 'mmcv', 'mmpretrain']))"


@pytest.mark.slow
@pytest.mark.parametrize('with_mmpretrain', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_function_of_other_libraries_is_the_one_of_before(with_mmpretrain):
    """Safe loading, which is imported by itself, replaces the loader of local files, and that of the fork."""
    if with_mmpretrain:
        pytest.importorskip('mmpretrain')
    script = IDENTITIES.format(blocked='' if with_mmpretrain else BLOCKED)
    run = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    if with_mmpretrain:
        checkpoint = 'mmengine.runner.checkpoint'
        assert lines.pop() == f"['safe', ('{checkpoint}', '_safe_torch_load'), ''] True"
    assert lines[-1] == ("4 True [] ['attncnn://'] False" if with_mmpretrain else '2 True [] [] False')


def narrow_vit():
    """Two heads of 64 channels of three, which the state dict alone says."""
    model = timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=5)
    prune_heads(model, {0: [1]})
    return model


def with_attention(model, layers):
    convs_to_attention(model, layers)
    return model


def classifier():
    MODELS = pytest.importorskip('mmpretrain').registry.MODELS
    backbone = dict(type='ResNet', depth=18, base_channels=4, stem_channels=4)
    head = dict(type='LinearClsHead', num_classes=3, in_channels=32)
    neck = dict(type='GlobalAveragePooling')
    with_scope = dict(type='mmpretrain.ImageClassifier', backbone=backbone, neck=neck, head=head)
    return MODELS.build(with_scope)


STOCK = {
    'timm ViT': (
        lambda: timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=5),
        narrow_vit,
        r'size mismatch for blocks\.0\.attn\.qkv\.weight',
    ),
    'torchvision ResNet': (
        lambda: resnet18(num_classes=4),
        lambda: with_attention(resnet18(num_classes=4), 'layer4.*'),
        r'Missing key.*layer4\.0\.conv1\.weight',
    ),
    'mmpretrain classifier': (
        classifier,
        lambda: with_attention(classifier(), 'backbone.layer4.*'),
        r'Missing key.*backbone\.layer4\.0\.conv1\.weight',
    ),
}


@pytest.mark.parametrize('name', STOCK)
def test_a_stock_model_refuses_another_structure_as_pytorch_does(name):
    """Loading it calls nothing of the plugin."""
    stock, changed, message = STOCK[name]
    model, state = stock(), changed().state_dict()
    types, own, called, folder = (
        [type(module) for module in model.modules()],
        model.state_dict(),
        [],
        attncnn_plugin.__path__[0],
    )

    def profile(frame, event, argument):
        if event == 'call' and frame.f_code.co_filename.startswith(folder):
            called.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        model.load_state_dict(own)
    finally:
        sys.setprofile(None)
    assert not called
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)
    assert [type(module) for module in model.modules()] == types
    random = torch.random.get_rng_state()
    assert follow_state_dict(model, state) and not follow_state_dict(model, state)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert str(model.load_state_dict(state)) == '<All keys matched successfully>'


def test_transformers_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(ImportError, match=r"needs Hugging Face transformers: pip install 'attncnn_plugin\[hf\]'"):
        attncnn_plugin.load_hugging_face('folder')
