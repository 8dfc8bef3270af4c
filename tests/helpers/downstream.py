"""Made-up images in the layouts of COCO and ADE20K."""

import json
from pathlib import Path
from typing import Sequence

import numpy as np
from PIL import Image

SIZES = [(64, 80), (80, 64), (72, 96), (64, 64)]  # heights and widths


def _image(generator: np.random.Generator, size: Sequence[int], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)


def make_coco(root: Path, classes: Sequence[str]) -> None:
    """Images with two boxes each, as in ``data/coco``."""
    generator = np.random.default_rng(0)
    for part in ('train2017', 'val2017'):
        images, annotations = [], []
        for i, (height, width) in enumerate(SIZES):
            _image(generator, (height, width), root / part / f'{i}.jpg')
            images.append(dict(id=i, file_name=f'{i}.jpg', height=height, width=width))
            for label, (x, y) in enumerate([(4, 6), (30, 20)], start=1):
                box = dict(bbox=[x, y, 20 + 8 * i, 36], area=36 * (20 + 8 * i), iscrowd=0)
                annotations.append(dict(box, id=len(annotations) + 1, image_id=i, category_id=label))
        categories = [dict(id=i, name=name) for i, name in enumerate(classes, start=1)]
        path = root / f'annotations/instances_{part}.json'
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(dict(images=images, annotations=annotations, categories=categories)))


def make_ade20k(root: Path) -> None:
    """Images with a class of 150 for each pixel, or 0 for none, as in ``data/ade/ADEChallengeData2016``."""
    generator = np.random.default_rng(0)
    for part in ('training', 'validation'):
        for i, size in enumerate(SIZES):
            _image(generator, size, root / f'images/{part}/{i}.jpg')
            labels = generator.integers(0, 151, [n // 8 for n in size], dtype=np.uint8)
            path = root / f'annotations/{part}/{i}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.kron(labels, np.ones((8, 8), np.uint8))).save(path)
