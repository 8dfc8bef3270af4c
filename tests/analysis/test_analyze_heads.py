"""The tool that prints head reports."""

import json

import cv2
import numpy as np
import pytest
import torch
from helpers.digits import small_config
from helpers.head_reports import check_schema
from helpers.images import write_images
from helpers.small import SMALL, small_timm
from helpers.small_configs import SMALL_VIT
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from attncnn_plugin.analysis import head_report


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    """Configs of small models, their checkpoints, and images of another size."""
    folder = tmp_path_factory.mktemp('reports')
    configs = {name: small_config(repository, folder, f'sa_{name}_digits') for name in ('quadratic', 'learned_content')}
    configs['vit_base'] = Config.fromfile(repository / 'configs/vit_base_cifar100.py')
    configs['vit_base'].model.backbone.arch, configs['vit_base'].model.head.in_channels = SMALL_VIT, 16
    init_default_scope('mmpretrain')
    torch.manual_seed(0)
    for name, config in configs.items():
        config.dump(folder / f'{name}.py')
        torch.save(dict(state_dict=MODELS.build(config.model).state_dict(), meta={}), folder / f'{name}.pth')
    torch.save(small_timm('sa_quadratic_cifar', num_classes=3).state_dict(), folder / 'timm.pth')
    write_images(folder / 'images', ['a'], 4, size=20)
    return folder


@pytest.fixture
def tool(tool, capsys):
    """Gives the status of the tool, its output and its errors."""

    def call(*arguments):
        status = 0
        try:
            tool('analysis_tools/analyze_heads.py', *arguments)
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_tool_by_position(folder, tool):
    out = folder / 'new/quadratic.json'
    status, text, _ = tool(folder / 'quadratic.py', folder / 'quadratic.pth', '--json', out)
    assert not status and 'backbone.blocks.1.attn: by position, 8x8 tokens, 3 heads\n' in text
    legend, report = text.split('\n\n')[:2]
    assert all(f'{word}: ' in legend for word in ('std', 'share', '5x5')) and report.startswith('backbone.blocks.0')
    assert f'Saved {out}' in text
    loaded = check_schema(out.read_text())
    assert loaded['model'] == str(folder / 'quadratic.py') and loaded['num_images'] == 0
    model = small_timm('sa_quadratic_cifar', in_chans=1, checkpoint_path=str(folder / 'quadratic.pth'))
    for layer, expected in zip(loaded['layers'], head_report(model, size=(8, 8)).layers):
        assert layer == {**json.loads(json.dumps(expected.to_dict())), 'name': layer['name']}


def test_tool_content(folder, tool):
    model, out = [folder / 'learned_content.py', folder / 'learned_content.pth'], folder / 'content.json'
    status, text, _ = tool(*model, '--num-images', 5, '--json', out)
    assert not status and 'mean over 5 images' in text
    loaded = check_schema(out.read_text())
    assert [layer['attention'] for layer in loaded['layers']] == ['position', 'images'] * 2
    assert loaded['num_images'] == 5
    from attncnn_plugin.mm.datasets import Digits

    digits = Digits(split='test')
    images = [
        cv2.resize(digits[i * len(digits) // 5]['img'], (16, 16), interpolation=cv2.INTER_CUBIC) for i in range(5)
    ]
    by_hand = small_timm('sa_learned_content_cifar', in_chans=1, img_size=16, checkpoint_path=str(model[1]))
    expected = head_report(by_hand, (torch.tensor(np.array(images))[:, None].float() - 77.9) / 95.9)
    for layer, report in zip(loaded['layers'], expected.layers):
        for head, other in zip(layer['heads'], report.heads):
            assert head['center'] == pytest.approx(other.center, abs=1e-4)

    status, text, _ = tool(*model, '--images', folder / 'images', '--num-images', 3)
    assert not status and 'mean over 3 images, 8x8 tokens' in text


def test_tool_on_transformers_of_mmpretrain(folder, tool):
    """L21's rivals: patches to patches, without the class token."""
    config, checkpoint, out = folder / 'vit_base.py', folder / 'vit_base.pth', folder / 'vit_base.json'
    status, text, _ = tool(config, checkpoint, '--images', folder / 'images', '--json', out)
    assert not status and 'backbone.layers.1.attn: mean over 4 images, 14x14 tokens, 2 heads\n' in text
    loaded = check_schema(out.read_text())
    assert [layer['attention'] for layer in loaded['layers']] == ['images'] * 2 and loaded['num_images'] == 4
    assert all(0 < head['prefix_mass'] < 1 for layer in loaded['layers'] for head in layer['heads'])


def test_tool_timm(folder, tool):
    small = [f'{name}={value}' for name, value in {**SMALL, 'num_classes': 3}.items()]
    model = ['--timm', 'sa_quadratic_cifar', '--checkpoint', folder / 'timm.pth', '--model-kwargs', *small]
    for grid, source in (('16x16', ['--images', folder / 'images']), ('5x6', ['--size', '5', '6'])):
        status, text, error = tool(*source, *model)
        assert not status and f'blocks.1.attn: by position, {grid} tokens, 3 heads' in text and 'random' not in error


@pytest.mark.parametrize(
    'arguments, message',
    [
        ([], 'a config and a checkpoint are needed, or --timm NAME'),
        (['--timm', 'vit_tiny_patch16_224'], '--timm needs --images FOLDER, or --size'),
        (['quadratic.py', 'quadratic.pth', '--json', 'images'], '--json images is a folder'),
        (['quadratic.py', 'quadratic.pth', '--size', '4', '4', '--images', 'images'], 'give no --images with it'),
        (['quadratic.py', 'quadratic.pth', '--num-images', '0'], '--num-images 0 must be at least 1'),
        (['learned_content.py', 'learned_content.pth', '--images', 'nowhere'], 'holds no image files'),
        (['vit_base.py', 'vit_base.pth', '--size', '4', '4'], 'depends on images, which say the grid'),
    ],
)
def test_tool_errors(arguments, message, folder, tool, monkeypatch):
    monkeypatch.chdir(folder)
    status, _, error = tool(*arguments)
    assert message in (error if status == 2 else status)
