"""Peak memory of one training step, each in a process of its own.

On a CPU it is the largest resident set of the process (VmHWM; getrusage's ru_maxrss where there is no /proc: on Linux a
new process inherits the ru_maxrss of the one that started it), with glibc's malloc told to give every tensor that is
freed back at once, so that it is what the tensors need, not the holes that malloc leaves between them. On a GPU it is
what torch's allocator had at most. What was there before the step, with the libraries, the weights and the images, is
given too.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Dict

import torch
from models import batch, sa_model, with_original_attention
from settings import DTYPES, Settings
from steps import training_step

STATUS = Path('/proc/self/status')
GIVE_BACK = {'MALLOC_MMAP_THRESHOLD_': '65536'}  # for glibc's malloc: blocks from this size on have pages of their own


def resident_bytes(field: str) -> int:
    """The resident set now, ``'VmRSS'``, or at most since the process began, ``'VmHWM'``."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def step_memory(settings: Settings, side: str, name: str, pixels: int, batch_size: int) -> Dict[str, int]:
    """Bytes before a training step without attention dropout, and at most in it.

    Args:
        settings (Settings): Of the run.
        side (str): ``'ours'`` or ``'original'``.
        name (str): Name of the model in timm.
        pixels (int): Height and width of the images.
        batch_size (int): Number of images.

    Returns:
        dict[str, int]: ``before`` and ``peak``.
    """
    model = sa_model(settings, name, pixels)
    if side == 'original':
        model = with_original_attention(model, pixels, pixels)
        gc.collect()  # what it was copied from
    step = training_step(model, *batch(settings, batch_size, pixels, 10), settings.dtype)
    if settings.device == 'cuda':
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return dict(before=before, peak=torch.cuda.max_memory_allocated())
    before = resident_bytes('VmRSS')
    step()
    return dict(before=before, peak=resident_bytes('VmHWM'))


def in_new_process(settings: Settings, side: str, name: str, pixels: int, batch_size: int) -> Dict[str, int]:
    """:func:`step_memory` in a process of its own.

    Raises:
        RuntimeError: The process failed; its errors are the message.
    """
    command = [
        sys.executable,
        __file__,
        side,
        name,
        str(pixels),
        str(batch_size),
        '--device',
        settings.device,
        '--dtype',
        settings.dtype_name,
        *(['--quick'] if settings.quick else []),
    ]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **GIVE_BACK})
    if result.returncode:
        raise RuntimeError(f'{side} {name} at {pixels} px, batch {batch_size}, failed: {result.stderr}')
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('side', choices=['ours', 'original'])
    parser.add_argument('name', help='name of the model in timm')
    parser.add_argument('pixels', type=int, help='height and width of the images')
    parser.add_argument('batch_size', type=int)
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    parser.add_argument('--dtype', choices=list(DTYPES), default='float32')
    parser.add_argument('--quick', action='store_true', help='a small model')
    args = parser.parse_args()
    settings = Settings(args.device, args.dtype, args.quick)
    settings.start()
    print(json.dumps(step_memory(settings, args.side, args.name, args.pixels, args.batch_size)))


if __name__ == '__main__':
    main()
