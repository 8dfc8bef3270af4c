"""Curves of a metric over one or several trainings.

Figures 2 and 13 of Cordonnier et al. 2020 (C20), and Figure 2 of Li et al. 2021 (L21).

mmpretrain's ``analyze_logs.py`` does not join the logs of a run that was resumed.
"""

from pathlib import Path
from typing import Dict, Optional, Union

from matplotlib.figure import Figure

from ..analysis.training_logs import ATTENTION, read_scalars
from .style import COLORS, color_of, draw_grid, mark_transition, settings

NAMES = {'accuracy/top1': 'accuracy, %', 'accuracy/top5': 'top-5 accuracy, %', 'cross_entropy/mean': 'validation loss'}
LINE_STYLES = ('solid', (0, (4, 2)), (0, (1, 1)))


@settings()
def plot_metric(
    runs: Dict[str, Union[str, Path]], metric: str = 'accuracy/top1', offsets: Optional[Dict[str, float]] = None
) -> Figure:
    """Draws a metric of several runs by epoch (C20, Figures 2 and 13; L21, Figure 2, with ``'cross_entropy/mean'``).

    Args:
        runs (dict[str, str | Path]): The runs by the names that they have in the figure, see
            :func:`~attncnn_plugin.analysis.read_scalars`.
        metric (str): The name of the metric in the logs. Defaults to ``'accuracy/top1'``.
        offsets (dict[str, float], optional): By the names of runs, the epoch, or iteration, at which they begin in the
            figure, such as the last one of the run that they go on from: 300 for the pruned network of C20, Figure 13.
            Defaults to None, means 0 for all.

    Returns:
        Figure: One axes with a line for each run, and a mark where ``PhaseTransitionHook`` made attention of
        convolutions.

    Raises:
        FileNotFoundError: A run without a log.
        ValueError: No runs; an offset of none of them; a run without the metric, or with validations that are not told
            apart.
    """
    if not runs:
        raise ValueError('runs is empty: give at least one')
    offsets = offsets or {}
    if offsets.keys() - runs.keys():
        raise ValueError(f'offsets={offsets} must be of some of the runs, which are {", ".join(runs)}')
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
        look = dict(color=color_of(i), linestyle=LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)], linewidth=1.3)
        begins = offsets.get(label, 0)
        axes.plot(values[:, 0] + begins, values[:, 1], label=f'{label}, {last} at the end', **look)
        mark_transition(axes, [begins + step for step, _ in scalars.get('transition/parameters', ())])
    axes.set_xlabel(' or '.join(sorted(units)))
    axes.set_ylabel(NAMES.get(metric, f'{metric}, %' if percent else metric))
    axes.locator_params(axis='x', integer=True)
    draw_grid(axes)
    figure.legend(loc='outside lower center', ncols=1 if len(runs) < 3 else 2)
    return figure
