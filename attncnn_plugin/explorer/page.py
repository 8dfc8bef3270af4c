"""One page with its script, its style and its data inside: no server, no network."""

import base64
import hashlib
import html
import re
from pathlib import Path
from typing import Optional, Sequence

import numpy as np
from torch import Tensor, nn

from ..analysis import attention_layers, grid_of
from .contents import Contents
from .records import image_scores, layer_records

FOLDER = Path(__file__).parent

MAX_TOKENS = 1024
MAX_CONTENT_TOKENS = 576  # where scores depend on content: 9 seconds and 6 MB for an image of 6 layers and 9 heads


def explorer_page(
    model: nn.Module,
    images: Tensor,
    pictures: Sequence[np.ndarray],
    names: Optional[Sequence[str]] = None,
    title: str = 'Attention explorer',
    max_bytes: int = 10_000_000,
) -> str:
    """A page that shows where every head attends to from a pixel that is chosen.

    What depends on position alone is exact in it, up to 1e-6. What depends on images is quantized, as finely as fits:
    the page says how large the error of a probability is at most.

    Args:
        model (nn.Module): A model with attention of this package: of positions, of content, or of patches.
        images (Tensor): ``(B, C, H, W)``, what the forward pass of ``model`` takes.
        pictures (Sequence[ndarray]): What is shown of each image, uint8, ``(h, w)`` or ``(h, w, 3)`` RGB.
        names (Sequence[str], optional): A name of each image. Defaults to ``'Image 0'``, ….
        title (str): Title of the page. Defaults to ``'Attention explorer'``.
        max_bytes (int): What the page may take. Defaults to 10 MB.

    Returns:
        str: HTML, to be written as UTF-8.

    Raises:
        ValueError: A model without attention layers, such as a CMHSA in the convolution phase; no images, or other
            numbers of pictures or names; more than 1024 tokens, or than 576 where scores depend on content;
            probabilities that are not finite; a page that cannot be made small enough.
    """
    names = [f'Image {i}' for i in range(len(images))] if names is None else list(names)
    if not len(images) == len(pictures) == len(names) > 0:
        raise ValueError(
            f'images, pictures and names are {len(images)}, {len(pictures)} and {len(names)}: give as '
            'many of each, at least one'
        )
    height, width = grid_of(model, images)
    by_image = any(layer.depends_on_content for layer in attention_layers(model).values())
    most = MAX_CONTENT_TOKENS if by_image else MAX_TOKENS
    if height * width > most:
        kind = 'attention by content' if by_image else 'attention by position'
        raise ValueError(
            f'images of {images.shape[2]}x{images.shape[3]} pixels have {height}x{width} tokens, more '
            f'than the {most} that a page can show of {kind}: give smaller images'
        )
    shell = _shell(title)
    budget = (max_bytes - len(shell.encode())) // 4 * 3  # in base64
    layers = layer_records(model, height, width)
    contents = Contents(dict(title=title, grid=[height, width], names=names), layers, [_rgb(p) for p in pictures])
    too_large = ValueError(
        f'the page takes more than max_bytes={max_bytes:,} with {len(images)} images of '
        f'{height}x{width} tokens, as coarsely as they can be quantized: give fewer images, smaller '
        'ones, or a larger max_bytes'
    )
    for done in range(len(images) if by_image else 0):
        seen = image_scores(layers, model, images[done : done + 1])
        size = len(contents.packed())
        if not contents.add_image(seen, size + (budget - size) // (len(images) - done)):
            raise too_large
    packed = contents.packed()
    if len(packed) > budget:
        raise too_large
    return base64.b64encode(packed).decode().join(shell.rsplit('{{data}}', 1))


def _rgb(picture: np.ndarray) -> np.ndarray:
    picture = np.asarray(picture)
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.ndim == 3 and picture.shape[2] != 3:
        raise ValueError(
            f'a picture is of {picture.dtype} and shape {picture.shape}, but uint8 and (h, w) or (h, w, 3) are expected'
        )
    return np.broadcast_to(picture[..., None], (*picture.shape, 3)) if picture.ndim == 2 else picture


def _shell(title: str) -> str:
    """The page without its data. Its policy allows the script and the style that it holds, and no request."""
    page, style, script = ((FOLDER / f'explorer.{kind}').read_text(encoding='utf-8') for kind in ('html', 'css', 'js'))
    digests = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for kind, text in (('style', style), ('script', script))
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; style-src 'sha256-{digests['style']}'; "
        "base-uri 'none'; form-action 'none'"
    )
    texts = {'policy': policy, 'title': html.escape(title), 'style': style, 'script': script, 'data': '{{data}}'}
    return re.sub(r'{{(\w+)}}', lambda match: texts[match[1]], page)  # at once: a title is not looked at again
