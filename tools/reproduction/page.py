"""The page of a table: its rows in Markdown, and its curves."""

import io
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

from attncnn_plugin.engine.reliability import AtomicBackend

from .tables import Table, epochs_of

COSTS = ('parameters', 'multiply_adds')
LABELS = {'accuracy/top1': 'top-1, %', 'cross_entropy/mean': 'validation loss'}


def write_page(folder: Path, name: str, table: Table, runs: Sequence, data: str) -> Path:
    """Writes the page and the figure of a table.

    Args:
        folder (Path): Where they go.
        name (str): Of the table.
        table (Table): The table.
        runs (Sequence[Run]): All of its trainings, those that are missing too.
        data (str): What the images are, in words.

    Returns:
        Path: The page.
    """
    images = sorted({run.images for run in runs})
    results = [run.result for run in runs if run.result is not None]
    lines = [f'# {table.title}', '', table.about, '', _conditions(runs, results, data), '']
    sizes = [f'top-1 of {number:,} images, %' for number in images]
    time = f'minutes with {images[-1]:,} images' if len(images) > 1 else 'minutes of a training'
    columns = ['network', 'parameters', 'multiply-adds', *sizes, time, 'seeds']
    lines += [f'| {" | ".join(columns)} |', '| --- ' * len(columns) + '|']
    for row in table.rows:
        of_row = [run for run in runs if run.label == row.label]
        if of_row:
            lines.append(f'| {" | ".join(_cells(row.label, of_row, images))} |')
    missing = [str(run) for run in runs if run.result is None]
    if missing:
        lines += ['', f'Missing, {len(missing)} of {len(runs)} trainings:', '', *(f'- {run}' for run in missing)]
    figure = folder / f'{name}.svg'
    if results and draw(figure, table, results):
        lines += ['', f'![{" and ".join(LABELS[metric] for metric in table.curves)} by epoch]({figure.name})']
    page = folder / f'{name}.md'
    AtomicBackend().put('\n'.join([*lines, '']).encode(), page)
    return page


def _conditions(runs: Sequence, results: List[dict], data: str) -> str:
    """A sentence on the images and the epochs, and one on where it was trained."""
    epochs = {number: max(run.epochs for run in runs if run.images == number) for number in {r.images for r in runs}}
    lengths = ', '.join(f'{number:,} images up to {epochs[number]} epochs' for number in sorted(epochs))
    text = (
        f'Trained on {data}: {lengths}. Means over the seeds, and ranges in brackets. Minutes are without the '
        'validations.'
    )
    machines = {f'{_machine(result)} {_recipe(result["config"])}' for result in results}
    return f'{text} {" ".join(sorted(machines))}'.rstrip()


def _machine(result: dict) -> str:
    machine, versions = result['machine'], result['versions']
    threads = f'{machine["threads"]} thread{"s" * (machine["threads"] > 1)} a training'
    return f'{machine["gpu"] or machine["processor"]}, {threads}, PyTorch {versions["torch"]}.'


def _recipe(config: dict) -> str:
    """What of the config can be set for all trainings of a table."""
    validated = config['val_dataloader']['dataset'].get('num_images')
    precision = (
        'Trained in bfloat16, validated' if 'BFloat16' in config['optim_wrapper'].get('type', '') else 'Validated'
    )
    return f'{precision} with {f"{validated:,}" if validated else "all"} test images.'


def _cells(label: str, runs: Sequence, images: Sequence[int]) -> List[str]:
    """One row; the time is that of the largest size of the table."""
    results = [run.result for run in runs if run.result is not None]
    cells = [label]
    for key in COSTS:
        costs = [result[key] for result in results]
        cells.append(_mean_and_range(costs if len(set(costs)) > 1 else costs[:1], ',.0f'))
    for number in images:
        of_size = [run for run in runs if run.images == number]
        values = [run.result['top1'] for run in of_size if run.result is not None]
        part = f', {len(values)} of {len(of_size)} seeds' if 0 < len(values) < len(of_size) else ''
        cells.append(_mean_and_range(values, '.1f') + part if of_size else '')
    largest = [result['seconds'] / 60 for result in results if result['images'] == images[-1]]
    cells.append(_mean_and_range(largest, '.1f') if images[-1] in {run.images for run in runs} else '')
    return [*cells, str(len({run.seed for run in runs}))]


def _mean_and_range(values: Sequence[float], form: str) -> str:
    if not values:
        return 'missing'
    mean, low, high = (format(value, form) for value in (np.mean(values), min(values), max(values)))
    return mean if len(values) == 1 else f'{mean} ({low} to {high})'


def draw(path: Path, table: Table, results: List[dict]) -> bool:
    """Draws the curves of a table: a panel for each metric and number of images, means and ranges over the seeds.

    Returns:
        bool: Whether there is matplotlib to draw with.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return False
    images = sorted({result['images'] for result in results})
    size = (5.5 * len(images) + 2, 3.8 * len(table.curves))
    figure = Figure(figsize=size, layout='constrained')
    axes = figure.subplots(len(table.curves), len(images), squeeze=False)
    rows = {row.label: row for row in table.rows}
    # The same in all panels; matplotlib has ten colours.
    styles = {
        label: dict(color=f'C{i % 10}', linestyle='-' if i < 10 else '--', label=label) for i, label in enumerate(rows)
    }
    lines: Dict[str, Any] = {}
    for metric, row_of_axes in zip(table.curves, axes):
        for axis, number in zip(row_of_axes, images):
            groups: Dict[str, List[dict]] = {}
            for result in results:
                if result['images'] == number:
                    groups.setdefault(result['label'], []).append(result)
            for label, group in groups.items():
                steps, values = _common(group, metric)
                row = rows[label]
                begins = epochs_of(rows[row.start], table.epochs[number]) if row.start else 0
                offset = begins or row.begins * table.epochs[number]
                (lines[label],) = axis.plot(steps + offset, values.mean(0), **styles[label])
                low, high = values.min(0), values.max(0)
                axis.fill_between(steps + offset, low, high, color=styles[label]['color'], alpha=0.2, linewidth=0)
            axis.set(title=f'{number:,} images', xlabel='epochs', ylabel=LABELS[metric])
    shown = [label for label in rows if label in lines]
    figure.legend([lines[label] for label in shown], shown, loc='outside right upper', fontsize='small')
    picture = io.BytesIO()
    with rc_context({'svg.hashsalt': path.name}):  # the same figure is the same file
        figure.savefig(picture, format='svg', metadata=dict(Date=None))
    AtomicBackend().put(picture.getvalue(), path)
    return True


def _common(group: List[dict], metric: str):
    """Epochs that all seeds have, and the values there, ``(seeds, T)``."""
    curves = [dict(map(tuple, result['curves'][metric])) for result in group]
    steps = sorted(set.intersection(*map(set, curves)))
    return np.array(steps), np.array([[curve[step] for step in steps] for curve in curves])
