"""Damaged checkpoint files are refused in one sentence that names them, or read as they were."""

import io
import os
import pickle
import random
import zipfile
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from helpers.payload import Payload
from helpers.small import SMALL, small_timm

from attncnn_plugin.checkpoint_files import load_from_local, register_safe_globals

try:
    from mmengine.logging import HistoryBuffer
except ImportError:  # with timm alone
    HistoryBuffer = None

DAMAGED = 'is damaged or no checkpoint at all: give a whole file that torch.save has written'


@pytest.fixture(scope='module')
def checkpoint():
    """What mmengine saves, small, or as much of it as there is without mmengine."""
    register_safe_globals()
    logs = {}
    if HistoryBuffer is not None:
        logs = dict(loss=HistoryBuffer(), best=np.float64(97.5))
        logs['loss'].update(0.5, 3)
    return dict(
        state_dict={'weight': torch.randn(4, 3), 'steps': torch.arange(4)},
        meta=dict(epoch=3, config='lr = 1'),
        message_hub=logs,
    )


def saved(checkpoint, **options):
    file = io.BytesIO()
    torch.save(checkpoint, file, **options)
    return file.getvalue()


def is_equal(actual, expected):
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(actual) == list(expected) and all(is_equal(actual[key], expected[key]) for key in expected)
    if isinstance(expected, torch.Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    if HistoryBuffer is not None and isinstance(expected, HistoryBuffer):
        return all(map(np.array_equal, actual.data, expected.data))
    return bool(np.array_equal(actual, expected))


def refusal(path, content, expected=None, **options):
    """Why a file of this content is refused, without the name of the file; None if it is read as it was."""
    path.write_bytes(content)
    try:
        actual = load_from_local(str(path), **options)
    except pickle.UnpicklingError as error:
        message = str(error)
        assert message.startswith(f'{path} ') and len(message.splitlines()) == 1, message
        return message[len(str(path)) + 1 :]
    assert is_equal(actual, expected)
    return None


def flipped(content, position, bit):
    damaged = bytearray(content)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


def some_bits(content):
    """A bit of every eighth byte, and of every byte of the directory at the end of a zip file."""
    numbers = random.Random(0)
    directory = zipfile.ZipFile(io.BytesIO(content)).start_dir
    positions = [*range(numbers.randrange(8), directory, 8), *range(directory, len(content))]
    return [(position, numbers.randrange(8)) for position in positions]


def all_bits(content):
    return [(position, bit) for position in range(len(content)) for bit in range(8)]


@pytest.mark.parametrize('choice', [some_bits, pytest.param(all_bits, marks=pytest.mark.slow)])
def test_flipped_bits(tmp_path, checkpoint, choice):
    content = saved(checkpoint)
    refusals = Counter(refusal(tmp_path / 'run.pth', flipped(content, *bit), checkpoint) for bit in choice(content))
    assert refusals.keys() == {DAMAGED, None} and refusals[DAMAGED] > refusals[None]  # of padding and dates


def test_records_that_became_folders(tmp_path, checkpoint):
    """PyTorch gives memory that it has not written to for a record with the bit of a folder."""
    content = saved(checkpoint)
    attributes = 38  # where they are in an entry of the directory of a zip file
    entries = [position for position in range(len(content)) if content.startswith(b'PK\x01\x02', position)]
    assert len(entries) == len(zipfile.ZipFile(io.BytesIO(content)).namelist())
    for entry in entries:
        assert refusal(tmp_path / 'run.pth', flipped(content, entry + attributes, bit=4)) == DAMAGED


@pytest.mark.parametrize('is_zip', [True, False])
def test_bytes_missing_in_the_middle_or_at_the_end(tmp_path, checkpoint, is_zip):
    content = saved(checkpoint, _use_new_zipfile_serialization=is_zip)
    numbers = random.Random(0)
    for _ in range(100):
        start, length = numbers.randrange(len(content)), numbers.choice([1, 2, 7, 64, 500])
        path = tmp_path / 'run.pth'
        if is_zip:
            assert refusal(path, content[:start] + content[start + length :]) == DAMAGED
            assert refusal(path, content[:start]) == DAMAGED
        else:
            assert refusal(path, content[:start])


@pytest.mark.filterwarnings('ignore')
def test_flipped_bits_of_a_file_without_checksums(tmp_path, checkpoint):
    """PyTorch's format of before version 1.6: what can be noticed is refused in one sentence."""
    content = saved(checkpoint['state_dict'], _use_new_zipfile_serialization=False)
    path = tmp_path / 'run.pth'
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=f'{path} has no checksums: damage to its weights is not noticed'):
        assert is_equal(load_from_local(str(path)), checkpoint['state_dict'])
    numbers = random.Random(0)
    for position in range(0, len(content), 2):
        path.write_bytes(flipped(content, position, numbers.randrange(8)))
        try:
            load_from_local(str(path))
        except (pickle.UnpicklingError, TypeError) as error:
            assert str(error).startswith(f'{path} ') and len(str(error).splitlines()) == 1  # noqa: PT017


def test_zeros_for_checksums(tmp_path, checkpoint):
    """As PyTorch writes them where the user has asked for it."""
    path = tmp_path / 'run.pth'
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(checkpoint, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(UserWarning, match='has no checksums'):
        assert is_equal(load_from_local(str(path)), checkpoint)


@pytest.mark.filterwarnings('error')
def test_whole_files(tmp_path, checkpoint, monkeypatch):
    path = tmp_path / 'run.pth'
    torch.save(checkpoint, path)
    monkeypatch.setenv('HOME', str(tmp_path))
    for load in (load_from_local, partial(load_from_local, mmap=True)):
        assert is_equal(load('~/run.pth'), checkpoint)
    with pytest.raises(FileNotFoundError, match='none.pth can not be found'):
        load_from_local('none.pth')
    torch.save([1, 2], path)
    with pytest.raises(TypeError, match=f'{path} holds a list, but a checkpoint is a dictionary'):
        load_from_local(str(path))


def test_whole_files_that_cannot_be_loaded(tmp_path, checkpoint):
    """Want of memory, or of the device that ``map_location`` names, is no damage."""

    def out_of_memory(storage, location):
        raise MemoryError('no room for\nthis tensor')

    path = tmp_path / 'run.pth'
    assert refusal(path, saved(checkpoint), map_location=out_of_memory) == 'cannot be loaded: no room for'


def test_a_command_with_models_of_timm(tmp_path, command):
    """Older versions of timm run malicious files."""
    victim, path = tmp_path / 'victim', tmp_path / 'model.pth'
    weights = small_timm('sa_quadratic_cifar').state_dict()
    torch.save(dict(state_dict=weights, meta=Payload(os.mkdir, str(victim))), path)
    sizes = [f'{name}={value}' for name, value in SMALL.items()]
    options = ('--checkpoint', path, '--model-kwargs', *sizes)
    status, _, error = command('report', '--timm', 'sa_quadratic_cifar', *options)
    message = f'attncnn report: {path} was refused and nothing in it was run: it asks for posix.mkdir, '
    assert status == 2 and error.startswith(message) and not victim.exists()
