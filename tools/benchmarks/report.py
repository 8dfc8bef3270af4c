"""The tables of a run, and the page that holds those of several."""

import os
import statistics
from pathlib import Path
from typing import Any, Dict, List, Sequence

from cost_curve import cost_table, exponents_text
from groups import GROUPS
from tables import billions, number, table

INTRODUCTION = """# Benchmarks

Written by `tools/benchmarks/benchmark.py`; nothing here is edited by hand. To measure again, on any machine:

```bash
python tools/benchmarks/benchmark.py --out cpu.json --markdown docs/benchmarks.md
python tools/benchmarks/benchmark.py --only sa cost                  # some groups
python tools/benchmarks/benchmark.py --device cuda --out cuda.json   # on a GPU
python tools/benchmarks/benchmark.py --from cpu.json cuda.json --markdown docs/benchmarks.md  # the page of earlier runs
python tools/benchmarks/cost_curve.py                                # the figure
```

## How it is measured

- Speed is a ratio. Both sides run in turns in one process, on the same images and, where they compute the same
  function, from the same weights; after a warm-up, medians of the repetitions (column n) are compared. What is slower
  is repeated less often, but at least three times.
- A forward pass is in evaluation mode, without gradients. A training step is a forward pass with the dropout that the
  row names, the backward pass of the cross-entropy, and a step of SGD with momentum, for all models.
- *Original* is the dense attention of Cordonnier et al. (C20), every score and probability by einsum as in the code
  that the paper published: `tools/benchmarks/original.py`. `tests/test_benchmarks.py` shows that it computes the same
  outputs and gradients as the models of this package. A pair differs in its attention layers alone.
- Multiply-adds, in thousand millions, are those of matrix products, convolutions and attention kernels, by torch's
  `FlopCounterMode`. *By arithmetic* is their ratio: what the measured one would be if both sides ran at the same
  rate.
- *Of matrix rate* is the least time for our multiply-adds, at the rate of a product of two large matrices on the same
  machine with the same number of threads, over our time.
- Peak memory is that of one training step without attention dropout, in a process of its own: on a CPU the largest
  resident set of the process, with glibc's malloc told to give freed tensors back at once (for both sides; the holes
  that it leaves otherwise come on top), on a GPU what torch's allocator had at most. It is compared as a whole, with
  the libraries, weights and images, and without what was there before the step.
- All times of all repetitions are in the JSON of a run.
"""


def tables(run: Dict[str, Any], level: str = '##', figure: str = '') -> str:
    """The settings of a run and a table for each of its groups.

    Args:
        run (dict): ``settings`` and ``groups``, as ``benchmark.py`` writes them.
        level (str): What a heading begins with. Defaults to ``'##'``.
        figure (str): A link to put under the table of the group ``cost``. Defaults to none.
    """
    parts = [f'{level} {machine(run["settings"])}', _rates(run['settings'])]
    for name, rows in run['groups'].items():
        group = GROUPS[name]
        parts.append(f'{level}# {group.title} (`{name}`)')
        if not rows:
            parts.append('Nothing of this group can be measured here.')
        elif name == 'cost':
            points = rows[0]['points']
            parts += [cost_table(points, run['settings']['device']), exponents_text(points) + _verdict_text(rows[0])]
            parts += [figure] if figure else []
        elif name == 'memory':
            parts.append(_memory_table(rows))
        else:
            parts.append(_speed_table(rows, group.ratio, run['settings']))
    return '\n\n'.join(parts)


def page(runs: Sequence[Dict[str, Any]], figure: Path, path: Path) -> str:
    """The whole page.

    Args:
        runs (Sequence[dict]): See :func:`tables`.
        figure (Path): The figure of the first run that has the group ``cost``.
        path (Path): Where the page goes.
    """
    with_curve = next((run for run in runs if 'cost' in run['groups']), None)
    link = Path(os.path.relpath(figure, path.parent)).as_posix()
    link = f"![Time of SA quadratic's attention against the number of tokens]({link})"
    return '\n'.join([INTRODUCTION, *(tables(run, figure=link if run is with_curve else '') + '\n' for run in runs)])


