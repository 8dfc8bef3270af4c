"""The tool that prints head reports."""

import json
import runpy
import sys

import cv2
import numpy as np
import pytest
import torch
from helpers.head_reports import check_schema
from helpers.small import SMALL, SMALL_ARCH, small_timm
from mmengine.config import Config
from PIL import Image

from attncnn_plugin.analysis import head_report
from attncnn_plugin.pruning import prune_heads

CONFIG = """
_base_ = '{base}'
custom_imports = dict(imports=['attncnn_plugin'], allow_failed_imports=False)
model = dict(backbone=dict(arch=dict(_delete_=True, **{arch})), head=dict(in_channels=16))
"""

VIT = """
_base_ = '{base}'
custom_imports = dict(imports=['attncnn_plugin'], allow_failed_imports=False)
model = dict(
    backbone=dict(arch=dict(_delete_=True, embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)),
    head=dict(in_channels=16))
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    """Configs of small models, their checkpoints, and images of another size."""
    from mmengine.registry import MODELS, init_default_scope

    folder = tmp_path_factory.mktemp('reports')
    torch.manual_seed(0)
    for name in ('quadratic', 'learned_content', 'generalized'):
        config = folder / f'{name}.py'
        config.write_text(CONFIG.format(base=repository / f'configs/sa_{name}_digits.py', arch=SMALL_ARCH))
        init_default_scope('mmpretrain')
        model = MODELS.build(Config.fromfile(config).model)
        torch.save(dict(state_dict=model.state_dict(), meta={}), folder / f'{name}.pth')
        if name == 'generalized':
            prune_heads(model.backbone, {0: [1], 1: [0, 2]})
            torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'pruned.pth')
    for name in ('deit_small', 'vit_base', 'resnet18'):
        config, of = folder / f'{name}.py', 10 if name == 'resnet18' else 100
        base = repository / f'configs/{name}_cifar{of}.py'
        config.write_text(VIT.format(base=base) if of == 100 else f"_base_ = '{base}'")
        model = MODELS.build(Config.fromfile(config).model)
        torch.save(dict(state_dict=model.state_dict(), meta={}), folder / f'{name}.pth')
    cmhsa = Config.fromfile(repository / 'configs/cmhsa3_digits.py').model
    model = MODELS.build(cmhsa)
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'conv.pth')
    model.backbone.to_attention()
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'attn.pth')
    torch.save(small_timm('sa_quadratic_cifar', num_classes=3).state_dict(), folder / 'timm.pth')
    (folder / 'images/a').mkdir(parents=True)
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f'images/a/{i}.png')
    return folder


@pytest.fixture
def tool(repository, monkeypatch, capsys):
    """The tool in this process."""

    def call(*arguments):
        path = str(repository / 'tools/analysis_tools/analyze_heads.py')
        monkeypatch.setattr(sys, 'argv', [path, *map(str, arguments)])
        status = 0
        try:
            runpy.run_path(path, run_name='__main__')
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_tool_by_position(folder, tool):
    out = folder / 'new/quadratic.json'
    status, text, _ = tool(folder / 'quadratic.py', folder / 'quadratic.pth', '--json', out)
    assert not status and 'backbone.blocks.1.attn: by position, 8x8 tokens, 3 heads: ' in text
    assert f'Saved {out}' in text
    loaded = check_schema(out.read_text())
    assert loaded['model'] == str(folder / 'quadratic.py') and loaded['num_images'] == 0
    model = small_timm('sa_quadratic_cifar', in_chans=1, checkpoint_path=str(folder / 'quadratic.pth'))
    for layer, expected in zip(loaded['layers'], head_report(model, size=(8, 8)).layers):
        assert layer == {**json.loads(json.dumps(expected.to_dict())), 'name': layer['name']}


def test_tool_content(folder, tool):
    status, text, _ = tool(
        folder / 'learned_content.py',
        folder / 'learned_content.pth',
        '--num-images',
        5,
        '--json',
        folder / 'content.json',
    )
    assert not status and 'mean over 5 images' in text
    loaded = check_schema((folder / 'content.json').read_text())
    assert [layer['attention'] for layer in loaded['layers']] == ['position', 'images'] * 2
    assert loaded['num_images'] == 5
    # The same as by hand.
    from attncnn_plugin.mm.datasets import Digits

    model = small_timm(
        'sa_learned_content_cifar', in_chans=1, img_size=16, checkpoint_path=str(folder / 'learned_content.pth')
    )
    digits = Digits(split='test')
    images = [
        cv2.resize(digits[i * len(digits) // 5]['img'], (16, 16), interpolation=cv2.INTER_CUBIC) for i in range(5)
    ]
    expected = head_report(model, (torch.tensor(np.array(images))[:, None].float() - 77.9) / 95.9)
    for layer, report in zip(loaded['layers'], expected.layers):
        for head, other in zip(layer['heads'], report.heads):
            assert head['center'] == pytest.approx(other.center, abs=1e-4)

    status, text, _ = tool(
        folder / 'learned_content.py', folder / 'learned_content.pth', '--images', folder / 'images', '--num-images', 3
    )
    assert not status and 'mean over 3 images, 8x8 tokens' in text


def test_tool_cmhsa(folder, tool, repository):
    config = repository / 'configs/cmhsa3_digits.py'
    status, text, _ = tool(config, folder / 'attn.pth', '--num-images', 2, '--json', folder / 'cmhsa.json')
    assert not status
    loaded = check_schema((folder / 'cmhsa.json').read_text())
    assert [layer['attention'] for layer in loaded['layers']] == ['position', 'images'] * 4
    assert all(layer['summary'].startswith('one convolution, 3x3, error ') for layer in loaded['layers'])
    status, _, _ = tool(config, folder / 'conv.pth')
    assert 'no attention layers' in status and 'in the convolution phase' in status


@pytest.mark.parametrize('name', ['deit_small', 'vit_base'])
def test_tool_on_transformers_of_mmpretrain(name, folder, tool):
    """L21's rivals: patches to patches, without the class token."""
    config, checkpoint, out = folder / f'{name}.py', folder / f'{name}.pth', folder / f'{name}.json'
    status, text, _ = tool(config, checkpoint, '--images', folder / 'images', '--json', out)
    assert not status and 'backbone.layers.1.attn: mean over 4 images, 14x14 tokens, 2 heads: ' in text
    loaded = check_schema(out.read_text())
    assert [layer['attention'] for layer in loaded['layers']] == ['images'] * 2 and loaded['num_images'] == 4
    assert all(0 < head['prefix_mass'] < 1 for layer in loaded['layers'] for head in layer['heads'])


