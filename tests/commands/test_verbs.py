"""The verbs of ``attncnn`` with a small model of timm: what they write is what the functions of the package compute."""

import json
import re
import sys

import numpy as np
import pytest
import timm
import torch
from helpers.images import write_images
from torch.nn.functional import cross_entropy

from attncnn_plugin import attention_maps, follow_state_dict
from attncnn_plugin.analysis import head_report, mean_attention
from attncnn_plugin.commands.model import TimmModel, stacked
from attncnn_plugin.pruning import head_ablation, head_importance, least_important, prunable_heads
from attncnn_plugin.transformers import init_as_convolution
from attncnn_plugin.weights import example_images

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=2)
OPTIONS = ['--model-kwargs', *(f'{name}={value}' for name, value in SMALL.items())]
MODEL = ['--timm', 'vit_tiny_patch16_224', '--checkpoint', 'vit.pth', *OPTIONS]
IMAGES = ['--images', 'images']


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


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture
def done(command):
    """Runs a verb that should succeed, and gives its output; three lines are last."""

    def run(*words):
        status, out, err = command(*words)
        assert status == 0, err
        *_, blank, done, where, following = out.splitlines()
        assert blank == '' and done and where and following.startswith('Next: ')
        return out

    return run


def loaded_model():
    return TimmModel('vit_tiny_patch16_224', 'vit.pth', **SMALL)


def test_maps(done):
    said = done('maps', *IMAGES, '--num-images', 2, '--layers', 'blocks.1.*', '--out', 'new/maps.npz', *MODEL)
    assert 'Attention of 1 layers' in said and '2x3x17x17' in said and 'Saved new/maps.npz' in said
    loaded = loaded_model()
    saved, expected = np.load('new/maps.npz'), attention_maps(loaded.model, stacked(loaded.images(['images'], 2)))
    assert saved['images'].tolist() == ['0.png', '0.png'] and set(saved) == {'images', 'blocks.1.attn'}
    assert np.allclose(saved['blocks.1.attn'], expected['blocks.1.attn'], atol=1e-6)


def test_report(done, folder):
    said = done('report', *IMAGES, '--json', 'new/report.json', *MODEL)
    assert said.startswith('layer ') and 'blocks.1.attn: mean over 6 images, 4x4 tokens, 3 heads\n' in said
    assert 'nearest shift: the shift that' in said and 'Saved new/report.json' in said
    report = json.loads((folder / 'new/report.json').read_text())
    assert (report['model'], report['checkpoint'], report['num_images']) == ('vit_tiny_patch16_224', 'vit.pth', 6)
    by_position = ['--timm', 'sa_quadratic_small', '--pretrained']  # no images are needed
    said = done('report', '--layers', 'blocks.1.*', *by_position)
    assert 'blocks.1.attn: by position, 16x16 tokens' in said and 'blocks.0' not in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.fixture
def drawn(monkeypatch):
    """The arguments of the functions that draw, and of that which saves."""
    plot = pytest.importorskip('attncnn_plugin.visualization')
    found = []
    for name in [name for name in vars(plot) if name.startswith('plot_')]:
        monkeypatch.setattr(plot, name, lambda *args, name=name, **options: found.append((name, args, options)))
    monkeypatch.setattr(plot, 'save_figure', lambda figure, path: found.append(path))
    return found


@pytest.mark.parametrize('words, chosen', [((), None), (('--query', 1, 2, '--layers', 'blocks.0.*'), 'blocks.0.*')])
def test_a_figure_of_an_image(words, chosen, done, drawn):
    done('plot', '--figure', 'attention', '--images', 'images/dog/1.png', '--out', 'a.svg', *words, *MODEL)
    (function, (model, images, layers, query), options), path = drawn
    assert (function, options, path) == ('plot_attention', dict(overlay=True), 'a.svg')
    loaded = loaded_model()
    assert torch.equal(images, stacked(loaded.images(['images/dog/1.png'], 1)))
    assert (layers, query) == (chosen, [1, 2] if words else None)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.model.state_dict().items())


