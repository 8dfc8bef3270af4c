#!/usr/bin/env python
"""Removes heads from a checkpoint, those that are named, those that are degenerate, or the least important.

The model has attention of this package, or is a vision transformer of mmpretrain, timm or Hugging Face transformers:

    prune_heads.py CONFIG CHECKPOINT OUT --criterion importance --keep 20
    prune_heads.py OUT --timm deit_tiny_patch16_224 --pretrained --images FOLDER --criterion importance --keep 20
    prune_heads.py OUT --timm vit_tiny_patch16_224 --checkpoint FILE --heads '{0: [1, 2]}'
    prune_heads.py OUT --hf FOLDER --heads '{0: [1, 2]}'

The result loads with its config, in training, testing and inference, and in timm. With --hf it is a new folder, which
attncnn_plugin.load_hugging_face and --hf take. Models of other libraries take its
structure by attncnn_plugin.follow_state_dict, or by FollowStateDictHook, which tools/train.py and tools/test.py add.
The mean output of the removed heads is lost: HeadPruningHook adds it to the bias of the layer. Attention by
content, and importance, are judged by batches of the config's train_dataloader, or by the images of a folder; for
importance it has a subfolder for each class, in the order of the model's classes.
"""

import argparse
import ast
import itertools
import sys
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Iterable, Optional

import torch
from torchvision.datasets import ImageFolder

warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated', module='mmcv|mmengine|importlib')

from attncnn_plugin.loaded_model import LoadedModel, evenly_spread
from attncnn_plugin.model_options import add_model_options, check_model_options, load_model
from attncnn_plugin.pruning import head_costs, prunable_heads, prune_heads
from attncnn_plugin.pruning.degenerate import depends_on_content
from attncnn_plugin.pruning.importance import Loss, check_amount
from attncnn_plugin.training import PruneHeads
from attncnn_plugin.training.head_pruning import IMPORTANCE, loss_of_batch

BATCH_SIZE = 32  # of images of a folder


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage='%(prog)s CONFIG CHECKPOINT OUT [options]\n       %(prog)s OUT (--timm NAME | --hf FOLDER) [options]',
    )
    parser.add_argument(
        'words',
        nargs='+',
        metavar='CONFIG CHECKPOINT OUT',
        help='config and checkpoint of the model, without --timm and --hf, and where the pruned checkpoint goes',
    )
    add_model_options(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        '--heads',
        help="heads to remove, by the number of the block or the name of the layer: '{0: [1, 3]}', "
        '\'{"backbone.layers.0.attn": [1]}\'',
    )
    which.add_argument(
        '--criterion',
        nargs='+',
        help='remove what any of these finds: uniform, stripe, entropy, duplicate, and importance, with one of '
        '--threshold, --keep and --multiply-adds',
    )
    parser.add_argument('--threshold', type=float, help='of importance: heads below it go')
    parser.add_argument('--keep', type=int, help='of importance: the number of heads of the model that stay')
    parser.add_argument('--multiply-adds', type=float, help="of importance: the share of the model's that stays")
    parser.add_argument('--layers', default='*', help='glob of the names of the layers to judge (default: all)')
    parser.add_argument('--images', metavar='FOLDER', help='images to judge by, with --timm or --hf')
    parser.add_argument(
        '--num-batches',
        type=int,
        default=8,
        help=f'training batches to judge by, of {BATCH_SIZE} images where they are of a folder (default: 8)',
    )
    parser.add_argument(
        '--size',
        nargs=2,
        type=int,
        metavar=('HEIGHT', 'WIDTH'),
        help="grid in tokens for the criteria entropy and duplicate (default: that of the config's img_size)",
    )
    args = parser.parse_args()
    of_library = args.timm or args.hf
    if len(args.words) != (1 if of_library else 3):
        parser.error(f'{" ".join(args.words)} must be ' + ('only OUT' if of_library else 'CONFIG CHECKPOINT OUT'))
    args.config, args.weights = (None, None) if of_library else args.words[:2]
    args.out = args.words[-1]
    if args.hf and Path(args.out).exists():
        parser.error(f'OUT {args.out} exists already: name a new folder')
    if not args.hf and Path(args.out).is_dir():
        parser.error(f'OUT {args.out} is a folder: name a file in it')
    if args.config and Path(args.out).suffix == '.safetensors':
        parser.error(f'OUT {args.out} must end in .pth: mmengine does not read safetensors')
    check_model_options(parser, args, args.config, args.weights)
    amount = {'--threshold': args.threshold, '--keep': args.keep, '--multiply-adds': args.multiply_adds}
    given = [option for option, value in amount.items() if value is not None]
    if args.heads is None and args.criterion is None:
        parser.error(
            "nothing says which heads go: give --heads '{0: [1]}', --criterion uniform stripe, or "
            '--criterion importance --keep NUMBER'
        )
    if args.heads is not None and given:
        parser.error(f'{", ".join(given)}: so many heads go by importance, but --heads names those that go')
    if args.num_batches < 1:
        parser.error(f'--num-batches={args.num_batches} must be at least 1')
    if args.images is not None and not of_library:
        parser.error(
            "--images is for --timm and --hf: of a config it is the train_dataloader's images that heads are judged by"
        )
    return args


