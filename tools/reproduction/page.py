"""The page of a table: its rows in Markdown, and its curves."""

import io
import itertools
from pathlib import Path
from typing import List, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from attncnn_plugin.mm.reliability import AtomicBackend

from .measures import IMAGES
from .results import Run
from .tables import Table

LABELS = {'accuracy/top1': 'top-1, %', 'cross_entropy/mean': 'validation loss'}


def write_page(folder: Path, name: str, table: Table, runs: Sequence[Run], data: str) -> None:
    """Writes the page and the figure of a table; the same results give the same bytes."""
    images, results = sorted(table.epochs), [run.result for run in runs if run.result is not None]
    time = f'minutes with {images[-1]:,} images' if len(images) > 1 else 'minutes of a training'
    columns = ['network', 'parameters', 'multiply-adds', *(f'top-1 of {n:,} images, %' for n in images), time, 'seeds']
    columns += ['attention at a shift'] * (table.gate is not None)
    lines = [f'# {table.title}', '', table.about, '', _conditions(table, runs, images, data), '']
    lines += [f'| {" | ".join(columns)} |', '| --- ' * len(columns) + '|']
    for label in table.rows:
        of_row = [run for run in runs if run.label == label]
        cells = _cells(of_row, images)
        if table.gate is not None:
            shares = [run.result['share'] for run in of_row if run.result and 'share' in run.result]
            cells.append(_mean_and_range(shares, '.2f') if shares else '')
        lines.append(f'| {label} | {" | ".join(cells)} |')
    missing = [f'- {run}' for run in runs if run.result is None]
    if missing:
        lines += ['', f'Missing, {len(missing)} of {len(runs)} trainings:', '', *missing]
    if results:
        AtomicBackend().put((draw if table.curves else draw_dots)(name, table, results), folder / f'{name}.svg')
        shown = ' and '.join(LABELS[metric] for metric in table.curves)
        lines += ['', f'![{f"{shown} by epoch" if shown else "top-1, a dot for each seed"}]({name}.svg)']
    AtomicBackend().put('\n'.join([*lines, '']).encode(), folder / f'{name}.md')


def _conditions(table: Table, runs: Sequence[Run], images: Sequence[int], data: str) -> str:
    """Returns a sentence on the images and the epochs, and some on where and how it was trained."""
    most = {number: max(run.epochs for run in runs if run.images == number) for number in images}
    lengths = ', '.join(f'{number:,} images up to {most[number]} epochs' for number in images)
    recipes = set()
    for result in [run.result for run in runs if run.result is not None]:
        machine, config = result['machine'], result['config']
        threads = f'{machine["threads"]} thread{"s" * (machine["threads"] > 1)} a training'
        validated = 'Trained in bfloat16, validated' if 'BFloat16' in str(config['optim_wrapper']) else 'Validated'
        number = config['val_dataloader']['dataset'].get('num_images')
        where = f'{machine["gpu"] or machine["processor"]}, {threads}, PyTorch {result["versions"]["torch"]}'
        recipes.add(f'{where}. {validated} with {f"{number:,}" if number else "all"} test images.')
    seeds = 'Means over the seeds, and ranges in brackets. Minutes are without the validations.'
    if table.gate is not None:
        seeds += (
            ' The attention at a shift is what heads that begin with one give it in the first block before training, '
            f'mean over the heads and {IMAGES} images; a row with less than {table.gate} is void and not trained.'
        )
    return ' '.join([f'Trained on {data}: {lengths}. {seeds}', *sorted(recipes)])


def _cells(runs: Sequence[Run], images: Sequence[int]) -> List[str]:
    """Returns the numbers of one row; the time is that of the largest size of the table."""
    results = [run.result for run in runs if run.result is not None]
    cells = [_mean_and_range([result[key] for result in results], ',.0f') for key in ('parameters', 'multiply_adds')]
    for number in images:
        seeds = len([run for run in runs if run.images == number])
        values = [x['top1'] for x in results if x['images'] == number and x['top1'] is not None]
        part = f', {len(values)} of {seeds} seeds' if 0 < len(values) < seeds else ''
        void = any(x['top1'] is None for x in results)
        cells.append('void' if void else _mean_and_range(values, '.1f') + part if seeds else '')
    minutes = [result['seconds'] / 60 for result in results if result['images'] == images[-1]]
    return [*cells, _mean_and_range(minutes, '.1f') if seeds else '', str(len({run.seed for run in runs}))]


def _mean_and_range(values: Sequence[float], form: str) -> str:
    if not values:
        return 'missing'
    mean, low, high = (format(value, form) for value in (np.mean(values), min(values), max(values)))
    return mean if len(set(values)) == 1 else f'{mean} ({low} to {high})'


def draw(name: str, table: Table, results: List[dict]) -> bytes:
    """Draws the curves: a panel for each metric and number of images, means and ranges over the seeds."""
    images = sorted({result['images'] for result in results})
    figure = Figure(figsize=(5.5 * len(images) + 2, 3.8 * len(table.curves)), layout='constrained')
    axes = figure.subplots(len(table.curves), len(images), squeeze=False)
    lines = {}
    for axis, (metric, number) in zip(axes.flat, itertools.product(table.curves, images)):
        axis.set(title=f'{number:,} images', xlabel='epochs', ylabel=LABELS[metric])
        for i, (label, row) in enumerate(table.rows.items()):
            group = [result for result in results if (result['label'], result['images']) == (label, number)]
            if not group:
                continue
            curves = [dict(map(tuple, result['curves'][metric])) for result in group]
            steps = sorted(set.intersection(*map(set, curves)))  # that all seeds have
            values = np.array([[curve[step] for step in steps] for curve in curves])
            begins = table.epochs_of(row.start, number) if row.start else row.begins * table.epochs[number]
            epochs = np.array(steps) + begins
            style = dict(color=f'C{i % 10}', linestyle='-' if i < 10 else '--', label=label)  # the same in all panels
            (lines[label],) = axis.plot(epochs, values.mean(0), **style)
            axis.fill_between(epochs, values.min(0), values.max(0), color=style['color'], alpha=0.2, linewidth=0)
    shown = [label for label in table.rows if label in lines]
    figure.legend([lines[label] for label in shown], shown, loc='outside right upper', fontsize='small')
    return _svg(name, figure)


def draw_dots(name: str, table: Table, results: List[dict]) -> bytes:
    """Draws a line for each row, with a dot for each seed at its last accuracy and a stroke at their mean."""
    figure = Figure(figsize=(7, 0.32 * len(table.rows) + 0.9), layout='constrained')
    axes = figure.subplots()
    axes.set(xlabel=LABELS['accuracy/top1'], yticks=range(len(table.rows)), yticklabels=list(table.rows))
    axes.set_ylim(len(table.rows) - 0.5, -0.5)
    axes.grid(axis='y', alpha=0.3)
    for place, label in enumerate(table.rows):
        values = [x['top1'] for x in results if x['label'] == label and x['top1'] is not None]
        axes.plot(values, [place] * len(values), 'o', color='C0', alpha=0.7)
        axes.plot([np.mean(values)] * bool(values), [place] * bool(values), '|', color='black', markersize=16)
    return _svg(name, figure)


def _svg(name: str, figure: Figure) -> bytes:
    picture = io.BytesIO()
    with rc_context({'svg.hashsalt': f'{name}.svg'}):  # the same figure is the same file
        figure.savefig(picture, format='svg', metadata=dict(Date=None))
    return picture.getvalue()
