"""Importing ``attncnn_plugin.mm.safe_loading`` changes mmengine so that no checkpoint is run, and may be done twice."""

import importlib
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict

import mmpretrain
import numpy as np
import pytest
import torch
from helpers.small import SMALL_ARCH
from mmengine.config import Config
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModule
from mmengine.runner import CheckpointLoader, Runner, checkpoint, load_checkpoint
from torch import nn

import attncnn_plugin
from attncnn_plugin.mm import safe_loading
from attncnn_plugin.mm.config_model import ConfigModel
from attncnn_plugin.mm.reliability import AtomicCheckpointHook


class Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.fixture
def malicious(tmp_path):
    torch.save(dict(state_dict={}, meta=Payload(os.mkdir, str(tmp_path / 'victim'))), tmp_path / 'malicious.pth')
    return tmp_path / 'malicious.pth'


@pytest.fixture
def config(repository, tmp_path):
    config = Config.fromfile(repository / 'configs/sa_quadratic_digits.py')
    config.model.backbone.arch = SMALL_ARCH
    config.model.head.in_channels = SMALL_ARCH['embed_dims']
    config.work_dir = str(tmp_path / 'run')
    return config


def load_from_openmmlab(path, config, monkeypatch):
    monkeypatch.setattr(checkpoint, 'get_external_models', lambda: dict(here=path))
    CheckpointLoader.load_checkpoint('openmmlab://here')


def train(path, config, hook=None, **settings):
    config.merge_from_dict(dict(load_from=path, log_level='ERROR', **settings))
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


def test_another_loader_of_local_files(monkeypatch):
    def load_from_elsewhere(filename, map_location=None):
        pass

    monkeypatch.setattr(CheckpointLoader, '_schemes', dict(CheckpointLoader._schemes))
    CheckpointLoader.register_scheme(prefixes='.*', loader=load_from_elsewhere)
    with pytest.warns(UserWarning, match='load_from_elsewhere and not by attncnn_plugin, which cannot promise'):
        importlib.reload(safe_loading)


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


REPLACED = """
import warnings
warnings.simplefilter('ignore')
import mmpretrain, torch
from mmengine.runner import CheckpointLoader, checkpoint
import attncnn_plugin
checkpoint._safe_torch_load = torch.load  # as onedl-mmengine has it
before = dict(CheckpointLoader._schemes), set(map(str, torch.serialization.get_safe_globals()))
loaders = dict(vars(checkpoint))
import attncnn_plugin.mm.safe_loading
after = dict(CheckpointLoader._schemes), set(map(str, torch.serialization.get_safe_globals()))
print(sorted(name for name in after[0] if after[0][name] is not before[0].get(name)))
print(len(after[1]) > len(before[1]) and before[1] < after[1] and any('HistoryBuffer' in name for name in after[1]))
print(sorted(name for name, value in vars(checkpoint).items() if value is not loaders.get(name)))
"""


def test_what_it_replaces():
    output = subprocess.run([sys.executable, '-c', REPLACED], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-3:] == ["['']", 'True', "['_safe_torch_load']"]


def test_configs_import_it(repository):
    """Every config that comes with the package."""
    for path in sorted(repository.glob('configs/**/*.py')):
        if '_base_' not in path.parts and 'downstream' not in path.parts:  # whose bases are of other libraries
            assert 'attncnn_plugin.mm.safe_loading' in Config.fromfile(path).custom_imports.imports, path
    for path in sorted(repository.glob('configs/**/*.py')):
        text = path.read_text()
        assert text.count('custom_imports') == text.count('attncnn_plugin.mm.safe_loading'), path


def test_logs_of_mmengine_load(tmp_path):
    buffer = HistoryBuffer()
    for value in (0.5, 2.5):
        buffer.update(value, 3)
    logs = dict(loss=buffer, best=np.float64(97.5), lr=np.float32(0.1), epoch=np.int64(3))
    torch.save(dict(state_dict={}, message_hub=logs), tmp_path / 'run.pth')
    loaded = torch.load(tmp_path / 'run.pth')['message_hub']
    assert loaded['loss'].mean() == 0.5 and loaded['loss'].statistics('max') == 2.5
    assert [loaded[name] for name in ('best', 'lr', 'epoch')] == [97.5, np.float32(0.1), 3]


@pytest.mark.parametrize('module', ['numpy.core.multiarray', 'numpy._core.multiarray'])
def test_logs_written_under_another_numpy_load(tmp_path, module):
    buffer = HistoryBuffer()
    buffer.update(0.5, 1)
    torch.save(dict(loss=buffer, best=np.float64(97.5)), tmp_path / 'here.pth')
    ours = np.zeros(1).__reduce__()[0].__module__
    with zipfile.ZipFile(tmp_path / 'here.pth') as here, zipfile.ZipFile(tmp_path / 'there.pth', 'w') as there:
        for item in here.infolist():
            content = here.read(item)
            if item.filename.endswith('data.pkl'):
                content = content.replace(ours.encode() + b'\n', module.encode() + b'\n')
                assert module.encode() in content
            there.writestr(item, content)
    assert torch.load(tmp_path / 'there.pth')['loss'].mean() == 0.5


@pytest.mark.parametrize('where', ['top', 'in the logs'])
@pytest.mark.parametrize('attack', ['os.system', 'eval', 'method of another class', 'method of the buffer'])
def test_a_payload_does_not_run(tmp_path, where, attack):
    victim = tmp_path / 'victim'
    script = f"open({str(victim)!r}, 'w').close()"
    payload = {
        'os.system': lambda: Payload(os.system, f'touch {victim}'),
        'eval': lambda: Payload(eval, script),
        'method of another class': lambda: Payload(getattr, OrderedDict, 'fromkeys'),
        'method of the buffer': lambda: Payload(getattr, HistoryBuffer, '__init__'),
    }[attack]()
    checkpoint = dict(state_dict={}, message_hub={})
    if where == 'top':
        checkpoint['meta'] = payload
    else:
        buffer = HistoryBuffer()
        buffer.extra = payload
        checkpoint['message_hub']['loss'] = buffer
    path = tmp_path / 'malicious.pth'
    torch.save(checkpoint, path)

    if attack in ('os.system', 'eval'):  # the file is really malicious
        torch.load(path, weights_only=False)
        assert victim.exists()
        victim.unlink()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path)
    assert not victim.exists()


def test_nothing_is_loaded_unsafely(repository):
    sources = [*(repository / 'attncnn_plugin').rglob('*.py'), *(repository / 'tools').rglob('*.py')]
    assert not [path for path in sources if 'weights_only=False' in path.read_text()]
