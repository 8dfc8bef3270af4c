"""The tools with models of timm: ``--timm NAME``, for figures, reports and pruning."""

import json
import sys

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from helpers.images import write_images
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip('matplotlib')

from attncnn_plugin import follow_state_dict, visualization
from attncnn_plugin.analysis import mean_attention
from attncnn_plugin.loaded_model import TimmModel
from attncnn_plugin.pruning import head_importance, prunable_heads
from attncnn_plugin.weights import example_images

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=2)
OPTIONS = ['--model-kwargs', *(f'{name}={value}' for name, value in SMALL.items())]
MODEL = ['--timm', 'vit_tiny_patch16_224', '--checkpoint', 'vit.pth', *OPTIONS]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A checkpoint, and images of two classes."""
    folder = tmp_path_factory.mktemp('timm')
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', **SMALL)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.5)
    torch.save(model.state_dict(), folder / 'vit.pth')
    write_images(folder / 'images', ['cat', 'dog'], 3, size=40)
    return folder


@pytest.fixture
def tool(tool, folder, monkeypatch):
    """Runs a tool in this process, in the folder."""
    monkeypatch.chdir(folder)
    return tool


def loaded_model():
    return TimmModel('vit_tiny_patch16_224', 'vit.pth', settings=SMALL)


def test_images(folder, monkeypatch):
    """As timm's transforms give them; the picture is the image before it was normalized."""
    monkeypatch.chdir(folder)
    loaded = loaded_model()
    image = loaded.image('images/cat/0.png')
    assert image.shape == (3, 32, 32) and not loaded.model.training
    picture = loaded.picture(image)
    assert picture.dtype == np.uint8 and picture.shape == (32, 32, 3)
    assert torch.allclose(torch.from_numpy(picture).permute(2, 0, 1) / 255 * 2 - 1, image, atol=1e-5)  # mean, std 0.5
    assert loaded.some_inputs('images', 4).shape == (4, 3, 32, 32)
    for which, message in [('7', 'image 7 must be a file'), ('vit.pth', 'cannot be read as an image')]:
        with pytest.raises(ValueError, match=message):
            loaded.image(which)
    with pytest.raises(ValueError, match='no test dataset: give images'):
        loaded.test_images(3)
    grey = TimmModel('vit_tiny_patch16_224', settings=dict(SMALL, in_chans=1))
    image = grey.image('images/cat/0.png')
    assert image.shape == (1, 32, 32) and grey.picture(image).shape == (32, 32, 3)
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    for bits, values in ((8, levels.astype(np.uint8)), (16, levels * 257)):
        Image.fromarray(values).save(f'{bits}bits.png')
    assert torch.equal(grey.image('16bits.png'), grey.image('8bits.png'))


@pytest.mark.parametrize(
    'options',
    [
        ['centers', '--images', 'images'],
        ['probabilities', '--images', 'images', '--zoom', 3, '--query', 1, 2],
        ['content', '--image', 'images/dog/1.png'],
    ],
)
def test_figures(options, tool, monkeypatch):
    """Drawn of the attention of patches to patches."""
    drawn = []
    name = 'plot_attention_centers' if options[0] == 'centers' else 'plot_attention_probs'
    draw = getattr(visualization, name)
    monkeypatch.setattr(
        visualization, name, lambda *args, **kwargs: drawn.append((args, kwargs)) or draw(*args, **kwargs)
    )
    tool('visualization/plot_attention.py', *MODEL, '--figure', *options, '--out', 'figure.png')
    ((args, kwargs),) = drawn
    loaded = loaded_model()
    images = loaded.inputs([loaded.image(options[2])]) if options[1] == '--image' else loaded.some_inputs('images', 9)
    for layer, maps in mean_attention(loaded.model, images).items():
        assert torch.allclose(args[0][layer].probs, maps.probs, atol=1e-6)
    if options[0] == 'probabilities':
        assert args[1:] == ([1, 2], 3)


@pytest.mark.parametrize('name, which', [('attention', '--image'), ('heads', '--images')])
def test_figures_of_a_model_and_images(name, which, tool, monkeypatch):
    drawn, path = [], 'images/dog/1.png' if which == '--image' else 'images'
    draw = getattr(visualization, f'plot_{name}')
    monkeypatch.setattr(visualization, f'plot_{name}', lambda *args: drawn.append(args) or draw(*args))
    options = ['--figure', name, which, path, '--out', 'figure.png']
    tool('visualization/plot_attention.py', *MODEL, *options)
    ((model, images),) = drawn
    loaded = loaded_model()
    assert torch.equal(
        images, loaded.inputs([loaded.image(path)] if which == '--image' else loaded.read_folder(path, 9))
    )
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.model.state_dict().items())


