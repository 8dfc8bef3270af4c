"""Draws the pictures of the documentation again: ``python docs/pictures.py``, the same files each time.

They are of the weights in the package and of the results in docs/tables, so that they need no data and no training.
Those of the first pages are drawn twice, for light and for dark pages.
"""

import argparse
import io
from pathlib import Path
from typing import Callable, Dict

import matplotlib
import numpy as np
import timm
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

import attncnn_plugin  # noqa: F401
from attncnn_plugin.analysis import mean_attention
from attncnn_plugin.visualization.style import COLORS, draw_attention, settings, text_color_on

DOCS = Path(__file__).parent
LIGHT = dict(paper='#FFFFFF', ink='#1F2328')
DARK = dict(paper='#0D1117', ink='#D1D7E0')
Pictures = Dict[str, Callable[[], Figure]]


def maps_of(name: str) -> Dict[str, np.ndarray]:
    """Returns what the pixel in the middle attends to by position, blocks by ``(N_h, H, W)``, of bundled weights."""
    model = timm.create_model(name, pretrained=True).eval()
    return {layer: own.of_query(None).numpy() for layer, own in mean_attention(model, size=(16, 16)).items()}


def nine_heads() -> Figure:
    """A 3x3 kernel taken apart into nine heads, and heads that were trained."""
    trained = list(maps_of('sa_quadratic_small').values())
    kernel = np.zeros((9, 16, 16))
    kernel[np.arange(9), 7 + np.arange(9) // 3, 7 + np.arange(9) % 3] = 1
    rows = {
        'A 3×3 convolution as nine heads: each looks at one neighbour and holds one matrix of the kernel': kernel,
        'The first block of a trained network: most heads look at a few neighbours': trained[0],
        'The last block: heads look at much of the image, and head 2 at all of it alike': trained[-1],
    }
    figure = Figure(figsize=(9.6, 4.6))
    for line, (title, maps) in enumerate(rows.items()):
        bottom = (0.735, 0.405, 0.125)[line]
        figure.text(0.106, bottom + 0.212, title, fontsize=9.5, weight='bold')
        for column, own in enumerate([*maps, maps.mean(0)]):
            left = 0.106 + 0.0875 * column + 0.017 * (column == 9)
            axes = figure.add_axes((left, bottom, 0.0785, 0.0785 * 9.6 / 4.6))
            drawn = draw_attention(axes, own * own.size)
            axes.add_patch(Rectangle((7.5, 7.5), 1, 1, facecolor='none', edgecolor='black'))
            axes.set_title(f'head {column}' if column < 9 else 'all nine', fontsize=8, pad=3)
            if line == 0:
                axes.set(xlim=(5.5, 10.5), ylim=(10.5, 5.5))
                sign = '+' if column < 8 else '=' if column == 8 else ''
                figure.text(left + 0.083 + 0.008 * (column == 8), bottom + 0.08, sign, ha='center', va='center')
                if column < 9:
                    look = dict(color=text_color_on(COLORS[column]), ha='center', va='center', fontsize=8)
                    chip = dict(boxstyle='square,pad=0.25', facecolor=COLORS[column], linewidth=0)
                    axes.text(0.5, -0.17, f'$W_{column}$', transform=axes.transAxes, bbox=chip, **look)
    draw_kernel(figure.add_axes((0.006, 0.735, 0.0785, 0.0785 * 9.6 / 4.6)))
    figure.text(0.0935, 0.815, '=', ha='center', va='center')
    figure.text(0.05, 0.49, '16×16 tokens,\n62.7% accuracy\non CIFAR-10-J', ha='center', va='center', fontsize=7)
    bar = figure.colorbar(drawn, cax=figure.add_axes((0.37, 0.06, 0.26, 0.022)), orientation='horizontal')
    bar.set_ticks([0.1, 1, 10, 100], labels=['1/10', 'uniform', '10 times', '100 times'])
    bar.ax.minorticks_off()
    figure.text(0.36, 0.071, 'attention from the black square, relative to uniform', ha='right', va='center')
    return figure


def draw_kernel(axes: Axes) -> None:
    """Draws the matrices of a kernel, each with the colour of its head."""
    for head, color in enumerate(COLORS):
        row, column = divmod(head, 3)
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor='white', linewidth=0.8))
        look = dict(color=text_color_on(color), ha='center', va='center', fontsize=8)
        axes.text(column + 0.5, row + 0.5, f'$W_{head}$', **look)
    axes.set(xlim=(0, 3), ylim=(3, 0), aspect='equal')
    axes.axis('off')


BOTH: Pictures = {'images/nine_heads': nine_heads}


def save(figure: Figure, path: Path) -> None:
    """Writes a figure in 256 colours."""
    file = io.BytesIO()
    figure.savefig(file, dpi=160)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(file).convert('RGB').quantize(256, kmeans=1).save(path, optimize=True)


def main() -> None:
    """Draws what the options say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=DOCS, help='folder in place of docs/')
    parser.add_argument('--only', default='', help='pictures whose names have this in them')
    args = parser.parse_args()
    for name, draw in BOTH.items():
        for theme, look in dict(light=LIGHT, dark=DARK).items():
            if args.only in name:
                with settings():
                    matplotlib.rcParams.update(theme_settings(**look))
                    save(draw(), args.out / f'{name}_{theme}.png')


def theme_settings(paper: str, ink: str) -> Dict[str, str]:
    """Returns the settings of matplotlib for a page of these colours."""
    of_ink = ['text.color', 'axes.labelcolor', 'axes.edgecolor', 'xtick.color', 'ytick.color']
    of_paper = ['figure.facecolor', 'savefig.facecolor', 'axes.facecolor']
    return {**dict.fromkeys(of_ink, ink), **dict.fromkeys(of_paper, paper)}


if __name__ == '__main__':
    main()
