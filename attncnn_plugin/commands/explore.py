"""``attncnn explore``: a page for the browser that shows where every head looks, from any place of an image."""

from argparse import Namespace
from pathlib import Path
from typing import List

from ..explorer import explorer_page
from .model import load, progress, stacked


def run(args: Namespace) -> List[str]:
    """Writes the page."""
    loaded = load(args)
    images = loaded.images(args.images, args.num_images)
    names, _, pictures, _ = zip(*images)
    inputs, size = stacked(images), int(args.max_size * 1e6)
    title = f'Attention explorer: {Path(loaded.name).name.removesuffix(".py")}'
    with progress(lambda model, inputs: model(inputs), len(images), 'maps') as call:
        page = explorer_page(loaded.model, inputs, pictures, names, title, max_bytes=size, call=call)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding='utf-8')
    return [
        f'A page of {len(images)} image{"s" * (len(images) > 1)}',
        f'Saved {out}, {out.stat().st_size / 1e6:.1f} MB',
        f'Next: open {out.resolve().as_uri()} in a browser',
    ]
