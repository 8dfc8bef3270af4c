#!/usr/bin/env python
"""How fast the models of this package are, and how much memory they take, against the original and other models.

Prints a table for each group of measurements. docs/tables/benchmarks.md, written by --page, says how they are made.
"""

import argparse
import copy
import gc
import inspect
import os
import re
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple, Union

import gpu
import timm
import torch
from gpu import C20, PHASES, TRANSFORMERS, smallest
from measure import Measured, Ratio, Step, added_by, forward_pass, side_by_side, training_step
from original import with_dense_original
from torch import nn

from attncnn_plugin import attention_maps
from attncnn_plugin.convert import convs_to_attention
from attncnn_plugin.pruning import prunable_heads, prune_heads

Cells = Iterator[Tuple[str, str, Union[Ratio, str]]]  # of a row and a column

WAYS = {'forward': False, 'training': True}
# Of heads that a convolution became; α = 6 is for heads that learn.
CONVERTED = {
    'hard': {},
    'additive': dict(content='additive', alpha=6),
    'gated': dict(content='gated', alpha=6),
    'additive, window_size=7': dict(content='additive', alpha=6, window_size=7),
}
# The convolutions of the last stage that are larger than a pixel.
LAST_STAGES = {'resnet18': 'layer4.*.conv*', 'resnet50': 'layer4.*.conv2', 'convnext_tiny': 'stages.3.*.conv_dw'}
# What attention_maps keeps of each layer.
KEPT = {'all maps': None, "reduce='class_token'": 'class_token'}


def create(quick: bool, name: str, **kwargs: Any) -> nn.Module:
    """Builds one of timm's models, or with ``quick`` one that is as small as it can be."""
    return timm.create_model(name, **{**kwargs, **(smallest(name) if quick else {})})


def c20_model(quick: bool, name: str, side: int) -> nn.Module:
    """Builds a model of C20 for a grid of ``side`` tokens; its blocks take as long as each other, so two are enough."""
    return create(quick, name, depth=2, **(dict(img_size=2 * side) if 'learned' in name else {}))


def make_step(training: bool, model: nn.Module, images: int, pixels: int) -> Step:
    """Makes a forward pass or a training step on random images."""
    x = torch.randn(images, 3, pixels, pixels)
    return training_step(model, x, torch.randint(10, (images,))) if training else forward_pass(model, x)


def compare(quick: bool, training: bool, models: Dict[str, nn.Module], images: int, pixels: int) -> Measured:
    """Measures models side by side."""
    gc.collect()  # the models before: hooks are reference cycles
    return side_by_side({name: make_step(training, model, images, pixels) for name, model in models.items()}, quick)


def original(quick: bool) -> Cells:
    """C20's networks against the dense original.

    Time of the dense original over ours, by the size of the grid in tokens, for two blocks.
    """
    for kind, name in C20.items():
        for way, training in WAYS.items():
            for side, images in ((4, 2),) if quick else ((16, 1), (16, 8), (32, 1), (64, 1)):
                ours = c20_model(quick, name, side)
                models = dict(ours=ours, original=with_dense_original(ours, side, side))
                ratio = compare(quick, training, models, images, 2 * side).ratio('original', 'ours')
                yield f'{kind}, {way}', f'{side}x{side}, batch {images}', ratio


def cmhsa(quick: bool) -> Cells:
    """CMHSA-5 against vision transformers.

    Time of CMHSA-5 over that of the other model, 224x224 pixels, batch 8. Over ViT-base, Li et al. 2021 report 0.49 for
    training the convolution, 1.48 for attention and 0.98 for both phases.
    """
    images, pixels = (2, 32) if quick else (8, 224)
    models = {row: create(quick, 'cmhsa5_patch16_224', num_classes=100, **kwargs) for row, kwargs in PHASES.items()}
    models.update((name, create(quick, name, num_classes=100)) for name in TRANSFORMERS)
    for way, training in WAYS.items():
        measured = compare(quick, training, models, images, pixels)
        for row in PHASES:
            for other in TRANSFORMERS:
                yield f'{row}, {way}', other, measured.ratio(row, other)


