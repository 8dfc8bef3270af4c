"""The common look of all figures, and the files they are written to."""

import cmath
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Dict, Mapping, Optional, Sequence, Tuple, Union

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from ..analysis import MeanAttention
from ..attention.window import shown

Place = Tuple[float, float]  # row and column
Query, Photo = Optional[Sequence[int]], Optional[np.ndarray]
Numbers = Optional[Mapping[str, Sequence[int]]]  # of the heads of layers

# Paul Tol's muted colours: told apart with every kind of colour blindness.
COLORS = ('#332288', '#CC6677', '#117733', '#88CCEE', '#882255', '#DDCC77', '#44AA99', '#AA4499', '#999933')
# Of all maps, also of the explorer: white for uniform attention, so that a head that does nothing looks like nothing.
PALETTE = dict(least='#44618A', less='#B4C4D9', uniform='#FFFFFF', more='#F9C58D', much='#E36F2C', most='#6A0F1F')


def ramp(**stops: float) -> LinearSegmentedColormap:
    """Returns a colour map of names of :data:`PALETTE` and their places, from 0 to 1."""
    return LinearSegmentedColormap.from_list('attncnn', [(place, PALETTE[name]) for name, place in stops.items()])


ATTENTION_COLORS = ramp(less=0, uniform=1 / 3, more=0.5, much=2 / 3, most=1)
ATTENTION_RANGE = 0.1, 100.0  # times uniform attention

# Sets the common settings of matplotlib inside a ``with``, or in a function, and those of outside again afterwards.
settings = partial(matplotlib.style.context, Path(__file__).with_name('figures.mplstyle'), after_reset=True)


def check_maps(maps: Mapping[str, MeanAttention]) -> None:
    """Raises an error if these are no attention maps by layer."""
    if not isinstance(maps, Mapping) or not all(isinstance(own, MeanAttention) for own in maps.values()):
        raise TypeError(f'maps={shown(maps)} must be the result of mean_attention(model, images)')
    if not maps:
        raise ValueError('maps is empty: the model has no attention, or none of this part')


def color_of(index: int) -> str:
    """Returns the colour of a head or of a run."""
    return COLORS[index % len(COLORS)]


def draw_heads(axes: Axes, places: Dict[int, Place], reach: float, beside: bool = False) -> None:
    """Draws the centres of heads as dots, and discs with their numbers, in an axes from −reach to reach.

    A disc lies on its dot, or beside it where another disc is there already, with a line to the dot. A dot that would
    lie beyond the axes is hollow, on its border.

    Args:
        axes (Axes): With the column as x and the row as y, from −``reach`` to ``reach`` tokens.
        places (dict[int, tuple[float, float]]): Row and column by head.
        reach (float): See ``axes``.
        beside (bool): Whether all discs lie beside their dots, which leaves free what ends there. Defaults to False.
    """
    dots = {head: tuple(min(max(value, -reach), reach) for value in place) for head, place in sorted(places.items())}
    discs = []
    for head, dot in dots.items():
        color, hollow = color_of(head), dot != places[head]
        disc = _free_place(dot, discs, [place for other, place in dots.items() if other != head], reach, beside)
        discs.append(disc)
        if disc != dot:
            axes.plot([dot[1], disc[1]], [dot[0], disc[0]], color='#888888', linewidth=0.5, zorder=2.5)
        fill, edge, ink = ('white', color, 'black') if hollow else (color, 'white', text_color_on(color))
        look = dict(markerfacecolor=fill, markeredgecolor=edge, clip_on=False)
        above = dict(markersize=4, markeredgewidth=0.6, zorder=4 if disc == dot else 7)
        axes.plot(dot[1], dot[0], 'o', label=f'head {head}', **look, **above)
        axes.plot(disc[1], disc[0], 'o', markersize=8.5, markeredgewidth=0.8, zorder=5, **look)
        axes.text(disc[1], disc[0], str(head), color=ink, ha='center', va='center_baseline', fontsize=6, zorder=6)


