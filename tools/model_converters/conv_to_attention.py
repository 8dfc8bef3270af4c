#!/usr/bin/env python
"""Turns a checkpoint of CMHSA's convolution phase into one of its attention phase (L21, section 4).

The result is for ``load_from`` in a config with phase='attn', and for testing and inference with either phase's config.
How hard the heads begin is attn_bias_init of the config, for instance --cfg-options model.backbone.attn_bias_init=40.
"""

import argparse
import sys
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint, save_checkpoint

import attncnn_plugin  # noqa: F401
from attncnn_plugin.models.networks import CMHSANetwork


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config of the model, of either phase')
    parser.add_argument('checkpoint', help='checkpoint of the convolution phase')
    parser.add_argument('out', help='where the converted checkpoint goes')
    parser.add_argument('--seed', type=int, default=0, help='seed of the key weights (default: 0)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides settings of the config: k=v')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    config = Config.fromfile(args.config)
    config.merge_from_dict(args.cfg_options or {})
    init_default_scope(config.get('default_scope', 'mmpretrain'))
    model = MODELS.build(config.model)
    networks = {name: module for name, module in model.named_modules() if isinstance(module, CMHSANetwork)}
    if not networks:
        sys.exit(f'{args.config} has no CMHSA: there is nothing to convert')

    torch.manual_seed(args.seed)
    try:
        checkpoint = load_checkpoint(model, args.checkpoint, map_location='cpu', strict=True)
    except (OSError, TypeError, UnpicklingError) as error:
        sys.exit(str(error))
    except RuntimeError as error:
        reason = shorten(str(error), 500, placeholder=' …')
        sys.exit(f'{args.checkpoint} does not fit the model of {args.config}: {reason}')
    state_dict = checkpoint.get('state_dict', checkpoint)
    for name, network in networks.items():
        if network.structure_in(state_dict, f'{name}.') != ('conv', False):
            sys.exit(f'{args.checkpoint} is not of the convolution phase: there is nothing to convert')
        if network.phase == 'conv':  # a network of the attention phase has converted what it loaded
            print(network.to_attention())
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({'state_dict': model.state_dict(), 'meta': checkpoint.get('meta', {})}, args.out)
    print(f'Saved {args.out}')


if __name__ == '__main__':
    main()
