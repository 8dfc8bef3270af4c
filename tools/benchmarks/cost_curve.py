#!/usr/bin/env python
"""How the cost of SA quadratic's attention grows with the grid: one layer, forward, batch 1, ours and dense.

The cost of the attention alone is the time of the layer without that of its linear map of the heads, which is measured
by itself. The exponent in the number of tokens is fitted by least squares in log-log.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch
from models import dense_original
from settings import DTYPES, Settings
from steps import forward_pass
from tables import billions, number, table
from timing import measure

from attncnn_plugin.layers import QuadraticAttention

FIGURE = Path(__file__).resolve().parents[2] / 'docs/images/attention_cost.svg'
SIDES = (16, 24, 32, 48, 64, 96, 128)
LARGEST_DENSE = 64  # above it the probabilities take too much memory
QUICK_SIDES, QUICK_LARGEST_DENSE = (8, 12, 16), 12


def measure_curve(settings: Settings) -> List[Dict[str, Any]]:
    """Times and multiply-adds on every grid.

    Returns:
        list[dict]: Of each grid its ``side`` in tokens and, by name, ``seconds`` and ``multiply_adds`` of ``ours``,
            ``linear``, the map of the heads, and ``dense``, unless the grid is too large for it.
    """
    dim, num_heads = (16, 3) if settings.quick else (400, 9)
    sides, largest_dense = (QUICK_SIDES, QUICK_LARGEST_DENSE) if settings.quick else (SIDES, LARGEST_DENSE)
    layer = QuadraticAttention(dim, num_heads).to(settings.device)
    points = []
    for side in sides:
        x = torch.randn(1, side, side, dim, device=settings.device)
        heads = torch.randn(1, side, side, num_heads * dim, device=settings.device)
        functions = dict(
            ours=forward_pass(layer, x, settings.dtype), linear=forward_pass(layer.value, heads, settings.dtype)
        )
        if side <= largest_dense:
            functions['dense'] = forward_pass(dense_original(layer, side, side), x, settings.dtype)
        points.append(dict(side=side, **measure(functions, settings.device, settings.repetitions)))
    return points


def layer_time(point: Dict[str, Any], name: str) -> Optional[float]:
    """Median time of ``'ours'``, ``'linear'`` or ``'dense'`` on a grid; None where it was not measured."""
    seconds = point['seconds'].get(name)
    return None if seconds is None else statistics.median(seconds)


def attention_time(point: Dict[str, Any], name: str) -> Optional[float]:
    """Median time without the linear map of the heads; None where it was not measured or no time is left."""
    layer = layer_time(point, name)
    alone = None if layer is None else layer - layer_time(point, 'linear')
    return alone if alone and alone > 0 else None


def exponent(points: List[Dict[str, Any]], name: str, time=attention_time) -> Optional[float]:
    """p of time ≈ c·(number of tokens)^p, by least squares in log-log.

    Args:
        points (list[dict]): See :func:`measure_curve`.
        name (str): ``'ours'`` or ``'dense'``.
        time (Callable): :func:`attention_time` or :func:`layer_time`. Defaults to :func:`attention_time`.

    Returns:
        float | None: None for fewer than two grids.
    """
    times = [(point['side'] ** 2, time(point, name)) for point in points]
    logs = [(math.log(tokens), math.log(seconds)) for tokens, seconds in times if seconds]
    return statistics.linear_regression(*zip(*logs)).slope if len(logs) > 1 else None


def cost_table(points: List[Dict[str, Any]], device: str) -> str:
    """Times and multiply-adds of every grid; times are ratios, on a GPU in milliseconds too."""
    unit = layer_time(points[0], 'ours')
    columns = [
        (layer_time, 'ours', 'ours, layer'),
        (attention_time, 'ours', 'ours, attention alone'),
        (layer_time, 'dense', 'dense, layer'),
        (attention_time, 'dense', 'dense, attention alone'),
    ]
    header = [
        'time in units of the first',
        *(title for _, _, title in columns),
        'dense / ours, layer',
        'multiply-adds of ours',
        'of dense',
        *(['ms of ours, layer'] if device == 'cuda' else []),
        'n',
    ]
    rows = []
    for point in points:
        times = [time(point, name) for time, name, _ in columns]
        counts = point['multiply_adds']
        rows.append(
            [
                f'{point["side"]}x{point["side"]} tokens',
                *(number(time and time / unit) for time in times),
                number(times[2] and times[2] / times[0]),
                billions(counts['ours']),
                billions(counts['dense']) if 'dense' in counts else '',
                *([number(1000 * times[0])] if device == 'cuda' else []),
                str(len(point['seconds']['ours'])),
            ]
        )
    return table(header, rows)


def exponents_text(points: List[Dict[str, Any]]) -> str:
    """The fitted exponents in a sentence."""
    fitted = [
        f'{name}, {part}: {number(exponent(points, name, time)) or "unknown"}'
        for name in ('ours', 'dense')
        for time, part in ((attention_time, 'attention alone'), (layer_time, 'whole layer'))
    ]
    return f'Fitted exponent in the number of tokens: {"; ".join(fitted)}.'


def draw(points: List[Dict[str, Any]], path: Path) -> None:
    """The figure: time against tokens, in units of our layer's on the smallest grid."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    unit = layer_time(points[0], 'ours')
    figure = Figure(figsize=(6.4, 4.2), layout='constrained')
    axes = figure.subplots()
    for name, label, colour in (('dense', 'dense', 'C3'), ('ours', 'ours', 'C0')):
        for time, part, style in ((layer_time, 'whole layer', '--'), (attention_time, 'attention alone', '-')):
            known = [(point['side'] ** 2, time(point, name) / unit) for point in points if time(point, name)]
            power = exponent(points, name, time)
            if power is not None:
                axes.plot(
                    *zip(*known),
                    style,
                    marker='o',
                    markersize=4,
                    color=colour,
                    label=f'{label}, {part}: tokens^{power:.2f}',
                )
    axes.set(
        xscale='log',
        yscale='log',
        xlabel='tokens',
        ylabel=f'time / our layer at {points[0]["side"]}x{points[0]["side"]}',
    )
    axes.set_xticks([point['side'] ** 2 for point in points], [f'{point["side"]}²' for point in points])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({'svg.hashsalt': 'attention cost', 'svg.fonttype': 'none'}):  # the same file for the same times
        figure.savefig(path, format='svg', metadata=dict(Date=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu', help='default: cpu')
    parser.add_argument('--dtype', choices=list(DTYPES), default='float32', help='default: float32')
    parser.add_argument('--quick', action='store_true', help='a small layer and small grids, one repetition')
    parser.add_argument('--figure', type=Path, default=FIGURE, help='default: docs/images/attention_cost.svg')
    parser.add_argument('--out', type=Path, help='where all times go, as JSON')
    args = parser.parse_args()
    settings = Settings(args.device, args.dtype, args.quick)
    settings.start()
    points = measure_curve(settings)
    print(f'{cost_table(points, args.device)}\n\n{exponents_text(points)}')
    draw(points, args.figure)
    print(f'Saved {args.figure}')
    if args.out:
        args.out.write_text(json.dumps(dict(settings=settings.describe(), points=points), indent=1) + '\n')


if __name__ == '__main__':
    main()
