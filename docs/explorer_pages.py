"""Writes the explorer pages of the gallery, and docs/images/explorer.webp: ``python docs/explorer_pages.py [FOLDER]``.

They are of the weights in the package. FOLDER is by default docs/. The picture, in which a query goes around an image,
needs Chromium, chromedriver and selenium.
"""

import base64
import io
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import List

import numpy as np
import timm
import torch
from PIL import Image

from attncnn_plugin.explorer import explorer_page
from attncnn_plugin.weights import FOLDER, example_images

DOCS = Path(__file__).parent
PAGES = {  # network, what it is, images, their side: pages of content grow with the fourth power
    'quadratic': ('sa_quadratic_small', 'Quadratic heads: Gaussians around a learned shift', 'frog ship dog', 32),
    'generalized': ('sa_generalized_small', 'Generalized quadratic heads: ellipses', 'frog ship dog', 32),
    'learned': ('sa_learned_small', 'Heads with a learned table of shifts', 'frog ship dog', 32),
    'content': ('sa_learned_content_small', 'Heads that see content and position', 'ship frog dog', 18),
    'transition': (
        'cmhsa3_small_patch4_32',
        'Attention of nine heads that began as a trained convolution',
        'truck frog ship',
        32,
    ),
}
SIZE, FRAMES = dict(width=640, height=744), 32


def page(name: str) -> str:
    """Returns a page of the gallery."""
    network, what, images, side = PAGES[name]
    model = timm.create_model(network, pretrained=True).eval()
    pictures = [Image.open(example_images()[own]).convert('RGB').resize((side, side)) for own in images.split()]
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**{**config, 'input_size': (3, side, side)})
    number, accuracy = re.search(
        r'parameters: (\d+).*value: (\S+)', (FOLDER / f'{network}.md').read_text(), re.DOTALL
    ).groups()
    return explorer_page(
        model,
        torch.stack([transform(picture) for picture in pictures]),
        [np.asarray(picture) for picture in pictures],
        images.split(),
        title=f'Attention explorer: {network}',
        about=f'{what}. {int(number):,} parameters, {float(accuracy):.1f}% accuracy on CIFAR-10-J.',
        back='index.html',
    )


def loop(path: Path) -> List[Image.Image]:
    """Returns pictures of a page while a query goes around its image."""
    sys.path.insert(0, str(DOCS.parent / 'tests'))
    from helpers.browser import Browser

    hide = ':root {overflow: hidden} .help, .numbers, .centers, header, .choices, .row, .legend, h2 {display: none}'
    hide += ' #says {font-size: 15px}'
    with tempfile.TemporaryDirectory() as folder, Browser(folder) as browser:
        browser.command('Emulation.setDeviceMetricsOverride', dict(**SIZE, deviceScaleFactor=1, mobile=False))
        browser.open(path, '#theme=light&locked=1')
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
    return frames


def main() -> None:
    """Writes all."""
    out = Path(*sys.argv[1:2] or [DOCS])
    for name in PAGES:
        path = out / f'gallery/{name}/explorer.html'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(name), encoding='utf-8')
    frames = loop((out / 'gallery/quadratic/explorer.html').resolve())
    (out / 'images').mkdir(exist_ok=True)
    options = dict(save_all=True, append_images=frames[1:], duration=160, loop=0, quality=50, method=6)
    frames[0].save(out / 'images/explorer.webp', **options)


if __name__ == '__main__':
    main()
