"""The layers in the data of a page, as ``explorer.js`` reads them: the probabilities of every query, in 8 bits.

A layer has

- ``label``, ``name``, and ``heads``, their number N_h;
- ``centers``: Δ of its heads, ``(N_h, 2)``, where they are Gaussian and do not depend on an image, or null;
- ``grid``: height H and width W of its keys, in patches, tokens or pixels;
- ``rows`` and ``columns``: where its queries are on this grid. With even kernels some lie in the padding;
- ``others``: the names of the T tokens beside the grid: ``cls``, the one that the model reads, ``extra 2``, …. They are
  queries too, the first ones: there are N = T + rows · columns queries;
- ``keys``: null where a query sees all K = H·W keys. In windows the numbers of the K = M keys in the window of each
  query, ``(N, M)``, H·W for those that it does not see;
- ``parts``: of ``position``, ``content`` and ``both`` those that the layer has, or ``attention`` of another library's
  model. Each is a list of what follows, one for each image, or one for all of them:
    - ``largest``: the largest probability of each query, ``(N_h, N)``;
    - ``bytes``: b = 255·√(p / largest) of each probability p, ``(N_h, N, K)``, so that p is (b / 255)²·largest, within
      1/255 of the largest. Without the square root, the many small probabilities of a wide head would round to 0, and
      its sums and its centre would be wrong;
    - ``beside``: what a query gives to each of ``others``, ``(N_h, N, T)``; without others what lies outside of the
      image, ``(N_h, N, 1)``, or ``(N_h, N, 0)`` where nothing does.

An array is an object with its ``dtype``, its ``shape``, and its ``data``: row-major, little-endian, gzip, base64.
"""

import base64
import gzip
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.layer_maps import HIDDEN, attention_layers, layer_labels, probs_of_scores, visit_layers
from ..analysis.recorder import no_attention, observe
from ..attention import AttentionLayer
from ..heads.places import Places, cells

MAX_PAIRS = 2**20  # of a query and a key, for each head
ROUNDING = 1e-5  # of a sum of probabilities

Layer = Dict[str, Any]


def own_layers(model: nn.Module, images: Tensor) -> List[Layer]:
    """Returns the data of this package's attention on images, of which one is run where no layer depends on content."""
    layers = attention_layers(model)
    found: Dict[str, Layer] = {}

    def visit(name: str, layer: AttentionLayer, x: Tensor) -> None:
        size = layer.grid_of(x)
        places = [range(n) if layer.window is None else layer.window.queries(i, n).tolist() for i, n in enumerate(size)]
        _check_pairs(name, images, size, size[0] * size[1])
        heads = None if layer.depends_on_content else layer.gaussian_heads()
        centers = None if heads is None else heads.center.tolist()
        data = found.setdefault(name, _layer(layer.num_heads, size, places, centers=centers))
        for part, probs in _own_probs(layer, x).items():
            if not probs.isfinite().all():
                raise ValueError(f'the probabilities of {name} are not finite: the parameters of the model must be')
            data['parts'].setdefault(part, []).append(_packed_part(probs, _outside(1 - probs.sum(-1))))

    some = images if any(layer.depends_on_content for layer in layers.values()) else images[:1]
    for image in some.split(1):
        visit_layers(model, image, layers, visit)
    return _finished({name: found[name] for name in layers})


