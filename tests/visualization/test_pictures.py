"""The pictures of the documentation are those that its script draws."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

DOCS = Path(__file__).parents[2] / 'docs'


@pytest.mark.slow
def test_the_pictures_of_the_documentation(tmp_path, monkeypatch):
    """Fonts of other versions of matplotlib may differ a little; results that were trained since may not."""
    pytest.importorskip('mmpretrain')  # for the tables
    monkeypatch.setattr(sys, 'argv', ['pictures.py', str(tmp_path)])
    runpy.run_path(str(DOCS / 'pictures.py'), run_name='__main__')
    drawn = sorted(tmp_path.rglob('*.png'))
    assert len(drawn) > 20
    for path in drawn:
        committed = DOCS / path.relative_to(tmp_path)
        assert path.stat().st_size < 150_000 and committed.stat().st_size < 150_000, committed
        now, then = (np.asarray(Image.open(file).convert('RGB'), dtype=float) for file in (path, committed))
        assert now.shape == then.shape and np.abs(now - then).mean() < 1, f'{committed}: run docs/pictures.py again'
