"""The small networks and the images, with timm alone."""

import pytest
import timm
import torch
from helpers.saved import saved_models
from PIL import Image
from timm.models import save_for_hf

from attncnn_plugin import weights

PARAMETERS = {
    'sa_quadratic_small': 233_270,
    'sa_generalized_small': 233_378,
    'sa_learned_small': 253_642,
    'sa_learned_content_small': 540_618,
    'cmhsa3_small_patch4_32': 737_968,
}


@pytest.mark.parametrize('name, parameters', PARAMETERS.items())
def test_size_and_data(name, parameters):
    model = timm.create_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    data = timm.data.resolve_model_data_config(model)
    assert data['input_size'] == (3, 32, 32) and data['crop_pct'] == 1 and data['mean'] == (0.4914, 0.4822, 0.4465)
    assert model.pretrained_cfg['label_names'] == weights.CLASSES
    assert model.pretrained_cfg.get('file') == weights.weights_file(name)


@pytest.mark.parametrize('name', PARAMETERS)
def test_without_weights(name):
    with pytest.raises(RuntimeError, match='No pretrained weights exist'):
        timm.create_model(name, pretrained=True, pretrained_cfg_overlay=dict(file=None))
    assert (f'{name}.cifar10' in timm.list_models(pretrained=True)) == (weights.weights_file(name) is not None)


def test_images():
    images = {name: Image.open(path) for name, path in weights.example_images().items()}
    assert tuple(images) == weights.CLASSES == tuple(sorted(images))
    assert all(image.size == (32, 32) and image.mode == 'RGB' for image in images.values())
    assert len({image.tobytes() for image in images.values()}) == 10


def test_a_model_of_a_user_is_saved_and_loaded_as_timms_are(tmp_path):
    model = timm.create_model('sa_learned_small', num_classes=5).eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    x = torch.randn(1, 3, 32, 32)
    for loaded in saved_models(tmp_path, 'sa_learned_small', num_classes=5):
        assert torch.equal(loaded.eval()(x), model(x))
