"""The tool that writes a checkpoint which starts as a convolution."""

import timm
import torch
from helpers.processes import REPOSITORY, run
from safetensors.torch import load_file

from attncnn_plugin.transformers import init_as_convolution

TOOL = REPOSITORY / 'tools/model_converters/start_as_convolution.py'
OPTIONS = ['--alpha', '3', '--seed', '2', '--shifts', 'random']
SETTINGS = ['--model-kwargs', 'img_size=32', 'patch_size=8', 'depth=1', 'num_classes=10']


def test_it_writes_the_start(tmp_path):
    out = tmp_path / 'new/start.safetensors'
    said = run('python', TOOL, 'vit_tiny_patch16_224', out, *SETTINGS, *OPTIONS, folder=tmp_path)
    torch.manual_seed(2)
    model = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, depth=1, num_classes=10)
    report = init_as_convolution(model, alpha=3, seed=2, shifts='random')
    assert str(report) in said
    state_dict = load_file(out)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state_dict.items())
    timm.create_model(
        'vit_tiny_patch16_224', img_size=32, patch_size=8, depth=1, num_classes=10, checkpoint_path=str(out)
    )
    said = run('python', TOOL, 'vit_tiny_patch16_224', out, folder=tmp_path, expected=1)
    assert f'{out} exists: name a new file' in said


def test_mistakes(tmp_path):
    out = tmp_path / 'start.pth'
    for words, message in (
        (['no_such_model'], 'name no_such_model is no model of timm: timm.list_models() has the names'),
        (['resnet18'], 'ResNet'),
        (['swin_tiny_patch4_window7_224', '--method', 'impulse'], "method='impulse' needs absolute positions"),
        (['vit_tiny_patch16_224', '--alpha', '-1', *SETTINGS], 'alpha=-1.0 must be a number above 0'),
    ):
        assert message in run('python', TOOL, words[0], out, *words[1:], folder=tmp_path, expected=1)
    assert not out.exists()