def cnns(quick: bool) -> Cells:
    """CNNs with a last stage of attention.

    Time of the CNN whose last stage became attention over that of the CNN, 224x224 pixels, batch 8. Heads are hard and
    see only positions, or begin with α = 6 and attend to content too.
    """
    images, pixels = (2, 32) if quick else (8, 224)
    for name, layers in LAST_STAGES.items():
        models = dict(CNN=timm.create_model(name, num_classes=100))
        for kind, options in CONVERTED.items():
            models[kind] = copy.deepcopy(models['CNN'])
            convs_to_attention(models[kind], layers, **options)
        for way, training in WAYS.items():
            measured = compare(quick, training, models, images, pixels)
            for kind in CONVERTED:
                yield f'{name}, {kind}', way, measured.ratio(kind, 'CNN')


def memory(quick: bool) -> Cells:
    """Memory of a training step.

    What a step adds to the largest resident set of a process of its own, ours over the other. C20's networks have two
    blocks; CMHSA-5 has 8 images of 224x224 pixels.
    """
    side, images = (4, 2) if quick else (64, 1)
    for kind, name in C20.items():
        ours, dense = (added_by(c20_step, quick, name, side, images, dense) for dense in (False, True))
        yield f'{kind}, {side}x{side}, batch {images}, over the dense original', 'memory', of_bytes(ours, dense)
    base = added_by(large_step, quick, TRANSFORMERS[-1], {})
    for phase, kwargs in PHASES.items():
        ours = added_by(large_step, quick, 'cmhsa5_patch16_224', kwargs)
        yield f'CMHSA-5, {phase}, over {TRANSFORMERS[-1]}', 'memory', of_bytes(ours, base)


def of_bytes(ours: int, others: int) -> str:
    """Returns the ratio of two numbers of bytes, and both."""
    return f'{ours / others:.2f} ({ours / 1e6:,.0f} of {others / 1e6:,.0f} MB)'


def c20_step(quick: bool, name: str, side: int, images: int, dense: bool) -> Step:
    """Makes a training step of one of the models of C20 or of its dense original."""
    model = c20_model(quick, name, side)
    model = with_dense_original(model, side, side) if dense else model
    gc.collect()  # what it was copied from
    return make_step(True, model, images, 2 * side)


def large_step(quick: bool, name: str, kwargs: dict) -> Step:
    """Makes a training step of CMHSA-5 or a vision transformer."""
    images, pixels = (2, 32) if quick else (8, 224)
    return make_step(True, create(quick, name, num_classes=100, **kwargs), images, pixels)


