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


def is_as_committed(name, theme, drawn):
    """Whether blocks of 32x32 pixels are: fonts of matplotlib 3.9 and 3.11 differ by 1 in the mean and 33 at most."""
    committed = Image.open(DOCS / f'{name}_{theme}.png').convert('RGB')
    if np.abs(np.subtract(drawn.size, committed.size)).max() > 2:
        return False
    own = drawn.convert('RGB').resize(committed.size)
    blocks = np.abs(np.subtract(*(np.asarray(picture.reduce(32), dtype=float) for picture in (own, committed))))
    return blocks.mean() < 2 and blocks.max() < 50


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