@pytest.mark.parametrize('name, query', [('centers', []), ('heads', []), ('heads', ['--query', 1, 2])])
def test_figures_of_mean_maps(name, query, done, drawn):
    done('plot', '--figure', name, *IMAGES, '--layers', 'blocks.1.*', *query, *MODEL)
    (function, (maps, *others), options), path = drawn
    assert (function, others, options) == (f'plot_{"attention_" * (name == "centers")}{name}', others, {})
    assert path == f'{name}.png' and others == ([] if name == 'centers' else [query[1:] or None])
    loaded = loaded_model()
    expected = mean_attention(loaded.model, stacked(loaded.images(['images'], 100)), layers='blocks.1.*')
    assert maps.keys() == expected.keys() == {'blocks.1.attn'}
    assert torch.allclose(maps['blocks.1.attn'].probs, expected['blocks.1.attn'].probs, atol=1e-6)


def test_a_figure_of_distances(done, drawn):
    done('plot', '--figure', 'distance', *IMAGES, *MODEL)
    (function, (reports,), _), _ = drawn
    loaded = loaded_model()
    expected = head_report(loaded.model, stacked(loaded.images(['images'], 100)))
    assert function == 'plot_attention_distance' and reports == {'vit_tiny_patch16_224': expected}


def test_explore(done, folder):
    said = done('explore', '--images', 'images/cat/0.png', 'images/dog', '--out', 'page.html', *MODEL)
    assert 'A page of 4 images' in said and re.search(r'Saved page.html, 0\.\d MB', said)
    assert 'Attention explorer: vit_tiny_patch16_224<' in (folder / 'page.html').read_text()
    done('explore', '--images', *example_images().values(), '--timm', 'sa_quadratic_small', '--pretrained')
    assert (folder / 'explorer.html').stat().st_size > 1e5


def loss(model, batch):
    logits = model(batch[0])
    return cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).sum()


def batches():
    loaded = loaded_model()
    files = [f'images/{label}/{i}.png' for label in ('cat', 'dog') for i in range(3)]
    return loaded.model, [(stacked(loaded.images(files, 6)), torch.tensor([0, 0, 0, 1, 1, 1]))]


def test_rank(done, folder):
    """The most important head first; labels are those of the subfolders, or what the model predicts."""
    pytest.importorskip('matplotlib')
    said = done('rank', *IMAGES, *MODEL)
    model, images = batches()
    ablation, importance = head_ablation(model, images, loss), head_importance(model, images, loss)
    assert f'loss {ablation.loss:.4f}, accuracy {ablation.accuracy:.1%}; right is what the subfolders say' in said
    rows = re.findall(r'^(blocks\S+) +(\d) +(\S+) +(\S+) +(\S+)$', said, re.MULTILINE)
    assert len(rows) == 6 and max(map(len, said.splitlines())) <= 80
    values = [float(importance[name][int(head)]) for name, head, *_ in rows]
    assert values == sorted(values, reverse=True)
    for name, head, value, change, accuracy in rows:
        assert float(value) == pytest.approx(float(importance[name][int(head)]), abs=1e-3)
        assert float(change) == pytest.approx(float(ablation.zero_loss[name][int(head)]), abs=1e-4)
        assert accuracy == f'{ablation.zero_accuracy[name][int(head)]:+.1%}'
    assert (folder / 'rank.png').stat().st_size > 1e4
    said = done('rank', '--images', 'images/cat', '--layers', 'blocks.1.*', '--out', 'a.svg', *MODEL)
    assert 'accuracy 100.0%; right is what the whole model predicts' in said and 'blocks.0' not in said


@pytest.mark.parametrize(
    'options, amount',
    [
        (['--share', '30%', *IMAGES], dict(keep=4)),
        (['--keep', 3, '--criterion', 'ablation', *IMAGES], dict(keep=3)),
        (['--threshold', 0.5, '--layers', 'blocks.0.*', *IMAGES], dict(threshold=0.5)),
    ],
)
def test_prune_by_score(options, amount, done, folder):
    (folder / 'p.pth').unlink(missing_ok=True)
    said = done('prune', *options, '--out', 'p.pth', *MODEL)
    model, images = batches()
    ablating, layers = 'ablation' in options, 'blocks.0.*' if '--layers' in options else None
    scores = (
        head_ablation(model, images, loss).zero_loss
        if ablating
        else head_importance(model, images, loss, layers=layers)
    )
    gone = least_important(scores, **amount)
    check_pruned('p.pth', gone)
    for name, heads in gone.items():
        assert said.count(name) == 1 and f'{name}: 3 heads, now without {", ".join(map(str, heads))}\n' in said
    number = sum(map(len, gone.values()))
    assert f'{number} of 6 heads removed; ' in said and 'right is what the subfolders say' in said


