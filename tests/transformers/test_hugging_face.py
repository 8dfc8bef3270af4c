"""Models of Hugging Face transformers: saved without some heads and loaded again, and timm's models inside of them."""

import logging
import sys

import pytest
import timm
import torch
from helpers.small import numbers
from helpers.vits import OF_HUGGING_FACE, SIZE, not_small, output_of, small_vit
from safetensors.torch import load_file, save_file

pytest.importorskip('transformers.models')  # this folder has the name of the library

from attncnn_plugin import attention_maps, follow_state_dict, load_hugging_face
from attncnn_plugin.convert import convs_to_attention
from attncnn_plugin.pruning import head_ablation, prunable_heads, prune_heads

transformers = sys.modules['transformers']


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
    with pytest.raises(RuntimeError, match='ignore_mismatched_sizes'):
        type(model).from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / 'again')
    again = load_hugging_face(tmp_path / 'again', dtype=torch.float64)
    assert again.dtype == torch.float64 and numbers(again) == numbers(model)


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
    assert {key for key, *_ in info['mismatched_keys']} == {'classifier.weight', 'classifier.bias'}
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
