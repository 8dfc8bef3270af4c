"""The command ``attncnn``: its options. Each verb has a module; its ``run(args)`` says what was done, and what next."""

import argparse
import ast
import importlib
import io
import os
import sys
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Dict, List, Optional, Sequence

from ..transformers.start import METHODS, SHIFTS

VERBS = {
    'maps': 'Writes the attention of every layer to images, query by query, to a file of NumPy.',
    'report': 'Says where each head looks, and what convolution the heads of a layer form.',
    'plot': 'Draws the heads of a model, or their paths during a training.',
    'explore': 'Writes a page for the browser that shows where every head looks, from any place of an image.',
    'rank': 'Says which heads matter: their importance, and what the model loses without each.',
    'prune': 'Removes heads from a model: those that are named, or those that matter least.',
    'convert': 'Turns convolutions into attention that computes the same.',
    'start': 'Lets the heads of an untrained vision transformer start as a convolution.',
}
EXAMPLES = {
    'maps': '--timm vit_tiny_patch16_224 --pretrained --images photo.jpg',
    'report': '--hf FOLDER --images photos',
    'plot': '--timm vit_tiny_patch16_224 --pretrained --figure attention --images photo.jpg',
    'explore': '--timm vit_tiny_patch16_224 --pretrained --images photo.jpg',
    'rank': '--timm vit_tiny_patch16_224 --pretrained --images photos',
    'prune': '--timm vit_tiny_patch16_224 --pretrained --images photos --share 30% --out pruned.pth',
    'convert': "--timm resnet18 --pretrained --layers 'layer4.*.conv2' --out attention.pth",
    'start': '--timm vit_tiny_patch16_224 --model-kwargs num_classes=10 --out start.pth',
}
FIGURES = {
    'attention': 'where the class token of each image, or its --query, looks: each head, on the photo',
    'heads': 'what every head of all layers attends to from the --query, mean over images',
    'centers': 'the centre of each head, a panel for each layer; with 50%% and 90%% contours of Gaussian heads',
    'distance': 'how far the heads of each layer look',
    'movement': 'the centres over a training with AttentionVisualizationHook, --run FOLDER and no model',
}
PICTURES = '.png', '.svg', '.pdf'


def setting(text: str) -> str:
    """Returns a ``key=value`` unchanged, and refuses any other word, such as a file name after the option."""
    if '=' not in text:
        raise argparse.ArgumentTypeError(f'{text} is no key=value: put all that is none before this option')
    return text


def natural(text: str) -> int:
    """Returns a whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text} must be a whole number, at least 1')
    return int(text)


def share(text: str) -> float:
    """Returns a share, ``30%`` or 0.3, as a number above 0, below 1."""
    try:
        value = float(text[:-1]) / 100 if text.endswith('%') else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f'{text} must be a share between 0 and 1, such as 30%')
    return value


def named_heads(text: str) -> Dict[Any, List[int]]:
    """Returns heads by block number or layer name, from a dict in Python's notation."""
    try:
        heads = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        heads = None
    if not isinstance(heads, dict) or not heads or not all(isinstance(own, (list, tuple)) for own in heads.values()):
        raise argparse.ArgumentTypeError(f"{text!r} must be the heads of some blocks, for instance '{{0: [1, 3]}}'")
    return heads


def parse_args(words: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Reads the command line; a mistake ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog='attncnn',
        description='See, rank and prune the heads of a vision model, turn its convolutions into heads.',
        epilog='attncnn VERB --help lists the options of a verb.',
    )
    verbs = parser.add_subparsers(dest='verb', metavar='VERB', required=True)
    parsers = {}
    for verb, text in VERBS.items():
        epilog = f'for instance: attncnn {verb} {EXAMPLES[verb]}'
        usage = f'attncnn {verb} (--timm NAME | --hf FOLDER | --mm CONFIG CHECKPOINT) [options]'
        say = dict(help=text, description=text, usage=usage, epilog=epilog)
        parsers[verb] = verbs.add_parser(verb, formatter_class=argparse.RawDescriptionHelpFormatter, **say)
        _add_model(parsers[verb], required=verb != 'plot')
        _add_own(parsers[verb], verb)
    args = parser.parse_args(words)
    _check(parsers[args.verb], args)
    return args


