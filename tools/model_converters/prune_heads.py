#!/usr/bin/env python
"""Removes heads from a checkpoint, those that are named, those that are degenerate, or those that matter least.

The model has attention of this package, or is a vision transformer of mmpretrain. The result loads with its config,
in training, testing and inference. The mean output of the removed heads is lost: HeadPruningHook adds it to the bias of
the layer. Attention that depends on content, and importance, are judged by batches of the config's train_dataloader.
"""

import argparse
import ast
import itertools
import sys
from pathlib import Path
from pickle import UnpicklingError

from mmengine.config import DictAction
from mmengine.runner import Runner, save_checkpoint

import attncnn_plugin  # noqa: F401
from attncnn_plugin.apis.config_model import ConfigModel
from attncnn_plugin.apis.judged_heads import IMPORTANCE, HeadJudge
from attncnn_plugin.pruning import prunable_heads, prune_heads


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config of the model')
    parser.add_argument('checkpoint', help='checkpoint of the model')
    parser.add_argument('out', help='where the pruned checkpoint goes')
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        '--heads',
        help="heads to remove, by the number of the block or the name of the layer: '{0: [1, 3]}', "
        '\'{"backbone.layers.0.attn": [1]}\'',
    )
    which.add_argument(
        '--criterion',
        nargs='+',
        default=['uniform', 'stripe'],
        help='remove what any of these finds: uniform, stripe, entropy, duplicate, and importance, with one of '
        '--threshold, --keep and --multiply-adds (default: uniform stripe)',
    )
    parser.add_argument('--threshold', type=float, help='of importance: heads below it go')
    parser.add_argument('--keep', type=int, help='of importance: the number of heads of the model that stay')
    parser.add_argument('--multiply-adds', type=float, help="of importance: the share of the model's that stays")
    parser.add_argument('--layers', default='*', help='glob of the names of the layers to judge (default: all)')
    parser.add_argument('--num-batches', type=int, default=8, help='training batches to judge by (default: 8)')
    parser.add_argument(
        '--size',
        nargs=2,
        type=int,
        metavar=('HEIGHT', 'WIDTH'),
        help="grid in tokens for the criteria entropy and duplicate (default: that of the config's img_size)",
    )
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides settings of the config: k=v')
    return parser.parse_args()


def named_heads(text: str) -> dict:
    """``'{0: [1, 3]}'`` as a dict."""
    try:
        heads = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        heads = None
    if not isinstance(heads, dict) or not all(isinstance(indices, (list, tuple)) for indices in heads.values()):
        sys.exit(f"--heads {text!r} must be the heads of each block, for instance '{{0: [1, 3]}}'")
    return heads


def judged_heads(loaded: ConfigModel, args: argparse.Namespace) -> dict:
    """The heads that go by the criteria, all but one of a layer at most."""
    amount = dict(threshold=args.threshold, keep=args.keep, multiply_adds=args.multiply_adds)
    amount = {name: value for name, value in amount.items() if value is not None}
    if amount and IMPORTANCE not in args.criterion:
        raise ValueError(f'{amount} say how many heads go by importance: add it to --criterion')
    judge = HeadJudge(
        [dict(type=name, **amount) if name == IMPORTANCE else name for name in args.criterion], args.layers
    )
    model = loaded.model
    judge.check(model)
    batches, size = [], None
    if judge.needs_images(model):
        if loaded.config.get('train_dataloader') is None:
            raise ValueError(f'{args.config} has no train_dataloader, whose images heads are judged by')
        loader = Runner.build_dataloader(loaded.config.train_dataloader, seed=0)
        batches = itertools.islice(loader, args.num_batches)
    else:
        size = tuple(args.size or loaded.grid)
    judged = judge.judge(model, batches, size)
    for name, report in judged.reports.items():
        print(f'{name}: {report}')
    heads = judge.to_remove(model, judged, size)
    for name, report in judged.reports.items():
        for kept in sorted(set(report.heads) - set(heads.get(name, []))):
            print(f'{name}: all heads are to go, {kept} is kept as the least uniform one')
    return heads


def main() -> None:
    args = parse_args()
    try:
        loaded = ConfigModel(args.config, args.checkpoint, args.cfg_options)
        model = loaded.model
        if not prunable_heads(model):
            sys.exit(f'the model of {args.config} has no attention with heads that can be removed')
        before = sum(parameter.numel() for parameter in model.parameters())
        heads = named_heads(args.heads) if args.heads else judged_heads(loaded, args)
        prune_heads(model, heads)
    except (OSError, TypeError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))
    after = sum(parameter.numel() for parameter in model.parameters())
    print(f'Removed heads {heads}: {before:,} parameters became {after:,}')
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({'state_dict': model.state_dict(), 'meta': loaded.meta}, args.out)
    print(f'Saved {args.out}')


if __name__ == '__main__':
    main()
