"""Models that timm has saved in a folder, as on the hub."""

import inspect

from timm.models import _hub, create_model

# That of timm 1.0.22 unpickles all files, those of safetensors too.
HAS_SAFE_FOLDERS = inspect.signature(_hub.load_state_dict_from_path).parameters['weights_only'].default


def saved_models(folder, name, **settings):
    """Loads a model from its folder, in all ways that this timm has."""
    assert not list(folder.glob('*.bin'))
    yield create_model(name, checkpoint_path=str(folder / 'model.safetensors'), **settings)
    if HAS_SAFE_FOLDERS:
        yield create_model(f'local-dir:{folder}', pretrained=True)