def pruning(quick: bool) -> Cells:
    """Without half of the heads.

    Time of the network without half of the heads of each layer over that of the whole network, batch 8.
    """
    pixels = 32 if quick else 224
    networks = {
        'sa_generalized_cifar, 2 blocks': (c20_model(quick, 'sa_generalized_cifar', 16), 32),
        'cmhsa5_patch16_224': (create(quick, 'cmhsa5_patch16_224'), pixels),
        TRANSFORMERS[0]: (create(quick, TRANSFORMERS[0]), pixels),
    }
    for name, (whole, size) in networks.items():
        pruned = copy.deepcopy(whole)
        prune_heads(pruned, {layer: range(heads.num_heads // 2) for layer, heads in prunable_heads(pruned).items()})
        models = dict(pruned=pruned, whole=whole)
        yield name, 'forward', compare(quick, False, models, 8, size).ratio('pruned', 'whole')


def maps(quick: bool) -> Cells:
    """Attention maps.

    Time of `attention_maps` over that of a forward pass of one image, and what either adds to the largest resident
    set of a process of its own. DINOv2 has images of 518x518 pixels.
    """
    for name in (TRANSFORMERS[-1], 'vit_base_patch14_dinov2'):
        model = create(quick, name)
        steps = {kept: maps_step(model, reduce) for kept, reduce in KEPT.items()}
        measured = side_by_side(dict(forward=large_forward(model), **steps), quick)
        base = added_by(added_maps, quick, name, 'forward')
        for kept in KEPT:
            yield f'{name}, {kept}', 'time', measured.ratio(kept, 'forward')
            yield f'{name}, {kept}', 'memory', of_bytes(added_by(added_maps, quick, name, kept), base)


def large_forward(model: nn.Module) -> Step:
    """Makes a forward pass of one image as large as the model takes it."""
    return make_step(False, model, 1, model.patch_embed.img_size[0])


def maps_step(model: nn.Module, reduce: Optional[str]) -> Step:
    """Makes a call of ``attention_maps`` with such an image."""
    image = torch.randn(1, 3, *model.patch_embed.img_size)
    return lambda: attention_maps(model, image, reduce=reduce)


def added_maps(quick: bool, name: str, kept: str) -> Step:
    """Makes one of these steps."""
    model = create(quick, name)
    return large_forward(model) if kept == 'forward' else maps_step(model, KEPT[kept])


GROUPS = {group.__name__: group for group in (cmhsa, cnns, pruning, maps, memory, original)}


def machine(quick: bool) -> str:
    """Says what a run runs on, and what else runs there."""
    load = os.getloadavg()[0]
    shared = f'; other processes ran on the machine too (load {load:.0f})' if load >= 1 else ''
    no_measurement = '; small models and one call each: no measurement' if quick else ''
    processor = re.search(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())
    cores = f'{os.cpu_count()} cores of {processor[1] if processor else "an unknown processor"}'
    if torch.cuda.is_available():
        cores = f'{torch.cuda.get_device_name()}, {cores}, CUDA {torch.version.cuda}'
    versions = f'torch {torch.__version__}, timm {timm.__version__}'
    return f'{cores}, {torch.get_num_threads()} threads, {versions}{shared}{no_measurement}.'


def section(name: str, cells: Dict[Tuple[str, str], str], where: str) -> str:
    """Returns a group's heading, words (the docstring of its function) and table, from texts by row and column."""
    title, _, words = inspect.getdoc({**GROUPS, **gpu.GROUPS}[name]).partition('.\n\n')
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in range(2))
    lines = [['', *columns], *([row, *(cells.get((row, column), '') for column in columns)] for row in rows)]
    return f'## {title} (`{name}`)\n\n{words}\n\n{where}\n\n{table(lines)}\n'


def table(lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are aligned, so that it reads well as text too."""
    widths = [max(3, *map(len, column)) for column in zip(*lines)]
    lines = [lines[0], ['-' * width for width in widths], *lines[1:]]
    return '\n'.join(f'| {" | ".join(cell.ljust(width) for cell, width in zip(line, widths))} |' for line in lines)


def update(page: Path, sections: Dict[str, str]) -> None:
    """Writes sections of groups into the page; what is before them, and sections of other groups, stay as they are."""
    text = page.read_text() if page.exists() else gpu.INTRODUCTION
    introduction, *parts = re.split(r'^(?=## .* \(`\w+`\)$)', text, flags=re.MULTILINE)
    known = {re.match(r'## .* \(`(\w+)`\)\n', part)[1]: part for part in parts}
    known.update(sections)
    page.write_text(
        '\n'.join(
            part.rstrip('\n') + '\n'
            for part in [introduction, *map(known.get, filter(known.get, [*GROUPS, *gpu.GROUPS]))]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f'of {", ".join(GROUPS)}, or with --device of {", ".join(gpu.GROUPS)} (default: all)'
    parser.add_argument('--only', nargs='+', choices=[*GROUPS, *gpu.GROUPS], metavar='GROUP', help=names)
    parser.add_argument(
        '--device', type=torch.device, help='measure times and memory there, such as cuda, and no ratios'
    )
    parser.add_argument('--page', type=Path, metavar='FILE.md', help='a page whose tables of these groups are replaced')
    parser.add_argument('--threads', type=int, default=2, help='default: 2')
    parser.add_argument('--quick', action='store_true', help='small models, one call each: to see that everything runs')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = machine(args.quick)
    groups = {name: partial(group, device=args.device) for name, group in gpu.GROUPS.items()} if args.device else GROUPS
    for name in args.only or groups:
        torch.manual_seed(0)
        cells = {}
        for row, column, ratio in groups[name](args.quick):
            print(f'{name}: {row}, {column}: {ratio}', flush=True)
            cells[row, column] = str(ratio)
        text = section(name, cells, where)
        print(f'\n{text}', flush=True)
        if args.page:
            update(args.page, {name: text})


if __name__ == '__main__':
    main()
