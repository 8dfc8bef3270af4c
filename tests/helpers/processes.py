"""Tools and trainings for the tests: in this process, or in processes of their own, to be killed or distributed."""

import contextlib
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Dict, Optional

import pytest
import torch
import torch.multiprocessing

REPOSITORY = Path(__file__).parents[2]

# The module for custom_imports: one fault at an iteration, on one rank, and the weights of every rank at the end.
HOOKS = textwrap.dedent("""
    import os, signal
    import torch
    from mmengine.config import config
    from mmengine.dist import get_rank
    from mmengine.hooks import EMAHook, Hook
    from mmpretrain.registry import HOOKS

    config.FormatCode = lambda text, **settings: (text, False)  # takes longer than an epoch here
    fault, iteration, rank = os.environ.get('FAULT', 'none,-1,0').split(',')
    fsync, calls = os.fsync, []

    def killing_fsync(descriptor):
        calls.append(descriptor)
        if fault == 'save' and len(calls) == int(iteration):
            os.ftruncate(descriptor, 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    if fault == 'save':
        os.fsync = killing_fsync

    @HOOKS.register_module(force=True)
    class TestHook(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if (runner.iter, get_rank()) != (int(iteration), int(rank)):
                return
            if fault == 'SIGKILL':
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == 'nan':
                with torch.no_grad():
                    next(runner.model.parameters()).fill_(float('nan'))

        def after_train(self, runner):
            average = next(hook for hook in runner.hooks if isinstance(hook, EMAHook)).ema_model.state_dict()
            model = getattr(runner.model, 'module', runner.model).state_dict()
            torch.save(dict(model=model, average=average), os.path.join(runner.work_dir, f'rank{get_rank()}.pt'))
""")


def write_configs(folder: Path, kind: str, base: str, pruning: Optional[dict] = None, **changes: object) -> None:
    """Writes the module of the hook, and ``kind8.py`` and ``kind4.py``, configs of 24 images by their batch sizes.

    They are those of :func:`helpers.digits.small_config`, with plain gradients, an average, and a pruning.
    """
    from .digits import SGD, small_config

    (folder / 'hooks_of_a_test.py').write_text(HOOKS)
    changes = {'optim_wrapper.optimizer': SGD, 'log_level': 'INFO', **changes}
    config = small_config(REPOSITORY, folder / kind, base, **changes)
    config.custom_imports.imports.append('hooks_of_a_test')
    prunings = [] if pruning is None else [dict(type='HeadPruningHook', **pruning)]
    others = [*prunings, dict(type='EMAHook', momentum=0.2), dict(type='TestHook')]
    config.custom_hooks = [*(config.get('custom_hooks') or []), *others]
    for batch_size in (8, 4):
        config.train_dataloader.batch_size = batch_size
        config.dump(folder / f'{kind}{batch_size}.py')


def environment(folder: Path, **variables: str) -> Dict[str, str]:
    """The variables of a command: ``python`` is this one, and modules of this checkout and of a folder are found."""
    modules = [folder, REPOSITORY, os.environ.get('PYTHONPATH', '')]
    return {
        **os.environ,
        'PATH': os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']]),
        'PYTHONPATH': os.pathsep.join(map(str, modules)),
        'OMP_NUM_THREADS': str(torch.get_num_threads()),  # others would sum in another order
        **variables,
    }


def run(*command: object, folder: Path, expected: int = 0, **variables: str) -> str:
    """Runs a command to its end.

    Args:
        command: Its words. ``python`` with a script, or with ``-m`` and a module, runs in this process where there are
            no variables, since importing takes seconds.
        folder (Path): Its modules can be imported.
        expected (int): The status with which it should end. Default: 0.
        variables: Of its environment.

    Returns:
        str: Its output and its errors.
    """
    words = [str(word) for word in command]
    if words[0] == 'python' and not variables:
        status, output = _run_here(words[1:], folder)
    else:
        result = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(folder, **variables),
            start_new_session=True,  # some tests send signals to the process group
        )
        status, output = result.returncode, result.stdout
    assert status == expected, output
    return output


def _run_here(words, folder):
    """The status and the output of a script in this process, which begins without runs of mmengine."""
    output, arguments, paths, modules = io.StringIO(), sys.argv, list(sys.path), set(sys.modules)
    is_module = words[0] == '-m'
    sys.argv, sys.path[:0] = words[is_module:], [str(folder), *([] if is_module else [str(Path(words[0]).parent)])]
    forget_runs()
    status = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            (runpy.run_module if is_module else runpy.run_path)(words[is_module], run_name='__main__')
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            print(end.code if isinstance(end.code, str) else '')
        except Exception:
            status = 1
            traceback.print_exc()
    sys.argv, sys.path[:] = arguments, paths
    for name in set(sys.modules) - modules:  # others have modules of the same name
        if getattr(sys.modules[name], '__file__', None) and Path(sys.modules[name].__file__).parent == Path(folder):
            del sys.modules[name]
    forget_runs()
    return status, output.getvalue()


def forget_runs():
    """Two runs within a second have the same name: loggers, visualizers and histories would be those of the first."""
    if 'mmengine.utils.manager' in sys.modules:
        kinds = list(sys.modules['mmengine.utils.manager'].ManagerMixin.__subclasses__())
        while kinds:
            kind = kinds.pop()
            kinds += kind.__subclasses__()
            kind._instance_dict.clear()


def train(config: Path, work_dir: Path, *options: object, **kwargs) -> str:
    """Runs ``tools/train.py``, and returns what it says; other arguments are those of :func:`run`."""
    tool = REPOSITORY / 'tools/train.py'
    return run('python', tool, config, '--work-dir', work_dir, *options, folder=config.parent, **kwargs)


def free_port() -> str:
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        return str(unused.getsockname()[1])


def train_on_ranks(config: Path, work_dir: Path, *options: object, killed_at: Optional[int] = None) -> str:
    """Runs ``tools/train.py`` in two ranks, and returns what the first one says; the second can be killed."""
    words = [REPOSITORY / 'tools/train.py', config, '--work-dir', work_dir, '--launcher', 'pytorch', *options]
    work_dir.mkdir(exist_ok=True)
    fault = 'none,-1,0' if killed_at is None else f'SIGKILL,{killed_at},1'
    arguments = [str(word) for word in words], config.parent, work_dir, free_port(), fault
    # The rank that is killed, or the other one, which notices first.
    errors = torch.multiprocessing.ProcessExitedException, torch.multiprocessing.ProcessRaisedException
    with contextlib.nullcontext() if killed_at is None else pytest.raises(errors):
        torch.multiprocessing.start_processes(_train_rank, arguments, nprocs=2, start_method='spawn')
    return (work_dir / 'rank0.log').read_text() if killed_at is None else ''


def _train_rank(rank, words, folder, work_dir, port, fault):
    place = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    os.environ.update(place, TORCHELASTIC_RUN_ID='none', FAULT=fault)
    status, output = _run_here(words, folder)
    (work_dir / f'rank{rank}.log').write_text(output)
    assert status == 0, output


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
            assert torch.allclose(actual[kind][name].float(), value.float(), rtol=0, atol=tolerance), (kind, name)
