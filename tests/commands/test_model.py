"""Models of timm and Hugging Face with their preprocessing: checkpoints, folders, and images as they take them."""

import io
import itertools
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.images import write_images
from helpers.small import SMALL, small_timm
from helpers.vits import OF_TIMM, small_vit
from PIL import Image
from torchvision.datasets import ImageFolder

from attncnn_plugin import load_hugging_face
from attncnn_plugin.commands.model import HuggingFaceModel, Picture, TimmModel, progress, stacked
from attncnn_plugin.pruning import prunable_heads, prune_heads

VIT, SWIN = 'vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_images(tmp_path / 'images', ['a', 'b'], 2, size=40).parent


def test_images(folder):
    """As timm's transforms give them; the picture is the image before it was normalized."""
    loaded = TimmModel(VIT, **OF_TIMM[VIT])
    (image,) = loaded.images(['images/a/0.png'], 9)
    assert image.tensor.shape == (3, 32, 32) and image.name == '0.png' and not loaded.model.training
    assert image.pixels.dtype == np.uint8 and image.pixels.shape == (32, 32, 3)
    normalized = torch.from_numpy(image.pixels).permute(2, 0, 1) / 255 * 2 - 1  # mean and deviation 0.5
    assert torch.allclose(normalized, image.tensor, atol=1e-5)
    labels = [label for _, label in ImageFolder('images').samples]
    assert [own.label for own in loaded.images(['images'], 9)] == labels == [0, 0, 1, 1]
    assert [own.label for own in loaded.images(['images'], 2)] == [0, 1]  # evenly spread
    assert [own.label for own in loaded.images(['images/a', 'images'], 9)] == [None] * 6
    Path('links').mkdir()
    for name in 'ab':
        Path('links', name).symlink_to(Path('images', name).resolve())
    assert [own.label for own in loaded.images(['links'], 9)] == labels
    Image.new('RGB', (4, 4)).save('images/beside.png')
    assert [own.label for own in loaded.images(['images'], 9)] == [None] * 5
    with pytest.raises(ValueError, match=r'2 different sizes after preprocessing, such as \(4, 4\) and \(5, 4\)'):
        stacked([Picture('', torch.zeros(3, size, 4), image.pixels) for size in (5, 4)])


@pytest.mark.parametrize('is_terminal, number, least, most', [(True, 9, 9, 10), (False, 20, 0, 0), (False, 200, 2, 7)])
def test_progress(is_terminal, number, least, most, monkeypatch):
    """A bar on a terminal; in a log a line each half minute, none of short work. The loss stays what it is."""
    stream, seconds = io.StringIO(), itertools.count()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, 'stderr', stream)
    monkeypatch.setattr('tqdm.std.time', lambda: next(seconds))  # a second or two for each
    with progress(lambda model, batch: batch, number, 'heads') as counted:
        assert [counted(None, own) for own in range(number)] == list(range(number))
    assert least <= stream.getvalue().count('heads: ') <= most


def test_grey_images():
    grey = TimmModel(VIT, **OF_TIMM[VIT], in_chans=1)
    tensor, picture = grey.read('images/a/0.png')
    assert tensor.shape == (1, 32, 32) and picture.shape == (32, 32, 3)
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    for bits, values in ((8, levels.astype(np.uint8)), (16, levels * 257)):
        Image.fromarray(values).save(f'{bits}bits.png')
    assert torch.equal(grey.read('16bits.png')[0], grey.read('8bits.png')[0])
    for dtype in (np.float32, np.int32):
        Image.fromarray(levels.astype(dtype)).save('32bits.tif')
        with pytest.raises(ValueError, match='32bits.tif cannot be read as an image: its levels have 32 bits'):
            grey.read('32bits.tif')


@pytest.mark.parametrize('name', [VIT, SWIN])
def test_checkpoints_of_the_training_script(name):
    """The average's weights, and the settings that are given."""
    model = timm.create_model(name, **OF_TIMM[name]).eval()
    content = dict(arch=name, args=Namespace(lr=0.1), state_dict_ema=model.state_dict(), state_dict={})
    torch.save(content, 'model.pth.tar')
    loaded = TimmModel(name, 'model.pth.tar', **OF_TIMM[name])
    images = stacked(loaded.images(['images'], 2))
    assert images.shape[2:] == (32, 32) and torch.equal(loaded.model(images), model(images))
    message = r'does not fit .*: .* torch.Size\(\[5, .* torch.Size\(\[7, .*; give .* --model-kwargs num_classes='
    with pytest.raises(ValueError, match=message) as error:
        TimmModel(name, 'model.pth.tar', **{**OF_TIMM[name], 'num_classes': 7})
    assert '\n' not in str(error.value)


