"""Checkpoints load with weights_only=True, and malicious ones do not run."""

import os
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

import attncnn_plugin  # noqa: F401


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


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
    import zipfile

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
