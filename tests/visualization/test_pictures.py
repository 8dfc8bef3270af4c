"""The pictures of the documentation are those that its script draws."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
DOCS = ROOT / 'docs'


@pytest.fixture(scope='module')
def pictures():
    """The script."""
    pytest.importorskip('mmpretrain')  # for the tables
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module('pictures')
    sys.path.remove(str(DOCS))


def difference(a, b):
    """The mean and the largest difference of blocks of 16x16 pixels, from 0 to 255, which other fonts hardly change."""
    if a.size != b.size:
        return 255.0, 255.0
    a, b = (np.asarray(own.convert('RGB').reduce(16), dtype=float) for own in (a, b))
    return np.abs(a - b).mean(), np.abs(a - b).max()


def is_as_committed(name, theme, drawn):
    mean, largest = difference(drawn, Image.open(DOCS / f'{name}_{theme}.png'))
    return mean < 1 and largest < 40


def test_every_picture_is_drawn_and_shown(pictures):
    committed = {path.relative_to(DOCS).with_suffix('').as_posix() for path in DOCS.glob('[ig]*/**/*.png')}
    assert committed == {f'{name}_{theme}' for name in pictures.PICTURES for theme in ('light', 'dark')}
    shown = set()
    for page in (ROOT / 'README.md', *DOCS.rglob('*.md')):
        shown |= {(page.parent / own).resolve() for own in re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text())}
    assert all(path.exists() for path in shown)
    assert {DOCS / f'{name}.png' for name in committed} <= shown


@pytest.mark.slow
def test_pictures_are_what_the_code_draws(pictures):
    stale = [
        f'{name}_{theme}'
        for name, drawing in pictures.PICTURES.items()
        for theme, drawn in pictures.render(drawing).items()
        if not is_as_committed(name, theme, drawn)
    ]
    assert stale == [], 'run docs/pictures.py again'


def test_a_stale_picture_is_seen(pictures, monkeypatch):
    """Other colours, or other weights; but not other fonts."""
    name, page = 'gallery/quadratic/thumbnail', 'quadratic'
    drawing = pictures.PICTURES[name]
    assert all(is_as_committed(name, *drawn) for drawn in pictures.render(drawing).items())
    with monkeypatch.context() as patch:
        patch.setattr(pictures.style, 'ATTENTION_COLORS', 'RdBu_r')
        assert not is_as_committed(name, 'light', pictures.render(drawing)['light'])
    maps = pictures.maps_of(page)
    other = {name: maps[last] for name, last in zip(maps, reversed(maps))}
    monkeypatch.setattr(pictures, 'maps_of', lambda page, *images: other)
    assert not is_as_committed(name, 'light', pictures.render(drawing)['light'])
