"""Trainings in processes of their own, for the tests: killed, distributed, compared."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Dict

import torch

REPOSITORY = Path(__file__).parents[2]

# A module for custom_imports: ends the process at an iteration, and keeps the weights of every rank.
HOOKS = textwrap.dedent("""
    import os, signal
    import torch
    from mmengine.dist import get_rank
    from mmengine.hooks import EMAHook, Hook
    from mmpretrain.registry import HOOKS

    @HOOKS.register_module()
    class TestHook(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if str(runner.iter) == os.environ.get('KILL_AT'):
                os.kill(os.getpid(), signal.SIGKILL)

        def after_train(self, runner):
            average = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.state_dict()
            model = getattr(runner.model, 'module', runner.model).state_dict()
            torch.save(dict(model=model, average=average), os.path.join(runner.work_dir, f'rank{get_rank()}.pt'))
""")


def environment(folder: Path, **variables: str) -> Dict[str, str]:
    """The variables of a command: ``python`` is a warm one, and modules of this checkout and of a folder are found."""
    warm = os.environ['WARM_PYTHON']
    paths = [warm, Path(sys.executable).parent, os.environ['PATH']]
    modules = [folder, REPOSITORY, os.environ.get('PYTHONPATH', '')]
    return {
        **os.environ,
        'PATH': os.pathsep.join(map(str, paths)),
        'PYTHONPATH': os.pathsep.join(map(str, modules)),
        'PYTHON_EXEC': f'{warm}/python',  # which torchrun starts
        'OMP_NUM_THREADS': '1',
        **variables,
    }


def run(*command: object, folder: Path, expected: int = 0, **variables: str) -> str:
    """Runs a command to its end.

    Args:
        command: Its words: ``'python'`` for a Python that has imported the plugin, ``sys.executable`` for one that
            has not.
        folder (Path): Its modules can be imported.
        expected (int): The status with which it should end. Default: 0.
        variables: Of its environment.

    Returns:
        str: Its output and its errors.
    """
    result = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(folder, **variables),
        start_new_session=True,  # some tests send signals to the process group
    )
    assert result.returncode == expected, result.stdout
    return result.stdout


def train(config: Path, work_dir: Path, *options: object, **kwargs) -> str:
    """Runs ``tools/train.py``, and returns what it says; other arguments are those of :func:`run`."""
    tool = REPOSITORY / 'tools/train.py'
    return run('python', tool, config, '--work-dir', work_dir, *options, folder=config.parent, **kwargs)


def train_two(config: Path, work_dir: Path, *options: object, **kwargs) -> str:
    """Runs ``tools/dist_train.sh`` with two processes, and returns what it says."""
    tool = REPOSITORY / 'tools/dist_train.sh'
    return run('bash', tool, config, 2, '--work-dir', work_dir, *options, folder=config.parent, **kwargs)


def rates(work_dir):
    """The learning rate of every iteration, from the logs."""
    lines = [
        json.loads(line)
        for path in sorted(work_dir.glob('*/vis_data/*.json'))
        if path.stem != 'config' and path.name != 'scalars.json'
        for line in path.read_text().splitlines()
    ]
    return {line['iter']: line['lr'] for line in lines if 'lr' in line}


def assert_equal(work_dir, whole, rank=0, tolerance=1e-6):
    actual, expected = torch.load(work_dir / f'rank{rank}.pt'), torch.load(whole / 'rank0.pt')
    for kind in expected:
        assert actual[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            assert torch.allclose(actual[kind][name].float(), value.float(), atol=tolerance), (kind, name)