def observed_layers(model: nn.Module, images: Tensor) -> List[Layer]:
    """Returns the data of the attention between patches that a model of another library computes on images."""
    found: Dict[str, Layer] = {}
    others: Dict[str, Tuple[int, ...]] = {}
    tokens: Dict[str, List[float]] = {}
    windows: Dict[str, Tuple[Tensor, Any]] = {}  # the keys of each query, and which of these it sees in some image

    def visit(name: str, probs: Tensor, places: Places) -> None:
        probs = probs.float().cpu()
        if not probs.isfinite().all():
            raise ValueError(f'the probabilities of {name} are not finite: the parameters of the model must be')
        same = places.are_windows or places.queries is not None and torch.equal(places.queries, places.keys)
        if not same or places.on_grid(probs[:, :1]) is None:
            others[name] = tuple(probs.shape)
            return
        queries, numbers = places.queries.cpu(), places.keys.cpu()
        (_, query, grid), (_, key, _) = cells(queries), cells(numbers)
        _check_pairs(name, images, grid, key.shape[1])
        where = query.flatten().argsort(stable=True)  # tokens beside the grid, then patches
        where = where[(query < 0).sum() :] if places.are_windows else where
        probs = probs.transpose(0, 1).flatten(1, 2)[:, where]  # (N_h, N, K)
        if places.are_windows:
            keys = key[where // query.shape[1]]
            beside = _outside((probs * (keys < 0)).sum(-1))
            probs = probs.masked_fill(keys < 0, 0)
            windows[name] = keys, windows.get(name, (None, False))[1] | (probs.amax(0) > HIDDEN)
        else:
            tokens[name] = numbers[0, key[0] < 0].tolist()
            order = key[0].argsort(stable=True)
            beside, probs = probs[..., order].split([len(tokens[name]), grid[0] * grid[1]], -1)
        data = found.setdefault(name, _layer(len(probs), grid, [*map(range, grid)]))
        data['parts'].setdefault('attention', []).append(_packed_part(probs, beside))

    for image in images.split(1):
        read = observe(model, image, visit)
    if not found:
        raise no_attention(model, others)
    for name, numbers in tokens.items():
        found[name]['others'] = ['cls' if own == read else f'extra {i + 1}' for i, own in enumerate(numbers)]
    for name, (keys, seen) in windows.items():
        whole = keys.masked_fill(~seen, math.prod(found[name]['grid']))
        found[name]['keys'] = packed(whole.numpy().astype(np.int32))
    return _finished(found)


def packed(array: np.ndarray) -> Dict[str, Any]:
    """Returns an array as it is in the data."""
    data = array.astype(array.dtype.newbyteorder('<')).tobytes()
    text = base64.b64encode(gzip.compress(data, mtime=0)).decode()
    return {'dtype': array.dtype.name, 'shape': array.shape, 'data': text}


def _own_probs(layer: AttentionLayer, x: Tensor) -> Dict[str, Tensor]:
    """Returns the probabilities of the parts that a layer has, on one image, ``(N_h, Q, K)``."""
    size = layer.grid_of(x)
    if layer.num_heads == 0:
        return {}
    if not layer.depends_on_content:
        return {'position': layer.attention_probs(size).float().cpu()}
    parts = {
        'position': layer.position_scores(x),
        'content': layer.content_scores(x),
        'both': layer.attention_scores(x),
    }
    return {part: probs_of_scores(scores, size)[0].cpu() for part, scores in parts.items()}


def _layer(
    heads: int,
    size: Sequence[int],
    places: Sequence[Sequence[int]],
    centers: Optional[List[List[float]]] = None,
) -> Layer:
    return {
        'heads': heads,
        'centers': centers,
        'grid': list(size),
        'rows': list(places[0]),
        'columns': list(places[1]),
        'others': [],
        'keys': None,
        'parts': {},
    }


def _outside(mass: Tensor) -> Tensor:
    """Returns what lies outside of the image, ``(N_h, N)``, as it is in ``beside``."""
    return mass.clamp(min=0)[..., None][..., : int((mass > ROUNDING).any())]


def _finished(layers: Dict[str, Layer]) -> List[Layer]:
    """Returns the layers with their names, and of each part that is the same on all images one."""
    for name, label in layer_labels(layers).items():
        layers[name].update(name=name, label=label)
        for of_images in layers[name]['parts'].values():
            if all(image == of_images[0] for image in of_images):
                del of_images[1:]
    return list(layers.values())


def _packed_part(probs: Tensor, beside: Tensor) -> Dict[str, Any]:
    largest = probs.amax(-1)
    relative = probs / largest.clamp(min=torch.finfo(probs.dtype).tiny)[..., None]
    return {
        'largest': packed(largest.numpy()),
        'bytes': packed((255 * relative.sqrt()).round().byte().numpy()),
        'beside': packed(beside.numpy()),
    }


def _check_pairs(name: str, images: Tensor, size: Sequence[int], keys: int) -> None:
    height, width = size
    if height * width * keys > MAX_PAIRS:
        raise ValueError(
            f'images of {images.shape[2]}x{images.shape[3]} pixels are, for {name}, {height}x{width} tokens with '
            f'{keys} keys each, more than the {MAX_PAIRS:,} pairs that a page can show: give smaller images, or a '
            'model that takes smaller ones (--model-kwargs img_size=224)'
        )
