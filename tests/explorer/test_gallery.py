"""The pages of the gallery: small, linked, and working in a browser."""

import pathlib

import pytest

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