def named_heads(text: str) -> dict:
    """``'{0: [1, 3]}'`` as a dict."""
    try:
        heads = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        heads = None
    if not isinstance(heads, dict) or not all(isinstance(indices, (list, tuple)) for indices in heads.values()):
        sys.exit(f"--heads {text!r} must be the heads of each block, for instance '{{0: [1, 3]}}'")
    return heads


def judged_heads(loaded: LoadedModel, args: argparse.Namespace, image: Optional[torch.Tensor]) -> dict:
    """The heads that go by the criteria, all but one of a layer at most."""
    amount = dict(threshold=args.threshold, keep=args.keep, multiply_adds=args.multiply_adds)
    amount = {name: value for name, value in amount.items() if value is not None}
    if amount and IMPORTANCE not in args.criterion:
        raise ValueError(f'{amount} say how many heads go by importance: add it to --criterion')
    criteria = [name for name in args.criterion if name != IMPORTANCE]
    if IMPORTANCE in args.criterion:
        check_amount(args.threshold, args.keep, args.multiply_adds)
    model = loaded.model
    example = [] if args.config or image is None else [(image, torch.zeros(1, dtype=torch.long))]
    pruner = PruneHeads(batches=example, loss=loss_of(args), criteria=criteria, layers=args.layers, **amount)
    layers = pruner.layers(model)
    if not layers:
        raise ValueError(f'--layers {args.layers}: there is {pruner.nothing}')
    pruner.check(model)
    batches, size = [], None
    if amount or any(map(depends_on_content, layers.values())):
        batches = itertools.islice(batches_of(loaded, args), args.num_batches)
    else:
        size = tuple(args.size or loaded.grid)
    judged = pruner.judge(model, batches, size)
    for name, report in judged.reports.items():
        print(f'{name}: {report}')
    for name, report in judged.reports.items():
        for kept in sorted(set(report.heads) - set(judged.heads.get(name, []))):
            print(f'{name}: all heads are to go, {kept} is kept as the least uniform one')
    return judged.heads


def loss_of(args: argparse.Namespace) -> Loss:
    """The loss of a model on a batch."""
    if args.config:
        from attncnn_plugin.mm.runner import training_loss

        return training_loss
    return loss_of_batch if IMPORTANCE in args.criterion else lambda model, batch: model(batch[0])


def batches_of(loaded: LoadedModel, args: argparse.Namespace) -> Iterable[Any]:
    """Batches of the config's training images, or of the images of a folder."""
    if args.config:
        from mmengine.runner import Runner

        if loaded.config.get('train_dataloader') is None:
            raise ValueError(f'{args.config} has no train_dataloader, whose images heads are judged by')
        return Runner.build_dataloader(loaded.config.train_dataloader, seed=0)
    if args.images is None:
        raise ValueError(f'the heads of {loaded.name} are judged by images: give --images FOLDER, or --heads')
    number = BATCH_SIZE * args.num_batches
    if IMPORTANCE in args.criterion:
        files = ImageFolder(args.images).samples
        chosen = [files[i] for i in evenly_spread(len(files), number)]
        images, labels = [loaded.read(path) for path, _ in chosen], [label for _, label in chosen]
    else:
        images = loaded.read_folder(args.images, number)
        labels = [0] * len(images)
    return zip(loaded.inputs(images).split(BATCH_SIZE), torch.tensor(labels).split(BATCH_SIZE))


def main() -> None:
    args = parse_args()
    try:
        loaded = load_model(args, args.config, args.weights)
        model = loaded.model
        image = None if loaded.input_shape is None else torch.rand(1, *loaded.input_shape)
        if not prunable_heads(model, image):
            sys.exit(f'the model of {loaded.name} has no attention with heads that can be removed')
        heads = named_heads(args.heads) if args.heads is not None else judged_heads(loaded, args, image)
        before = None if image is None else head_costs(model, lambda: model(image))[0]
        change = prune_heads(model, heads, image)
        after = None if image is None else head_costs(model, lambda: model(image))[0]
        loaded.save(args.out)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))
    print(f'Removed heads {heads}: {change.parameters_before:,} parameters became {change.parameters_after:,}')
    if before is not None and after is not None:
        print(f'{before:,} multiply-adds of an image became {after:,}, {after / before:.1%} of them')
    print(change)
    print(f'Saved {args.out}')


if __name__ == '__main__':
    main()
