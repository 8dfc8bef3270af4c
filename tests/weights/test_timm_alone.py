"""The small networks and the images, with timm alone."""

import inspect

import pytest
import timm
import torch
from PIL import Image
from timm.models import _hub, save_for_hf

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
    assert model.pretrained_cfg['file'] == weights.weights_file(name) is not None
    assert f'{name}.cifar10' in timm.list_models(pretrained=True)


def test_images():
    images = {name: Image.open(path) for name, path in weights.example_images().items()}
    assert tuple(images) == weights.CLASSES == tuple(sorted(images))
    assert all(image.size == (32, 32) and image.mode == 'RGB' for image in images.values())
    assert len({image.tobytes() for image in images.values()}) == 10


@pytest.mark.parametrize('name', PARAMETERS)
def test_other_settings(name):
    """Another classifier, features alone, and images of another size."""
    state_dict = timm.create_model(name, pretrained=True).state_dict()
    for num_classes in (100, 0):
        model = timm.create_model(name, pretrained=True, num_classes=num_classes)
        kept = {key: value for key, value in model.state_dict().items() if not key.startswith('head.')}
        assert all(torch.equal(value, state_dict[key]) for key, value in kept.items())
        assert kept.keys() == {key for key in state_dict if not key.startswith('head.')}
    features = timm.create_model(name, pretrained=True, features_only=True)
    assert torch.equal(features.state_dict()['model.stem.proj.weight'], state_dict['stem.proj.weight'])
    # Gaussian heads take images of any size as they are; position tables are made for one.
    settings = {} if name in ('sa_quadratic_small', 'sa_generalized_small') else dict(img_size=64)
    model = timm.create_model(name, pretrained=True, **settings)
    assert model(torch.zeros(1, 3, 64, 64)).isfinite().all()
    assert model.pretrained_cfg['fixed_input_size'] == bool(settings)  # its scripts give --img-size to those
    if hasattr(timm.data, 'resolve_input_data_config'):  # from timm 1.0.31 on
        assert timm.data.resolve_input_data_config(model)['input_size'] == (3, *[settings.get('img_size', 32)] * 2)


@pytest.mark.parametrize('name', PARAMETERS)
def test_a_model_of_a_user_is_saved_and_loaded_as_timms_are(name, tmp_path):
    model = timm.create_model(name, pretrained=True, num_classes=5).eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    assert weights.weights_file(name) not in (tmp_path / 'config.json').read_text()
    saved = [timm.create_model(name, checkpoint_path=str(tmp_path / 'model.safetensors'), num_classes=5)]
    # timm 1.0.22 unpickles all files of a folder, those of safetensors too.
    if inspect.signature(_hub.load_state_dict_from_path).parameters['weights_only'].default:
        saved.append(timm.create_model(f'local-dir:{tmp_path}', pretrained=True))
    x = torch.randn(1, 3, 32, 32)
    assert not list(tmp_path.glob('*.bin')) and all(torch.equal(loaded.eval()(x), model(x)) for loaded in saved)
