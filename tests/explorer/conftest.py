"""A browser, as on a desk and as on a phone."""

import pytest
from helpers.browser import Browser, missing_programs


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    if missing_programs():
        pytest.skip(f'{" and ".join(missing_programs())} not installed: apt-get install chromium chromium-driver')
    with Browser(tmp_path_factory.mktemp('browser')) as browser:
        yield browser


@pytest.fixture
def phone(browser):
    browser.command('Emulation.setDeviceMetricsOverride', dict(width=360, height=740, deviceScaleFactor=2, mobile=True))
    browser.command('Emulation.setTouchEmulationEnabled', dict(enabled=True))
    yield browser
    browser.command('Emulation.clearDeviceMetricsOverride', {})
    browser.command('Emulation.setTouchEmulationEnabled', dict(enabled=False))
