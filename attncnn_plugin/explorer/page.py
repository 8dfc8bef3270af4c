"""One page with its script, its style and its data inside: no server, no network."""

import base64
import hashlib
import html
import re
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis import layer_labels, shown_layers, visit_layers
from ..analysis.model_attention import is_other_vit
from ..analysis.transformer_attention import TokenPlaces, visit_vit_attention
from ..analysis.vision_transformer import find_transformer, prefix_names
from ..layers import AttentionLayer
from .layer_scores import LayerScores
from .observed_layer import ObservedLayer
from .stream import pack

FOLDER = Path(__file__).parent

MAX_TOKENS = 1024
MAX_TOKENS_IN_WINDOWS = 16_384  # their keys are those of a window
SCORE_ERRORS = [5e-4 * 1.1**i for i in range(55)]  # root mean square; the last one is 9%
PROBABILITY_STEPS = [2 ** (i / 2 - 16) for i in range(23)]  # from 16 bits to 5 bits, relative to the largest one
ERROR_BYTES = 12  # of the error of a head in the header, at most


def explorer_page(
    model: nn.Module,
    images: Tensor,
    pictures: Sequence[np.ndarray],
    names: Optional[Sequence[str]] = None,
    title: str = 'Attention explorer',
    max_bytes: int = 10_000_000,
) -> str:
    """A page that shows where every head attends to from a pixel that is chosen.

    Probabilities that depend on position alone are exact up to 1e-6. Those that depend on an image are as fine as fits:
    the page says how large their errors are. Each layer shows its query that is nearest to the pixel; queries in the
    padding of an image, which even kernels have, cannot be chosen.

    Args:
        model (nn.Module): A model with attention of this package: by position, by content, of patches, or in the place
            of convolutions. Or a vision transformer of timm or mmpretrain, see
            :func:`~attncnn_plugin.analysis.vit_attention`.
        images (Tensor): ``(B, C, H, W)``, the input of ``model``.
        pictures (Sequence[ndarray]): The pictures to show of the images, uint8, ``(h, w)`` or ``(h, w, 3)`` RGB.
        names (Sequence[str], optional): A name of each image. Defaults to ``'Image 0'``, ….
        title (str): Title of the page. Defaults to ``'Attention explorer'``.
        max_bytes (int): Largest size of the page. Defaults to 10 MB.

    Returns:
        str: HTML, to be written as UTF-8.

    Raises:
        ValueError: A model without attention, such as a CMHSA in the convolution phase, with layers that the images
            do not reach, or along one or three axes; no images, or other numbers of pictures or names; pictures
            of another kind; more than 1024 tokens of a layer, or 16,384 of one with windows; parameters that are not
            finite; a page that cannot be made small enough; a vision transformer that is built in another way.
    """
    names = [f'Image {i}' for i in range(len(images))] if names is None else list(names)
    if not len(images) == len(pictures) == len(names) > 0:
        raise ValueError(
            f'images, pictures and names are {len(images)}, {len(pictures)} and {len(names)}: give as '
            'many of each, at least one'
        )
    pictures = [_rgb(picture) for picture in pictures]
    if is_other_vit(model):
        layers, precisions = _observed_layers(model, images), PROBABILITY_STEPS
    else:
        layers, precisions = _layer_scores(model, images), SCORE_ERRORS
    grid = [max(sizes) for sizes in zip(*(layer.size for layer in layers))]
    about = {'title': title, 'grid': grid, 'names': names, 'pictures': pictures}
    shell = _shell(title)
    room = (max_bytes - len(shell.encode())) // 4 * 3  # base64 takes 4 bytes for 3
    data = _finest_data(about, layers, precisions, room)
    if data is None:
        raise ValueError(
            f'the page takes more than max_bytes={max_bytes:,} with {len(images)} images of {images.shape[2]}x'
            f'{images.shape[3]} pixels, as coarsely as they can be quantized: give fewer images, smaller ones, or a '
            'larger max_bytes'
        )
    return base64.b64encode(data).decode().join(shell.rsplit('{{data}}', 1))


def _layer_scores(model: nn.Module, images: Tensor) -> List[LayerScores]:
    """The scores of all layers on some images, of which as few run through the model as matter."""
    layers = shown_layers(model)
    for name, layer in layers.items():
        if layer.window is not None and layer.window.ndim != 2:
            raise ValueError(
                f'{name} is attention along {layer.window.ndim} axes, but a page shows the height and the width of '
                'images'
            )
    inputs: Dict[str, List[Tensor]] = {name: [] for name in layers}

    def visit(name: str, layer: AttentionLayer, x: Tensor) -> None:
        _check_tokens(name, images, layer.grid_of(x), MAX_TOKENS)
        inputs[name].append(x)

    some = images if any(layer.depends_on_content for layer in layers.values()) else images[:1]
    for image in some.split(1):
        visit_layers(model, image, layers, visit)
    labels = layer_labels(layers)
    return [LayerScores(name, labels[name], layer, torch.cat(inputs[name])) for name, layer in layers.items()]


def _observed_layers(model: nn.Module, images: Tensor) -> List[ObservedLayer]:
    """The attention of all layers of a vision transformer on some images."""
    found: Dict[str, Tuple[TokenPlaces, List[Tensor]]] = {}

    def visit(name: str, probs: Tensor, places: TokenPlaces) -> None:
        limit = MAX_TOKENS if places.windows is None else MAX_TOKENS_IN_WINDOWS
        _check_tokens(name, images, places.grid, limit)
        found.setdefault(name, (places, []))[1].append(probs.cpu())

    for image in images.split(1):
        visit_vit_attention(model, image, visit)
    labels = layer_labels(found)
    others = prefix_names(find_transformer(model)[1])
    layers = []
    for name, label in labels.items():
        places, probs = found.pop(name)  # large: not to be kept twice
        layers.append(ObservedLayer(name, label, torch.cat(probs), places, others[: places.prefix]))
    return layers


def _check_tokens(name: str, images: Tensor, size: Sequence[int], limit: int) -> None:
    height, width = size
    if height * width > limit:
        raise ValueError(
            f'images of {images.shape[2]}x{images.shape[3]} pixels are, for {name}, {height}x{width} tokens, more '
            f'than the {limit} that a page can show: give smaller images, or a model that takes smaller ones '
            '(--model-kwargs img_size=224)'
        )


def _finest_data(
    about: dict,
    layers: Sequence[Union[LayerScores, ObservedLayer]],
    precisions: Sequence[float],
    max_bytes: int,
) -> Optional[bytes]:
    """The data of the page with the first of the precisions that fits, from fine to coarse; None if none does."""

    def data(precision: float, with_errors: bool) -> bytes:
        return pack({**about, 'layers': [layer.header(precision, with_errors) for layer in layers]})

    max_bytes -= sum(ERROR_BYTES * layer.num_heads * len(layer.parts) for layer in layers)
    first, end, index = 0, len(precisions), 0  # most pages fit with the first one
    while first < end:
        fits = len(data(precisions[index], with_errors=False)) <= max_bytes
        first, end = (first, index) if fits else (index + 1, end)
        index = (first + end) // 2
    return data(precisions[first], with_errors=True) if first < len(precisions) else None


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
