"""What a long run meets: killed, out of numbers; damaged files and mistaken configs."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from helpers.images import write_images
from helpers.processes import assert_equal, environment, train, train_two, write_configs
from mmpretrain.registry import MODELS

import attncnn_plugin  # noqa: F401
from attncnn_plugin.mm.reliability import find_whole_checkpoint
from attncnn_plugin.mm.tools import one_line

ITERATIONS = 3  # of an epoch

IMAGES = """
_base_ = './batch4.py'
load = dict(type='LoadImageFromFile', color_type='grayscale')
train_dataloader = dict(dataset=dict(_delete_=True, type='CustomDataset', data_root='{images}', pipeline=[
    load, dict(type='Resize', scale=16), dict(type='PackInputs')]), num_workers=1)
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    """The configs, and images of the data set's classes."""
    folder = tmp_path_factory.mktemp('faults')
    write_configs(folder, 'batch', 'sa_quadratic_digits', **{'train_cfg.max_epochs': 3})
    (folder / 'images.py').write_text(IMAGES.format(images=folder / 'images'))
    write_images(folder / 'images', range(2), 12, size=8)
    return folder


@pytest.fixture(scope='module')
def whole(folder):
    """A run to which nothing happens."""
    train(folder / 'batch8.py', folder / 'whole')
    return folder / 'whole'


# Killed.


@pytest.mark.slow
def test_killed_while_saving(folder, whole):
    """While the checkpoint that last_checkpoint names is written again, with the best score."""
    config, work_dir = folder / 'batch8.py', folder / 'saving'
    train(config, work_dir, expected=-signal.SIGKILL, FAULT='save,3,0')
    assert (work_dir / 'epoch_1.pth.part').stat().st_size == 1000
    assert (work_dir / 'last_checkpoint').read_text().endswith('epoch_1.pth') and torch.load(work_dir / 'epoch_1.pth')
    log = train(config, work_dir, '--resume')
    assert 'resumed epoch: 1, iter: 3' in log and 'damaged' not in log
    assert_equal(work_dir, whole, tolerance=0)
    assert not list(work_dir.glob('*.part'))


@pytest.mark.slow
def test_killed_at_a_random_moment(folder, whole, repository):
    config, work_dir = folder / 'batch8.py', folder / 'random'
    command = ['python', repository / 'tools/train.py', config, '--work-dir', work_dir]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen([*map(str, command)], env=environment(folder), **quiet)
    while process.poll() is None and not (work_dir / 'epoch_1.pth').exists():
        time.sleep(0.01)
    delay = random.SystemRandom().uniform(0, 1.0)
    time.sleep(delay)
    process.kill()
    process.wait()
    print(f'killed {delay:.3f} s after the first checkpoint')
    train(config, work_dir, '--resume')
    assert_equal(work_dir, whole, tolerance=0)


def test_which_checkpoint_is_whole(whole, tmp_path):
    last, newest = tmp_path / 'last_checkpoint', str(tmp_path / 'epoch_2.pth')
    assert find_whole_checkpoint(str(tmp_path)) is None
    for number, path in enumerate([whole / 'epoch_1.pth', whole / 'epoch_2.pth', *whole.glob('best_*.pth')]):
        shutil.copy(path, tmp_path)
        os.utime(tmp_path / path.name, (number, number))
    assert find_whole_checkpoint(str(tmp_path)) == newest  # last_checkpoint is missing
    for content in ('', newest[:-5], '/moved/epoch_2.pth', newest):
        last.write_text(content)
        assert find_whole_checkpoint(str(tmp_path)) == newest
    other = tmp_path / 'other'  # the folder that was copied, which has trained on
    other.mkdir()
    shutil.copy(whole / 'epoch_3.pth', other / 'epoch_2.pth')
    last.write_text(str(other / 'epoch_2.pth'))
    assert find_whole_checkpoint(str(tmp_path)) == newest
    assert find_whole_checkpoint(str(tmp_path), str(other)) == str(other / 'epoch_2.pth')  # where checkpoints go
    Path(newest).rename(tmp_path / 'kept')  # to go on from the one before
    assert find_whole_checkpoint(str(tmp_path)) == str(tmp_path / 'epoch_1.pth')
    (tmp_path / 'kept').rename(newest)
    shutil.rmtree(other)
    last.write_text(newest)
    content = Path(newest).read_bytes()
    weights = torch.load(newest)['state_dict']['head.fc.weight'].numpy().tobytes()
    flipped = bytearray(content)
    flipped[content.index(weights)] ^= 1  # one bit of one weight
    for damaged in (bytes(flipped), content[:5000] + content[5001:], content[:-5000]):
        Path(newest).write_bytes(damaged)
        os.utime(newest, (1, 1))
        assert find_whole_checkpoint(str(tmp_path)) == str(tmp_path / 'epoch_1.pth')
    os.truncate(tmp_path / 'epoch_1.pth', 0)
    with pytest.raises(FileNotFoundError, match=f'{newest} is missing, damaged or .*, and {tmp_path} holds no other '):
        find_whole_checkpoint(str(tmp_path))


# Out of numbers and ranks; out of disk: test_reliability_hooks.py.


@pytest.mark.slow  # in one process: test_reliability_hooks.py
def test_numbers_of_one_rank_that_are_not_finite(folder):
    work_dir = folder / 'nan'
    log = train_two(folder / 'batch4.py', work_dir, expected=1, FAULT=f'nan,{ITERATIONS},1')
    said = f'not finite any more after iteration 6, and is not saved; the last checkpoint is {work_dir}/epoch_1.pth: '
    assert log.count(said) >= 2  # on both ranks
    assert not list(work_dir.glob('epoch_2*'))
    assert all(value.isfinite().all() for value in torch.load(work_dir / 'epoch_1.pth')['state_dict'].values())


@pytest.mark.slow
def test_one_rank_dies(folder):
    start = time.monotonic()
    log = train_two(folder / 'batch4.py', folder / 'dead', expected=1, FAULT=f'SIGKILL,{ITERATIONS},1')
    assert time.monotonic() - start < 600  # gloo gives up after 1,800 s
    assert 'Signal 9 (SIGKILL) received by PID' in log


# Mistakes in the data and in the config.


def test_damaged_image(folder):
    shutil.copytree(folder / 'images', folder / 'damaged_images')
    (folder / 'damaged_images/1/5.png').write_bytes(b'no image')
    root = f'train_dataloader.dataset.data_root={folder}/damaged_images'
    log = train(folder / 'images.py', folder / 'image', '--cfg-options', root, expected=1)
    said = f'AssertionError: failed to load image: {folder}/damaged_images/1/5.png'
    assert log.strip().splitlines()[-1] == said


def test_mistaken_backbone():
    """A misspelt argument: test_backbones.py."""
    headless = dict(embed_dims=64, num_layers=1, num_heads=0, feedforward_channels=64)
    for said, config in (
        ('ValueError: num_heads=0 must be at least 1', dict(type='SALearned', content=True, arch=headless)),
        ('ValueError: img_size=32 must be a multiple of patch_size=5', dict(type='CMHSA', img_size=32, patch_size=5)),
        ('KeyError: SAQuadratik is not in the mmpretrain::model registry. Please check', dict(type='SAQuadratik')),
    ):
        with pytest.raises((KeyError, ValueError)) as error:
            MODELS.build(config)
        assert one_line(error.value).startswith(said)
