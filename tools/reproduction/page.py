"""The page of a table: its rows in Markdown, and its figures."""

import io
import itertools
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from attncnn_plugin.mm.reliability import AtomicBackend
from attncnn_plugin.visualization.style import COLORS, draw_grid, mark_transition, settings

from .results import Run
from .tables import Table

LABELS = {'accuracy/top1': 'accuracy, %', 'cross_entropy/mean': 'validation loss'}


def write_page(folder: Path, name: str, table: Table, runs: Sequence[Run], data: str) -> None:
    """Writes the page and the figures of a table; the same results give the same bytes."""
    images, results = sorted(table.epochs), [run.result for run in runs if run.result is not None]
    time = f'minutes with {images[-1]:,} images' if len(images) > 1 else 'minutes of a training'
    columns = ['network', 'parameters', 'multiply-adds', *(f'top-1 of {n:,} images, %' for n in images), time, 'seeds']
    lines = [f'# {table.title}', '', table.about, '', _conditions(runs, images, data), '']
    lines += [f'| {" | ".join(columns)} |', '| --- ' * len(columns) + '|']
    for label in table.rows:
        lines.append(f'| {label} | {" | ".join(_cells([run for run in runs if run.label == label], images))} |')
    missing = [f'- {run}' for run in runs if run.result is None]
    if missing:
        lines += ['', f'Missing, {len(missing)} of {len(runs)} trainings:', '', *missing]
    if results:
        AtomicBackend().put(_svg(lambda: dot_plot(accuracies(table, results))), folder / f'{name}.svg')
        lines += ['', f'![Accuracy by network: a dot for each seed, a bar for the mean]({name}.svg)']
    if results and table.curves:
        AtomicBackend().put(_svg(lambda: curves(table, results)), folder / f'{name}-curves.svg')
        lines += ['', f'![{" and ".join(LABELS[metric] for metric in table.curves)} by epoch]({name}-curves.svg)']
    AtomicBackend().put('\n'.join([*lines, '']).encode(), folder / f'{name}.md')


def _conditions(runs: Sequence[Run], images: Sequence[int], data: str) -> str:
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
    return ' '.join([f'Trained on {data}: {lengths}. {seeds}', *sorted(recipes)])


def _cells(runs: Sequence[Run], images: Sequence[int]) -> List[str]:
    """Returns the numbers of one row; the time is that of the largest size of the table."""
    results = [run.result for run in runs if run.result is not None]
    cells = [_mean_and_range([result[key] for result in results], ',.0f') for key in ('parameters', 'multiply_adds')]
    for number in images:
        seeds = len([run for run in runs if run.images == number])
        values = [result['top1'] for result in results if result['images'] == number]
        part = f', {len(values)} of {seeds} seeds' if 0 < len(values) < seeds else ''
        cells.append(_mean_and_range(values, '.1f') + part if seeds else '')
    minutes = [result['seconds'] / 60 for result in results if result['images'] == images[-1]]
    return [*cells, _mean_and_range(minutes, '.1f') if seeds else '', str(len({run.seed for run in runs}))]


def _mean_and_range(values: Sequence[float], form: str) -> str:
    if not values:
        return 'missing'
    mean, low, high = (format(value, form) for value in (np.mean(values), min(values), max(values)))
    return mean if len(set(values)) == 1 else f'{mean} ({low} to {high})'


def _svg(draw: Callable[[], Figure]) -> bytes:
    """Returns a figure in the style of the package; the same figure is the same file."""
    picture = io.BytesIO()
    with settings():
        draw().savefig(picture, format='svg', metadata=dict(Date=None))
    return picture.getvalue()


def accuracies(table: Table, results: Sequence[dict]) -> Dict[str, Dict[str, List[float]]]:
    """Returns the accuracies of the seeds, by number of images and by row, for :func:`dot_plot`."""
    found: Dict[str, Dict[str, List[float]]] = {}
    for number, label in itertools.product(sorted({result['images'] for result in results}), table.rows):
        of_row = [own['top1'] for own in results if (own['label'], own['images']) == (label, number)]
        found.setdefault(f'{number:,} images', {})[label] = of_row
    return found


def dot_plot(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draws accuracies in per cent: a panel for each title, a line for each row, a dot a seed, a bar at the mean."""
    rows = list(dict.fromkeys(label for values in panels.values() for label in values))
    size = 0.075 * max(map(len, rows)) + 2.3 * len(panels) + 0.4, 0.23 * len(rows) + 0.75
    figure = Figure(figsize=size, layout='constrained')
    for axes, (title, values) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False).flat, panels.items()):
        for line, label in enumerate(rows):
            seeds = values.get(label, ())
            axes.plot(seeds, [line] * len(seeds), 'o', color=COLORS[6], alpha=0.75, markersize=4.5, markeredgewidth=0)
            if len(seeds) > 1:
                axes.plot(np.mean(seeds), line, '|', color=COLORS[1], markersize=11, markeredgewidth=1.8)
        axes.set(title=title, xlabel='accuracy, %', ylim=(len(rows) - 0.4, -0.6))
        axes.set_yticks(range(len(rows)), rows)
        axes.margins(x=0.08)
        axes.locator_params(axis='x', nbins=5)
        axes.tick_params(axis='y', length=0)
        draw_grid(axes)
    return figure


def curves(table: Table, results: Sequence[dict]) -> Figure:
    """Draws what the table shows by epoch, of the most images: a panel a metric, means and ranges over the seeds."""
    most = max(table.epochs)
    figure = Figure(figsize=(5.6 * len(table.curves), 3.6), layout='constrained')
    for axes, (metric, labels) in zip(figure.subplots(1, len(table.curves), squeeze=False).flat, table.curves.items()):
        for color, label in zip(COLORS, labels):
            group = [own for own in results if (own['label'], own['images']) == (label, most)]
            if not group:
                continue
            of_seeds = [dict(map(tuple, result['curves'][metric])) for result in group]
            steps = sorted(set.intersection(*map(set, of_seeds)))  # that all seeds have
            values = np.array([[curve[step] for step in steps] for curve in of_seeds])
            row = table.rows[label]
            begins = table.epochs_of(row.start, most) if row.start else row.begins * table.epochs[most]
            axes.plot(np.array(steps) + begins, values.mean(0), color=color, label=label, linewidth=1.3)
            axes.fill_between(
                np.array(steps) + begins, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0
            )
            hooks = group[0]['config'].get('custom_hooks') or ()
            mark_transition(axes, [hook['epoch'] for hook in hooks if hook.get('type') == 'PhaseTransitionHook'])
        axes.set(title=f'{most:,} images', xlabel='epoch', ylabel=LABELS[metric])
        axes.locator_params(axis='x', integer=True)
        draw_grid(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc='outside lower center', ncols=2)
    return figure
