"""What the tests of several tools share."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def images(tmp_path):
    """A folder of random images, one of each of ten classes, for training and for tests."""
    generator = np.random.default_rng(0)
    for split in ('train', 'test'):
        for label in range(10):
            folder = tmp_path / split / str(label)
            folder.mkdir(parents=True)
            Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / '0.png')
    return tmp_path
