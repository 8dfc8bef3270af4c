"""The tools without a config: checkpoints of timm's training script, and folders of Hugging Face transformers."""

from argparse import Namespace

import pytest
import timm
import torch
from helpers.images import write_images
from helpers.small import SMALL, small_timm
from helpers.vits import OF_TIMM, small_vit

pytest.importorskip('matplotlib')

from attncnn_plugin import load_hugging_face
from attncnn_plugin.loaded_model import HuggingFaceModel, TimmModel
from attncnn_plugin.pruning import prunable_heads, prune_heads

VIT, SWIN = 'vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_images(tmp_path / 'images', ['a', 'b'], 2, size=40).parent


@pytest.mark.parametrize('name', [VIT, SWIN])
def test_checkpoints_of_the_training_script(name):
    """The average's weights, and the settings that are given."""
    model = timm.create_model(name, **OF_TIMM[name]).eval()
    content = dict(arch=name, args=Namespace(lr=0.1), state_dict_ema=model.state_dict(), state_dict={})
    torch.save(content, 'model.pth.tar')
    loaded = TimmModel(name, 'model.pth.tar', settings=OF_TIMM[name])
    images = loaded.some_inputs('images', 2)
    assert images.shape[2:] == (32, 32) and torch.equal(loaded.model(images), model(images))
    message = r'does not fit .*: .* torch.Size\(\[5, .* torch.Size\(\[7, .*; give .* --model-kwargs num_classes='
    with pytest.raises(ValueError, match=message) as error:
        TimmModel(name, 'model.pth.tar', settings={**OF_TIMM[name], 'num_classes': 7})
    assert '\n' not in str(error.value)


def test_no_checkpoint(folder):
    (folder / 'x.safetensors').write_text('no weights')
    torch.save({'encoder.layer.0.weight': torch.zeros(2)}, folder / 'other.pth')
    for path, message in [
        ('no.safetensors', 'no.safetensors is no file'),
        ('x.safetensors', 'is damaged or no'),
        ('other.pth', 'other.pth does not fit .*: .* Missing key.* or another --timm'),
    ]:
        with pytest.raises((OSError, ValueError), match=message):
            TimmModel(VIT, path)


@pytest.fixture
def pruned(folder):
    pytest.importorskip('transformers.models')
    model = small_vit('transformers.ViT')
    prune_heads(model, {0: [1]})
    model.save_pretrained(folder / 'vit')
    return model.eval()


def test_tools_take_a_folder(pruned, tool, folder, capsys):
    model = ['--hf', 'vit']
    tool('analysis_tools/analyze_heads.py', *model, '--images', 'images', '--json', 'report.json')
    printed = capsys.readouterr()
    assert '4x4 tokens, 2 heads' in printed.out and '4x4 tokens, 3 heads' in printed.out
    assert printed.err.count('no preprocessor_config.json: images are scaled to 32x32 pixels, with mean and') == 1
    tool(
        'visualization/plot_attention.py', *model, '--figure', 'content', '--image', 'images/a/0.png', '--out', 'a.png'
    )
    tool('visualization/attention_explorer.py', 'images/a/0.png', *model, '--out', 'page.html')
    assert 'Attention explorer: vit<' in (folder / 'page.html').read_text()
    importance = ['--criterion', 'importance', '--keep', 3, '--images', 'images']
    tool('model_converters/prune_heads.py', 'less', *model, *importance)
    heads = [layer.num_heads for layer in prunable_heads(load_hugging_face('less')).values()]
    assert sum(heads) == 3
    tool('model_converters/prune_heads.py', 'features', *model, '--criterion', 'duplicate', '--images', 'images')
    for options in (['less', '--heads', '{0: [0]}'], ['less', '--checkpoint', 'x'], ['less', '--timm', 'x']):
        with pytest.raises(SystemExit):
            tool('model_converters/prune_heads.py', *options, *model)
        error = capsys.readouterr().err
        assert any(part in error for part in ('OUT less exists already', 'are for --timm', 'not allowed with'))


def test_images_as_the_folder_says(pruned, folder):
    from transformers import ViTImageProcessor

    by_hand = ViTImageProcessor(size=dict(height=32, width=32), image_mean=[0.1] * 3, image_std=[0.3] * 3)
    by_hand.save_pretrained('vit')
    loaded = HuggingFaceModel('vit')
    image = loaded.image('images/a/0.png')
    picture = torch.from_numpy(loaded.picture(image)).permute(2, 0, 1)
    assert torch.allclose((picture / 255 - 0.1) / 0.3, image, atol=0.01)
    images = loaded.inputs([image])
    assert torch.allclose(loaded.model(images).logits, pruned(images).logits, atol=1e-6)
    loaded.save('again')
    assert (folder / 'again/preprocessor_config.json').is_file()
    with pytest.raises(ValueError, match='config.json cannot be read as an image'):
        loaded.image('vit/config.json')
    (folder / 'vit/model.safetensors').write_text('no weights')
    for path, message in [('nowhere', 'nowhere has no config.json: give a folder'), ('vit', '--hf vit cannot be')]:
        with pytest.raises(ValueError, match=message):
            HuggingFaceModel(path)


def test_weights_of_more_heads():
    """The sentence of this package, and no shapes; other errors of timm stay what they are."""
    torch.save(small_timm('sa_quadratic_cifar', num_heads=4).state_dict(), 'model.pth')
    with pytest.raises(
        ValueError, match=r'model.pth does not fit sa_quadratic_cifar: .* blocks.0.attn has 4 heads in '
    ):
        TimmModel('sa_quadratic_cifar', 'model.pth', settings=SMALL)
    with pytest.raises(RuntimeError, match='nothing'):
        TimmModel(f'{VIT}.nothing')


def test_a_model_of_timm_has_no_grid_of_its_own():
    with pytest.raises(ValueError, match=f'the model of {SWIN} has no img_size: give the size of its grid in tokens'):
        _ = TimmModel(SWIN, settings=OF_TIMM[SWIN]).grid