def check_pruned(path, gone):
    """timm's model takes the pruned checkpoint when it is told to."""
    model, state = timm.create_model('vit_tiny_patch16_224', **SMALL), timm.models.load_state_dict(path)
    follow_state_dict(model, state)
    model.load_state_dict(state)
    left = {name: layer.num_heads for name, layer in prunable_heads(model).items()}
    assert left == {name: 3 - len(gone.get(name, ())) for name in left}


def test_prune_named_random_and_degenerate_heads(done, folder):
    said = done('prune', '--heads', '{1: [0, 2]}', '--out', 'named.safetensors', *MODEL)
    check_pruned('named.safetensors', {'blocks.1.attn': [0, 2]})
    assert (
        '2 of 6 heads removed; multiply-adds per image: 337k → 301k (89%)\nSaved named.safetensors, 18.0k of 19.6k p'
        in said
    )
    done('prune', '--criterion', 'random', '--multiply-adds', '95%', '--out', 'random.pth', *MODEL)
    said = done('prune', '--criterion', 'degenerate', *IMAGES, '--out', 'content.pth', *MODEL)
    assert '0 of 6 heads removed' in said
    said = done(
        'prune', '--criterion', 'degenerate', '--timm', 'sa_generalized_small', '--pretrained', '--out', 'g.pth'
    )
    assert said.count('stripe     condition number 1.3e+05 > 1e+03') == 1 and '1 of 36 heads removed' in said
    again = ['--timm', 'sa_generalized_small', '--checkpoint', 'g.pth']
    assert '16x16 tokens, 8 heads' in done('report', *again)  # the commands take what they have pruned


def test_convert(done, command, folder):
    cnn = ['--timm', 'resnet18', '--model-kwargs', 'num_classes=3', 'in_chans=1']
    done('convert', '--layers', 'layer4.1.conv*', '--alpha', 40, '--out', 'cnn.pth', *cnn)
    model = timm.create_model('resnet18', num_classes=3, in_chans=1)
    state = torch.load('cnn.pth')['state_dict']
    follow_state_dict(model, state)
    model.load_state_dict(state)
    assert (
        type(model.layer4[1].conv2).__name__ == 'QuadraticImageAttention'
        and type(model.layer4[0].conv2).__name__ == 'Conv2d'
    )
    phased = ['--timm', 'cmhsa3_patch16_224', '--model-kwargs', 'img_size=32', 'patch_size=8', 'depth=1']
    said = done('convert', '--out', 'phase.pth', *phased, 'phase=conv')
    assert 'Layers that are attention now: 1' in said
    assert 'blocks.0.attn.value.weight' in torch.load('phase.pth')['state_dict']
    status, _, err = command('convert', '--out', 'other.pth', '--alpha', '2', *phased, 'phase=conv')
    assert status == 2 and '--layers and --alpha are for a CNN: cmhsa3_patch16_224 has two phases' in err


def test_start(done, folder):
    options = ['--alpha', 3, '--seed', 2, '--shifts', 'random', '--kernel-size', 3, '--method', 'gaussian']
    said = done('start', '--out', 'new/start.safetensors', *options, '--timm', 'vit_tiny_patch16_224', *OPTIONS)
    torch.manual_seed(2)
    model = timm.create_model('vit_tiny_patch16_224', **SMALL)
    assert str(init_as_convolution(model, alpha=3, seed=2, shifts='random')) in said
    saved = timm.create_model('vit_tiny_patch16_224', **SMALL, checkpoint_path='new/start.safetensors').state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


