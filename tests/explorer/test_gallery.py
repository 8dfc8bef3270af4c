"""The pages of the gallery: small, linked, and working in a browser."""

import pathlib
import re
import runpy

import numpy as np
import pytest
import timm
import torch
from helpers.explorer_pages import unpack
from PIL import Image

from attncnn_plugin.analysis import head_report
from attncnn_plugin.weights import FOLDER, example_images

GALLERY = pathlib.Path(__file__).parents[2] / 'docs/gallery'
SCRIPT = runpy.run_path(str(GALLERY.parent / 'explorer_pages.py'))
PAGES = sorted(GALLERY.rglob('*.html'))
NAMES = [page.parent.name for page in PAGES]


def test_there_are_pages():
    assert sorted(SCRIPT['PAGES']) == NAMES


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_small_current_and_linked(page):
    """A page is what its script writes of today's weights, but for the last bits of other versions of PyTorch."""
    assert page.stat().st_size < 2.5e6
    now, then = SCRIPT['page'](page.parent.name), page.read_text(encoding='utf-8')
    shells = [re.sub(r'id="data">[^<]*<', '', text) for text in (now, then)]
    assert shells[0] == shells[1], 'run docs/explorer_pages.py again'
    assert_alike(unpack(now), unpack(then))
    name = page.relative_to(GALLERY).as_posix()
    assert f'({name})' in (GALLERY / f'{page.parent.name}.md').read_text()
    assert f'(gallery/{name})' in (GALLERY.parent / 'explorer.md').read_text()
    assert 'href="index.html"' in then  # the network's page on the site


def assert_alike(now, then):
    """Whether two pages have the same data, up to a step of a byte and 1e-4 of a number."""
    if isinstance(now, dict):
        assert now.keys() == then.keys()
        for key in now:
            assert_alike(now[key], then[key])
    elif isinstance(now, list):
        assert len(now) == len(then)
        for own, other in zip(now, then):
            assert_alike(own, other)
    elif isinstance(now, np.ndarray):
        assert now.shape == then.shape and now.dtype == then.dtype
        close = dict(rtol=0, atol=1) if now.dtype == np.uint8 else dict(rtol=1e-4, atol=1e-6)
        assert np.allclose(now.astype(float), then.astype(float), **close), 'run docs/explorer_pages.py again'
    else:
        assert now == (pytest.approx(then, abs=1e-5) if isinstance(now, float) else then)


@pytest.mark.slow
def test_the_loop_of_the_documentation(browser):
    """Its frames are what the page shows today; fonts of other machines may differ a little."""
    now = SCRIPT['loop'](GALLERY / 'quadratic/explorer.html')
    then = Image.open(GALLERY.parent / 'images/explorer.webp')
    assert then.n_frames == len(now) and (GALLERY.parent / 'images/explorer.webp').stat().st_size < 500_000
    for number, frame in enumerate(now):
        then.seek(number)
        small = [np.asarray(own.convert('RGB').resize((80, 93)), dtype=float) for own in (frame, then)]
        assert np.abs(small[0] - small[1]).mean() < 2, 'run docs/explorer_pages.py again'


@pytest.mark.parametrize('name', NAMES)
def test_numbers_are_of_the_weights(name):
    """The accuracy, on the page and in the index, and each line of the report."""
    text = (GALLERY / f'{name}.md').read_text()
    (network,) = re.findall(r'^`(\w+)` has', text, re.MULTILINE)
    (accuracy,) = re.findall(r'value: (.+)', (FOLDER / f'{network}.md').read_text())
    assert f'{float(accuracy):.1f}%' in text
    assert re.search(rf'\(gallery/{name}.md\), {float(accuracy):.1f}%', (GALLERY.parent / 'explorer.md').read_text())
    model = timm.create_model(network, pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    images = torch.stack([transform(Image.open(path).convert('RGB')) for path in example_images().values()])
    report = head_report(model, images) if '--images' in text else head_report(model, size=(16, 16))
    lines = re.search(r'^```text\n(.*?)^```', text, re.MULTILINE | re.DOTALL)[1].splitlines()
    assert len(lines) >= 5 and set(lines) <= set(str(report).splitlines())
