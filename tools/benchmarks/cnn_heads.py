#!/usr/bin/env python
"""Whether the heads of the networks that cnn_accuracy.py trained leave the kernel positions that they began at.

Reads the weights in OUT from before and after the second phase. For each layer it prints the share of a head's
attention at its own kernel position and the mean distance of its attention from there, in pixels of the layer's input,
both means over heads, queries whose position is inside of the image, test images and seeds.

    python tools/benchmarks/cnn_heads.py DATA OUT
    python tools/benchmarks/cnn_heads.py DATA OUT --figures FOLDER   # centres and contours of seed 0, too
"""

import argparse
from pathlib import Path
from typing import Dict, Tuple

import torch
from cnn_accuracy import FROM_SCRATCH, new_cnn, turn
from small_images import load_images, normalized, some_of
from torch import Tensor, nn

from attncnn_plugin.analysis import attention_layers, grids_of, mean_attention_probs_of

TIMES = ('before', 'after')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path)
    parser.add_argument('out', type=Path)
    parser.add_argument('--images', type=int, default=200, help='of the test set; default 200')
    parser.add_argument('--kinds', nargs='+', default=['positions alone', 'additive', 'gated', FROM_SCRATCH])
    parser.add_argument('--figures', type=Path, help='a folder for figures')
    args = parser.parse_args()
    images = normalized(some_of(load_images(args.data / 'test'), args.images, seed=0)[0])
    print(table(args.out, args.kinds, images))
    if args.figures is not None:
        draw(args.out, args.kinds, images, args.figures)


def load(path: Path, kind: str) -> nn.Module:
    """A network that was saved before or after its second phase."""
    model = new_cnn(0)
    turn(model, 'additive' if kind == FROM_SCRATCH else kind, 0)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def mean_probs(model: nn.Module, images: Tensor) -> Dict[str, Tensor]:
    """The probabilities of each layer, mean over images, ``(N_h, Q, K)``."""
    layers = attention_layers(model)
    if not any(layer.depends_on_content for layer in layers.values()):
        return {name: layers[name].attention_probs(size).detach() for name, size in grids_of(model, images[:1]).items()}
    return mean_attention_probs_of(model, images, batch_size=50)


def of_own_positions(layer: nn.Module, probs: Tensor, size: Tuple[int, int]) -> Tuple[float, float]:
    """The share at a head's own kernel position, and the mean distance from it."""
    rows, columns = (layer.window.queries(axis, n) for axis, n in enumerate(size))
    queries = torch.cartesian_prod(rows, columns)
    keys = torch.cartesian_prod(*(torch.arange(n) for n in size))
    own = queries + layer.window.shifts()[:, None]  # (N_h, Q, 2)
    inside = ((own >= 0) & (own < torch.tensor(size))).all(-1)
    distance = torch.linalg.vector_norm((keys - own[:, :, None]).float(), dim=-1)  # (N_h, Q, K)
    total = probs.sum(-1).clamp(min=1e-12)
    share = (probs * (distance == 0)).sum(-1) / total
    mean = (probs * distance).sum(-1) / total
    return float(share[inside].mean()), float(mean[inside].mean())


def table(out: Path, kinds: Tuple[str, ...], images: Tensor) -> str:
    """In Markdown, one column a layer."""
    lines = []
    for kind in kinds:
        for when in TIMES:
            paths = sorted(out.glob(f'{kind}-*.{when}.pth'.replace(' ', '_')))
            cells: Dict[str, list] = {}
            for path in paths:
                model = load(path, kind)
                sizes = grids_of(model, images[:1])
                for name, probs in mean_probs(model, images).items():
                    layer = attention_layers(model)[name]
                    cells.setdefault(name, []).append(of_own_positions(layer, probs, sizes[name]))
            if not lines:
                lines = [f'| heads | | {" | ".join(cells)} | seeds |', '| --- ' * (3 + len(cells)) + '|']
            means = [torch.tensor(values).mean(0).tolist() for values in cells.values()]
            shown = [f'{share:.0%}, {distance:.2f}' for share, distance in means]
            lines.append(f'| {kind} | {when} | {" | ".join(shown)} | {len(paths)} |')
    return '\n'.join(lines)


def draw(out: Path, kinds: Tuple[str, ...], images: Tensor, folder: Path) -> None:
    """The centres of the heads of seed 0, a figure for each kind and time."""
    from attncnn_plugin.visualization import plot_attention_centers, save_figure

    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        for when in TIMES:
            path = out / f'{kind}-0.{when}.pth'.replace(' ', '_')
            model = load(path, kind)
            figure = plot_attention_centers(model, grids_of(model, images[:1]), probs=mean_probs(model, images))
            save_figure(figure, folder / f'{path.stem}.png')


if __name__ == '__main__':
    main()