MISTAKES = {
    'maps': {
        '': '--images FOLDER',
        '--images nowhere.png': 'nowhere.png cannot be read as an image',
        '--images 7': 'image 7 must be a file: vit_tiny_patch16_224 has no test set',
        '--images vit.pth': 'vit.pth cannot be read as an image',
        '--images new --layers x': 'new holds no image files',
        '--images images --layers x': 'layers chooses none of the attention that was seen: blocks.0.attn',
        '--images images --num-images 0': '--num-images: 0 must be a whole number, at least 1',
        '--images images --out a.pt': '--out a.pt must end in .npz',
    },
    'report': {
        '--json images': '--json images must end in .json',
        '--images images --json vit.pth': '--json vit.pth must end in .json',
        '--cfg-options a=1': '--cfg-options is for --mm',
        '--hf vit': 'argument --timm: not allowed with argument --hf',
    },
    'plot': {
        '--figure centers': '--images FOLDER',
        '--figure movement --run x': '--figure movement is of a training: give --run FOLDER and no model',
        '--figure centers --images images --query 1 2': '--query is for --figure attention and heads',
        '--figure heads --images images --out a.gif': '--out a.gif must end in .png or .svg or .pdf',
        '--figure heads --images images/cat/0.png --out images/cat/0.png': '0.png is read, or in a folder that is read',
        '--figure heads --images images --out vit.pth/a.png': 'vit.pth is no folder, or not yours',
    },
    'explore': {
        '--images images --max-size 0': '--max-size 0.0 must be above 0',
        '--images images --out images/cat/0.png': '--out images/cat/0.png must end in .html',
    },
    'rank': {
        '--images new/class': 'holds no image files',
        '--images images/cat --out a.txt': 'must end in .png or .svg',
        '--images images --out images/dog/1.png': '1.png is read, or in a folder that is read: name a new file',
    },
    'prune': {
        '--out x.pth': "which heads go? one of --heads '{0: [1]}'",
        '--out x.pth --share 30': '30 must be a share between 0 and 1, such as 30%',
        '--out x.pth --share 30%': '--images FOLDER',
        '--out x.pth --heads {0:[1]} --share 0.5': 'which heads go?',
        '--out x.pth --heads 7': "'7' must be the heads of some blocks",
        '--out x.pth --heads {0:[7]}': 'heads=[7] must be different heads from 0 to 2',
        '--out x.pth --share 0.5 --layers block.*': '--layers block.* of vit_tiny_patch16_224 has no',
        '--out images --heads {0:[1]}': '--out images is a folder',
        '--out vit.pth --heads {0:[1]}': '--out vit.pth exists already: name a new one',
        '--out vit.pth/a.pth --heads {0:[1]}': 'vit.pth is no folder, or not yours',
    },
    'convert': {'--out x.pth': "say which convolutions, --layers 'layer4.*.conv2'"},
    'start': {'--out x.pth --alpha -1': 'alpha=-1.0 must be a number above 0'},
}


@pytest.mark.parametrize('verb', MISTAKES)
def test_mistakes(verb, command, folder):
    """Status 2, and a sentence without a traceback that names the argument; nothing is written."""
    (folder / 'new/class').mkdir(parents=True, exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob('*')}
    for options, message in MISTAKES[verb].items():
        status, out, err = command(verb, *options.split(), *MODEL)
        assert status == 2 and message in err.splitlines()[-1], (options, err)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob('*')} == before


def test_classes_that_are_not_those_of_the_model(command):
    model = ['--timm', 'vit_tiny_patch16_224', '--model-kwargs', *OPTIONS[1:-1], 'num_classes=3']
    assert len(command('rank', '--timm', 'vit_tiny_patch61_224')[2].splitlines()) == 1  # what is wrong, nothing else
    status, _, err = command('rank', *IMAGES, *model)
    assert 'The weights of vit_tiny_patch16_224 are random: give --pretrained or --checkpoint' in err
    assert status == 2 and '--images images has 2 folders, but the model 3 classes: give a folder for each' in err


def test_figures_without_matplotlib(command, monkeypatch):
    for name in [name for name in sys.modules if name.startswith('attncnn_plugin.visualization')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, 'attncnn_plugin.commands.rank', raising=False)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    status, _, err = command('rank', *IMAGES, *MODEL)
    assert status == 2 and "the figures need matplotlib: pip install 'attncnn_plugin[vis]'" in err
