#!/usr/bin/env python
"""Turns a checkpoint of the convolution phase of CMHSA (L21, section 4) or ConvToAttention into one of attention.

The result is for ``load_from`` in a config with phase='attn', and for testing and inference with either phase's config.
How hard the heads begin is in the config: attn_bias_init of CMHSA, for instance --cfg-options
model.backbone.attn_bias_init=40, and alpha of ConvToAttention.
"""

import argparse
import re
import sys
import warnings
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten

import torch

warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated', module='mmcv|mmengine|importlib')

from mmengine.config import DictAction
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint

import attncnn_plugin.mm.safe_loading  # noqa: F401
from attncnn_plugin.loaded_model import write_checkpoint
from attncnn_plugin.mm.tools import one_line, read_config
from attncnn_plugin.model_options import setting
from attncnn_plugin.models import CMHSANetwork
from attncnn_plugin.training import PhasedModule, parts_in_phases


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config of the model, of either phase')
    parser.add_argument('checkpoint', help='checkpoint of the convolution phase')
    parser.add_argument('out', help='where the converted checkpoint goes')
    parser.add_argument(
        '--seed', type=int, default=0, help="seed of the key weights, with phase='conv' in the config (default: 0)"
    )
    parser.add_argument(
        '--cfg-options', nargs='+', type=setting, action=DictAction, help='overrides settings of the config: k=v'
    )
    args = parser.parse_args()
    if Path(args.out).is_dir():
        parser.error(f'out {args.out} is a folder: name a file in it')
    return args


def main() -> None:
    args = parse_args()
    try:
        config = read_config(args.config)
    except FileNotFoundError as error:
        sys.exit(str(error))
    config.merge_from_dict(args.cfg_options or {})
    init_default_scope(config.get('default_scope') or 'mmpretrain')
    try:
        model = MODELS.build(config.model)
    except (KeyError, TypeError, ValueError) as error:
        sys.exit(f'{args.config}: {one_line(error)}')
    parts = parts_in_phases(model)
    if not parts:
        sys.exit(f'{args.config} has no CMHSA and no ConvToAttention: there is nothing to convert')

    torch.manual_seed(args.seed)
    try:
        checkpoint = load_checkpoint(model, args.checkpoint, map_location='cpu', strict=True)
    except (OSError, TypeError, UnpicklingError) as error:
        sys.exit(str(error))
    except RuntimeError as error:
        reason = shorten(str(error), 500, placeholder=' …')
        sys.exit(f'{args.checkpoint} does not fit the model of {args.config}: {reason}')
    # As load_checkpoint does with names of a wrapper for distributed training.
    state_dict = {
        re.sub(r'^module\.', '', key): value for key, value in checkpoint.get('state_dict', checkpoint).items()
    }
    names = {module: name for name, module in model.named_modules()}
    for part in parts:
        prefix = f'{names[part]}.' if names[part] else ''
        if not is_of_convolutions(part, state_dict, prefix):
            sys.exit(f'{args.checkpoint} is not of the convolution phase: there is nothing to convert')
        if part.phase == 'conv':  # one of the attention phase has converted what it loaded
            print(part.to_attention())
    try:
        write_checkpoint(args.out, model.state_dict(), meta=checkpoint.get('meta', {}))
    except (OSError, RuntimeError) as error:
        sys.exit(str(error))
    print(f'Saved {args.out}')


def is_of_convolutions(part: PhasedModule, state_dict: dict, prefix: str) -> bool:
    """Whether a state dict has the convolutions of a part of the model, and not what became of them."""
    if isinstance(part, CMHSANetwork):
        return f'{prefix}blocks.0.attn.conv.weight' in state_dict
    return all(f'{prefix}{name}.weight' in state_dict for name in part.conversion.layers)


if __name__ == '__main__':
    main()
