"""``attncnn --mm CONFIG CHECKPOINT``: reports, figures and pages of small models of mmpretrain."""

import json

import cv2
import numpy as np
import pytest
import torch
from helpers.digits import small_config
from helpers.explorer_pages import unpack
from helpers.head_reports import check_schema
from helpers.images import write_images
from helpers.logs import write_log
from helpers.small import small_timm
from helpers.small_configs import SMALL_VIT
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from attncnn_plugin.analysis import head_report

MODELS_OF = {name: ['--mm', f'{name}.py', f'{name}.pth'] for name in ('quadratic', 'vit_base')}


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    """Configs of small models, their checkpoints, a training's log, and images of another size."""
    folder = tmp_path_factory.mktemp('configs')
    configs = dict(quadratic=small_config(repository, folder, 'sa_quadratic_digits'))
    configs['vit_base'] = Config.fromfile(repository / 'configs/vit_base_cifar100.py')
    configs['vit_base'].model.backbone.arch, configs['vit_base'].model.head.in_channels = SMALL_VIT, 16
    init_default_scope('mmpretrain')
    torch.manual_seed(0)
    for name, config in configs.items():
        config.dump(folder / f'{name}.py')
        torch.save(dict(state_dict=MODELS.build(config.model).state_dict(), meta={}), folder / f'{name}.pth')
    center = 'attention/blocks.0.attn/head0/center'
    write_log(folder / 'run', '1', [{'step': i, f'{center}_row': 1.0, f'{center}_column': i} for i in range(3)])
    write_images(folder / 'images', ['a'], 4, size=20)
    return folder


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture
def done(command):
    def run(*words):
        status, out, err = command(*words)
        assert status == 0, err
        return out

    return run


def test_report_by_position(done, folder):
    said = done('report', *MODELS_OF['quadratic'], '--json', 'new/quadratic.json')
    assert 'backbone.blocks.1.attn: by position, 8x8 tokens, 3 heads\n' in said and 'Saved new/quadratic.json' in said
    loaded = check_schema((folder / 'new/quadratic.json').read_text())
    assert (loaded['model'], loaded['checkpoint'], loaded['num_images']) == ('quadratic.py', 'quadratic.pth', 0)
    model = small_timm('sa_quadratic_cifar', in_chans=1, checkpoint_path='quadratic.pth')
    for layer, expected in zip(loaded['layers'], head_report(model, size=(8, 8)).layers):
        assert layer == {**json.loads(json.dumps(expected.to_dict())), 'name': layer['name']}


def test_report_of_a_transformer_of_mmpretrain(done, folder):
    """L21's rivals: patches to patches, without the class token."""
    said = done('report', *MODELS_OF['vit_base'], '--images', 'images', '--json', 'vit_base.json')
    assert 'backbone.layers.1.attn: mean over 4 images, 14x14 tokens, 2 heads\n' in said
    loaded = check_schema((folder / 'vit_base.json').read_text())
    assert all(0 < head['prefix_mass'] < 1 for layer in loaded['layers'] for head in layer['heads'])


def test_explore_maps_and_plot(done, folder):
    images = ['--images', 'images/a/0.png', 5]
    assert 'Saved pages/a.html, 0.' in done('explore', *MODELS_OF['quadratic'], *images, '--out', 'pages/a.html')
    content = unpack((folder / 'pages/a.html').read_text(encoding='utf-8'))
    assert content['names'] == ['0.png', 'test image 5'] and content['grid'] == [8, 8]
    assert [picture.shape for picture in content['pictures']] == [(16, 16, 3)] * 2
    done('maps', *MODELS_OF['vit_base'], '--images', 'images')
    assert np.load('maps.npz')['backbone.layers.0.attn'].shape == (4, 2, 197, 197)
    done('plot', '--figure', 'movement', '--run', 'run', '--out', 'movement.png')
    assert cv2.imread('movement.png').std() > 10


@pytest.mark.parametrize(
    'words, message',
    [
        (['report', '--mm', 'nowhere.py', 'a.pth'], "No such file or directory: 'nowhere.py'"),
        (['report', *MODELS_OF['quadratic'], '--images', 'nowhere'], 'nowhere'),
        (['report', *MODELS_OF['quadratic'], '--cfg-options', 'a=1', 'photo.jpg'], 'photo.jpg is no key=value'),
        (['report', *MODELS_OF['quadratic'], '--cfg-options', 'model.backbone.type=Quad'], 'Quad is not in the'),
        (['plot', *MODELS_OF['quadratic'], '--figure', 'heads', '--query', 8, 0], 'query=(8, 0) must be a row'),
        (['plot', '--figure', 'movement', *MODELS_OF['quadratic'], '--run', 'run'], '--run FOLDER and no model'),
        (['explore', *MODELS_OF['quadratic'], '--images', 'quadratic.pth'], 'quadratic.pth cannot be read as an image'),
        (['prune', *MODELS_OF['quadratic'], '--out', 'a.safetensors', '--heads', '{0: [1]}'], 'must end in .pth'),
    ],
)
def test_mistakes(words, message, command, folder):
    status, _, err = command(*words)
    assert status == 2 and message in err.splitlines()[-1]
    assert not (folder / 'a.pth').exists()