def test_distance(tool, folder, monkeypatch):
    """By the reports of two models."""
    for name in ('vit', 'other'):
        model = MODEL if name == 'vit' else ['--timm', 'vit_tiny_patch16_224', *OPTIONS]
        tool('analysis_tools/analyze_heads.py', *model, '--images', 'images', '--json', f'{name}.json')
    figures = []
    monkeypatch.setattr(visualization, 'save_figure', lambda figure, path: figures.append(figure))
    options = ['--figure', 'distance', '--reports', 'vit.json', 'b=other.json', '--out', 'a.png']
    tool('visualization/plot_attention.py', *options)
    far, other, near, _ = figures[0].axes
    assert (far.get_title(), other.get_title()) == ('vit', 'b')
    lines = [(line, axes.get_ylim()) for axes in figures[0].axes for line in axes.get_lines()]
    assert all(bottom == 0 and (line.get_ydata() <= top).all() for line, (bottom, top) in lines)  # of all models
    with pytest.raises(SystemExit, match='a.json is no report of analyze_heads.py --json'):
        (folder / 'a.json').write_text('[]')
        tool('visualization/plot_attention.py', *options[:-2], 'c=a.json', '--out', 'a.png')
    for reports, message in (({'a': {'layers': []}}, 'the report of a has no layers with heads'), ({}, 'is empty')):
        with pytest.raises(ValueError, match=message):
            visualization.plot_attention_distance(reports)
    layers = json.loads((folder / 'vit.json').read_text())['layers']
    for axes, heads in ((far, lambda head: head['distance'] / 4), (near, lambda head: head['mass_3x3'])):
        dots, mean = axes.get_lines()[:-1], axes.get_lines()[-1]
        expected = [[100 * heads(head) for head in layer['heads']] for layer in layers]
        assert [list(line.get_ydata()) for line in dots] == [pytest.approx(heads) for heads in expected]
        assert list(mean.get_ydata()) == pytest.approx([np.mean(heads) for heads in expected])


def multiply_adds(model):
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.eval()(torch.zeros(1, 3, 32, 32))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    'options, left',
    [
        (['--heads', '{1: [0, 2]}'], [3, 1]),
        (['--criterion', 'importance', '--keep', '4', '--images', 'images'], None),
        (['--criterion', 'entropy', '--images', 'images'], [3, 3]),
    ],
)
def test_pruning(options, left, tool, folder, monkeypatch, capsys):
    """timm's model takes the pruned checkpoint when it is told to."""
    out = 'pruned.safetensors' if '--heads' in options else 'pruned.pth'
    tool('model_converters/prune_heads.py', out, *options, *MODEL)
    said = capsys.readouterr().out
    assert f'Saved {out}' in said
    model, state = timm.create_model('vit_tiny_patch16_224', **SMALL), timm.models.load_state_dict(out)
    follow_state_dict(model, state)
    model.load_state_dict(state)
    before, after = (multiply_adds(own) for own in (timm.create_model('vit_tiny_patch16_224', **SMALL), model))
    assert f'{before:,} multiply-adds of an image became {after:,}, {after / before:.1%} of them' in said
    assert (after < before) == ('entropy' not in options)
    numbers = [layer.num_heads for layer in prunable_heads(model).values()]
    if left is None:
        loaded = loaded_model()
        files = [f'images/{label}/{i}.png' for label in ('cat', 'dog') for i in range(3)]
        batch = loaded.inputs([loaded.image(path) for path in files]), torch.tensor([0, 0, 0, 1, 1, 1])
        importance = head_importance(
            loaded.model, [batch], lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
        )
        threshold = torch.cat(list(importance.values())).topk(4).values.min()
        left = [int((own >= threshold).sum()) for own in importance.values()]
    assert numbers == left


@pytest.mark.parametrize(
    'path, options, message',
    [
        ('model_converters/prune_heads.py', ['x.pth', '--criterion', 'entropy'], 'give --images FOLDER, or --heads'),
        ('model_converters/prune_heads.py', ['a.py', 'b.pth', 'x.pth'], 'must be only OUT'),
        ('model_converters/prune_heads.py', ['images', '--heads', '{0: [1]}'], 'OUT images is a folder'),
        ('model_converters/prune_heads.py', ['x.pth', '--heads', ''], "--heads '' must be the heads of each block"),
        (
            'model_converters/prune_heads.py',
            ['x.pth', '--criterion', 'importance', '--keep', '4', '--images', 'images', '--layers', 'block.*'],
            "--layers block.*: there is no attention with layers='block.*'",
        ),
        ('model_converters/prune_heads.py', ['x.pth', '--heads', '{0: [1]}', '--keep', '3'], '--keep: so many heads'),
        ('model_converters/prune_heads.py', ['x.pth'], "nothing says which heads go: give --heads '{0: [1]}', --crit"),
        ('visualization/plot_attention.py', ['--figure', 'centers', '--out', 'a.png'], 'give images of your own'),
        ('visualization/plot_attention.py', ['--figure', 'distance', '--out', 'a.png'], 'give --reports JSON'),
        ('visualization/plot_attention.py', ['--figure', 'attention', '--out', 'a.png'], 'give --image'),
        ('visualization/plot_attention.py', ['--figure', 'heads', '--out', 'a.png', '--query', '1', '2'], '--size are'),
    ],
)
def test_mistakes(path, options, message, tool, capsys):
    with pytest.raises(SystemExit) as stop:
        tool(path, *options, *MODEL)
    assert message in (str(stop.value) if stop.value.code != 2 else capsys.readouterr().err)


