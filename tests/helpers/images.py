"""Folders of random images."""

import numpy as np
from PIL import Image


def write_images(root, labels=range(10), count=2, size=32):
    """Writes some images of each class, as the datasets of mmpretrain and timm find them; returns the folder."""
    generator = np.random.default_rng(0)
    for label in labels:
        (root / str(label)).mkdir(parents=True)
        for i in range(count):
            pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / str(label) / f'{i}.png')
    return root
