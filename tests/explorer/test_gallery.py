"""The pages of the gallery: small, linked, and working in a browser."""

import pathlib
import re

import pytest
import timm
import torch
from PIL import Image

from attncnn_plugin.analysis import head_report
from attncnn_plugin.weights import FOLDER, example_images

GALLERY = pathlib.Path(__file__).parents[2] / 'docs/gallery'
EXPLORER = GALLERY.parents[1] / 'attncnn_plugin/explorer'
PAGES = sorted(GALLERY.rglob('*.html'))
NAMES = [page.parent.name for page in PAGES]


def test_there_are_pages():
    assert PAGES


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_small_current_and_linked(page):
    """Its script and style are those of the package: a page is written again where these change."""
    assert page.stat().st_size < 2.5e6
    text = page.read_text(encoding='utf-8')
    assert all((EXPLORER / f'explorer.{kind}').read_text(encoding='utf-8') in text for kind in ('js', 'css'))
    name = page.relative_to(GALLERY).as_posix()
    assert any(f'({name})' in text.read_text() for text in GALLERY.glob('*.md'))


@pytest.mark.parametrize('name', NAMES)
def test_numbers_are_of_the_weights(name):
    """The accuracy, on the page and in the index, and each line of the report."""
    text = (GALLERY / f'{name}.md').read_text()
    (network,) = re.findall(r'^`(\w+)` has', text, re.MULTILINE)
    (accuracy,) = re.findall(r'value: (.+)', (FOLDER / f'{network}.md').read_text())
    assert f'{float(accuracy):.1f}%' in text
    assert re.search(rf'\({name}.md\), {float(accuracy):.1f}%', (GALLERY / 'index.md').read_text())
    model = timm.create_model(network, pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    images = torch.stack([transform(Image.open(path).convert('RGB')) for path in example_images().values()])
    report = head_report(model, images) if '--images' in text else head_report(model, size=(16, 16))
    lines = re.search(r'^```text\n(.*?)^```', text, re.MULTILINE | re.DOTALL)[1].splitlines()
    assert len(lines) >= 5 and set(lines) <= set(str(report).splitlines())


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_in_a_browser(page, browser):
    """It shows another query's attention when one is chosen, and asks for nothing else."""
    browser.open(page)
    before = browser.image('#map')
    browser.press('#query', 'down', 'right', 'down')
    after = browser.image('#map')
    assert before.shape == after.shape and (before != after).any()
    console, addresses = browser.logs()
    assert console == []
    assert [address for address in addresses if address != 'about:blank'] == [page.as_uri()]
