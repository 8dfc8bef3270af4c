"""The tables, and the page that holds them."""

import os
import re
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import timm
import torch
from groups import GROUPS, Group
from measure import LEAST_ROUNDS, MOST_ROUNDS, NUM_THREADS
from models import Settings

INTRODUCTION = f"""# Benchmarks

Written by `tools/benchmarks/benchmark.py`; nothing here is edited by hand. To measure again, on any machine:

```bash
python tools/benchmarks/benchmark.py --page docs/benchmarks.md
```

`--only auto first` measures some of the groups (the names in brackets); the tables of the others stay.

## How it is measured

- All figures are ratios, since times belong to a machine. The two sides run in turns in one process, with
  {NUM_THREADS} threads, on the same images and, where they compute the same function, from the same weights.
  `1.30 ±0.02 (1.38)` says: by time 1.30, the median of {LEAST_ROUNDS} to {MOST_ROUNDS} rounds, half of which lie within
  about 0.02 of it; by arithmetic 1.38, the ratio of the multiply-adds of matrix products, convolutions and attention.
- Forward passes are in evaluation mode, without gradients. Training is a forward pass and a backward pass. The models
  are those of timm's entry points, in float32, without dropout where nothing else is said.
- The *dense original* is the attention of Cordonnier et al. 2020 (C20) written from its equations, every score and
  probability by einsum: `tools/benchmarks/original.py`. `tests/tools/test_benchmarks.py` shows that it has the outputs
  and gradients of the models of this package.
- Memory is the largest resident set of a process of its own during one training step, less what was there before.
- Li et al. 2021 is L21.

Groups without a table here were last measured for [an earlier page](earlier_benchmarks.md).
"""


def machine(settings: Settings) -> str:
    """What a run runs on, and what else runs there."""
    device = torch.cuda.get_device_name() if settings.device == 'cuda' else f'{os.cpu_count()} CPU cores'
    load = os.getloadavg()[0]
    shared = f'; other processes ran on the machine too (load {load:.0f})' if load >= 1 else ''
    quick = '; small models and one call each: no measurement' if settings.quick else ''
    return f'{device}, {NUM_THREADS} threads, torch {torch.__version__}, timm {timm.__version__}{shared}{quick}.'


def section(name: str, cells: Dict[Tuple[str, str], str], where: str) -> str:
    """A group's heading, words and table.

    Args:
        name (str): Of the group.
        cells (dict): Texts by row and column.
        where (str): See :func:`machine`.
    """
    group: Group = GROUPS[name]
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in range(2))
    lines = [['', *columns], *([row, *(cells.get((row, column), '') for column in columns)] for row in rows)]
    return f'## {group.title} (`{name}`)\n\n{group.ratio}\n\n{where}\n\n{table(lines)}\n'


def table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, so that it reads well as text too."""
    widths = [max(3, *map(len, column)) for column in zip(*lines)]
    lines = [lines[0], ['-' * width for width in widths], *lines[1:]]
    return '\n'.join(f'| {" | ".join(cell.ljust(width) for cell, width in zip(line, widths))} |' for line in lines)


def update(path: Path, sections: Dict[str, str]) -> None:
    """Writes the page with new sections, and those that it has of the other groups."""
    known = {}
    if path.exists():
        parts: List[str] = re.split(r'^(?=## )', path.read_text(), flags=re.MULTILINE)
        known = {name: part for part in parts for name in re.findall(r'\A## .* \(`(\w+)`\)\n', part)}
    known.update(sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join([INTRODUCTION, *(known[name].rstrip('\n') + '\n' for name in GROUPS if name in known)]))
