#!/usr/bin/env python
"""Writes one page for the browser that shows where every head of a model attends to, of any pixel of some images."""
import argparse
import sys
from pathlib import Path
from typing import List, Sequence, Tuple

import numpy as np
import torch
from mmengine.config import Config, DictAction
from mmengine.dataset import Compose
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from mmpretrain.registry import TRANSFORMS
from PIL import Image, ImageOps, UnidentifiedImageError

import attncnn_plugin  # noqa: F401
from attncnn_plugin.visualization.explorer import explorer_page


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config of the model')
    parser.add_argument('checkpoint', help='checkpoint of the model')
    parser.add_argument('images', nargs='+', metavar='image', help='image files, or .npy arrays of uint8')
    parser.add_argument('--out', default='explorer.html', help='where the page goes (default: explorer.html)')
    parser.add_argument('--max-size', type=float, default=10., help='what the page may take, in MB (default: 10)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides settings of the config: k=v')
    return parser.parse_args()


def read_image(path: str) -> Image.Image:
    """An image file, or an array ``(h, w)`` or ``(h, w, 3)``, as it is to be seen."""
    try:
        if path.endswith('.npy'):
            return Image.fromarray(np.load(path))
        return ImageOps.exif_transpose(Image.open(path))
    except (OSError, TypeError, ValueError, UnidentifiedImageError) as error:
        sys.exit(f'{path} cannot be read as an image: {error}')


class TestPipeline:
    """What the config does with an image before the network sees it.

    Args:
        config (Config): The config.
        model (nn.Module): The classifier.
    """

    def __init__(self, config: Config, model: torch.nn.Module) -> None:
        steps = config.test_dataloader.dataset.pipeline
        self.transform = Compose([TRANSFORMS.build(step) for step in steps if step['type'] != 'LoadImageFromFile'])
        self.preprocess = model.data_preprocessor
        self.size = tuple(model.backbone.img_size) if hasattr(model.backbone, 'img_size') else None
        self.grey = len(config.get('data_preprocessor', {}).get('mean') or ()) == 1

    def __call__(self, image: Image.Image) -> Tuple[torch.Tensor, np.ndarray]:
        """The input of the network, ``(1, C, H, W)``, and the picture that it is of, uint8, ``(H, W, 3)`` or grey."""
        inputs = self._transformed(image)
        if self.size is not None and tuple(inputs.shape[1:]) != self.size:
            # The config leaves the size as it is, for its dataset has a single one.
            inputs = self._transformed(ImageOps.fit(image, self.size[::-1], Image.Resampling.BICUBIC))
        picture = inputs.permute(1, 2, 0).numpy().clip(0, 255).astype(np.uint8)
        picture = picture[..., 0] if self.grey else picture[..., ::-1] if self.preprocess.to_rgb else picture
        return self.preprocess(dict(inputs=[inputs]), training=False)['inputs'], np.ascontiguousarray(picture)

    def _transformed(self, image: Image.Image) -> torch.Tensor:
        array = np.array(image.convert('L' if self.grey else 'RGB'))
        if self.preprocess.to_rgb:  # files are read as BGR then
            array = np.ascontiguousarray(array[..., ::-1])
        return self.transform(dict(img=array, img_shape=array.shape[:2], ori_shape=array.shape[:2]))['inputs']


def prepare(pipeline: TestPipeline, paths: Sequence[str]) -> Tuple[torch.Tensor, List[np.ndarray]]:
    """The inputs ``(B, C, H, W)`` and the pictures of image files."""
    inputs, pictures = zip(*(pipeline(read_image(path)) for path in paths))
    sizes = {tuple(x.shape[2:]) for x in inputs}
    if len(sizes) > 1:
        sys.exit(f"the images have sizes {sorted(sizes)} after the config's test pipeline: a page takes one size, give "
                 'images of the same one')
    return torch.cat(inputs), list(pictures)


def main() -> None:
    args = parse_args()
    config = Config.fromfile(args.config)
    config.merge_from_dict(args.cfg_options or {})
    init_default_scope(config.get('default_scope', 'mmpretrain'))
    if 'data_preprocessor' in config:
        config.model.setdefault('data_preprocessor', config.data_preprocessor)
    model = MODELS.build(config.model).eval()
    load_checkpoint(model, args.checkpoint, map_location='cpu', strict=True)
    images, pictures = prepare(TestPipeline(config, model), args.images)
    title = f'{Path(args.config).stem}: what its heads attend to'
    try:
        page = explorer_page(
            model, images, pictures, [Path(path).name for path in args.images], title, int(args.max_size * 1e6))
    except ValueError as error:
        sys.exit(str(error))
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding='utf-8')
    print(f'Saved {out}, {out.stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    main()
