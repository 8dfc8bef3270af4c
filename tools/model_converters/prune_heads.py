#!/usr/bin/env python
"""Removes heads from a checkpoint of a self-attention network, those that are named or those that are degenerate.

The result loads with the same config, in training, testing and inference. The mean output of the removed heads is lost:
HeadPruningHook, which sees training images, adds it to the bias of the layer.
"""

import argparse
import ast
import sys
from pathlib import Path
from pickle import UnpicklingError

from mmengine.config import DictAction
from mmengine.runner import save_checkpoint

import attncnn_plugin  # noqa: F401
from attncnn_plugin.apis.config_model import ConfigModel
from attncnn_plugin.models.networks import SelfAttentionNetwork
from attncnn_plugin.pruning import find_degenerate_heads, least_uniform_head


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config of the model')
    parser.add_argument('checkpoint', help='checkpoint of the model')
    parser.add_argument('out', help='where the pruned checkpoint goes')
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--heads', help="heads to remove of each block, for instance '{0: [1, 3]}'")
    which.add_argument(
        '--criterion',
        nargs='+',
        default=['uniform', 'stripe'],
        help='remove what is degenerate by any of these (default: uniform stripe)',
    )
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


def degenerate_heads(network: SelfAttentionNetwork, criteria: list, size: tuple) -> dict:
    """The degenerate heads of each block, all but one at most."""
    heads = {}
    for i, block in enumerate(network.blocks):
        report = find_degenerate_heads(block.attn, criteria, size)
        print(f'Block {i}: {report}')
        heads[i] = list(report.heads)
        if len(heads[i]) == block.attn.num_heads > 0:
            kept = least_uniform_head(block.attn, size)
            heads[i].remove(kept)
            print(f'Block {i}: all heads are degenerate, {kept} is kept as the least uniform one')
    return {i: indices for i, indices in heads.items() if indices}


def main() -> None:
    args = parse_args()
    try:
        loaded = ConfigModel(args.config, args.checkpoint, args.cfg_options)
        model = loaded.model
        networks = [module for module in model.modules() if isinstance(module, SelfAttentionNetwork)]
        if len(networks) != 1:
            sys.exit(f'{args.config} has {len(networks)} self-attention networks: heads are removed from one')
        before = sum(parameter.numel() for parameter in model.parameters())
        heads = (
            named_heads(args.heads)
            if args.heads
            else degenerate_heads(networks[0], args.criterion, tuple(args.size or loaded.grid))
        )
        networks[0].prune_heads(heads)
    except (OSError, TypeError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))
    after = sum(parameter.numel() for parameter in model.parameters())
    print(f'Removed heads {heads}: {before:,} parameters became {after:,}')
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({'state_dict': model.state_dict(), 'meta': loaded.meta}, args.out)
    print(f'Saved {args.out}')


if __name__ == '__main__':
    main()
