"""Curves of a metric over trainings, and of how far heads look by depth.

Figures 2 and 13 of Cordonnier et al. 2020 (C20), and Figure 2 of Li et al. 2021 (L21); Dosovitskiy et al. 2021, Figure
7, and Raghu et al. 2021, Figure 3. mmpretrain's ``analyze_logs.py`` does not join the logs of a run that was resumed.
"""

import math
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

from matplotlib.figure import Figure

from ..analysis.training_logs import ATTENTION, read_scalars
from .style import COLORS, color_of, draw_grid, mark_transition, settings

NAMES = {'accuracy/top1': 'accuracy, %', 'accuracy/top5': 'top-5 accuracy, %', 'cross_entropy/mean': 'validation loss'}
PANELS = {'distance': 'mean distance, % of the image side', 'mass_3x3': 'attention within 3×3, %'}
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
    axes = (figure := Figure(figsize=(5.6, 3.6), layout='constrained')).add_subplot()
    units, percent = set(), metric.startswith('accuracy/')
    for i, (label, path) in enumerate(runs.items()):
        scalars = read_scalars(path)
        if metric not in scalars:
            known = sorted(name for name in scalars if not name.startswith(ATTENTION))
            raise ValueError(f'metric={metric!r} is not in the logs of {path}: they have {", ".join(known)}')
        values = scalars[metric]
        if values[-1, 0] == 0:
            need = 'a training by iterations needs default_hooks=dict(logger=dict(log_metric_by_epoch=False))'
            raise ValueError(f'all values of metric={metric!r} in the logs of {path} are of step 0: {need}')
        # Only the logs of a training by epochs have the epoch.
        units.add('epoch' if 'epoch' in scalars and values[-1, 0] <= scalars['epoch'][-1, 1] else 'iteration')
        last = f'{values[-1, 1]:.1f}' if percent else f'{values[-1, 1]:.4g}'
        look = dict(color=color_of(i), linestyle=LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)], linewidth=1.3)
        begins = offsets.get(label, 0)
        axes.plot(values[:, 0] + begins, values[:, 1], label=f'{label}, {last} at the end', **look)
        mark_transition(axes, [begins + step for step, _ in scalars.get('transition/parameters', ())])
    axes.set(xlabel=' or '.join(sorted(units)), ylabel=NAMES.get(metric, f'{metric}, %' if percent else metric))
    axes.locator_params(axis='x', integer=True)
    draw_grid(axes)
    figure.legend(loc='outside lower center', ncols=1 if len(runs) < 3 else 2)
    return figure


@settings()
def plot_attention_distance(reports: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws how far, and how locally, the heads of each layer look, one column a model.

    Above is the mean distance from a query to its keys, each of which counts by its probability, as a share of the side
    of the grid, √(H·W): so grids of several sizes can be compared. Below is the attention that lies within the 3x3
    tokens around the query. A dot is a head, the line the mean of the heads of a layer.

    Args:
        reports (Mapping[str, Mapping]): By the names of models in the figure, their head reports as data, see
            :meth:`~attncnn_plugin.analysis.HeadReport.to_dict`. Where a layer has a report of its attention to images
            beside one by position, it is the former that is drawn.

    Returns:
        Figure: Two axes a model; x is the number of the layer, from 0.

    Raises:
        ValueError: No reports, or one without layers that have heads.
    """
    if not reports:
        raise ValueError('reports is empty: give at least one, of attncnn report --json')
    figure = Figure(figsize=(max(2.7 * len(reports), 3.6), 4.6), layout='constrained')
    panels = figure.subplots(2, len(reports), sharex='col', sharey='row', squeeze=False)
    for column, (label, report) in enumerate(reports.items()):
        # The last one of a layer is that of its attention to images where there is one.
        layers = {layer['name']: layer for layer in report.get('layers', ()) if layer['heads']}
        if not layers:
            raise ValueError(f'the report of {label} has no layers with heads')
        for axes, (number, name) in zip(panels[:, column], PANELS.items()):
            for place, layer in enumerate(layers.values()):
                whole = math.sqrt(math.prod(layer['grid'])) if number == 'distance' else 1
                heads = [100 * head[number] / whole for head in layer['heads'] if head[number] is not None]
                look = dict(color=color_of(column), alpha=0.45, markersize=3.5, markeredgewidth=0, clip_on=False)
                axes.plot([place] * len(heads), heads, 'o', **look)
            dots = [(line.get_xdata()[0], line.get_ydata()) for line in axes.get_lines() if len(line.get_xdata())]
            means = [(place, sum(heads) / len(heads)) for place, heads in dots]
            axes.plot(*zip(*means), color=color_of(column), linewidth=1.3)
            axes.locator_params(axis='x', integer=True, nbins=7)
            draw_grid(axes)
            if column == 0:
                axes.set_ylabel(name)
        panels[0, column].set_title(label)
        panels[1, column].set_xlabel('layer')
    for row in panels:  # which share their axis
        largest = max(max(line.get_ydata(), default=0) for axes in row for line in axes.get_lines())
        row[0].set_ylim(0, 1.05 * max(largest, 1))
    return figure
