"""One page with its script, its style and its data inside: no server, no network."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence

import numpy as np
from PIL import Image
from torch import nn

from ..heads.found import Call
from .layer_data import layers_of, packed


def explorer_page(
    model: nn.Module,
    images: Any,
    pictures: Sequence[np.ndarray],
    names: Optional[Sequence[str]] = None,
    title: str = 'Attention explorer',
    about: str = '',
    back: str = '',
    max_bytes: int = 10_000_000,
    call: Call = None,
) -> str:
    """Returns a page that shows where every head looks, from any token that its reader chooses.

    It opens on the most local head: the one with the largest mean probability of one shift from query to key. Each
    probability is within 1/255 of the largest one of its query, which is exact. Each layer shows its query that is
    nearest to the chosen token. The page names attention that it leaves out, such as that of a class token alone.

    Args:
        model (nn.Module): Any model with softmax attention whose queries and keys are patches of a grid, of this
            package or of others: in windows, with tokens beside the grid, with pooled queries or keys.
        images (Tensor | Mapping): ``(B, C, H, W)``, the input of ``model``, or keyword arguments with batches of these.
        pictures (Sequence[ndarray]): The pictures to show of the images, uint8, ``(h, w)`` or ``(h, w, 3)`` RGB; or
            images of PIL.
        names (Sequence[str], optional): A name of each image. Defaults to ``'Image 0'``, ….
        title (str): Title of the page. Defaults to ``'Attention explorer'``.
        about (str): A line on the network, such as its accuracy. Defaults to none.
        back (str): Address that the page links back to. Defaults to none.
        max_bytes (int): Largest size of the page. Defaults to 10 MB.
        call (Callable, optional): ``call(model, images)`` runs the model. Defaults to None, ``model(images)``.

    Returns:
        str: HTML, to be written as UTF-8.

    Raises:
        ValueError: A model that does not run on the images, or has no attention between patches, has layers that the
            images do not reach, or along one or three axes; no images, or other numbers of pictures or names; pictures
            of another kind; more than 1024 tokens of a layer, or as many pairs in windows; parameters that are not
            finite; a page larger than ``max_bytes``.
    """
    number = len(next(iter(images.values())) if isinstance(images, Mapping) else images)
    names = [f'Image {i}' for i in range(number)] if names is None else list(names)
    if not number == len(pictures) == len(names) > 0:
        numbers = f'{number}, {len(pictures)} and {len(names)}'
        raise ValueError(f'images, pictures and names are {numbers}: give as many of each, at least one')
    if wrong := [own.dtype for own in map(np.asarray, pictures) if own.dtype != np.uint8]:
        raise ValueError(f'pictures are of {wrong[0]}, but must be uint8')
    rgb = [np.asarray(Image.fromarray(np.asarray(own)).convert('RGB')) for own in pictures]
    data: Dict[str, Any] = dict(names=names, pictures=list(map(packed, rgb)))
    data['layers'], data['leftOut'] = layers_of(model, images, call)
    axes = enumerate(('rows', 'columns'))
    data['grid'] = [max(max(own['grid'][i], len(own[axis])) for own in data['layers']) for i, axis in axes]
    text = json.dumps(data, separators=(',', ':'), allow_nan=False).replace('<', '\\u003c')
    page = _filled(dict(title=html.escape(title), about=html.escape(about), back=html.escape(back), data=text))
    if (size := len(page.encode())) > max_bytes:
        raise ValueError(f'the page takes {size:,} bytes, more than {max_bytes=:,} (--max-size): give fewer images')
    return page


def _filled(texts: Dict[str, str]) -> str:
    """Returns the page with texts inside. Its policy allows the script and the style that it holds, and no request."""
    path = Path(__file__).with_name('explorer.html')
    page, style, script = (path.with_suffix(own).read_text('utf-8') for own in ('.html', '.css', '.js'))
    of_style, of_script = (base64.b64encode(hashlib.sha256(own.encode()).digest()).decode() for own in (style, script))
    policy = f"default-src 'none'; script-src 'sha256-{of_script}'; style-src 'sha256-{of_style}'; "
    texts.update(style=style, script=script, policy=f"{policy}base-uri 'none'; form-action 'none'")
    texts['back'] = texts['back'] and f'<a href="{texts["back"]}">← Back</a>'
    return re.sub(r'{{(\w+)}}', lambda match: texts[match[1]], page)  # at once: a title is not looked at again
