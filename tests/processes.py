"""Trainings in processes of their own, for the tests: killed, distributed, compared."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

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


def run(*command, folder, expected=0, **variables):
    path = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
    modules = os.pathsep.join([str(folder), os.environ.get('PYTHONPATH', '')])
    environment = {**os.environ, 'PATH': path, 'PYTHONPATH': modules, 'OMP_NUM_THREADS': '1', **variables}
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment)
    assert result.returncode == expected, result.stdout + result.stderr
    return result.stdout + result.stderr


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
