"""``attncnn start``: an untrained vision transformer whose heads start as a convolution, for a training script."""

from argparse import Namespace
from typing import List

from ..transformers import init_as_convolution
from .model import load


def run(args: Namespace) -> List[str]:
    """Starts the model and saves it."""
    loaded = load(args)
    start = init_as_convolution(loaded.model, args.kernel_size, args.method, args.alpha, args.seed, shifts=args.shifts)
    loaded.save(args.out)
    print(start)
    use = f'timm: train.py --model {args.timm} --initial-checkpoint {args.out}' if args.timm else 'train it'
    return [f'The heads of {loaded.name} start as {args.method}', f'Saved {args.out}', f'Next: {use}']
