"""The pages of the gallery, in a browser on a desk and on a phone."""

import pathlib

import pytest

GALLERY = pathlib.Path(__file__).parents[2] / 'docs/gallery'
PAGES = sorted(GALLERY.rglob('*.html'))
NAMES = [page.parent.name for page in PAGES]


def test_there_are_pages():
    assert PAGES


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_small_and_linked(page):
    assert page.stat().st_size < 2e6
    name = page.relative_to(GALLERY).as_posix()
    assert any(f'({name})' in text.read_text() for text in GALLERY.glob('*.md'))


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_desk(page, browser):
    browser.open(page)
    check(page, browser)


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_phone(page, phone):
    phone.open(page)
    check(page, phone)
    assert phone.script('return document.documentElement.scrollWidth <= innerWidth')


def check(page, browser):
    """It shows another query's attention when one is chosen, and asks for nothing else."""
    before = browser.image('#map')
    browser.press('#query', 'down', 'right', 'down')
    after = browser.image('#map')
    assert before.shape == after.shape and (before != after).any()
    console, addresses = browser.logs()
    assert console == []
    assert [address for address in addresses if address != 'about:blank'] == [page.as_uri()]
