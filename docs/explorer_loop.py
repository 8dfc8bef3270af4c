"""Draws docs/images/explorer.webp: a query goes around an image. Needs Chromium, chromedriver and selenium."""

import base64
import io
import math
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'tests'))
from helpers.browser import Browser  # noqa: E402

SIZE, FRAMES = dict(width=640, height=665), 32

with Browser(tempfile.mkdtemp()) as browser:
    browser.command('Emulation.setDeviceMetricsOverride', dict(**SIZE, deviceScaleFactor=1, mobile=False))
    browser.open(ROOT / 'docs/gallery/quadratic/explorer.html', '#layer=1&head=4&theme=light&locked=1')
    hide = ':root {overflow: hidden} .help, .numbers, .centers, header, .choices, .row, .legend, h2 {display: none}'
    browser.script(
        'const sheet = new CSSStyleSheet(); sheet.replaceSync(arguments[0]); document.adoptedStyleSheets = [sheet]',
        hide,
    )
    frames = []
    for angle in (2 * math.pi * frame / FRAMES for frame in range(FRAMES)):
        place = round(7.5 + 5.5 * math.sin(angle)), round(7.5 + 5.5 * math.cos(angle))
        browser.script('change({query: arguments[0] * width + arguments[1]})', *place)
        browser.settle()
        shot = base64.b64decode(browser.command('Page.captureScreenshot', dict(format='png'))['data'])
        frames.append(Image.open(io.BytesIO(shot)).convert('RGB'))
out = ROOT / 'docs/images/explorer.webp'
frames[0].save(out, save_all=True, append_images=frames[1:], duration=160, loop=0, quality=60, method=6)