def draw_attention(axes: Axes, times: np.ndarray, photo: Photo = None, query: Query = None) -> AxesImage:
    """Draws attention to a grid of tokens, in multiples of uniform attention, over a photo if there is one."""
    times, norm = np.maximum(times, 1e-9), LogNorm(*ATTENTION_RANGE)
    # Uniform attention leaves the photo as it is.
    alpha = None if photo is None else np.minimum(2.4 * np.abs(norm(times).filled() - norm(1)), 0.8)
    drawn = axes.imshow(times, cmap=ATTENTION_COLORS, norm=norm, alpha=alpha, interpolation='nearest')
    draw_photo(axes, photo, times.shape, query)
    return drawn


def draw_photo(axes: Axes, photo: Photo, grid: Sequence[int], query: Query) -> None:
    """Draws a photo under a map of tokens, and a square around the query."""
    if photo is not None:
        axes.imshow(photo, extent=(-0.5, grid[1] - 0.5, grid[0] - 0.5, -0.5), cmap='gray', zorder=-1)
    if query is not None:
        token = 72 * axes.bbox.height / axes.figure.dpi / grid[0]  # in points
        line = min(max(0.17 * token, 0.45), 1)
        look = dict(linewidth=line, path_effects=[withStroke(linewidth=2 * line, foreground='white')])
        axes.add_patch(Rectangle((query[1] - 0.5, query[0] - 0.5), 1, 1, facecolor='none', edgecolor='black', **look))
    axes.set(xticks=[], yticks=[])


def attention_bar(figure: Figure, drawn: AxesImage, **where) -> None:
    """Adds the colour bar of all maps of attention."""
    bar = figure.colorbar(drawn, extend='both', label='× uniform attention', **where)
    bar.ax.minorticks_off()
    bar.set_ticks([0.1, 1, 10, 100], labels=['1/10', '1', '10', '100'])
    bar.outline.set_linewidth(0.6)


def draw_grid(axes: Axes) -> None:
    """Draws the lines of a grid behind curves, in a frame that is open above and on the right."""
    axes.grid(color='#888888', alpha=0.22, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)


def text_color_on(color: str) -> str:
    """Returns black or white, whichever is readable on a colour."""
    return 'white' if np.dot(to_rgb(color), (0.3, 0.59, 0.11)) < 0.55 else 'black'


def _free_place(place: Place, discs: Sequence[Place], dots: Sequence[Place], reach: float, beside: bool) -> Place:
    """Returns where a disc goes: on its dot, or nearby, where it covers no other disc and, if possible, no dot."""
    disc = 0.12 * reach  # the diameter of a disc in a panel of 2.6 inches
    near = [] if beside else [place]
    for distance, angle in itertools.product((0.9, 1.3, 1.7, 2.2, 2.8, 3.5), range(0, 360, 30)):
        turned = cmath.rect(distance * disc, math.radians(angle))
        near.append((place[0] + turned.imag, place[1] + turned.real))
    inside = [own for own in near if own == place or max(map(abs, own)) < reach]
    free = [own for own in inside if all(math.dist(own, drawn) >= disc for drawn in discs)]
    clear = (own for own in free if all(math.dist(own, dot) >= 0.7 * disc for dot in dots))
    return next(clear, free[0] if free else place)


def image_of(figure: Figure) -> np.ndarray:
    """Returns a figure as an image at 150 dots an inch, ``(rows, columns, 3)``, uint8."""
    figure.set_dpi(150)
    with settings():
        (canvas := FigureCanvasAgg(figure)).draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def save_figure(figure: Figure, path: Union[str, Path]) -> None:
    """Writes a figure to a file, PNG at 200 dots an inch, SVG or PDF, by its suffix; its folder is made.

    The same figure gives the same file.

    Raises:
        ValueError: Another suffix.
    """
    path = Path(path)
    dates = {'.png': {}, '.svg': {'Date': None}, '.pdf': {'CreationDate': None}}
    if path.suffix not in dates:
        raise ValueError(f'out={str(path)!r} must end in .png, .svg or .pdf')
    path.parent.mkdir(parents=True, exist_ok=True)
    with settings():
        figure.savefig(path, dpi=200, metadata=dates[path.suffix])
