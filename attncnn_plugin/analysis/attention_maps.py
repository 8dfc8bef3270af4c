"""Attention probabilities of every layer of a model, of the positions alone and of images.

A model is any module with the attention of this package inside: a network, a timm model, a classifier or a backbone of
mmpretrain. Images are what its forward pass takes, normalized as in training.
"""

import math
import re
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..layers.content_attention import ContentAttention
from ..layers.grid_attention import GridAttention
from ..layers.merged_patch_attention import MergedPatchAttention
from ..layers.patch_attention import PatchAttention
from ..layers.precision import at_least_float32, full_precision
from ..layers.shifts import at_shifts
from ..models.networks.grid_network import GridNetwork

Scores = Callable[[nn.Module, Tensor], Optional[Tensor]]


def attention_layers(model: nn.Module) -> Dict[str, nn.Module]:
    """The attention layers of a model by name, in the order of its blocks.

    The names are those of ``model.named_modules()``. A CMHSA in the convolution phase has none.
    """
    kinds = (GridAttention, PatchAttention, MergedPatchAttention)
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}


def layer_label(name: str) -> str:
    """What a layer is called for the eye: ``'block 2'`` for ``'backbone.blocks.2.attn'``, otherwise its name."""
    block = re.search(r'(?:^|\.)blocks\.(\d+)\.', name)
    return f'block {block[1]}' if block else name


def require_attention_layers(model: nn.Module) -> Dict[str, nn.Module]:
    """As :func:`attention_layers`, at least one.

    Raises:
        ValueError: The model has none, as a CMHSA in the convolution phase.
    """
    layers = attention_layers(model)
    if not layers:
        raise ValueError(
            f'the model, of type {type(model).__name__}, has no attention layers of this package (a CMHSA '
            'in the convolution phase gets them with its transition; switch_to_deploy with to_conv puts '
            'convolutions in their place)'
        )
    return layers


def depends_on_content(layer: nn.Module) -> bool:
    """Whether the probabilities of a layer depend on its input."""
    if isinstance(layer, GridAttention):
        return layer.depends_on_content
    return isinstance(layer, (PatchAttention, MergedPatchAttention))


def has_position_scores(layer: nn.Module) -> bool:
    """Whether a term of the scores depends on position alone: q·r_δ depends on the query too."""
    return not isinstance(layer, ContentAttention) or 'vr' in layer.terms


@torch.no_grad()
def position_probs(layer: nn.Module, height: int, width: int) -> Optional[Tensor]:
    """The probabilities by what depends on position alone.

    For position-only attention these are its probabilities; for attention with content the softmax of vᵀr_δ (C20, eq.
    8), or of the relative position bias of CMHSA. With the null key of CMHSA, which takes what lies outside of the
    grid, the rows add up to less than 1.

    Args:
        layer (nn.Module): One of :func:`attention_layers`.
        height, width (int): Size of the grid in tokens.

    Returns:
        Tensor | None: ``(N_h, height*width, height*width)``, float32; None without :func:`has_position_scores`.
    """
    if not has_position_scores(layer):
        return None
    if not depends_on_content(layer):
        return layer.attention_probs((height, width)).float()
    if not isinstance(layer, ContentAttention):
        return layer.position((height, width)).float().softmax(-1)[..., :-1]
    rows, columns = (scores.softmax(-1) for scores in layer.axis_scores((height, width)))
    probs = rows[:, :, None, :, None] * columns[:, None, :, None, :]
    return probs.reshape(layer.num_heads, height * width, height * width).float()


def attention_probs_of(model: nn.Module, images: Tensor) -> Dict[str, Tensor]:
    """The probabilities of every layer whose scores depend on content, by content and position, on some images.

    The model runs once, in evaluation mode, without gradients; afterwards its modules are in the modes they were in.

    Args:
        model (nn.Module): The model.
        images (Tensor): ``(B, C, H, W)``.

    Returns:
        dict[str, Tensor]: ``(B, N_h, H*W, H*W)`` by the layer's name, H and W in tokens, float32. With the null key of
        CMHSA the rows add up to less than 1. Empty for a model of position-only attention.
    """
    return _probs_of(model, images, _all_scores)