@pytest.mark.parametrize(
    'path, options',
    [
        ('analysis_tools/analyze_heads.py', [*MODEL, '--images', 'images', '--json', '/dev/full']),
        (
            'visualization/plot_attention.py',
            [*MODEL, '--figure', 'heads', '--images', 'images', '--out', 'vit.pth/a.png'],
        ),
        ('visualization/attention_explorer.py', ['images/cat/0.png', *MODEL, '--out', 'vit.pth/a.html']),
        ('model_converters/prune_heads.py', ['vit.pth/a.pth', *MODEL, '--heads', '{0: [1]}']),
        ('model_converters/start_as_convolution.py', ['vit_tiny_patch16_224', 'vit.pth/a.pth', *OPTIONS]),
    ],
)
def test_a_file_that_cannot_be_written(path, options, tool):
    with pytest.raises(SystemExit, match=r'^\[Errno .*'):
        tool(path, *options)


@pytest.mark.parametrize(
    'path, options',
    [
        ('analysis_tools/analyze_heads.py', ['--images', 'images']),
        ('visualization/plot_attention.py', ['--figure', 'centers', '--images', 'images', '--out', 'a.png']),
        ('visualization/attention_explorer.py', ['images/cat/0.png']),
        ('model_converters/prune_heads.py', ['x.pth', '--heads', '{0: [1]}']),
    ],
)
def test_a_name_that_timm_does_not_know(path, options, tool):
    with pytest.raises(SystemExit) as stop:
        tool(path, *options, '--timm', 'vit_tiny_patch61_224')
    message = '--timm vit_tiny_patch61_224 is no model of timm: did you mean vit_tiny_patch16_224 or '
    assert stop.value.code.startswith(message) and '\n' not in stop.value.code


@pytest.mark.parametrize(
    'path, options, settings',
    [
        ('visualization/attention_explorer.py', [], '--model-kwargs'),
        ('analysis_tools/analyze_heads.py', [], '--cfg-options'),
        ('reproduce.py', ['C20-1'], '--cfg-options'),
    ],
)
def test_a_file_after_settings(path, options, settings, tool, capsys):
    if settings == '--cfg-options':
        pytest.importorskip('mmpretrain')
    with pytest.raises(SystemExit) as stop:
        tool(path, *options, settings, 'a=1', 'b=c=2', 'photo.jpg')
    message = f'argument {settings}: photo.jpg is no key=value: name configs, checkpoints and images before this option'
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_figures_without_matplotlib(tool, monkeypatch):
    for name in [name for name in sys.modules if name.startswith('attncnn_plugin.visualization')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(SystemExit, match=r"the figures need matplotlib: pip install 'attncnn_plugin\[vis\]'"):
        tool('visualization/plot_attention.py', *MODEL, '--figure', 'centers', '--images', 'images', '--out', 'a.png')


def test_explorer(tool, folder, capsys):
    """A page of images of a folder, by the name of the model."""
    model = ['--timm', 'vit_tiny_patch16_224.augreg_in21k', *MODEL[2:]]
    tool('visualization/attention_explorer.py', 'images/cat/0.png', 'images/dog/1.png', '--out', 'page.html', *model)
    assert 'Saved page.html' in capsys.readouterr().out
    page = (folder / 'page.html').read_text()
    assert 'Attention explorer: vit_tiny_patch16_224.augreg_in21k<' in page
    trained = ['--timm', 'sa_quadratic_small', '--pretrained']
    tool('visualization/attention_explorer.py', *example_images().values(), '--out', 'page.html', *trained)
    assert 'are random' not in capsys.readouterr().err
    with pytest.raises(SystemExit, match='image 7 must be a file'):
        tool('visualization/attention_explorer.py', '7', *MODEL)
    with pytest.raises(SystemExit):
        tool('visualization/attention_explorer.py', 'a.py', 'b.pth')
    assert 'a.py b.pth must be CONFIG CHECKPOINT and an image, or add --timm NAME' in capsys.readouterr().err