def test_no_model(folder):
    """The sentence of this package, and no shapes; other errors of timm stay what they are."""
    (folder / 'x.safetensors').write_text('no weights')
    torch.save({'encoder.layer.0.weight': torch.zeros(2)}, folder / 'other.pth')
    torch.save(small_timm('sa_quadratic_cifar', num_heads=4).state_dict(), 'heads.pth')
    for name, path, message in (
        (VIT, 'no.safetensors', 'no.safetensors is no file'),
        (VIT, 'x.safetensors', 'is damaged or no'),
        (VIT, 'other.pth', 'other.pth does not fit .*: .* Missing key.* or another --timm'),
        ('sa_quadratic_cifar', 'heads.pth', r'heads.pth does not fit sa_quad.* blocks.0.attn has 4 heads in '),
        ('vit_tiny_patch61_224', None, '--timm vit_tiny_patch61_224 is no .*: did you mean vit_tiny_patch16_224 or '),
        (f'{VIT}.nothing', None, 'nothing'),
    ):
        with pytest.raises((OSError, RuntimeError, ValueError), match=message):
            TimmModel(name, path, **(SMALL if name.startswith('sa_') else {}))


@pytest.fixture
def pruned(folder):
    pytest.importorskip('transformers.models')
    model = small_vit('transformers.ViT')
    prune_heads(model, {0: [1]})
    model.save_pretrained(folder / 'vit')
    return model.eval()


def test_commands_take_a_folder(pruned, command, folder):
    pytest.importorskip('matplotlib')
    model = ['--hf', 'vit']
    status, out, err = command('report', *model, '--images', 'images', '--json', 'report.json')
    assert status == 0 and '4x4 tokens, 2 heads' in out and '4x4 tokens, 3 heads' in out
    assert err.count('no preprocessor_config.json: images are scaled to 32x32 pixels, with mean and') == 1
    for words in (
        ['explore', '--images', 'images/a/0.png'],
        ['rank', '--images', 'images/a'],
        ['prune', '--out', 'less', '--share', '0.4', '--images', 'images/a'],
        ['prune', '--out', 'features', '--criterion', 'degenerate', '--images', 'images'],
    ):
        assert command(*words, *model)[0] == 0
    assert sum(layer.num_heads for layer in prunable_heads(load_hugging_face('less')).values()) == 3
    assert (folder / 'features/config.json').is_file()
    for options, message in (
        (['--out', 'less', '--heads', '{0: [0]}'], '--out less is a folder already: name a new one'),
        (['--out', 'new', '--heads', '{0: [0]}', '--checkpoint', 'x'], 'are for --timm'),
    ):
        status, _, err = command('prune', *options, *model)
        assert status == 2 and message in err


def test_images_as_the_folder_says(pruned, folder):
    from transformers import ViTImageProcessor

    by_hand = ViTImageProcessor(size=dict(height=32, width=32), image_mean=[0.1] * 3, image_std=[0.3] * 3)
    by_hand.save_pretrained('vit')
    loaded = HuggingFaceModel('vit')
    (image,) = loaded.images(['images/a/0.png'], 1)
    assert torch.allclose((torch.from_numpy(image.pixels).permute(2, 0, 1) / 255 - 0.1) / 0.3, image.tensor, atol=0.01)
    images = image.tensor[None]
    assert torch.allclose(loaded.model(images).logits, pruned(images).logits, atol=1e-6)
    loaded.save('again')
    assert (folder / 'again/preprocessor_config.json').is_file()
    with pytest.raises(ValueError, match='config.json cannot be read as an image'):
        loaded.read('vit/config.json')
    (folder / 'vit/model.safetensors').write_text('no weights')
    for path, message in [('nowhere', 'nowhere has no config.json: give a folder'), ('vit', '--hf vit cannot be')]:
        with pytest.raises(ValueError, match=message):
            HuggingFaceModel(path)