def content_only_probs_of(model: nn.Module, images: Tensor) -> Dict[str, Tensor]:
    """As :func:`attention_probs_of`, by the terms without position, q·k and u·k of C20's eq. 8.

    An absolute encoding, the position bias of CMHSA and its null key are left out too. A layer without such a term is
    not in the result.
    """
    return _probs_of(model, images, _content_scores)


def position_only_probs_of(model: nn.Module, images: Tensor) -> Dict[str, Tensor]:
    """As :func:`attention_probs_of`, by the terms with relative position, q·r_δ and v·r_δ of C20's eq. 8.

    The former depends on the content of the query, not on that of the keys. For CMHSA this is the position bias. A
    layer without such a term is not in the result.
    """
    return _probs_of(model, images, _position_scores)


def look_at_scores(
    model: nn.Module,
    images: Tensor,
    look: Callable[[str, Tensor, Optional[Tensor], Optional[Tuple[Tensor, Tensor]]], None],
) -> None:
    """Calls ``look(name, scores, content, axes)`` for every layer whose scores depend on content, in one pass.

    Layers without heads are left out.

    Args:
        model (nn.Module): The model.
        images (Tensor): ``(B, C, H, W)``.
        look (Callable): Takes the layer's name; all of its scores, ``(B, N_h, H*W, H*W)``, for CMHSA with those of the
            null key last; those of :func:`content_only_probs_of` or None; and, where the scores of the position depend
            on the query's content, their terms of rows and of columns, ``(B, N_h, H*W, H)`` and ``(B, N_h, H*W, W)``,
            else None. In evaluation mode, without gradients.
    """
    layers = {
        layer: name for name, layer in attention_layers(model).items() if depends_on_content(layer) and layer.num_heads
    }

    def scores_of(layer: nn.Module, x: Tensor) -> None:
        axes = None
        if 'qr' in getattr(layer, 'terms', ()):
            axes = tuple(scores.flatten(2, 3) for scores in _position_axes(layer, x))
        look(layers[layer], _all_scores(layer, x), _content_scores(layer, x), axes)

    if layers:
        _run(model, images, layers, scores_of)


def mean_attention_probs_of(model: nn.Module, images: Tensor, batch_size: int = 10) -> Dict[str, Tensor]:
    """The mean over images of :func:`attention_probs_of`, a few images at a time.

    Args:
        model (nn.Module): The model.
        images (Tensor): ``(B, C, H, W)``, at least one.
        batch_size (int): Images in a pass. Defaults to 10.

    Returns:
        dict[str, Tensor]: ``(N_h, H*W, H*W)`` by the layer's name, float32.
    """
    means = mean_over_images(
        lambda batch: {name: (probs,) for name, probs in attention_probs_of(model, batch).items()}, images, batch_size
    )
    return {name: probs for name, (probs,) in means.items()}


def mean_over_images(
    of_images: Callable[[Tensor], Dict[str, Tuple[Tensor, ...]]],
    images: Tensor,
    batch_size: int = 10,
) -> Dict[str, Tuple[Tensor, ...]]:
    """The means over images of tensors by name, a few images at a time.

    Args:
        of_images (Callable): Gives for images ``(B, C, H, W)`` tensors ``(B, …)``.
        images (Tensor): ``(B, C, H, W)``, at least one.
        batch_size (int): Images in a call. Defaults to 10.
    """
    sums = {}
    for batch in images.split(batch_size):
        for name, values in of_images(batch).items():
            own = [value.sum(0) for value in values]
            sums[name] = [a + b for a, b in zip(sums[name], own)] if name in sums else own
    return {name: tuple(value / len(images) for value in own) for name, own in sums.items()}


def relative_entropy_of(probs: Tensor) -> Tensor:
    """Entropy of maps ``(…, Q, K)``, mean over queries, relative to that of uniform attention, ``(…,)``, 0 to 1.

    Raises:
        ValueError: There is a single key, to which every head is uniform.
    """
    if probs.shape[-1] < 2:
        raise ValueError('the grid is a single token, on which every head is uniform: at least two are needed')
    return (torch.special.entr(probs).sum(-1).mean(-1) / math.log(probs.shape[-1])).clamp(max=1)


def grid_of(model: nn.Module, images: Tensor) -> Tuple[int, int]:
    """Height and width of the grid of tokens that the attention of a model works on.

    Args:
        model (nn.Module): The model.
        images (Tensor): ``(B, C, H, W)``; the first one is run.

    Raises:
        ValueError: The model has no attention layers, as a CMHSA in the convolution phase.
    """
    layers = list(require_attention_layers(model).values())
    sizes = []
    _run(model, images[:1], layers[:1], lambda layer, x: sizes.append(tuple(x.shape[1:3])))
    return sizes[0]