def test_tool_pruned(folder, tool):
    status, text, _ = tool(folder / 'generalized.py', folder / 'pruned.pth', '--size', 5, 6, '--tolerance', 0.9)
    assert not status and '0.attn: by position, 5x6 tokens, 2 heads' in text and '5x6 tokens, 1 heads' in text


def test_tool_timm(folder, tool):
    arguments = ['embed_dim=12', 'num_heads=3', 'depth=2', 'img_size=(24,32)', 'patch_size=8', 'in_chans=1']
    status, text, error = tool(
        '--timm',
        'vit_tiny_patch16_224',
        '--images',
        folder / 'images',
        '--json',
        folder / 'timm.json',
        '--model-kwargs',
        *arguments,
    )
    assert not status and 'mean over 4 images, 3x4 tokens, 3 heads' in text
    assert 'The weights of vit_tiny_patch16_224 are random' in error
    loaded = check_schema((folder / 'timm.json').read_text())
    assert loaded['model'] == 'vit_tiny_patch16_224' and loaded['num_images'] == 4 and loaded['checkpoint'] is None
    assert all(head['prefix_mass'] > 0 for layer in loaded['layers'] for head in layer['heads'])
    small = [f'{name}={value}' for name, value in {**SMALL, 'num_classes': 3}.items()]
    for grid, source in (('16x16', ['--images', folder / 'images']), ('5x6', ['--size', '5', '6'])):
        status, text, error = tool(
            '--timm', 'sa_quadratic_cifar', *source, '--checkpoint', folder / 'timm.pth', '--model-kwargs', *small
        )
        assert not status and f'blocks.1.attn: by position, {grid} tokens, 3 heads' in text and 'random' not in error


@pytest.mark.parametrize(
    'arguments, message',
    [
        ([], 'a config and a checkpoint are needed, or --timm NAME'),
        (['quadratic.py', 'quadratic.pth', '--pretrained'], 'are for --timm'),
        (['--timm', 'vit_tiny_patch16_224'], '--timm needs --images FOLDER, or --size'),
        (
            ['--timm', 'vit_tiny_patch16_224', '--size', '4', '4', '--model-kwargs', 'depth=1'],
            'depends on images, which say the grid',
        ),
        (['quadratic.py', 'quadratic.pth', '--json', 'images'], '--json images is a folder'),
        (['quadratic.py', '--timm', 'vit_tiny_patch16_224'], '--timm takes the place of the config'),
        (['quadratic.py', 'quadratic.pth', '--size', '4', '4', '--images', 'images'], 'give no --images with it'),
        (['quadratic.py', 'quadratic.pth', '--num-images', '0'], '--num-images 0 must be at least 1'),
        (['quadratic.py', 'nothing.pth'], 'nothing.pth can not be found'),
        (['quadratic.py', 'quadratic.pth', '--size', '1', '1'], 'is a single token'),
        (['quadratic.py', 'quadratic.pth', '--tolerance', '2'], 'tolerance=2.0 must be at least 1e-07'),
        (['learned_content.py', 'learned_content.pth', '--images', 'nowhere'], 'holds no image files'),
        (['deit_small.py', 'deit_small.pth', '--size', '4', '4'], 'depends on images, which say the grid'),
        (['resnet18.py', 'resnet18.pth'], 'has no attention layers of this package'),
        (['--timm', 'no_such_model', '--images', 'images'], 'Unknown model'),
        (['--timm', 'resnet18', '--images', 'images'], 'of type ResNet, has no attention layers of this package'),
    ],
)
def test_tool_errors(arguments, message, folder, tool, monkeypatch):
    monkeypatch.chdir(folder)
    status, _, error = tool(*arguments)
    assert message in (error if status == 2 else status)
