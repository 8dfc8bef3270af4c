"""Models of Hugging Face transformers: saved without some heads and loaded again, and timm's models inside of them."""

import copy
import json
import logging
import re
import subprocess
import sys

import pytest
import timm
import torch
from helpers.processes import environment
from helpers.small import numbers
from helpers.versions import new_hugging_face
from helpers.vits import OF_HUGGING_FACE, SIZE, not_small, output_of, small_vit
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip('transformers.models')  # this folder has the name of the library

from attncnn_plugin import attention_maps, follow_state_dict, load_hugging_face
from attncnn_plugin.convert import convs_to_attention
from attncnn_plugin.heads.found import called
from attncnn_plugin.heads.sizes import NOTE, RECORD
from attncnn_plugin.pruning import head_ablation, prunable_heads, prune_heads
from attncnn_plugin.pruning.importance import plain_products

transformers = sys.modules['transformers']
DTYPE = 'dtype' if tuple(map(int, transformers.__version__.split('.')[:2])) >= (4, 56) else 'torch_dtype'


@pytest.mark.parametrize('name, part', [*((name, '') for name in OF_HUGGING_FACE), ('transformers.ViT', 'vit')])
def test_saved_and_loaded(name, part, tmp_path):
    """Every entry and the outputs are the same; ``from_pretrained`` alone refuses the shapes."""
    model, images = small_vit(name).get_submodule(part), torch.randn(2, 3, SIZE, SIZE)
    first, second = list(prunable_heads(model))[:2]
    prune_heads(model, {first: [0, 2], second: [1]})
    model.save_pretrained(tmp_path)
    loaded = load_hugging_face(tmp_path)
    assert type(loaded) is type(model) and not loaded.training
    assert numbers(loaded) == numbers(model)
    assert all(torch.equal(own, loaded.state_dict()[key]) for key, own in model.state_dict().items())
    assert torch.equal(output_of(loaded, images), output_of(model, images))
    with pytest.raises(RuntimeError, match='ignore_mismatched_sizes|size mismatch'):
        type(model).from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / 'again')
    again = load_hugging_face(tmp_path / 'again', **{DTYPE: torch.float64})
    assert again.dtype == torch.float64 and numbers(again) == numbers(model)


def test_the_folder_says_what_loads_it(tmp_path, monkeypatch, caplog):
    """In its configuration and by the names of records; ``pipeline`` alone refuses it."""
    monkeypatch.setattr(logging.getLogger('transformers'), 'propagate', True)
    model = small_vit('transformers.ViT')
    whole = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match='keep one'):
        prune_heads(model, {0: [0, 1, 2]})
    assert NOTE not in model.config.to_dict()
    prune_heads(model, {0: [1]})
    for own in (model, model.vit):
        own.save_pretrained(tmp_path)
        assert json.loads((tmp_path / 'config.json').read_text())[NOTE].endswith('load_hugging_face(folder)')
    model.save_pretrained(tmp_path)
    transformers.ViTImageProcessor().save_pretrained(tmp_path)
    with pytest.raises((ValueError, RuntimeError)) as error:
        transformers.pipeline('image-classification', model=str(tmp_path))
    if new_hugging_face():
        assert RECORD in caplog.text
    assert 'size mismatch' in str(error.value) + caplog.text
    pruned = copy.deepcopy(model.state_dict())
    follow_state_dict(model, whole)
    assert NOTE not in model.config.to_dict()
    follow_state_dict(model, pruned)
    assert NOTE in model.config.to_dict()


def test_loaded_whole(tmp_path):
    model = small_vit('transformers.ViT')
    model.save_pretrained(tmp_path)
    loaded, info = load_hugging_face(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(own, loaded.state_dict()[key]) for key, own in model.state_dict().items())
    loaded.config.hidden_size = 48  # which no heads explain
    loaded.config.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r'size mismatch for vit\.|with transformers 5\.20 or newer, not [45]\.'):
        load_hugging_face(tmp_path)
    convs_to_attention(model, '*')
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='attention instead of a convolution, .*projection: .*follow_state_dict'):
        load_hugging_face(tmp_path)
    for name in ('Vit', 'pipeline', 'ViTConfig'):
        (tmp_path / 'config.json').write_text(f'{{"model_type": "vit", "architectures": ["{name}"]}}')
        with pytest.raises(ValueError, match=f'has the architecture {name}, which is no model of transformers'):
            load_hugging_face(tmp_path)


def test_missing_weights_are_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger('transformers'), 'propagate', True)
    caplog.set_level(logging.WARNING, logger='transformers')  # whatever another test has set
    small_vit('transformers.ViT').save_pretrained(tmp_path)
    load_hugging_face(tmp_path)
    assert 'classifier' not in caplog.text
    weights = load_file(tmp_path / 'model.safetensors')
    del weights['classifier.weight']
    save_file(weights, tmp_path / 'model.safetensors', dict(format='pt'))
    load_hugging_face(tmp_path)
    assert 'classifier.weight' in caplog.text


