#!/usr/bin/env python
"""Packs a network that tools/reproduce.py has trained into the package: weights in half precision, and a model card.

  pack_weights.py work_dirs/reproduce/cifar10/runs/quadratic_20000_60_0 sa_quadratic_small
  pack_weights.py                 # packs nothing, writes the table and the metafile anew from the model cards

RUN is the folder of the training, with its result.json and its last checkpoint. NAME is the network in timm.
Both go into attncnn_plugin/weights; the table of docs/models.md and configs/pretrained/metafile.yml follow the cards.
Logits of the ten images in the package may change by 0.1 at most, and all weights may take 6 MB.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from pickle import UnpicklingError
from typing import List

import timm
import torch
from mmengine.config import Config
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from attncnn_plugin.analysis import head_report
from attncnn_plugin.weights import example_images

TOOLS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOOLS))  # for those who import this file
from model_converters.model_cards import model_card, write_metafile, write_table  # noqa: E402
from reproduction.results import trained_model  # noqa: E402

BACKBONE = 'backbone.'  # mmpretrain's prefix of the names of the network
DRIFT = 0.1  # of a logit: no probability changes by more than 0.025
MEGABYTES = 6.0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', nargs='?', type=Path, metavar='RUN', help='folder of the training')
    parser.add_argument('name', nargs='?', metavar='NAME', help='the network in timm')
    parser.add_argument('--data', default='CIFAR-10', help='what the images are, in words (default: CIFAR-10)')
    parser.add_argument('--root', type=Path, default=TOOLS.parent, help='the checkout (default: that of this file)')
    args = parser.parse_args()
    if (args.run is None) != (args.name is None):
        parser.error('RUN and NAME are needed, or none of them')
    return args


def pack(run: Path, name: str, data: str, folder: Path) -> str:
    """Writes the weights and the model card of a training, and returns what was done.

    Args:
        run (Path): Its folder.
        name (str): The network in timm.
        data (str): What its images are, in words.
        folder (Path): Where the files go. They stay as they are if anything is wrong.

    Raises:
        OSError: A file is missing.
        RuntimeError: The weights do not fit the network.
        ValueError: The network was trained with other images, the logits change too much, or the files are too large.
    """
    result = json.loads((run / 'result.json').read_text())
    config = Config(result['config'])
    trained = trained_model(config, run / f'epoch_{result["epochs"]}.pth').eval()
    weights = {
        key[len(BACKBONE) :] if key.startswith(BACKBONE) else key: value.half() if value.is_floating_point() else value
        for key, value in trained.state_dict().items()
    }
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        file = Path(temporary) / f'{name}.safetensors'
        save_file({key: value.contiguous() for key, value in weights.items()}, file, metadata=dict(format='pt'))
        packed = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=dict(file=str(file))).eval()
        check_preprocessing(config, packed)
        images = inputs(packed)
        with torch.no_grad():
            before, after = trained(images), packed(images)
        drift = float((before - after).abs().max())
        if not drift <= DRIFT:  # not a number is no small change
            raise ValueError(f'{name} in half precision changes logits by {drift:.3f}, more than {DRIFT}')
        others = [path for path in folder.glob('*.safetensors') if path.stem != name]
        size = sum(path.stat().st_size for path in [*others, file]) / 1e6
        if size > MEGABYTES:
            raise ValueError(f'{name} makes all weights {size:.2f} MB, more than {MEGABYTES:g}')
        right = int((after.argmax(1) == torch.arange(len(images))).sum())
        card = model_card(name, result, data, drift, right, kernel_errors(packed, images))
        shutil.copyfile(file, folder / file.name)  # moved, it would stay readable only by its owner
    card.save(folder / f'{name}.md')
    return (
        f'{folder / file.name}: logits up to {float(before.abs().max()):.2f} change by {drift:.4f} at most, {right} of '
        f'{len(images)} images are right; all weights take {size:.2f} MB'
    )


def check_preprocessing(config: Config, packed: nn.Module) -> None:
    """Raises ValueError if a training normalizes its images in another way than a model of timm, red first in both."""
    for key in ('mean', 'std'):
        expected = [255 * value for value in packed.pretrained_cfg[key]]
        found = config.data_preprocessor[key]
        if not torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-3):
            raise ValueError(f'the training has {key}={found}, but timm has {expected}: it was for other images')


def inputs(model: nn.Module) -> Tensor:
    """Returns the ten images of the package, as a model of timm takes them, ``(10, 3, 32, 32)``."""
    transform = create_transform(**resolve_model_data_config(model))
    return torch.stack([transform(Image.open(path).convert('RGB')) for path in example_images().values()])


def kernel_errors(model: nn.Module, images: Tensor) -> List[float]:
    """Returns how far a random 3x3 kernel is from the span of each layer's heads by position, in percent."""
    layers = head_report(model, images).layers
    return [round(100 * layer.spanned[0].error, 1) for layer in layers if layer.attention == 'position']


def main() -> None:
    args = parse_args()
    folder = args.root / 'attncnn_plugin/weights'
    if args.run is not None:
        try:
            print(pack(args.run, args.name, args.data, folder))
        except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
            sys.exit(str(error))
    write_table(args.root / 'docs/models.md', folder)
    write_metafile(args.root / 'configs/pretrained/metafile.yml', folder)


if __name__ == '__main__':
    main()
