"""Draws the pictures of the documentation: ``python docs/pictures.py [FOLDER]``, by default into docs/.

They are of the weights in the package, of the results in docs/tables, and of what blocks of the README and the tutorial
draw, so that they need no data. They are drawn twice, for light and for dark pages.
"""

import contextlib
import io
import json
import re
import sys
from functools import cache, partial
from pathlib import Path
from typing import Callable, Dict, Optional, Sequence, Union

import matplotlib
import numpy as np
import timm
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from PIL import Image

from attncnn_plugin import visualization
from attncnn_plugin.analysis import MeanAttention, mean_attention
from attncnn_plugin.transformers import init_as_convolution
from attncnn_plugin.visualization import plot_attention, plot_attention_centers, plot_heads, style
from attncnn_plugin.weights import example_images

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / 'tools'))
from reproduction.page import accuracies, dot_plot  # noqa: E402

PAPER = np.array([13, 17, 23]) / 255  # of GitHub's dark pages
NAMES = {'content': 'sa_learned_content_small', 'transition': 'cmhsa3_small_patch4_32'}  # that need images
PAGES = ('quadratic', 'generalized', 'learned', *NAMES)
TITLE = dict(fontsize=9.5, weight='bold')
EXAMPLES = {name: Image.open(path).convert('RGB') for name, path in example_images().items()}


@cache
def maps_of(page: str, *images: str) -> Dict[str, MeanAttention]:
    """Returns the mean attention of a network of the gallery to example images, or by position without any."""
    model = timm.create_model(NAMES.get(page, f'sa_{page}_small'), pretrained=True).eval()
    if not images:
        return mean_attention(model, size=(8, 8) if page == 'transition' else (16, 16), part='position')
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return mean_attention(model, torch.stack([transform(EXAMPLES[image]) for image in images]))


def times_uniform(maps: MeanAttention, query: Optional[Sequence[int]] = None) -> np.ndarray:
    """Returns how many times uniform attention each token gets from a query, heads by rows by columns."""
    return maps.of_query(query)[0].numpy() * np.prod(maps.grid)


def draw(axes: Axes, what: Union[np.ndarray, str], query: Sequence[int] = (8, 8), title: str = '') -> AxesImage:
    """Draws a map of attention, or an example image on 16x16 tokens, with a query."""
    axes.set_title(title, fontsize=8, pad=3)
    if not isinstance(what, str):
        return style.draw_attention(axes, what, query=query)
    return style.draw_photo(axes, EXAMPLES[what], (16, 16), query)


def draw_kernel(axes: Axes) -> None:
    """Draws the matrices of a kernel, each with the colour of its head."""
    for head, color in enumerate(style.COLORS):
        row, column = divmod(head, 3)
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor='white', linewidth=0.8))
        axes.text(column + 0.5, row + 0.5, f'$W_{head}$', color=style.text_color_on(color), ha='center', va='center')
    axes.set(xlim=(0, 3), ylim=(3, 0), aspect='equal', xticks=[], yticks=[], frame_on=False)


