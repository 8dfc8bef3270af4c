"""The page of a table: its rows in Markdown, and its figure."""

import io
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np
from matplotlib.figure import Figure

from attncnn_plugin.mm.reliability import AtomicBackend
from attncnn_plugin.visualization.style import COLORS, draw_grid, settings

from .measures import CORRUPTED, IMAGES
from .results import Run
from .tables import Table

# What results of some tables have beside the accuracy: the column, the form of its numbers, and what it is.
EXTRAS: Dict[str, Tuple[str, str, str]] = {
    'share': (
        'attention at a shift',
        '.3f',
        'Attention at a shift is what heads that begin with one give it in the first block before training, the mean '
        f'over the heads and {IMAGES} images.',
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
    columns = ['network', 'parameters', 'multiply-adds', 'top-1, %', 'minutes of a training', 'seeds']
    columns += [EXTRAS[key][0] for key in extras]
    lines = [f'# {table.title}', '', table.about, '', _conditions(table, results, data, extras), '']
    lines += [f'| {" | ".join(columns)} |', '| --- ' * len(columns) + '|']
    for label in table.rows:
        lines.append(f'| {label} | {" | ".join(_cells([run for run in runs if run.label == label], extras))} |')
    missing = [f'- {run}' for run in runs if run.result is None]
    if missing:
        lines += ['', f'Missing, {len(missing)} of {len(runs)} trainings:', '', *missing]
    if results:
        picture = io.BytesIO()
        with settings():  # the same figure is the same file
            dot_plot(results).savefig(picture, format='svg', metadata=dict(Date=None))
        AtomicBackend().put(picture.getvalue(), folder / f'{name}.svg')
        lines += ['', f'![Accuracy by network: a dot for each seed, a bar for the mean]({name}.svg)']
    AtomicBackend().put('\n'.join([*lines, '']).encode(), folder / f'{name}.md')


def _conditions(table: Table, results: Sequence[dict], data: str, extras: Sequence[str]) -> str:
    """Returns a sentence on the images and the epochs, and some on where and how it was trained."""
    lengths: Dict[int, List[int]] = {}
    for label in table.rows:
        lengths.setdefault(table.images_of(label), []).append(table.epochs_of(label))
    recipes = set()
    for result in results:
        config = result['config']
        validated = 'Trained in bfloat16, validated' if 'BFloat16' in str(config['optim_wrapper']) else 'Validated'
        number = config['val_dataloader']['dataset'].get('num_images')
        where = ', then '.join(dict.fromkeys(map(_place, result.get('parts') or [result])))
        recipe = f'{where}. {validated} with {f"{number:,}" if number else "all"} test images.'
        recipes.add((-result['images'], f'{result["images"]:,} images: {recipe}' if len(lengths) > 1 else recipe))
    seeds = 'Means over the seeds, and ranges in brackets. Minutes are wall-clock, without the validations; other '
    hours = sum(result['seconds'] for result in results) / 3600
    seeds += f'programs on the machine make them longer. All trainings took {hours:.1f} hours together.'
    images = ', and '.join(
        f'{number:,} images for {" or ".join(map(str, sorted(set(epochs))))} epochs'
        for number, epochs in lengths.items()
    )
    return ' '.join(
        [
            f'Trained on {data}: {images}. {seeds}',
            *(EXTRAS[key][2] for key in extras),
            *(recipe for _, recipe in sorted(recipes)),
        ]
    )


def _place(part: Mapping[str, Any]) -> str:
    """Returns where a part of a training ran."""
    machine, torch = part['machine'], part['versions']['torch']
    threads = 'one thread' if machine['threads'] == 1 else f'{machine["threads"]} threads'
    return f'{machine["gpu"] or machine["processor"]}, {threads} per training, PyTorch {torch}'


def _cells(runs: Sequence[Run], extras: Sequence[str]) -> List[str]:
    """Returns the numbers of one row."""
    results = [run.result for run in runs if run.result is not None]
    cells = [_mean_and_range([result[key] for result in results], ',.0f') for key in ('parameters', 'multiply_adds')]
    part = f', {len(results)} of {len(runs)} seeds' if 0 < len(results) < len(runs) else ''
    cells.append(_mean_and_range([result['top1'] for result in results], '.1f') + part)
    cells.append(_mean_and_range([result['seconds'] / 60 for result in results], '.1f'))
    cells.append(str(len(runs)))
    for key in extras:
        found = [result[key] for result in results if key in result]
        values = [np.mean(list(own.values()) if isinstance(own, dict) else own) for own in found]
        cells.append(_mean_and_range(values, EXTRAS[key][1]) if values else '')
    return cells


def _mean_and_range(values: Sequence[float], form: str) -> str:
    if not values:
        return 'missing'
    mean, low, high = (format(value, form) for value in (np.mean(values), min(values), max(values)))
    return mean if len(set(values)) == 1 else f'{mean} ({low} to {high})'


def accuracies(results: Sequence[dict]) -> Dict[str, List[float]]:
    """Returns the accuracies of the seeds by row."""
    found: Dict[str, List[float]] = {}
    for result in results:
        found.setdefault(result['label'], []).append(result['top1'])
    return found


def dot_plot(results: Sequence[dict]) -> Figure:
    """Draws accuracies in per cent: a line for each row, a dot a seed, a bar at the mean."""
    rows, numbers = accuracies(results), sorted({result['images'] for result in results})[::-1]
    figure = Figure(figsize=(0.075 * max(map(len, rows)) + 2.7, 0.23 * len(rows) + 0.75), layout='constrained')
    axes = figure.subplots()
    for line, seeds in enumerate(rows.values()):
        axes.plot(seeds, [line] * len(seeds), 'o', color=COLORS[6], alpha=0.75, markersize=4.5, markeredgewidth=0)
        if len(seeds) > 1:
            axes.plot(np.mean(seeds), line, '|', color=COLORS[1], markersize=11, markeredgewidth=1.8)
    title = f'{" and ".join(f"{number:,}" for number in numbers)} images'
    axes.set(title=title, xlabel='accuracy, %', ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), rows)
    axes.margins(x=0.08)
    axes.locator_params(axis='x', nbins=5)
    axes.tick_params(axis='y', length=0)
    draw_grid(axes)
    return figure