def machine(settings: Dict[str, Any]) -> str:
    """What a run ran on, in a line."""
    device = settings['gpu'] or f'{settings["cores"]} CPU cores'
    quick = ', quick: small models, no measurement' if settings['quick'] else ''
    return (
        f'{device}, {settings["threads"]} threads, {settings["dtype"]}, torch {settings["torch"]}, '
        f'timm {settings["timm"]}{quick}'
    )


def _rates(settings: Dict[str, Any]) -> str:
    return (
        f'Matrix products: {billions(settings["matrix_rate"])} thousand million multiply-adds a second. '
        f'Copying: {billions(settings["copy_rate"])} GB a second, read and written.'
    )


def _speed_table(rows: List[Dict[str, Any]], ratio: str, settings: Dict[str, Any]) -> str:
    cuda = settings['device'] == 'cuda'
    paper = any(row.get('paper') for row in rows)
    images = cuda and any(row.get('images') for row in rows)
    header = [
        '',
        ratio,
        *_target_header(rows),
        *(['in L21'] if paper else []),
        'by arithmetic',
        'multiply-adds of these',
        'of matrix rate',
        *(['ms of these'] if cuda else []),
        *(['images/s of these'] if images else []),
        'n',
    ]
    return table(
        header,
        [
            [
                row['name'],
                number(row['ratio']),
                *_target(row, rows),
                *([number(row.get('paper'))] if paper else []),
                number(row['ratio_of_multiply_adds']),
                ' / '.join(billions(row['multiply_adds'][side]) for side in _sides(row)),
                _of_matrix_rate(row, settings['matrix_rate']),
                *([_milliseconds(row)] if cuda else []),
                *([_images(row)] if images else []),
                str(len(row['seconds'][row['denominator']])),
            ]
            for row in rows
        ],
    )


def _memory_table(rows: List[Dict[str, Any]]) -> str:
    header = ['', 'ours / original', *_target_header(rows), 'MB of ours', 'MB of the original']
    return table(
        header,
        [
            [
                row['name'],
                number(row['ratio']),
                *_target(row, rows),
                *(f'{row["bytes"][side] / 1e6:,.0f}' for side in ('ours', 'original')),
            ]
            for row in rows
        ],
    )


def _target_header(rows: List[Dict[str, Any]]) -> List[str]:
    return ['target', 'met'] if any(row['target'] for row in rows) else []


def _target(row: Dict[str, Any], rows: List[Dict[str, Any]]) -> List[str]:
    if not _target_header(rows):
        return []
    return [f'{row["target"][0]} {row["target"][1]:g}', 'yes' if is_met(row) else 'no'] if row['target'] else ['', '']


def is_met(row: Dict[str, Any]) -> bool:
    """Whether a row with a target reaches it."""
    bound, target = row['target']
    return row['ratio'] is not None and (row['ratio'] >= target if bound == 'at least' else row['ratio'] <= target)


def _verdict_text(row: Dict[str, Any]) -> str:
    if not row['target']:
        return ''
    bound, target = row['target']
    return f' Target for ours, attention alone: {bound} {target:g}; {"met" if is_met(row) else "not met"}.'


def _sides(row: Dict[str, Any]) -> List[str]:
    return [*row['numerator'], row['denominator']]


def _of_matrix_rate(row: Dict[str, Any], matrix_rate: float) -> str:
    if row['ours'] is None:
        return ''
    floor = row['multiply_adds'][row['ours']] / matrix_rate
    return f'{floor / statistics.median(row["seconds"][row["ours"]]):.0%}'


def _milliseconds(row: Dict[str, Any]) -> str:
    return ' / '.join(number(1000 * statistics.median(row['seconds'][side])) for side in _sides(row))


def _images(row: Dict[str, Any]) -> str:
    return ' / '.join(number(row['images'] / statistics.median(row['seconds'][side])) for side in _sides(row))