def nine_heads() -> Figure:
    """A 3x3 kernel taken apart into nine heads, and heads that were trained."""
    first, *_, last = [times_uniform(maps) for maps in maps_of('quadratic').values()]
    kernel = np.zeros((9, 16, 16))
    kernel[np.arange(9), 7 + np.arange(9) // 3, 7 + np.arange(9) % 3] = 256
    rows = {
        'A 3×3 convolution as nine heads: each looks at one neighbour and holds one matrix of the kernel': kernel,
        'The first block of a trained network: six heads (thick frames) have become positions of a kernel': first,
        'The last block: most heads look at much of the image': last,
    }
    figure, size = Figure(figsize=(9.6, 4.6)), (0.0785, 0.0785 * 9.6 / 4.6)
    for bottom, (title, maps) in zip((0.755, 0.44, 0.175), rows.items()):
        figure.text(0.106, bottom + 0.212, title, **TITLE)
        for head, own in enumerate([*maps, maps.mean(0)]):
            left = 0.106 + 0.0875 * head + 0.017 * (head == 9)
            axes = figure.add_axes((left, bottom, *size))
            drawn = draw(axes, own, title=f'head {head}' if head < 9 else 'all nine')
            if maps is first and head in (1, 2, 3, 4, 5, 8):
                axes.spines[:].set(color='black', linewidth=2.2)
            if maps is kernel:
                axes.set(xlim=(5.5, 10.5), ylim=(10.5, 5.5))
                sign = left - (0.0125 if head in (0, 9) else 0.0045), bottom + 0.08
                figure.text(*sign, '=' if head in (0, 9) else '+', ha='center', va='center')
            if maps is kernel and head < 9:
                chip = dict(boxstyle='square,pad=0.25', facecolor=style.COLORS[head], linewidth=0)
                axes.set_xlabel(f'$W_{head}$', color=style.text_color_on(style.COLORS[head]), bbox=chip, labelpad=6)
    draw_kernel(figure.add_axes((0.006, 0.755, *size)))
    figure.text(0.05, 0.525, '16×16 tokens,\n79.0% accuracy\non CIFAR-10-J', ha='center', va='center', fontsize=7)
    style.attention_bar(figure, drawn, cax=figure.add_axes((0.4, 0.115, 0.3, 0.022)), orientation='horizontal')
    return figure


def two_phases() -> Figure:
    """The two phases on a time line, with the accuracy of a training and heads of its last block."""
    runs = json.loads((DOCS / 'tables/two-phases.json').read_text())
    of_seed = {run['label']: run for run in runs if run['seed'] == 0}
    run, alone = of_seed['both phases'], of_seed['convolution']
    epochs, accuracy = np.array(run['curves']['accuracy/top1']).T
    change, end = run['config']['custom_hooks'][0]['epoch'], epochs[-1]
    figure, ratio = Figure(figsize=(9.6, 4.2)), 9.6 / 4.2
    axes = figure.add_axes((0.06, 0.12, 0.93, 0.4))
    axes.axvspan(0, change, color=style.COLORS[3], alpha=0.18, linewidth=0)
    axes.axvspan(change, end, color=style.COLORS[1], alpha=0.18, linewidth=0)
    axes.axvline(change, color=matplotlib.rcParams['text.color'], linewidth=0.8, linestyle=(0, (4, 2)))
    line = dict(color=style.COLORS[6], linewidth=1.8, markersize=4.5, clip_on=False)
    axes.plot(*np.array(alone['curves']['accuracy/top1']).T, 'o:', label='convolution to the end', **line)
    axes.plot(epochs, accuracy, 'o-', label='two phases', **line)
    axes.legend(frameon=False, loc='lower right')
    axes.set(xlabel='epoch', ylabel='accuracy, %', xlim=(0, end))
    style.draw_grid(axes)
    moments = {
        'Transition:\nnine heads that compute the same': (change, maps_of('transition'), (4, 4)),
        'Second phase:\nheads may look elsewhere': (0.87 * end, maps_of('transition', 'automobile'), (1, 3)),
    }
    figure.text(0.3, 0.965, 'First phase:\na 3×3 convolution', ha='center', va='top', **TITLE)
    draw_kernel(figure.add_axes((0.24, 0.57, 0.12, 0.12 * ratio)))
    for title, (epoch, maps, query) in moments.items():
        left = 0.06 + 0.93 * epoch / end
        figure.text(left, 0.965, title, ha='center', va='top', **TITLE)
        for head, own in enumerate(times_uniform(maps['blocks.5.attn'], query)):
            place = left - 0.063 + 0.043 * (head % 3), 0.755 - 0.043 * ratio * (head // 3), 0.04, 0.04 * ratio
            draw(figure.add_axes(place), own, query)
    return figure


def with_bar(drawn: AxesImage) -> Figure:
    """Returns the figure of a map, with a colour bar."""
    style.attention_bar(drawn.figure, drawn, ax=drawn.figure.axes, aspect=15, pad=0.01)
    return drawn.figure


def encodings() -> Figure:
    """A head of each kind; that with content beside its image."""
    heads = [
        ('quadratic: a disc', maps_of('quadratic')['blocks.2.attn'], 2),
        ('generalized: an ellipse', maps_of('generalized')['blocks.1.attn'], 6),
        ('learned: any shifts', maps_of('learned')['blocks.1.attn'], 0),
        ('with content: by the image', maps_of('content', 'ship')['blocks.0.attn'], 0),
    ]
    panels = Figure((9.6, 2), layout='constrained').subplots(1, 5)
    draw(panels[3], 'ship')
    for axes, (title, maps, head) in zip(panels[[0, 1, 2, 4]], heads):
        drawn = draw(axes, times_uniform(maps)[head], title=title)
    return with_bar(drawn)


def vit_init() -> Figure:
    """What twelve heads of a vision transformer attend to, before and after it starts as a convolution."""
    torch.manual_seed(0)
    model, images = timm.create_model('vit_base_patch16_224', depth=1).eval(), torch.randn(2, 3, 224, 224)
    for row, label in zip(
        Figure((9.6, 2), layout='constrained').subplots(2, 12), ('new ViT', 'started as a\nconvolution')
    ):
        (maps,) = mean_attention(model, images).values()
        for head, own in enumerate(times_uniform(maps)):
            drawn = draw(row[head], own, maps.of_query()[1], f'head {head}' if label == 'new ViT' else '')
        row[0].set_ylabel(label)
        init_as_convolution(model)
    return with_bar(drawn)


def worth(table: str) -> Figure:
    """Accuracies of a table."""
    return dot_plot(json.loads((DOCS / f'tables/{table}.json').read_text()))


def heads_removed() -> Figure:
    """Accuracies of the table on pruning by the number of heads that are removed: dots are seeds, lines their means."""
    found = accuracies(json.loads((DOCS / 'tables/pruning.json').read_text()))
    axes = Figure(figsize=(4.6, 2.7), layout='constrained').subplots()
    for how, color in (('by importance', style.COLORS[6]), ('at random', style.COLORS[1])):
        seeds = [found['all 24 heads'], *(found[f'{left} heads, {how}'] for left in (18, 12, 6))]
        axes.plot((0, 6, 12, 18), np.mean(seeds, axis=1), color=color, linewidth=1.8, label=how)
        axes.plot((0, 6, 12, 18), seeds, 'o', color=color, alpha=0.75, markersize=4.5, markeredgewidth=0)
    axes.set(xlabel='heads removed, of 24', ylabel='accuracy, %', xticks=(0, 6, 12, 18))
    axes.legend(frameon=False)
    style.draw_grid(axes)
    return axes.figure


def content() -> Figure:
    """The heads of the first block, for three images."""
    for row, image in zip(Figure((9.6, 2.9), layout='constrained').subplots(3, 10), ('ship', 'frog', 'airplane')):
        draw(row[0], image)
        for head, own in enumerate(times_uniform(maps_of('content', image)['blocks.0.attn'])):
            drawn = draw(row[head + 1], own, title=f'head {head}' if image == 'ship' else '')
    return with_bar(drawn)


def left_the_kernel() -> Figure:
    """The attention of one image after two phases."""
    model = timm.create_model(NAMES['transition'], pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return plot_attention(model, transform(EXAMPLES['automobile'])[None], ['blocks.0.*', 'blocks.5.*'], (1, 3), True)


def drawn_by(page: str) -> Figure:
    """The first figure that the Python of a page saves, with all that stands before it."""
    blocks, drawn = re.findall(r'^```python$\n(.*?)^```$', (DOCS / page).read_text(), re.M | re.S), []
    save, visualization.save_figure = visualization.save_figure, lambda figure, path: drawn.append(figure)
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        while not drawn:
            exec(blocks.pop(0), names)
    visualization.save_figure = save
    return drawn[0]


def thumbnail(page: str) -> Figure:
    """All heads of a network without words, blocks by heads."""
    maps = [times_uniform(own) for own in maps_of(page, *EXAMPLES if page in NAMES else ()).values()]
    figure = Figure(figsize=(3.6, 0.4 * len(maps)))
    grid = dict(left=0, right=1, bottom=0, top=1, wspace=0.06, hspace=0.06)
    for axes, own in zip(figure.subplots(len(maps), 9, gridspec_kw=grid).flat, np.concatenate(maps)):
        style.draw_attention(axes, own)
        axes.axis('off')
    return figure


PICTURES = {
    'images/photo': lambda: drawn_by('../README.md'),
    'images/tutorial_vit_attention': lambda: drawn_by('tutorial_vit.md'),
    'images/nine_heads': nine_heads,
    'images/two_phases': two_phases,
    'images/encodings': encodings,
    'images/vit_init': vit_init,
    'images/heads_removed': heads_removed,
    'images/worth_vit_init': lambda: worth('starts'),
    'images/worth_two_phases': lambda: worth('two-phases'),
    'images/worth_cnn_to_attention': lambda: worth('T-CNN'),
    'gallery/quadratic/probabilities': lambda: plot_heads(maps_of('quadratic')),
    'gallery/quadratic/centers': lambda: plot_attention_centers(maps_of('quadratic')),
    'gallery/generalized/probabilities': lambda: plot_heads(maps_of('generalized')),
    'gallery/learned/probabilities': lambda: plot_heads(maps_of('learned')),
    'gallery/content/image': content,
    'gallery/content/mean': lambda: plot_heads(maps_of('content', *EXAMPLES)),
    'gallery/transition/image': left_the_kernel,
    'gallery/transition/mean': lambda: plot_heads(maps_of('transition', *EXAMPLES)),
    **{f'gallery/{page}/thumbnail': partial(thumbnail, page) for page in PAGES},
}


def render(drawing: Callable[[], Figure]) -> Dict[str, Image.Image]:
    """Draws a picture for light and for dark pages: the latter has all colours but those of photos turned around."""
    file = io.BytesIO()
    with style.settings():
        (figure := drawing()).savefig(file, dpi=160)
    light = np.asarray(Image.open(file).convert('RGB')) / 255
    dark = light + 1 - light.max(-1, keepdims=True) - light.min(-1, keepdims=True)  # its lightness alone
    dark = PAPER + dark * (0.92 - PAPER)
    for axes in figure.axes:
        if any(np.ndim(image.get_array()) == 3 for image in axes.images):
            (left, bottom), (right, top) = np.round(axes.get_window_extent().get_points() * 160 / figure.dpi).astype(
                int
            )
            photo = slice(len(light) - top, len(light) - bottom), slice(left, right)
            dark[photo] = light[photo]
    return {
        theme: Image.fromarray((pixels * 255).round().astype(np.uint8)).quantize(256, kmeans=1)
        for theme, pixels in (('light', light), ('dark', dark))
    }


def main() -> None:
    """Draws all, in 256 colours."""
    out = Path(*sys.argv[1:2] or [DOCS])
    for name, drawing in PICTURES.items():
        for theme, picture in render(drawing).items():
            path = out / f'{name}_{theme}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path, optimize=True)


if __name__ == '__main__':
    main()
