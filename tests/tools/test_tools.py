"""The framework's own tools run the experiments, from start to inference."""

import socket
import subprocess
import sys
from pathlib import Path

import mmpretrain
import numpy as np
import pytest
import torch
from helpers.processes import run, train, train_two
from mmpretrain import FeatureExtractor, ImageClassificationInferencer

SHRINK = [
    '--cfg-options',
    'train_cfg.max_epochs=1',
    'train_dataloader.dataset.indices=40',
    'val_dataloader.dataset.indices=40',
    'randomness.seed=0',
]


@pytest.fixture(scope='module')
def trained(tmp_path_factory, repository):
    """A work folder after one epoch of tools/train.py, in a new process as a user has it."""
    work_dir = tmp_path_factory.mktemp('work')
    tool, config = repository / 'tools/train.py', repository / 'configs/sa_quadratic_digits.py'
    output = run(sys.executable, tool, config, '--work-dir', work_dir, *SHRINK, folder=work_dir)
    assert 'Epoch(val) [1]' in output and 'accuracy/top1' in output
    return work_dir


def test_training_resumes(trained, repository):
    options = [o.replace('max_epochs=1', 'max_epochs=2') for o in SHRINK]
    output = train(repository / 'configs/sa_quadratic_digits.py', trained, '--resume', *options)
    assert 'resumed epoch: 1, iter: 1' in output and 'Epoch(val) [2]' in output


def test_testing(trained, repository, tmp_path):
    config, checkpoint = repository / 'configs/sa_quadratic_digits.py', trained / 'epoch_1.pth'
    tool = repository / 'tools/test.py'
    output = run('python', tool, config, checkpoint, '--work-dir', tmp_path, folder=tmp_path)
    assert 'Epoch(test)' in output and 'accuracy/top1' in output


def test_mmpretrains_own_tool_runs_the_configs(repository, tmp_path):
    """In a process that has not imported the plugin: the config does it."""
    tool = Path(mmpretrain.__file__).parent / '.mim/tools/train.py'
    config = repository / 'configs/sa_learned_digits.py'
    output = run(sys.executable, tool, config, '--work-dir', tmp_path, *SHRINK, folder=tmp_path)
    assert 'Epoch(val) [1]' in output


@pytest.mark.slow
@pytest.mark.parametrize(
    'tool, config, arguments',
    [
        ('test.py', 'sa_quadratic_digits', ['--work-dir', 'out']),
        ('analysis_tools/analyze_heads.py', 'sa_quadratic_digits', []),
        ('visualization/plot_attention.py', 'sa_quadratic_digits', ['--figure', 'centers', '--out', 'out.svg']),
        ('visualization/attention_explorer.py', 'sa_quadratic_digits', ['3', '--out', 'out.html']),
        ('model_converters/prune_heads.py', 'sa_quadratic_digits', ['out.pth', '--heads', '{0: [1]}']),
        ('model_converters/conv_to_attention.py', 'cmhsa3_digits', ['out.pth']),
    ],
)
def test_tools_import_what_they_need(tool, config, arguments, repository, tmp_path):
    """In a process that has not imported the plugin."""
    config = repository / f'configs/{config}.py'
    torch.save(dict(state_dict=mmpretrain.get_model(str(config)).state_dict(), meta={}), tmp_path / 'model.pth')
    arguments = [tmp_path / word if word.startswith('out') else word for word in arguments]
    run(sys.executable, repository / 'tools' / tool, config, tmp_path / 'model.pth', *arguments, folder=tmp_path)
    assert list(tmp_path.glob('out*')) or tool == 'analysis_tools/analyze_heads.py'


@pytest.mark.parametrize('executable', ['warm', pytest.param('new', marks=pytest.mark.slow)])
def test_two_processes(executable, repository, tmp_path):
    """On a port that torchrun chooses, and on a given one."""
    config = repository / 'configs/sa_quadratic_digits.py'
    new = dict(PATH=f'{Path(sys.executable).parent}:/usr/bin:/bin', PYTHON_EXEC=sys.executable)
    variables = new if executable == 'new' else {}
    output = train_two(config, tmp_path, *SHRINK, **variables)
    assert 'Distributed training: True' in output and 'GPU number: 2' in output and 'Epoch(val) [1]' in output
    tool, checkpoint = repository / 'tools/dist_test.sh', tmp_path / 'epoch_1.pth'
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        port = unused.getsockname()[1]
    output = run(
        'bash', tool, config, checkpoint, 2, '--work-dir', tmp_path, folder=tmp_path, PORT=str(port), **variables
    )
    assert 'Epoch(test)' in output


@pytest.mark.parametrize(
    'script, arguments, usage',
    [
        ('dist_train.sh', ['c.py', '--amp'], 'dist_train.sh CONFIG GPUS'),
        ('dist_train.sh', ['c.py', '0'], 'dist_train.sh CONFIG GPUS'),
        ('dist_test.sh', ['c.py', '2'], 'dist_test.sh CONFIG CHECKPOINT GPUS'),
        ('slurm_train.sh', ['gpus', 'job', 'c.py', '--amp'], 'slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR'),
    ],
)
def test_usage_of_scripts(script, arguments, usage, repository, tmp_path):
    """Nothing is started where an argument is missing."""
    for name in ('python', 'srun'):
        (tmp_path / name).write_text('#!/bin/sh\necho started\n')
        (tmp_path / name).chmod(0o755)
    for given in ([], arguments):
        command = ['bash', repository / 'tools' / script, *given]
        ended = subprocess.run(command, capture_output=True, text=True, env=dict(PATH=f'{tmp_path}:/usr/bin:/bin'))
        assert (ended.returncode, ended.stdout) == (2, '') and f'{usage} [options of ' in ended.stderr


def test_slurm_command(repository, tmp_path):
    srun = tmp_path / 'srun'
    srun.write_text('#!/bin/sh\necho "$@"\n')
    srun.chmod(0o755)
    output = run(
        'bash',
        repository / 'tools/slurm_train.sh',
        'gpus',
        'job',
        'a config.py',
        'out',
        '--amp',
        folder=tmp_path,
        PATH=f'{tmp_path}:/usr/bin:/bin',
        GPUS='16',
        SRUN_ARGS='--quiet --time=1',
    )
    assert output.startswith('-p gpus --job-name=job --gres=gpu:8 --ntasks=16')
    assert output.strip().endswith(
        f'--quiet --time=1 python -u {repository}/tools/train.py a config.py --work-dir=out --launcher=slurm --amp'
    )


def test_inferencers(trained, repository):
    config, checkpoint = str(repository / 'configs/sa_quadratic_digits.py'), str(trained / 'epoch_1.pth')
    image = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)

    model = mmpretrain.get_model(config, pretrained=checkpoint)
    (result,) = ImageClassificationInferencer(model)([image])
    logits = model(torch.from_numpy(resize(image))[None, None].float().sub(77.9).div(95.9))
    assert result['pred_class'] in '0123456789'
    assert np.allclose(result['pred_scores'], logits.softmax(-1).detach()[0], atol=1e-5)
    (features,) = FeatureExtractor(model)([image])
    assert features[-1].shape == (64,)


def resize(image):
    import mmcv

    return mmcv.imresize(image, (16, 16), interpolation='bicubic')
