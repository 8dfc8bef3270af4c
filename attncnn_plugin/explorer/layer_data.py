"""The layers in the data of a page, as ``explorer.js`` reads them: the probabilities of every query, in 8 bits.

A layer has

- ``label``, ``name``, and ``heads``, their number N_h;
- ``centers`` and ``factors``: Δ of its heads, ``(N_h, 2)``, and M with Σ⁻¹ = MMᵀ, ``(N_h, 2, 2)``, only where they are
  Gaussian and do not depend on an image;
- ``grid``: height H and width W of its keys, in patches, tokens or pixels;
- ``rows`` and ``columns``: where its queries are on this grid. With even kernels some lie in the padding, and with
  keys or queries that are pooled some lie between rows;
- ``others``: the names of the T tokens beside the grid: ``cls``, the one that the model reads, ``extra 2``, …. They are
  queries too, the first ones: there are N = T + rows · columns queries;
- ``least``: the least weight, where heads that are mixed after the softmax have negative ones, which count as 0;
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
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np
import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..analysis.layer_maps import in_batches, layer_labels, probs_of_scores
from ..analysis.recorder import no_attention, observe
from ..attention import AttentionLayer
from ..attention.window import shown
from ..heads.found import Call
from ..heads.places import Places, cells

MAX_PAIRS = 2**20  # of a query and a key, for each head
ROUNDING = 1e-5  # of a sum of probabilities


def layers_of(model: nn.Module, images: Any, call: Call) -> Tuple[List[Dict[str, Any]], List[str]]:
    """Returns the data of all attention of a model between the tokens of images, and the names of what is left out."""
    model = unwrap_model(model)
    found: Dict[str, Dict[str, Any]] = {}
    others: Dict[str, Tuple[int, ...]] = {}

    def visit_own(name: str, layer: AttentionLayer, x: Tensor) -> None:
        _add(found, name, *_own_layer(name, layer, x))

    def visit(name: str, probs: Tensor, places: Places) -> None:
        if _are_on_grids(places):
            _add(found, name, *_layer(name, probs, places))
        else:
            others[name] = tuple(probs.shape)

    for image in in_batches(images, 1):
        try:
            read = observe(model, image, visit, call=call, visit_own=visit_own)
        except Exception as error:  # of the model, too
            raise ValueError(f'no page of a {type(model).__name__} with images={shown(image)}: {error}') from error
    if not found:
        raise no_attention(model, others)
    for name, label in layer_labels(found).items():
        layer, seen = found[name], found[name].pop('seen', None)
        layer.update(name=name, label=label)
        layer['others'] = ['cls' if own == read else f'extra {i + 1}' for i, own in enumerate(layer['others'])]
        if seen is not None:
            whole = layer['keys'].masked_fill(~seen, math.prod(layer['grid']))
            layer['keys'] = packed(whole.numpy().astype(np.int32))
        for of_images in layer['parts'].values():
            if all(image == of_images[0] for image in of_images):  # on all images the same
                del of_images[1:]
    return list(found.values()), list(others)


def _add(found: Dict[str, Dict[str, Any]], name: str, layer: Dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Adds a layer's attention on one more image to what was found: by part, on the grid and beside it."""
    own = found.setdefault(name, dict(dict(others=[], keys=None, parts={}), **layer))
    if 'seen' in layer:  # in some image
        own['seen'] = own['seen'] | layer['seen']
    for part, (probs, beside) in parts.items():
        if not probs.isfinite().all():
            raise ValueError(f'the probabilities of {name} are not finite: the parameters of the model must be')
        own['heads'] = len(probs)
        own['least'] = min(own.get('least', 0), probs.min().item())
        largest = (probs := probs.clamp(min=0)).amax(-1, keepdim=True)
        roots = (probs / largest.clamp(min=torch.finfo(probs.dtype).tiny)).sqrt()
        tensors = dict(largest=largest[..., 0], bytes=(255 * roots).round().byte(), beside=beside.clamp(min=0))
        own['parts'].setdefault(part, []).append({key: packed(own.numpy()) for key, own in tensors.items()})


