"""Importing ``attncnn_plugin.mm.safe_loading`` changes mmengine so that no checkpoint is run, and may be done twice."""

import importlib
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict

import mmpretrain
import numpy as np
import pytest
import torch
from helpers.digits import small_config
from helpers.payload import Payload
from mmengine.config import Config
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModule
from mmengine.runner import CheckpointLoader, Runner, checkpoint, load_checkpoint
from torch import nn

import attncnn_plugin
from attncnn_plugin.commands.config_model import ConfigModel
from attncnn_plugin.mm import safe_loading
from attncnn_plugin.mm.reliability import AtomicCheckpointHook


@pytest.fixture
def malicious(tmp_path):
    torch.save(dict(state_dict={}, meta=Payload(os.mkdir, str(tmp_path / 'victim'))), tmp_path / 'malicious.pth')
    return tmp_path / 'malicious.pth'


@pytest.fixture
def config(repository, tmp_path):
    return small_config(repository, tmp_path / 'run', 'sa_quadratic_digits', log_level='ERROR')


def load_from_openmmlab(path, config, monkeypatch):
    monkeypatch.setattr(checkpoint, 'get_external_models', lambda: dict(here=path))
    monkeypatch.setenv('MMENGINE_HOME', os.path.dirname(path))  # for what it downloads, elsewhere than in the user's
    CheckpointLoader.load_checkpoint('openmmlab://here')


def train(path, config, hook=None, **settings):
    config.merge_from_dict(dict(load_from=path, **settings))
    runner = Runner.from_cfg(config)
    if hook is not None:
        hook.before_run(runner)
    runner.load_or_resume()


def use_tool(path, config, monkeypatch):
    config.dump(f'{path}.py')
    ConfigModel(f'{path}.py', path)


WAYS = dict(
    loader=lambda path, *_: CheckpointLoader.load_checkpoint(path),
    load_from_local=lambda path, *_: checkpoint.load_from_local(path, 'cpu'),
    openmmlab=load_from_openmmlab,
    load_checkpoint=lambda path, *_: load_checkpoint(nn.Linear(2, 2), path),
    initialization=lambda path, *_: BaseModule(dict(type='Pretrained', checkpoint=path)).init_weights(),
    get_model=lambda path, config, _: mmpretrain.get_model(config, path),
    url_mapping=lambda path, config, _: mmpretrain.get_model(config, 'https://it', url_mapping=('https://it', path)),
    inferencer=lambda path, config, _: mmpretrain.ImageClassificationInferencer(config, path),
    load_from=lambda path, config, _: train(path, config),
    resume=lambda path, config, _: train(path, config, resume=True),
    resume_with_hook=lambda path, config, _: train(path, config, AtomicCheckpointHook(), resume=True),
    tools=use_tool,
)


@pytest.mark.parametrize('way', WAYS)
def test_nothing_is_run(way, malicious, config, monkeypatch):
    with pytest.raises(pickle.UnpicklingError):
        WAYS[way](str(malicious), config, monkeypatch)
    assert not (malicious.parent / 'victim').exists()
    torch.load(malicious, weights_only=not malicious.exists())  # the file is really malicious
    assert (malicious.parent / 'victim').exists()


def test_an_environment_that_asks_to_run_everything(malicious, monkeypatch):
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    with pytest.raises(pickle.UnpicklingError, match=f'{malicious} was refused and nothing in it was run'):
        CheckpointLoader.load_checkpoint(str(malicious))
    assert not (malicious.parent / 'victim').exists()


def test_an_mmengine_that_loads_again_what_pytorch_refuses(malicious, monkeypatch):
    """As onedl-mmengine does, which also takes its safe names away afterwards."""

    def load_all_the_same(file, map_location=None, weights_only=None):
        with torch.serialization.safe_globals([HistoryBuffer]):
            return torch.load(file, map_location, weights_only=not file)

    monkeypatch.setattr(checkpoint, '_safe_torch_load', load_all_the_same, raising=False)
    importlib.reload(safe_loading)
    for weights_only in (None, True, False):
        with pytest.raises(pickle.UnpicklingError):
            checkpoint._safe_torch_load(str(malicious), weights_only=weights_only)
    assert not (malicious.parent / 'victim').exists()