def _probs_of(model: nn.Module, images: Tensor, scores_of: Scores) -> Dict[str, Tensor]:
    layers = {layer: name for name, layer in attention_layers(model).items() if depends_on_content(layer)}
    probs = {}

    def keep(layer: nn.Module, x: Tensor) -> None:
        keys = x.shape[1] * x.shape[2]  # the null key comes after them
        scores = scores_of(layer, x) if layer.num_heads else x.new_zeros(len(x), 0, keys, keys)
        if scores is not None:
            probs[layers[layer]] = scores.float().softmax(-1)[..., :keys]

    if layers:
        _run(model, images, layers, keep)
    return probs


@torch.no_grad()
def _run(
    model: nn.Module,
    images: Tensor,
    layers: Sequence[nn.Module],
    look: Callable[[nn.Module, Tensor], None],
) -> None:
    """Calls ``look(layer, x)`` with the input of each layer in one pass of the images."""
    networks = [module for module in model.modules() if isinstance(module, GridNetwork)]
    handles = [layer.register_forward_pre_hook(lambda layer, args: look(layer, args[0])) for layer in layers]
    try:
        with evaluating(model):
            # Without what comes after it: a detector's heads ask for more than images.
            (networks[0] if len(networks) == 1 else model)(images)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, the mode of each single module as it was outside."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _all_scores(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, ContentAttention):
        return layer.attention_scores(x)
    position = at_least_float32(layer.position(x.shape[1:3]))  # the null key last
    return nn.functional.pad(_content_scores(layer, x), (0, 1)) + position


def _content_scores(layer: nn.Module, x: Tensor) -> Optional[Tensor]:
    """``(B, N_h, H*W, H*W)``."""
    tokens = x.flatten(1, 2)
    if isinstance(layer, MergedPatchAttention):
        query, key = layer.query_key(tokens), tokens[:, :, None]  # x_q A_h x_k
    elif isinstance(layer, PatchAttention):
        query, key = layer.query(tokens), layer.key(tokens)
    elif layer.key is None:
        return None
    else:
        query, key = layer.query(tokens) if 'qk' in layer.terms else 0, layer.key(tokens)
        if 'uk' in layer.terms:
            query = query + layer.key_bias.flatten().expand_as(key)
    with full_precision(x.device.type):
        query, key = (
            at_least_float32(vectors).reshape(*tokens.shape[:2], -1, layer.dim).transpose(1, 2)
            for vectors in (query, key)
        )
        return torch.matmul(query, key.mT) / layer.dim**0.5


def _position_scores(layer: nn.Module, x: Tensor) -> Optional[Tensor]:
    batch, height, width, _ = x.shape
    if not isinstance(layer, ContentAttention):
        return layer.position((height, width)).expand(batch, -1, -1, -1)
    if layer.tables is None:
        return None
    rows, columns = _position_axes(layer, x)
    scores = rows[..., :, None] + columns[..., None, :]  # (…, q1, q2, k1, k2)
    return scores.expand(batch, *scores.shape[-5:]).reshape(batch, layer.num_heads, height * width, -1)


def _position_axes(layer: ContentAttention, x: Tensor) -> Tuple[Tensor, Tensor]:
    """The terms of rows and of columns, ``(B, N_h, H, W, H)`` and ``(B, N_h, H, W, W)``.

    Without q·r_δ what they do not depend on is of size 1, and there is no B.
    """
    _, height, width, _ = x.shape
    rows = columns = 0
    with full_precision(x.device.type):
        if 'qr' in layer.terms:
            query = at_least_float32(layer.query(x)).unflatten(-1, (layer.num_heads, layer.dim)) / layer.dim**0.5
            row, column = layer.tables((height, width), like=layer.value.weight)
            rows = torch.einsum('bijhd,dik->bhijk', query, at_shifts(row.T, height))
            columns = torch.einsum('bijhd,djk->bhijk', query, at_shifts(column.T, width))
        if 'vr' in layer.terms:
            row, column = layer.axis_scores((height, width))
            rows, columns = rows + row[:, :, None], columns + column[:, None]
    return rows, columns
