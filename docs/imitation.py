"""Draws README's nine heads on their way into a kernel: ``python docs/imitation.py [FOLDER]``, into docs/images.

It runs the block of README's "Thirty seconds", and looks at the heads as it goes.
"""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any, List, Tuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_pre_hook

from attncnn_plugin.visualization import style

DOCS = Path(__file__).parent
THEMES = {'light': ('#1F2328', '#FFFFFF'), 'dark': ('#D1D7E0', '#0D1117')}  # ink and paper of GitHub
OF_INK = ['text.color', 'axes.labelcolor', 'axes.titlecolor', 'axes.edgecolor', 'xtick.color', 'ytick.color']
EVERY = 20  # steps from one picture to the next


def walk(seed: int = 0) -> Tuple[np.ndarray, np.ndarray, Any]:
    """Returns centres ``(T, 9, 2)`` and residual variances ``(T,)`` by steps of README's training, and its result."""
    blocks = re.findall(r'^```python$\n(.*?)^```$', (DOCS.parent / 'README.md').read_text(), re.M | re.S)
    (block,) = [own for own in blocks if 'QuadraticAttention' in own]
    centers: List[np.ndarray] = []
    losses: List[float] = []
    names: Any = {}

    def look(optimizer: Any, *_: Any) -> None:
        centers.append(names['attention'].encoding.center.detach().clone().numpy())
        losses.append(names['loss'].item())

    hook = register_optimizer_step_pre_hook(look)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(block.replace('manual_seed(0)', f'manual_seed({seed})'), names)
    hook.remove()
    return np.array(centers), np.array(losses), names['heads']


def draw(centers: np.ndarray, losses: np.ndarray, step: int) -> Figure:
    """Draws where the heads are at a step, where they came from, and how near they are to the convolution."""
    figure = Figure(figsize=(6.4, 3.1))
    axes = figure.add_axes((0.02, 0.12, 0.4, 0.4 * 6.4 / 3.1))
    axes.add_patch(Rectangle((-1.5, -1.5), 3, 3, facecolor=style.COLORS[3], alpha=0.25, linewidth=0))
    for line in (-1.5, -0.5, 0.5, 1.5):
        axes.plot((-1.5, 1.5), (line, line), color='gray', linewidth=0.5)
        axes.plot((line, line), (-1.5, 1.5), color='gray', linewidth=0.5)
    for head, color in enumerate(style.COLORS):
        rows, columns = centers[: step + 1, head].T
        axes.plot(columns, rows, color=color, linewidth=1)
        axes.plot(columns[-1], rows[-1], 'o', color=color, markersize=9)
        axes.text(columns[-1], rows[-1], head, color=style.text_color_on(color), ha='center', va='center', fontsize=6.5)
    reach = np.abs(centers).max() + 0.4
    axes.set(xlim=(-reach, reach), ylim=(reach, -reach), xticks=(), yticks=(), aspect='equal')
    axes.set_xlabel('centres of nine heads, and a 3×3 kernel', fontsize=8)
    axes = figure.add_axes((0.54, 0.19, 0.43, 0.72))
    axes.plot(losses[: step + 1], color=style.COLORS[6], linewidth=1.5)
    axes.set(yscale='log', xlim=(0, len(losses)), ylim=(losses.min() / 2, 2))
    axes.set_xlabel('step of Adam', fontsize=8)
    axes.set_title(f'residual variance: {losses[step]:.4f}', fontsize=9)
    axes.tick_params(labelsize=7)
    style.draw_grid(axes)
    return figure


def save(centers: np.ndarray, losses: np.ndarray, folder: Path) -> None:
    """Draws the moving picture for light and for dark pages."""
    steps = range(0, len(losses), EVERY)
    for theme, (ink, paper) in THEMES.items():
        pictures = []
        for step in steps:
            file = io.BytesIO()
            with style.settings():
                matplotlib.rcParams.update(dict.fromkeys(OF_INK, ink))
                matplotlib.rcParams.update({'savefig.facecolor': paper, 'axes.facecolor': paper})
                draw(centers, losses, step).savefig(file, dpi=100)
            pictures.append(Image.open(file).convert('RGB'))
        colors = pictures[-1].quantize(64)
        first, *others = [picture.quantize(palette=colors, dither=Image.Dither.NONE) for picture in pictures]
        times = [80] * len(others) + [4000]  # milliseconds
        first.save(folder / f'imitation_{theme}.gif', save_all=True, append_images=others, duration=times, loop=0)


if __name__ == '__main__':
    save(*walk()[:2], Path(*sys.argv[1:2] or [DOCS / 'images']))