def test_safe_names_that_another_library_takes_away(tmp_path):
    log = HistoryBuffer()
    log.update(0.5, 1)
    torch.save(dict(loss=log), tmp_path / 'run.pth')
    with torch.serialization.safe_globals([HistoryBuffer]):
        pass
    assert CheckpointLoader.load_checkpoint(str(tmp_path / 'run.pth'))['loss'].mean() == 0.5


def state():
    """All that importing the plugin changes beside registries of types."""
    return dict(
        names=sorted(map(str, torch.serialization.get_safe_globals())),
        schemes=dict(CheckpointLoader._schemes),
        load=getattr(checkpoint, '_safe_torch_load', None),
        models=mmpretrain.list_models(),
    )


def test_importing_twice():
    before = state()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        importlib.reload(attncnn_plugin)
        importlib.reload(safe_loading)
    assert {**state(), 'load': None} == {**before, 'load': None}


def test_configs_import_it(repository):
    """Those of weights; test_configs.py and test_reproduce.py have the others. No config imports the plugin alone."""
    for path in repository.glob('configs/pretrained/*.py'):
        assert 'attncnn_plugin.mm.safe_loading' in Config.fromfile(path).custom_imports.imports, path
    for path in repository.glob('configs/**/*.py'):
        text = path.read_text()
        assert text.count('custom_imports') == text.count('attncnn_plugin.mm.safe_loading'), path


@pytest.mark.parametrize('module', ['numpy.core.multiarray', 'numpy._core.multiarray'])
def test_logs_of_mmengine_load(tmp_path, module):
    """Those written under this numpy, and under one that has another name for its own."""
    buffer = HistoryBuffer()
    for value in (0.5, 2.5):
        buffer.update(value, 3)
    logs = dict(loss=buffer, best=np.float64(97.5), lr=np.float32(0.1), epoch=np.int64(3))
    torch.save(logs, tmp_path / 'here.pth')
    ours = np.zeros(1).__reduce__()[0].__module__
    with zipfile.ZipFile(tmp_path / 'here.pth') as here, zipfile.ZipFile(tmp_path / 'there.pth', 'w') as there:
        for item in here.infolist():
            content = here.read(item)
            if item.filename.endswith('data.pkl'):
                content = content.replace(ours.encode() + b'\n', module.encode() + b'\n')
                assert module.encode() in content
            there.writestr(item, content)
    loaded = torch.load(tmp_path / 'there.pth')
    assert loaded['loss'].mean() == 0.5 and loaded['loss'].statistics('max') == 2.5
    assert [loaded[name] for name in ('best', 'lr', 'epoch')] == [97.5, np.float32(0.1), 3]


@pytest.mark.parametrize(
    'attack, refused',
    [
        ('eval', 'eval'),
        ('method of another class', "asks for the attribute 'fromkeys' of <class 'collections.OrderedDict'>"),
        ('method of the buffer', "asks for the attribute '__init__' of <class 'mmengine"),
    ],
)
def test_a_payload_in_the_logs_does_not_run(tmp_path, attack, refused):
    victim, path = tmp_path / 'victim', tmp_path / 'malicious.pth'
    buffer = HistoryBuffer()
    buffer.update(0.5, 3)  # an empty one is refused for its arrays
    buffer.extra = {
        'eval': Payload(eval, f"open({str(victim)!r}, 'w').close()"),
        'method of another class': Payload(getattr, OrderedDict, 'fromkeys'),
        'method of the buffer': Payload(getattr, HistoryBuffer, '__init__'),
    }[attack]
    torch.save(dict(state_dict={}, message_hub=dict(loss=buffer)), path)
    with pytest.raises(pickle.UnpicklingError, match=refused):
        torch.load(path)
    assert not victim.exists()
    torch.load(path, weights_only=False)
    assert victim.exists() == (attack == 'eval')  # the file is really malicious


def test_nothing_is_loaded_unsafely(repository):
    sources = [*(repository / 'attncnn_plugin').rglob('*.py'), *(repository / 'tools').rglob('*.py')]
    assert not [path for path in sources if 'weights_only=False' in path.read_text()]
