"""What tools/train.py and tools/test.py say beside mmengine's log, and how their ranks end."""

import subprocess
import sys

import pytest
from helpers.processes import REPOSITORY, environment, free_port, run

TOOL = """
import os, time
import torch
rank = os.environ['RANK']
runner = [torch.distributed.group.WORLD]
runner.append(runner)  # a cycle, as mmengine's runner, that holds the group
if rank == '0':
    time.sleep(3)
    {rank0}
open(f'done{{rank}}', 'w').close()
"""
RANK = """
import os, sys
from pathlib import Path
from attncnn_plugin import installation
from attncnn_plugin.mm import tools
tools.mmpretrain.__file__ = os.path.abspath('mmpretrain/__init__.py')
sys.argv = ['slow.py']
tools.run_mmpretrain_tool('slow.py')
assert Path('done0').exists() and not tools.torch.distributed.is_initialized()
assert 'gloo' not in ''.join(path.read_text() for path in Path('/proc/self/task').glob('*/comm'))  # names of threads
"""


@pytest.mark.slow
@pytest.mark.parametrize('rank0, statuses', [('pass', [0, 0]), ('raise ValueError("disk full")', [1, 1])])
def test_ranks_wait_for_each_other(rank0, statuses, tmp_path):
    """The second has nothing left to do while the first still works; where that fails, it does not wait for ever."""
    (tmp_path / 'mmpretrain/.mim/tools').mkdir(parents=True)
    (tmp_path / 'mmpretrain/.mim/tools/slow.py').write_text(TOOL.format(rank0=rank0))
    place = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=free_port(), TORCHELASTIC_RUN_ID='none')
    ranks = [
        subprocess.Popen(
            [sys.executable, '-c', RANK],
            cwd=tmp_path,
            env=environment(tmp_path, RANK=rank, LOCAL_RANK=rank, CUDA_VISIBLE_DEVICES='', **place),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in '01'
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == statuses, errors
    assert ('disk full' in errors[0].strip().rpartition('\n')[2]) == (statuses[0] == 1)


@pytest.mark.slow
@pytest.mark.parametrize('tool', ['train.py', 'test.py', 'mmpretrain_tool.py'])
def test_a_quiet_start(tool, tmp_path):
    said = run(sys.executable, REPOSITORY / 'tools' / tool, '--help', folder=tmp_path)
    assert said.startswith(('usage: ', 'Runs any of mmpretrain')) and 'Warning' not in said


@pytest.mark.slow
def test_importing_the_package_changes_no_filters(tmp_path):
    code = """
import warnings
import mmpretrain.models, mmpretrain.datasets, timm, torchvision
before = list(warnings.filters)
import attncnn_plugin.mm.tools, attncnn_plugin.commands.config_model, attncnn_plugin.training
new = [own for own in warnings.filters if own not in before and own[2].__module__ != 'pkg_resources']  # has its own
assert not new, new
"""
    run(sys.executable, '-W', 'default', '-c', code, folder=tmp_path)
