"""The framework's own tools run the experiments, from start to inference."""

import re
import subprocess
import sys
from pathlib import Path

import mmpretrain
import pytest
import torch
from helpers.processes import run
from mmengine.config import Config
from mmpretrain.registry import MODELS


@pytest.mark.slow
def test_mmpretrains_own_tool_runs_the_configs(repository, tmp_path):
    """In a process that has not imported the plugin: the config does it."""
    tool = Path(mmpretrain.__file__).parent / '.mim/tools/train.py'
    config = repository / 'configs/sa_learned_digits.py'
    small = ['train_cfg.max_epochs=1', *(f'{loader}_dataloader.dataset.indices=40' for loader in ('train', 'val'))]
    output = run(sys.executable, tool, config, '--work-dir', tmp_path, '--cfg-options', *small, folder=tmp_path)
    assert 'Epoch(val) [1]' in output


@pytest.mark.parametrize(
    'script, arguments, usage',
    [
        ('dist_train.sh', ['c.py', '--amp'], 'dist_train.sh CONFIG GPUS'),
        ('dist_test.sh', ['c.py', '2'], 'dist_test.sh CONFIG CHECKPOINT GPUS'),
        ('slurm_train.sh', ['gpus', 'job', 'c.py', '--amp'], 'slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR'),
    ],
)
def test_usage_of_scripts(script, arguments, usage, repository):
    """Nothing is started where an argument is missing: no Python is in the PATH."""
    for given in ([], arguments):
        command = ['bash', repository / 'tools' / script, *given]
        ended = subprocess.run(command, capture_output=True, text=True, env=dict(PATH='/bin'))
        assert (ended.returncode, ended.stdout) == (2, '') and f'{usage} [options of ' in ended.stderr


def test_slurm_command(repository, tmp_path):
    srun = tmp_path / 'srun'
    srun.write_text('#!/bin/sh\necho "$@"\n')
    srun.chmod(0o755)
    command = ['bash', repository / 'tools/slurm_train.sh', 'gpus', 'job', 'a config.py', 'out', '--amp']
    variables = dict(PATH=f'{tmp_path}:/usr/bin:/bin', GPUS='16', SRUN_ARGS='--quiet --time=1')
    output = run(*command, folder=tmp_path, **variables)
    assert output.startswith('-p gpus --job-name=job --gres=gpu:8 --ntasks=16')
    assert output.strip().endswith(
        f'--quiet --time=1 python -u {repository}/tools/train.py a config.py --work-dir=out --launcher=slurm --amp'
    )


@pytest.mark.parametrize('saved, status', [(False, 143), (True, 143), (True, 1), (True, 0)])
def test_slurm_job_of_the_documentation(saved, status, repository, tmp_path):
    """It resumes what is there, and goes back into the queue after SIGTERM, but not after an error or at the end."""
    (script,) = re.findall(r'^(#!/bin/bash\n.*?)^```$', (repository / 'docs/cluster.md').read_text(), re.M | re.S)
    (tmp_path / 'job.sh').write_text(script)
    for name, body in (('srun', f'echo srun "$@"\nexit {status}'), ('scontrol', 'echo scontrol "$@"')):
        (tmp_path / name).write_text(f'#!/bin/sh\n{body}\n')
        (tmp_path / name).chmod(0o755)
    folder = tmp_path / 'work_dirs/cmhsa5'
    folder.mkdir(parents=True)
    if saved:
        (folder / 'epoch_1.pth').touch()
    variables = dict(PATH=f'{tmp_path}:/usr/bin:/bin', SLURM_JOB_ID='7')
    ended = subprocess.run(['bash', 'job.sh'], cwd=tmp_path, env=variables, capture_output=True, text=True)
    command = 'srun python -u tools/train.py configs/cmhsa5_cifar100.py --work-dir work_dirs/cmhsa5 --launcher slurm'
    expected = [f'{command}{" --resume" * saved} --cfg-options train_dataloader.batch_size=32']
    expected += ['scontrol requeue 7'] * (status == 143)
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (status, expected, '')


CONVERTED = """
custom_imports = dict(imports=['attncnn_plugin'])
model = dict(
    type='mmpretrain.ConvToAttention',
    backbone=dict(type='mmpretrain.ResNet', depth=18, stem_channels=4, base_channels=4),
    layers='layer4.1.*',
    phase='{phase}')
"""
IN_A_CLASSIFIER = """
model = dict(
    type='mmpretrain.ImageClassifier',
    backbone=model,
    neck=dict(type='mmpretrain.GlobalAveragePooling'),
    head=dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=32))
"""


@pytest.mark.parametrize(
    'model, prefix, phase', [('', '', 'conv'), (IN_A_CLASSIFIER, '', 'attn'), (IN_A_CLASSIFIER, 'module.', 'conv')]
)
def test_names_in_checkpoints_that_are_converted(model, prefix, phase, command, tmp_path, monkeypatch):
    """The backbone alone, whose own name is empty; and names as a wrapper for distributed training has them."""
    monkeypatch.chdir(tmp_path)
    for kind in ('conv', 'attn'):
        (tmp_path / f'{kind}.py').write_text(CONVERTED.format(phase=kind) + model)
    cnn, attention = (MODELS.build(Config.fromfile(f'{kind}.py').model) for kind in ('conv', 'attn'))
    torch.save({'state_dict': {f'{prefix}{name}': value for name, value in cnn.state_dict().items()}}, 'cnn.pth')
    assert command('convert', '--mm', f'{phase}.py', 'cnn.pth', '--out', 'out.pth')[0] == 0
    attention.load_state_dict(torch.load('out.pth')['state_dict'])
    cnn.eval(), attention.eval()
    x = torch.randn(2, 3, 32, 32)
    assert all(torch.allclose(expected, output, atol=1e-4) for expected, output in zip(cnn(x), attention(x)))
