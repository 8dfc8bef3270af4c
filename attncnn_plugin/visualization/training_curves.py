"""What mmengine's logs say about one or several runs: accuracy by epoch, and the centres of heads."""

import json
import math
import re
from pathlib import Path
from typing import Dict, Iterator, Union

import numpy as np
from matplotlib.figure import Figure

from .style import color_of, line_style_of, styled

ATTENTION = 'attention/'
CENTER = re.compile(ATTENTION + r'(?P<layer>.+)/head(?P<head>\d+)/center_(?P<axis>row|column)')


@styled
def plot_metric(runs: Dict[str, Union[str, Path]], metric: str = 'accuracy/top1') -> Figure:
    """A metric of several runs by epoch (C20, Figures 2 and 13; L21, Figure 2).

    Args:
        runs (dict[str, str | Path]): The runs by the names that they have in the figure, see :func:`read_scalars`.
        metric (str): What the evaluation of the runs calls it. Defaults to ``'accuracy/top1'``.

    Returns:
        Figure: One axes with a line for each run.

    Raises:
        FileNotFoundError: A run without a log.
        ValueError: No runs; a run without the metric, or with validations that are not told apart.
    """
    if not runs:
        raise ValueError('runs is empty: give at least one')
    figure = Figure(figsize=(5.6, 3.6), layout='constrained')
    axes = figure.add_subplot()
    units, percent = set(), metric.startswith('accuracy/')
    for i, (label, path) in enumerate(runs.items()):
        scalars = read_scalars(path)
        if metric not in scalars:
            known = sorted(name for name in scalars if not name.startswith(ATTENTION))
            raise ValueError(f'metric={metric!r} is not in the logs of {path}: they have {", ".join(known)}')
        values = scalars[metric]
        if values[-1, 0] == 0:
            raise ValueError(
                f'all values of metric={metric!r} in the logs of {path} are of step 0: a training by '
                'iterations needs default_hooks=dict(logger=dict(log_metric_by_epoch=False))'
            )
        # Only the logs of a training by epochs have the epoch.
        units.add('epoch' if 'epoch' in scalars and values[-1, 0] <= scalars['epoch'][-1, 1] else 'iteration')
        last = f'{values[-1, 1]:.1f}' if percent else f'{values[-1, 1]:.4g}'
        axes.plot(
            values[:, 0],
            values[:, 1],
            color=color_of(i),
            linestyle=line_style_of(i),
            linewidth=1.3,
            label=f'{label}, {last} at the end',
        )
    axes.set_xlabel(' or '.join(sorted(units)))
    axes.set_ylabel(f'{metric}, %' if percent else metric)
    axes.grid(color='#E5E5E5', linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
    figure.legend(loc='outside lower center', ncols=1 if len(runs) < 3 else 2)
    return figure


def read_centers(run: Union[str, Path]) -> Dict[str, Dict[int, np.ndarray]]:
    """The centres of heads that ``AttentionVisualizationHook`` recorded.

    Args:
        run (str | Path): See :func:`read_scalars`.

    Returns:
        dict[str, dict[int, ndarray]]: By layer and head, as they were numbered when the training began, epoch, row and
        column, ``(T, 3)``.

    Raises:
        FileNotFoundError: A run without a log.
    """
    centers = {}
    for name, values in read_scalars(run).items():
        match = CENTER.fullmatch(name)
        if match:
            head = centers.setdefault(match['layer'], {}).setdefault(int(match['head']), {})
            head[match['axis']] = values
    return {
        layer: {head: np.column_stack([axes['row'], axes['column'][:, 1]]) for head, axes in sorted(heads.items())}
        for layer, heads in centers.items()
    }


def read_scalars(run: Union[str, Path]) -> Dict[str, np.ndarray]:
    """All scalars of a run that mmengine's local backend wrote.

    Of a run that was resumed, the logs are joined: what a later one has again counts. All scalars of attention count
    as one, for heads may be gone since.

    Args:
        run (str | Path): The folder of a run, or a file ``scalars.json``.

    Returns:
        dict[str, ndarray]: Step and value by name, ``(T, 2)``, the steps rising.

    Raises:
        FileNotFoundError: There is no such file, or none in the folder.
    """
    run = Path(run)
    files = (
        [run]
        if run.is_file()
        else sorted(run.glob('*/vis_data/scalars.json')) or sorted(run.glob('vis_data/scalars.json'))
    )
    if not files:
        raise FileNotFoundError(
            f'{run} has no */vis_data/scalars.json: give the work_dir of a run that was logged by '
            "dict(type='LocalVisBackend'), or the file itself"
        )
    scalars = {}
    for path in files:
        later = {}
        for line in _lines(path):
            step = line.pop('step', None)
            for name, value in line.items():
                if step is not None and isinstance(value, (int, float)):
                    later.setdefault(name, {})[step] = value
        of_attention = [min(values) for name, values in later.items() if name.startswith(ATTENTION)]
        for name in {**scalars, **later}:
            values = later.get(name, {})
            begin = min(of_attention if name.startswith(ATTENTION) else values, default=math.inf)
            kept = {step: value for step, value in scalars.get(name, {}).items() if step < begin}
            scalars[name] = {**kept, **values}
    return {name: np.array(sorted(values.items()), dtype=float) for name, values in scalars.items() if values}


def _lines(path: Path) -> Iterator[dict]:
    for text in path.read_text().splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
