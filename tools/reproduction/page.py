"""The page of a table: its rows in Markdown, and its figure."""

import io
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from attncnn_plugin.mm.reliability import AtomicBackend

from .measures import CORRUPTED, IMAGES
from .results import Run
from .tables import Table

TOP1 = 'top-1, %'
# What results of some tables have beside the accuracy: the column, the form of its numbers, and what it is.
EXTRAS: Dict[str, Tuple[str, str, str]] = {
    'share': (
        'attention at a shift',
        '.3f',
        'Attention at a shift is what heads that begin with one give it in the first block before training, the mean '
        f'over the heads and {IMAGES} images. A row with less than half is void and not trained.',
    ),
    'corrupted': (
        'top-1 of corrupted images, %',
        '.1f',
        'Corrupted images have Gaussian noise, shot noise, blur, less contrast, or larger pixels, each in three '
        f'strengths (after Hendrycks and Dietterich 2019; {CORRUPTED:,} test images, the mean of all).',
    ),
    'moved': (
        'attention moved',
        '.3f',
        'Attention moved by ½ Σ_k |P[q, k] − P′[q, k]|, P before and P′ after the training, of the mean attention to '
        f'{IMAGES} images: 0 is not at all, 1 is all of it.',
    ),
}


def write_page(folder: Path, name: str, table: Table, runs: Sequence[Run], data: str) -> None:
    """Writes the page and the figure of a table; the same results give the same bytes."""
    results = [run.result for run in runs if run.result is not None]
    extras = [key for key in EXTRAS if any(key in result for result in results)]
    columns = [
        'network',
        'parameters',
        'multiply-adds',
        f'top-1 of {table.images:,} images, %',
        'minutes of a training',
    ]
    columns += ['seeds', *(EXTRAS[key][0] for key in extras)]
    lines = [f'# {table.title}', '', table.about, '', _conditions(table, results, data, extras), '']
    lines += [f'| {" | ".join(columns)} |', '| --- ' * len(columns) + '|']
    for label in table.rows:
        lines.append(f'| {label} | {" | ".join(_cells([run for run in runs if run.label == label], extras))} |')
    missing = [f'- {run}' for run in runs if run.result is None]
    if missing:
        lines += ['', f'Missing, {len(missing)} of {len(runs)} trainings:', '', *missing]
    if results:
        AtomicBackend().put(draw(name, table, results), folder / f'{name}.svg')
        lines += ['', f'![{TOP1}, a dot for each seed]({name}.svg)']
    AtomicBackend().put('\n'.join([*lines, '']).encode(), folder / f'{name}.md')


def _conditions(table: Table, results: Sequence[dict], data: str, extras: Sequence[str]) -> str:
    """Returns a sentence on the images and the epochs, and some on where and how it was trained."""
    most = max(table.epochs_of(label) for label in table.rows)
    recipes = set()
    for result in results:
        machine, config = result['machine'], result['config']
        threads = f'{machine["threads"]} thread{"s" * (machine["threads"] > 1)} a training'
        validated = 'Trained in bfloat16, validated' if 'BFloat16' in str(config['optim_wrapper']) else 'Validated'
        number = config['val_dataloader']['dataset'].get('num_images')
        where = f'{machine["gpu"] or machine["processor"]}, {threads}, PyTorch {result["versions"]["torch"]}'
        recipes.add(f'{where}. {validated} with {f"{number:,}" if number else "all"} test images.')
    seeds = 'Means over the seeds, and ranges in brackets. Minutes are without the validations.'
    images = f'Trained on {data}: {table.images:,} images up to {most} epochs. {seeds}'
    return ' '.join([images, *(EXTRAS[key][2] for key in extras), *sorted(recipes)])


def _cells(runs: Sequence[Run], extras: Sequence[str]) -> List[str]:
    """Returns the numbers of one row."""
    results = [run.result for run in runs if run.result is not None]
    cells = [_mean_and_range([result[key] for result in results], ',.0f') for key in ('parameters', 'multiply_adds')]
    part = f', {len(results)} of {len(runs)} seeds' if 0 < len(results) < len(runs) else ''
    trained = [result for result in results if result['top1'] is not None]
    void = len(trained) < len(results)
    cells.append('void' if void else _mean_and_range([result['top1'] for result in trained], '.1f') + part)
    cells.append('' if void else _mean_and_range([result['seconds'] / 60 for result in trained], '.1f'))
    cells.append(str(len(runs)))
    for key in extras:
        values = [np.mean(_numbers(result[key])) for result in results if key in result]
        cells.append(_mean_and_range(values, EXTRAS[key][1]) if values else '')
    return cells


def _numbers(value: Any) -> List[float]:
    return list(value.values()) if isinstance(value, dict) else [value]


def _mean_and_range(values: Sequence[float], form: str) -> str:
    if not values:
        return 'missing'
    mean, low, high = (format(value, form) for value in (np.mean(values), min(values), max(values)))
    return mean if len(set(values)) == 1 else f'{mean} ({low} to {high})'


def draw(name: str, table: Table, results: List[dict]) -> bytes:
    """Draws a line for each row, with a dot for the accuracy of each seed and a stroke at their mean."""
    figure = Figure(figsize=(7, 0.32 * len(table.rows) + 0.9), layout='constrained')
    axes = figure.subplots()
    for place, label in enumerate(table.rows):
        values = [x['top1'] for x in results if x['label'] == label and x['top1'] is not None]
        if values:
            axes.plot(values, [place] * len(values), 'o', color='C0', alpha=0.7)
            axes.plot(np.mean(values), place, '|', color='black', markersize=16)
    axes.set(xlabel=TOP1, yticks=range(len(table.rows)), yticklabels=list(table.rows))
    axes.set_ylim(len(table.rows) - 0.5, -0.5)
    axes.grid(axis='y', alpha=0.3)
    picture = io.BytesIO()
    with rc_context({'svg.hashsalt': f'{name}.svg'}):  # the same figure is the same file
        figure.savefig(picture, format='svg', metadata=dict(Date=None))
    return picture.getvalue()