def _own_layer(name: str, layer: AttentionLayer, x: Tensor) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Returns the data of a layer of this package, and its parts on one image."""
    size = layer.grid_of(x)
    _check_pairs(name, size, math.prod(size))
    places = [range(n) if layer.window is None else layer.window.queries(i, n).tolist() for i, n in enumerate(size)]
    data = dict(grid=list(size), rows=list(places[0]), columns=list(places[1]))
    if layer.depends_on_content:
        scores = dict(position=layer.position_scores, content=layer.content_scores, both=layer.attention_scores)
        probs = {part: probs_of_scores(scores_of(x), size)[0].cpu() for part, scores_of in scores.items()}
    else:
        probs = dict(position=layer.attention_probs(size).float().cpu())
        if (heads := layer.gaussian_heads()) is not None:
            data.update(centers=heads.center.tolist(), factors=heads.factor.tolist())
    return data, {part: (own, _outside(1 - own.sum(-1))) for part, own in probs.items()}


def _layer(name: str, probs: Tensor, places: Places) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Returns the data of attention of another library, and its only part on one image."""
    (_, query, size), (_, key, grid) = cells(places.queries.cpu()), cells(places.keys.cpu())
    _check_pairs(name, size, key.shape[1])
    middles = ([(i + 0.5) * keys / own - 0.5 for i in range(own)] for own, keys in zip(size, grid))
    data: Dict[str, Any] = dict(zip(('grid', 'rows', 'columns'), (list(grid), *middles)))
    where = query.flatten().argsort(stable=True)  # tokens beside the grid, then patches
    where = where[(query < 0).sum() :] if places.are_windows else where
    sees = places.sees(probs).flatten(0, 1)[where].cpu()
    probs = probs.float().cpu().transpose(0, 1).flatten(1, 2)[:, where]  # (N_h, N, K)
    if places.are_windows:
        keys = key[where // query.shape[1]]
        data.update(keys=keys, seen=sees)
        return data, dict(attention=(probs.masked_fill(keys < 0, 0), _outside((probs * (keys < 0)).sum(-1))))
    data['others'] = places.keys[0, key[0] < 0].tolist()
    beside, probs = probs[..., key[0].argsort(stable=True)].split([len(data['others']), math.prod(grid)], -1)
    return data, dict(attention=(probs, beside))


def packed(array: np.ndarray) -> Dict[str, Any]:
    """Returns an array as the page stores it."""
    data = gzip.compress(array.astype(array.dtype.newbyteorder('<')).tobytes(), mtime=0)
    return dict(dtype=array.dtype.name, shape=array.shape, data=base64.b64encode(data).decode())


def _are_on_grids(places: Places) -> bool:
    """Says whether the queries are all places of a grid, once each, and the keys are, or are those in windows."""
    if places.queries is None or places.keys is None:
        return False
    (_, query, (tall, wide)), (_, key, (height, width)) = cells(places.queries), cells(places.keys)
    once = [(place[place >= 0].bincount(minlength=2) == 1).all() for place in (query, key)]
    alike = max(tall * width, wide * height) < 2 * min(tall * width, wide * height)  # pooled along both axes
    same = torch.equal(places.queries[query < 0], places.keys[key < 0])
    return bool(once[0] and (places.are_windows or once[1] and alike and same))


def _outside(mass: Tensor) -> Tensor:
    """Returns what lies outside of the image, ``(N_h, N)``, as it is in ``beside``."""
    return mass.clamp(min=0)[..., None][..., : int((mass > ROUNDING).any())]


def _check_pairs(name: str, grid: Sequence[int], keys: int) -> None:
    if math.prod(grid) * keys > MAX_PAIRS:
        raise ValueError(
            f'{name} has {grid[0]}x{grid[1]} tokens with {keys} keys each, more than the {MAX_PAIRS:,} pairs that a '
            'page can show: give smaller images, or a model that takes smaller ones (--model-kwargs img_size=224)'
        )