def _add_model(parser: argparse.ArgumentParser, required: bool) -> None:
    add = parser.add_argument_group('the model').add_mutually_exclusive_group(required=required).add_argument
    add('--timm', metavar='NAME', help='a model of timm')
    add('--hf', metavar='FOLDER', help='one that Hugging Face transformers has saved, pruned or not')
    add('--mm', nargs=2, metavar=('CONFIG', 'CHECKPOINT'), help='one of mmpretrain')
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument('--pretrained', action='store_true', help="with --timm: timm's pretrained weights")
    weights.add_argument('--checkpoint', metavar='FILE', help='with --timm: its weights')
    pairs = dict(nargs='+', type=setting, metavar='K=V')
    parser.add_argument('--model-kwargs', help='arguments of the model of --timm', **pairs)
    parser.add_argument('--cfg-options', help='of the config of --mm', **pairs)


def _add_own(parser: argparse.ArgumentParser, verb: str) -> None:
    add = parser.add_argument
    if verb not in ('convert', 'start'):
        number = 64 if verb in ('rank', 'prune') else 100
        what = 'files or folders of images; with --mm also numbers in its test set, which is the default'
        if verb in ('rank', 'prune'):
            what = (
                'a folder with a subfolder for each class of the model, by name in the order of its classes; or images '
                "without, the model's own predictions being right then; of --mm the default is its training set"
            )
        add('--images', nargs='+', metavar='PATH', help=what)
        add('--num-images', type=natural, default=number, help=f'so many, evenly spread (default: {number})')
    if verb in ('maps', 'report', 'plot', 'rank', 'prune', 'convert'):
        default = '*' if verb == 'prune' else None
        default_of = 'all; of --figure attention the last one' if verb == 'plot' else 'all'
        what = 'convolutions of a CNN' if verb == 'convert' else f'names of the layers (default: {default_of})'
        add('--layers', metavar='GLOB', default=default, help=what)
    if verb == 'report':
        add('--json', metavar='FILE', dest='out', help='write all numbers to this file, too')
    elif verb in ('prune', 'convert', 'start'):
        add('--out', required=True, help='the new checkpoint; with --hf a folder')
        add('--seed', type=int, default=0, help='of random numbers (default: 0)')
    else:
        default = {'maps': 'maps.npz', 'explore': 'explorer.html', 'rank': 'rank.png'}.get(verb)
        add('--out', default=default, help=f'the file (default: {default or "FIGURE.png"})')
    if verb == 'plot':
        figures = '; '.join(f'{name}: {text}' for name, text in FIGURES.items())
        add('--figure', choices=FIGURES, metavar='FIGURE', required=True, help=figures)
        add('--query', nargs=2, type=int, metavar=('ROW', 'COLUMN'), help='in tokens, from 0')
        add('--run', metavar='FOLDER', help='of --figure movement: the folder of the training')
    if verb == 'explore':
        add('--max-size', type=float, default=10.0, help='what the page may take, in MB (default: 10)')
    if verb == 'prune':
        add('--heads', type=named_heads, help="those that go, by the block or the layer: '{0: [1, 3]}'")
        criteria = 'importance', 'ablation', 'degenerate', 'random'
        add('--criterion', choices=criteria, help='which heads go (default: importance, the least important)')
        amount = parser.add_mutually_exclusive_group().add_argument
        amount('--share', type=share, help='of the heads that goes, such as 30%%')
        amount('--keep', type=natural, help='number of heads that stay')
        amount('--multiply-adds', type=share, help='share of them that stays, such as 90%%')
        amount('--threshold', type=float, help='heads whose score is below it go')
    if verb == 'convert':
        add('--alpha', type=float, help='of the layers of a CNN: how narrow heads are; learnable up to about 6')
    if verb == 'start':
        add('--method', choices=METHODS, default='gaussian', help='how heads start (default: gaussian)')
        add('--kernel-size', type=natural, default=3, help='in patches (default: 3)')
        add('--shifts', choices=SHIFTS, default='ordered', help='of the heads (default: the centre first)')
        add('--alpha', type=float, default=2.0, help='of Gaussian heads, in 1/patches² (default: 2)')


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses options that do not go together, and files that cannot be written."""
    model, of_timm = args.timm or args.hf or args.mm, args.checkpoint or args.pretrained or args.model_kwargs
    problems = {
        '--checkpoint, --pretrained and --model-kwargs are for --timm': of_timm and not args.timm,
        '--cfg-options is for --mm': args.cfg_options and not args.mm,
    }
    kinds = dict(maps=('.npz',), report=('.json',), explore=('.html',), rank=PICTURES, plot=PICTURES)
    suffixes = kinds.get(args.verb, ('',))
    if args.verb == 'plot':
        args.out = args.out or f'{args.figure}.png'
        of_run, figure = args.figure == 'movement', f'--figure {args.figure} is of'
        problems[f'{figure} a model: give --timm NAME, --hf FOLDER or --mm CONFIG CHECKPOINT'] = not (of_run or model)
        problems[f'{figure} a training: give --run FOLDER and no model'] = of_run and (not args.run or model)
        of_query = args.figure in ('attention', 'heads')
        problems['--query is for --figure attention and heads'] = args.query and not of_query
    elif args.verb == 'explore':
        problems[f'--max-size {args.max_size} must be above 0'] = args.max_size <= 0
    elif args.verb == 'prune':
        amount = any(own is not None for own in (args.share, args.keep, args.multiply_adds, args.threshold))
        ways = sum([args.heads is not None, args.criterion == 'degenerate', amount])
        wrong = ways != 1 or args.heads and (args.criterion or args.layers != '*')
        problems["which heads go? one of --heads '{0: [1]}', --criterion degenerate and --share 30% says it"] = wrong
    if args.out is not None:
        args.out = os.path.expanduser(args.out)  # a shell leaves --out=~/file as it is
        out = f'{"--json" if args.verb == "report" else "--out"} {args.out}'
        problems[f'{out} must end in {" or ".join(suffixes)}'] = not args.out.endswith(suffixes)
        path = Path(args.out).resolve()
        above = next(folder for folder in path.parents if folder.exists())
        problems[f'{out} cannot be written: {above} is no folder, or not yours'] = not (
            above.is_dir() and os.access(above, os.W_OK)
        )
        problems[f'{out} is a folder already: name a new one'] = path.is_dir()
        files = args.hf, args.checkpoint, *(args.mm or ()), *(getattr(args, 'images', None) or ())
        read = {Path(own).resolve() for own in files if own}
        if args.verb in ('prune', 'convert', 'start'):
            problems[f'{out} exists already: name a new one'] = path.exists()
            problems[f'{out} must end in .pth: mmengine does not read safetensors'] = (
                args.mm and args.out[-4:] != '.pth'
            )
        problems[f'{out} is read, or in a folder that is read: name a new file'] = path.exists() and bool(
            read & {path, *path.parents}
        )
    for message, wrong in problems.items():
        if wrong:
            parser.error(message)


def main(words: Optional[Sequence[str]] = None) -> None:
    """Runs the command; an error is a sentence and status 2."""
    args = parse_args(words)
    if isinstance(sys.stdout, io.TextIOWrapper):  # an arrow in another encoding is no reason to stop
        sys.stdout.reconfigure(errors='replace')
    warnings.filterwarnings('ignore', 'pkg_resources is deprecated')  # which mmengine loads again and again
    try:
        said = importlib.import_module(f'.{args.verb}', __name__).run(args)
        print('', *said, sep='\n', flush=True)
    except BrokenPipeError:  # nobody reads on; all files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        sys.stderr.write(f'attncnn {args.verb}: {error}\n')
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
