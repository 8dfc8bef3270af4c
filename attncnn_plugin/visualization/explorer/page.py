"""One page with its script, its style and its data inside: no server, no network."""
import base64
import copy
import hashlib
import html
import json
import re
import zlib
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import numpy as np
from torch import Tensor, nn

from ..attention_maps import attention_layers, depends_on_content, grid_of
from .records import LayerRecords, add_image, position_records

FOLDER = Path(__file__).parent

# The steps of scores that are tried, the finest first: the first one with which the page is small enough.
STEPS = (0.002, 0.006, 0.02, 0.06, 0.2, 0.6)
PARTS = ('position', 'content', 'both')
MAX_TOKENS = 1024


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
            numbers of pictures or names; more than 1024 tokens; probabilities that are not finite; a page that cannot
            be made small enough.
    """
    names = [f'Image {i}' for i in range(len(images))] if names is None else list(names)
    if not len(images) == len(pictures) == len(names) > 0:
        raise ValueError(f'images, pictures and names are {len(images)}, {len(pictures)} and {len(names)}: give as '
                         'many of each, at least one')
    height, width = grid_of(model, images)
    if height * width > MAX_TOKENS:
        raise ValueError(f'images of {images.shape[2]}x{images.shape[3]} pixels have {height}x{width} tokens, more '
                         f'than the {MAX_TOKENS} that a page can show: give smaller images')
    shell = _shell(title)
    budget = (max_bytes - len(shell.encode())) // 4 * 3  # in base64
    about = dict(title=title, grid=[height, width], names=names)
    layers = position_records(model, height, width)
    by_image = any(map(depends_on_content, attention_layers(model).values()))
    for step in STEPS:
        packed = _pack(about, layers, model, images if by_image else images[:0], pictures, step, budget)
        if packed is not None:
            return base64.b64encode(packed).decode().join(shell.rsplit('{{data}}', 1))
    raise ValueError(f'the page takes more than max_bytes={max_bytes:,} with {len(images)} images however it is '
                     'quantized: give fewer images')


def _pack(
        about: dict,
        static: Dict[str, LayerRecords],
        model: nn.Module,
        images: Tensor,
        pictures: Sequence[np.ndarray],
        step: float,
        budget: int,
) -> Optional[bytes]:
    """Everything as one stream, or None if it takes, or is on the way to take, more than the budget.

    The stream is zlib's, of the arrays one after the other. Before it stands the length of a header in JSON as 4
    bytes, little-endian, and the header, which says where in the stream each array is; it is compressed too.
    """
    arrays = _Arrays()
    layers = copy.deepcopy(static)
    shown = [arrays.put(_rgb(picture)) for picture in pictures]
    described = {name: {'position': arrays.put_record(layer.position)} if layer.position else {}
                 for name, layer in layers.items()}
    fixed = arrays.size
    for index in range(len(images)):
        add_image(layers, model, images[index:index + 1], index, step)
        for name, layer in layers.items():
            for part in PARTS:
                records = getattr(layer, part)
                if isinstance(records, list):
                    described[name].setdefault(part, []).append(arrays.put_record(records[index]))
                    records[index] = {}  # packed
        if fixed + (arrays.size - fixed) / (index + 1) * len(images) > budget:
            return None
    header = {**about, 'step': step, 'pictures': shown, 'layers': [
        dict(name=name, heads=layer.num_heads, centers=layer.centers, errors=layer.errors,
             relative_errors=layer.relative_errors, parts=described[name]) for name, layer in layers.items()]}
    header = zlib.compress(json.dumps(header, separators=(',', ':')).encode(), 9)
    packed = len(header).to_bytes(4, 'little') + header + arrays.finish()
    return packed if len(packed) <= budget else None


class _Arrays:
    """Arrays one after the other in a zlib stream."""

    def __init__(self) -> None:
        self.size = 0  # compressed
        self._offset = 0
        self._chunks: List[bytes] = []
        self._compressor = zlib.compressobj(9)

    def put(self, array: np.ndarray) -> dict:
        """Adds an array and says where it is."""
        array = np.ascontiguousarray(array)
        place = dict(at=self._offset, dtype=array.dtype.name, shape=list(array.shape))
        padding = bytes(-array.nbytes % 8)  # the browser's arrays begin at multiples of 8 bytes
        self._add(self._compressor.compress(array.tobytes() + padding))
        self._offset += array.nbytes + len(padding)
        return place

    def put_record(self, record: dict) -> dict:
        """A record with its arrays replaced by where they are."""
        return {key: self.put(value) if isinstance(value, np.ndarray) else value for key, value in record.items()}

    def finish(self) -> bytes:
        """The whole stream."""
        self._add(self._compressor.flush())
        return b''.join(self._chunks)

    def _add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self.size += len(chunk)


def _rgb(picture: np.ndarray) -> np.ndarray:
    picture = np.asarray(picture)
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.ndim == 3 and picture.shape[2] != 3:
        raise ValueError(f'a picture is of {picture.dtype} and shape {picture.shape}, but uint8 and (h, w) or '
                         '(h, w, 3) are expected')
    return np.broadcast_to(picture[..., None], (*picture.shape, 3)) if picture.ndim == 2 else picture


def _shell(title: str) -> str:
    """The page without its data. Its policy allows the script and the style that it holds, and no request."""
    page, style, script = ((FOLDER / f'explorer.{kind}').read_text(encoding='utf-8') for kind in ('html', 'css', 'js'))
    digests = {kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
               for kind, text in (('style', style), ('script', script))}
    policy = (f"default-src 'none'; script-src 'sha256-{digests['script']}'; style-src 'sha256-{digests['style']}'; "
              "base-uri 'none'; form-action 'none'")
    texts = {'policy': policy, 'title': html.escape(title), 'style': style, 'script': script, 'data': '{{data}}'}
    return re.sub(r'{{(\w+)}}', lambda match: texts[match[1]], page)  # at once: a title is not looked at again
