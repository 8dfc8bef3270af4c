"""One page with its script, its style and its data inside: no server, no network."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np
from torch import Tensor, nn

from .layer_data import layers_of, packed

FOLDER = Path(__file__).parent


def explorer_page(
    model: nn.Module,
    images: Tensor,
    pictures: Sequence[np.ndarray],
    names: Optional[Sequence[str]] = None,
    title: str = 'Attention explorer',
    about: str = '',
    max_bytes: int = 10_000_000,
) -> str:
    """Returns a page that shows where every head attends to from a pixel that is chosen.

    Each probability is within 1/255 of the largest one of its query, which is exact. Each layer shows its query that is
    nearest to the pixel.

    Args:
        model (nn.Module): A model with attention of this package: by position, by content, of patches, or instead of
            convolutions. Or a vision transformer of another library, see
            :func:`~attncnn_plugin.analysis.mean_attention`.
        images (Tensor): ``(B, C, H, W)``, the input of ``model``.
        pictures (Sequence[ndarray]): The pictures to show of the images, uint8, ``(h, w)`` or ``(h, w, 3)`` RGB.
        names (Sequence[str], optional): A name of each image. Defaults to ``'Image 0'``, ….
        title (str): Title of the page. Defaults to ``'Attention explorer'``.
        about (str): A line on the network, such as its accuracy. Defaults to none.
        max_bytes (int): Largest size of the page. Defaults to 10 MB.

    Returns:
        str: HTML, to be written as UTF-8.

    Raises:
        ValueError: A model without attention, with layers that the images do not reach, or along one or three axes; no
            images, or other numbers of pictures or names; pictures of another kind; more than 1024 tokens of a layer,
            or as many pairs in windows; parameters that are not finite; a page larger than ``max_bytes``.
    """
    names = [f'Image {i}' for i in range(len(images))] if names is None else list(names)
    if not len(images) == len(pictures) == len(names) > 0:
        raise ValueError(
            f'images, pictures and names are {len(images)}, {len(pictures)} and {len(names)}: give as '
            'many of each, at least one'
        )
    layers = layers_of(model, images)
    grid = [max(sizes) for sizes in zip(*(layer['grid'] for layer in layers))]
    data: Any = dict(grid=grid, names=names, pictures=[packed(_rgb(picture)) for picture in pictures], layers=layers)
    data = json.dumps(data, separators=(',', ':'))
    page = data.replace('<', '\\u003c').join(_shell(title, about).rsplit('{{data}}', 1))
    size = len(page.encode())
    if size > max_bytes:
        raise ValueError(
            f'the page takes {size:,} bytes, more than max_bytes={max_bytes:,}, with {len(layers)} layers and images '
            f'of shape {tuple(images.shape)}: give fewer images, smaller ones, or a larger max_bytes (--max-size)'
        )
    return page


def _rgb(picture: np.ndarray) -> np.ndarray:
    picture = np.asarray(picture)
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.ndim == 3 and picture.shape[2] != 3:
        raise ValueError(
            f'a picture is of {picture.dtype} and shape {picture.shape}, but uint8 and (h, w) or (h, w, 3) are expected'
        )
    return np.broadcast_to(picture[..., None], (*picture.shape, 3)) if picture.ndim == 2 else picture


def _shell(title: str, about: str) -> str:
    """Returns the page without its data. Its policy allows the script and the style that it holds, and no request."""
    page, style, script = ((FOLDER / f'explorer.{kind}').read_text(encoding='utf-8') for kind in ('html', 'css', 'js'))
    of_style, of_script = (base64.b64encode(hashlib.sha256(own.encode()).digest()).decode() for own in (style, script))
    policy = f"default-src 'none'; script-src 'sha256-{of_script}'; style-src 'sha256-{of_style}'; "
    texts = dict(title=html.escape(title), about=html.escape(about), data='{{data}}', style=style, script=script)
    texts['policy'] = f"{policy}base-uri 'none'; form-action 'none'"
    return re.sub(r'{{(\w+)}}', lambda match: texts[match[1]], page)  # at once: a title is not looked at again
