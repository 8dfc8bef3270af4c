#!/usr/bin/env python
"""Writes a checkpoint of a vision transformer of timm, before training, whose attention starts as a convolution.

The result is for a training script's option for an initial checkpoint, --initial-checkpoint of timm's train.py:

    start_as_convolution.py vit_tiny_patch16_224 start.pth --model-kwargs img_size=32 patch_size=4 num_classes=10
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
from timm.utils import ParseKwargs

warnings.filterwarnings('ignore', 'Fail to import|pkg_resources is deprecated', module='mmcv|mmengine|importlib')

from attncnn_plugin.loaded_model import create_timm, write_checkpoint
from attncnn_plugin.model_options import setting
from attncnn_plugin.transformers import init_as_convolution
from attncnn_plugin.transformers.start import METHODS, SHIFTS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', help='name of the model in timm')
    parser.add_argument('out', type=Path, help='where the checkpoint goes, a new file')
    parser.add_argument(
        '--model-kwargs', nargs='+', type=setting, default={}, action=ParseKwargs, help='settings of the model: k=v'
    )
    parser.add_argument('--method', choices=METHODS, default='gaussian', help='how heads start (default: gaussian)')
    parser.add_argument('--kernel-size', type=int, default=3, help='of the kernel, in patches (default: 3)')
    parser.add_argument('--shifts', choices=SHIFTS, default='ordered', help='of the heads (default: the centre first)')
    parser.add_argument('--alpha', type=float, default=2.0, help='of Gaussian heads, in 1/patches² (default: 2)')
    parser.add_argument('--seed', type=int, default=0, help='of all weights (default: 0)')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.out.exists():
        sys.exit(f'{args.out} exists: name a new file')
    torch.manual_seed(args.seed)
    try:
        model = create_timm(args.name, 'name', **args.model_kwargs)
        print(init_as_convolution(model, args.kernel_size, args.method, args.alpha, args.seed, shifts=args.shifts))
        write_checkpoint(args.out, model.state_dict())
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(str(error))
    print(f'Saved {args.out}')


if __name__ == '__main__':
    main()
