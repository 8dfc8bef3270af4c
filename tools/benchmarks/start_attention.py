#!/usr/bin/env python
"""How near the attention of vision transformers that start as a convolution is to the wanted one, on random images.

Total variation in the first and in the last layer, mean over heads, as a table in Markdown.

python tools/benchmarks/start_attention.py                        # models of timm
python tools/benchmarks/start_attention.py vit_small_patch16_224 --alpha 1 --dtype bfloat16
"""

import argparse
from typing import List

import timm
import torch

from attncnn_plugin.init import ConvolutionalStart, init_as_convolution

MODELS = [
    'vit_tiny_patch16_224',
    'deit_tiny_patch16_224',
    'beit_base_patch16_224',
    'swin_tiny_patch4_window7_224',
    'eva02_tiny_patch14_224',
    'vit_small_patch16_dinov3',
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='*', default=MODELS, help='names of timm; default some of each kind')
    parser.add_argument('--alpha', type=float, default=2.0)
    parser.add_argument('--dtype', default='float32', choices=('float32', 'float16', 'bfloat16'), help='of autocast')
    parser.add_argument('--threads', type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print('| model | encoding | patches | first layer | last layer | to other tokens |\n' + '| --- ' * 6 + '|')
    for name in args.models:
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False)
        with torch.autocast('cpu', getattr(torch, args.dtype), enabled=args.dtype != 'float32'):
            report = init_as_convolution(model, alpha=args.alpha)
        print(f'| `{name}` | {" | ".join(cells(report))} |', flush=True)


def cells(report: ConvolutionalStart) -> List[str]:
    """Encoding, grid, total variation in the first and the last layer, mean over heads, and share of other tokens."""
    first, last = report.layers[0], report.layers[-1]
    variations = [sum(head.total_variation for head in layer.heads) / len(layer.heads) for layer in (first, last)]
    grid = '×'.join(map(str, first.grid))
    return [first.encoding, grid, *(f'{variation:.2g}' for variation in variations), f'{first.prefix_share:.2g}']


if __name__ == '__main__':
    main()