def test_loaded_for_other_classes(tmp_path):
    """A new classifier, and everything else as it was."""
    model = small_vit('transformers.ViT')
    prune_heads(model, {0: [1]})
    model.save_pretrained(tmp_path)
    options = dict(num_labels=7, ignore_mismatched_sizes=True)
    loaded, info = load_hugging_face(tmp_path, output_loading_info=True, **options)
    assert {key if isinstance(key, str) else key[0] for key in info['mismatched_keys']} == {
        'classifier.weight',
        'classifier.bias',
    }
    assert type(load_hugging_face(tmp_path, **options)) is type(loaded) is type(model)
    assert loaded.classifier.weight.shape == (7, 24)
    assert all(torch.equal(own, loaded.vit.state_dict()[key]) for key, own in model.vit.state_dict().items())


def test_a_backbone_stays_as_it_was():
    """Its windows pad the smaller grid of the second stage; those of a model alone become smaller, for good."""
    model = not_small(transformers.SwinBackbone(transformers.SwinConfig(**OF_HUGGING_FACE['transformers.Swin'])))
    images = torch.randn(2, 3, SIZE // 2, SIZE // 2)
    expected = model(images).feature_maps[0]
    *_, padded, shifted = attention_maps(model, images).values()
    assert (padded.sum(-1) < 0.99).all() and torch.allclose(shifted.sum(-1), torch.ones(2, 3, 4))
    head_ablation(model, [images], lambda model, images: model(images).feature_maps[0].square().mean())
    assert torch.equal(model(images).feature_maps[0], expected)


def test_timm_inside():
    """``TimmWrapperForImageClassification``: its maps are those of the model inside, and a state dict has its heads."""
    settings = dict(img_size=SIZE, patch_size=8, embed_dim=24, depth=2, num_heads=3)
    if not hasattr(transformers, 'TimmWrapperConfig'):
        pytest.skip(f'transformers {transformers.__version__} has no models of timm')
    config = transformers.TimmWrapperConfig(
        architecture='vit_tiny_patch16_224', model_args=settings, num_labels=5, do_pooling=True
    )
    model, fresh = (transformers.TimmWrapperForImageClassification(config).eval() for _ in range(2))
    inside = timm.create_model('vit_tiny_patch16_224', num_classes=5, **settings).eval()
    inside.load_state_dict(model.timm_model.state_dict())
    images = torch.randn(2, 3, SIZE, SIZE)
    for (name, own), expected in zip(attention_maps(model, images).items(), attention_maps(inside, images).values()):
        assert name.startswith('timm_model.blocks.') and torch.equal(own, expected)
    prune_heads(model, {0: [1]})
    assert follow_state_dict(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(output_of(fresh, images), output_of(model, images))


@pytest.mark.slow
def test_each_step_of_the_page_in_a_program_of_its_own(repository, tmp_path):
    """All but the last, ``hf upload``, which needs an account."""
    page = (repository / 'docs/hugging_face.md').read_text()
    prune, save, *others = re.findall(r'^```python$\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    assert re.findall(r'^```bash$\n(.*?)^```$', page, re.MULTILINE | re.DOTALL) == [
        'hf upload NAME/pruned-vit pruned\n'
    ]
    for program in (prune + save, *others):
        command = [sys.executable, '-c', program]
        subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), check=True)


@pytest.mark.parametrize('name', ['deit_small_patch16_224', pytest.param('CLIPVisionModel', marks=pytest.mark.slow)])
def test_numbers_of_the_page(name, repository):
    """What half of the heads are, of the models' full size: twelve times what a model of one layer loses."""

    def size_of(model):
        with FlopCounterMode(display=False) as counter, plain_products(), torch.no_grad():
            called(model, inputs)
        return torch.tensor([sum(own.numel() for own in model.parameters()), counter.get_total_flops() // 2])

    images = torch.randn(1, 3, 224, 224)
    if name == 'CLIPVisionModel':
        inputs = dict(pixel_values=images)
        models = [
            transformers.CLIPVisionModel(transformers.CLIPVisionConfig(patch_size=16, num_hidden_layers=depth)).eval()
            for depth in (1, 12)
        ]
    else:
        inputs, models = images, [timm.create_model(name, depth=depth).eval() for depth in (1, 12)]
    one, whole = map(size_of, models)
    (layer,) = prunable_heads(models[0], inputs).values()
    prune_heads(models[0], {layer.name: range(layer.num_heads // 2)}, inputs)
    left = whole - 12 * (one - size_of(models[0]))
    (weights, rest), (products, others) = zip(whole.tolist(), left.tolist())
    cells = f'| {weights / 1e6:.1f}M → {rest / 1e6:.1f}M | {products / 1e9:.2f}G → {others / 1e9:.2f}G |'
    lines = (repository / 'docs/hugging_face.md').read_text().splitlines()
    assert any(name in line and line.endswith(cells) for line in lines), cells
