#!/usr/bin/env python
"""Turns a checkpoint of the convolution phase of CMHSA (L21, section 4) or ConvToAttention into one of attention.

The result is for ``load_from`` in a config with phase='attn', and for testing and inference with either phase's config.
How hard the heads begin is in the config: attn_bias_init of CMHSA, for instance --cfg-options
model.backbone.attn_bias_init=40, and alpha of ConvToAttention.
"""

import argparse
import sys
import warnings
from pathlib import Path
from pickle import UnpicklingError

import torch

warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated', module='mmcv|mmengine|importlib')

from mmengine.config import DictAction

import attncnn_plugin.mm.safe_loading  # noqa: F401
from attncnn_plugin.mm.config_model import ConfigModel
from attncnn_plugin.model_options import setting
from attncnn_plugin.training import parts_in_phases, to_attention


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
    torch.manual_seed(args.seed)
    try:
        loaded = ConfigModel(args.config, args.checkpoint, args.cfg_options)
        if not parts_in_phases(loaded.model):
            sys.exit(f'{args.config} has no CMHSA and no ConvToAttention: there is nothing to convert')
        for change in to_attention(loaded.model, args.seed):
            print(change)
        if loaded.entries <= loaded.model.state_dict().keys():  # a model of phase='attn' has converted what it loaded
            sys.exit(f'{args.checkpoint} is not of the convolution phase: there is nothing to convert')
        loaded.save(args.out)
    except (OSError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        sys.exit(str(error))
    print(f'Saved {args.out}')


if __name__ == '__main__':
    main()
