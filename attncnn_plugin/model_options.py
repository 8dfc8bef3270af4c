"""The options by which the tools take a model: config and checkpoint, a name in timm, or a folder of Hugging Face."""

import argparse
from typing import Any, Optional

from timm.utils import ParseKwargs

from .installation import import_problem
from .loaded_model import HuggingFaceModel, LoadedModel, TimmModel


def setting(text: str) -> str:
    """Returns a ``key=value`` as it stands, for argparse; refuses others, such as a file after the option."""
    if '=' not in text:
        raise argparse.ArgumentTypeError(
            f'{text} is no key=value: name configs, checkpoints and images before this option, not after it'
        )
    return text


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options beside the config and its checkpoint, which are arguments of the tool itself."""
    pairs: Any = dict(nargs='+', type=setting, default={})
    if import_problem() is None:
        from mmengine.config import DictAction

        parser.add_argument('--cfg-options', **pairs, action=DictAction, help='overrides settings of the config: k=v')
    library = parser.add_mutually_exclusive_group()
    library.add_argument('--timm', metavar='NAME', help='a model of timm instead of config and checkpoint')
    library.add_argument('--hf', metavar='FOLDER', help='one that Hugging Face transformers has saved, pruned or not')
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument('--checkpoint', metavar='FILE', help='with --timm: its checkpoint')
    weights.add_argument('--pretrained', action='store_true', help="with --timm: timm's pretrained weights")
    parser.add_argument(
        '--model-kwargs',
        **pairs,
        action=ParseKwargs,
        help='with --timm: settings of the model, such as num_classes=10: k=v',
    )


def add_image_options(parser: argparse.ArgumentParser, which: Any = None) -> None:
    """Adds config and checkpoint, and what a mean over images needs: ``--images`` to a group if there is one."""
    parser.add_argument('config', nargs='?', help='config of the model')
    parser.add_argument('weights', nargs='?', metavar='checkpoint', help='checkpoint of the model')
    (which or parser).add_argument(
        '--images', metavar='FOLDER', help="images for the mean, with subfolders (default: those of the config's tests)"
    )
    parser.add_argument('--num-images', type=int, default=100, help='images for the mean, evenly spread (default: 100)')
    parser.add_argument(
        '--size',
        nargs=2,
        type=int,
        metavar=('HEIGHT', 'WIDTH'),
        help="grid in tokens, for attention by position alone (default: that of the config's img_size)",
    )


def check_model_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace, config: Optional[str], checkpoint: Optional[str]
) -> None:
    """Ends the tool where the options say no model, or two."""
    if args.timm is None and (args.checkpoint or args.pretrained or args.model_kwargs):
        parser.error('--checkpoint, --pretrained and --model-kwargs are for --timm')
    if not args.timm and not args.hf:
        if config is None or checkpoint is None:
            parser.error('a config and a checkpoint are needed, or --timm NAME, or --hf FOLDER')
    elif config is not None or getattr(args, 'cfg_options', None):
        parser.error('--timm and --hf take the place of the config, its checkpoint and --cfg-options')


def load_model(args: argparse.Namespace, config: Optional[str], checkpoint: Optional[str]) -> LoadedModel:
    """Returns the model that the options say; raises the errors of its class."""
    if args.timm:
        return TimmModel(args.timm, args.checkpoint, args.pretrained, args.model_kwargs)
    if args.hf:
        return HuggingFaceModel(args.hf)
    from .mm import safe_loading  # noqa: F401
    from .mm.config_model import ConfigModel

    return ConfigModel(str(config), str(checkpoint), args.cfg_options)
