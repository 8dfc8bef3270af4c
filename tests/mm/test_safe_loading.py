"""Importing ``attncnn_plugin.mm.safe_loading`` changes mmengine so that no checkpoint is run, and may be done twice."""

import importlib
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import mmpretrain
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
    """Makes a folder when it is unpickled."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.mkdir, (str(self.victim),)


@pytest.fixture
def malicious(tmp_path):
    torch.save(dict(state_dict={}, meta=Payload(tmp_path / 'victim')), tmp_path / 'malicious.pth')
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
    get_model_by_name=lambda path, *_: mmpretrain.get_model('sa_quadratic_digits', path),
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


def test_another_plugin_that_does_the_same(tmp_path, monkeypatch):
    """A copy of the modules: its loader is the one that stays, and the plugin's still works."""
    package = Path(attncnn_plugin.__file__).parent
    (tmp_path / 'other_plugin/mm').mkdir(parents=True)
    for name in ('checkpoint_files.py', 'mm/safe_loading.py'):
        shutil.copy(package / name, tmp_path / 'other_plugin' / name)
    for name in ('__init__.py', 'mm/__init__.py'):
        (tmp_path / 'other_plugin' / name).touch()
    (tmp_path / 'other_plugin/weights.py').touch()
    monkeypatch.syspath_prepend(tmp_path)
    other = importlib.import_module('other_plugin.mm.safe_loading')
    before = state()
    log = HistoryBuffer()
    log.update(0.5, 1)
    torch.save(dict(loss=log), tmp_path / 'run.pth')
    for module in (safe_loading, other, safe_loading):
        importlib.reload(module)
        assert CheckpointLoader._schemes[''] is module.load_from_local
        assert CheckpointLoader.load_checkpoint(str(tmp_path / 'run.pth'))['loss'].mean() == 0.5
    others = {'names': None, 'schemes': None, 'load': None}
    assert {**state(), **others} == {**before, **others}


REPLACED = """
import warnings
warnings.simplefilter('ignore')
import mmpretrain, torch
from mmengine.runner import CheckpointLoader, checkpoint
import attncnn_plugin
{onedl}
before = dict(CheckpointLoader._schemes), set(map(str, torch.serialization.get_safe_globals()))
loaders = dict(vars(checkpoint))
import attncnn_plugin.mm.safe_loading
after = dict(CheckpointLoader._schemes), set(map(str, torch.serialization.get_safe_globals()))
print(sorted(name for name in after[0] if after[0][name] is not before[0].get(name)))
print(len(after[1]) > len(before[1]) and before[1] < after[1] and any('HistoryBuffer' in name for name in after[1]))
print(sorted(name for name, value in vars(checkpoint).items() if value is not loaders.get(name)))
"""


@pytest.mark.parametrize('onedl', [False, True])
def test_what_it_replaces(onedl):
    script = REPLACED.format(onedl='checkpoint._safe_torch_load = torch.load' if onedl else '')
    output = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-3:] == [
        "['']",
        'True',
        "['_safe_torch_load']" if onedl or hasattr(checkpoint, '_safe_torch_load') else '[]',
    ]


def test_configs_import_it(repository):
    """Every config that comes with the package."""
    for path in sorted(repository.glob('configs/**/*.py')):
        if '_base_' not in path.parts and 'downstream' not in path.parts:  # whose bases are of other libraries
            assert 'attncnn_plugin.mm.safe_loading' in Config.fromfile(path).custom_imports.imports, path
    for path in sorted(repository.glob('configs/**/*.py')):
        text = path.read_text()
        assert text.count('custom_imports') == text.count('attncnn_plugin.mm.safe_loading'), path
