"""A vision transformer that starts as a convolution."""

from fnmatch import fnmatchcase
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from ..analysis.attention_maps import evaluating
from .absolute import start_absolute
from .embeddings import EMBEDDINGS, embedding_grid, set_sine_cosine_embedding
from .images import random_images
from .impulse import start_impulse
from .measure import measure
from .mimetic import set_mimetic_queries_and_keys
from .parts import Attention, find_attention, find_network
from .relative_tables import bias_of, start_relative, window_of
from .report import ConvolutionalStart, HeadStart, LayerStart
from .rotary import start_rotary
from .shifts import Size, draw_shifts, gaussian_scores
from .values import Values, check_values, set_values

METHODS = ('gaussian', 'impulse', 'mimetic')
HARD = 1e3  # α of the attention that impulses are compared with


@torch.no_grad()
def init_as_convolution(
    model: nn.Module,
    kernel_size: Union[int, Sequence[int]] = 3,
    method: str = 'gaussian',
    alpha: float = 2.0,
    shifts: str = 'random',
    layers: str = '*',
    values: Optional[Values] = None,
    embedding: str = 'sine-cosine',
    seed: int = 0,
    images: Optional[Tensor] = None,
) -> ConvolutionalStart:
    """Sets the attention of a vision transformer, in place, so that each head looks at one shift of a kernel.

    A checkpoint that is loaded afterwards replaces all of it.

    Args:
        model (nn.Module): A vision transformer of timm or mmpretrain, or a model with one, just built: with embeddings
            of absolute positions (ViT, DeiT), relative position biases (``vit_relpos_*``, BEiT, Swin) or rotary
            embeddings (timm's EVA02, DINOv3 and their relatives).
        kernel_size (int | tuple[int, int]): Of the kernel, in patches. Defaults to 3.
        method (str): ``'gaussian'``, a head is P[q, k] = softmax_k(−α‖k − q − Δ‖²) (C20, eq. 9); ``'impulse'``, Zheng
            et al. 2025, for embeddings of absolute positions; ``'mimetic'``, Trockman and Kolter 2023, without shifts.
            Defaults to ``'gaussian'``.
        alpha (float): α of Gaussian heads, in 1/patches². Defaults to 2: a head has 0.62 of its attention at Δ.
        shifts (str): ``'random'``, or ``'in turn'``, all positions of the kernel one after the other. Defaults to
            ``'random'``.
        layers (str): Glob of the names of attention to be started. Defaults to ``'*'``.
        values (str | nn.Conv2d | None): ``'default'``, those of the model; ``'identity'``; ``'mimetic'``; or a
            convolution over the patches from D to D channels. None is ``'default'`` for Gaussian heads and
            ``'mimetic'`` for the others, as in their papers. Defaults to None.
        embedding (str): What a learned embedding of absolute positions holds beside the functions that Gaussian heads
            need: ``'sine-cosine'``, or its ``'own'``. Defaults to ``'sine-cosine'``.
        seed (int): Of all that is random. Defaults to 0.
        images (Tensor | None): ``(B, C, H, W)``, normalized as for the model, on which the start is calibrated and
            measured. Defaults to :func:`random_images`.

    Returns:
        ConvolutionalStart: The shift of each head, and how near its attention is to the wanted one.

    Raises:
        ValueError: An argument is not one of these, or the model's attention cannot be started: the message says what
            was looked for.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2)
        >>> report = init_as_convolution(model, kernel_size=3, seed=0)
        >>> len(report.layers), len(report.layers[0].heads)
        (2, 3)
        >>> max(head.total_variation for layer in report.layers for head in layer.heads) < 0.1
        True
    """
    values = _checked(method, alpha, values, embedding)
    _, network = find_network(model)
    attentions = find_attention(model)
    chosen = [attention for attention in attentions if fnmatchcase(attention.name, layers)]
    if not chosen:
        raise ValueError(f'layers={layers!r} matches none of {", ".join(attention.name for attention in attentions)}')
    encodings = {attention.name: _encoding(network, attention) for attention in chosen}
    images = random_images(model, seed=seed) if images is None else images
    generator = torch.Generator().manual_seed(seed)

    drawn: Dict[str, Optional[Tensor]] = dict.fromkeys(encodings)
    if method != 'mimetic':
        drawn.update(_shifts(network, chosen, kernel_size, shifts, generator))
    errors = {x.name: set_values(x, values, drawn[x.name], generator) for x in chosen}
    if method == 'gaussian':
        _start_gaussian(network, attentions, chosen, drawn, encodings, alpha, embedding, images, generator)
    elif method == 'impulse':
        others = [name for name, encoding in encodings.items() if encoding != 'absolute']
        if others:
            raise ValueError(
                f'method={method!r} needs an embedding of absolute positions, and {others[0]} has a '
                f'{encodings[others[0]]} one: Gaussian heads with a large alpha are impulses there'
            )
        start_impulse(network, [(x, drawn[x.name]) for x in chosen], embedding_grid(network), generator)
    else:
        if embedding == 'sine-cosine' and 'absolute' in encodings.values():
            set_sine_cosine_embedding(network)
        for attention in chosen:
            set_mimetic_queries_and_keys(attention, generator)

    width = dict(gaussian=alpha, impulse=HARD).get(method)
    wanted = []
    for attention in chosen:
        size, of_layer = _grid(network, attention), drawn[attention.name]
        scores = None if of_layer is None else gaussian_scores(of_layer, width, size)
        wanted.append((attention, size, scores))
    measured = measure(network, images, wanted)
    reports = []
    for attention, size, _ in wanted:
        variations, share = measured[attention.name]
        of_layer = drawn[attention.name]
        heads = [HeadStart()] * attention.num_heads
        if of_layer is not None:
            heads = [HeadStart(tuple(x), tv) for x, tv in zip(of_layer.tolist(), variations.tolist())]
        reports.append(
            LayerStart(
                attention.name, encodings[attention.name], size, tuple(heads), max(share, 0.0), errors[attention.name]
            )
        )
    return ConvolutionalStart(method, alpha if method == 'gaussian' else None, tuple(reports))


def _checked(method: str, alpha: float, values: Optional[Values], embedding: str) -> Values:
    """The values that are meant, once the arguments are known to be possible."""
    if method not in METHODS:
        raise ValueError(f'method={method!r} must be one of {METHODS}')
    if not 0 < alpha < float('inf'):
        raise ValueError(f'alpha={alpha!r} must be a number above 0')
    if embedding not in EMBEDDINGS:
        raise ValueError(f'embedding={embedding!r} must be one of {EMBEDDINGS}')
    if values is None:
        return 'default' if method == 'gaussian' else 'mimetic'
    check_values(values)
    return values


def _encoding(network: Any, attention: Attention) -> str:
    if bias_of(network, attention) is not None:
        return 'relative'
    if getattr(network, 'rope', None) is not None:
        return 'rotary'
    if isinstance(getattr(network, 'pos_embed', None), nn.Parameter):
        return 'absolute'
    raise ValueError(
        f'{attention.name} of a {type(network).__name__} has no position encoding that is known: a relative position '
        'bias of the attention (relative_position_bias_table, rel_pos) or of all layers (shared_rel_pos, '
        'rel_pos_bias), rotations (rope) and an embedding of absolute positions (pos_embed) were looked for'
    )


def _shifts(
    network: Any,
    chosen: List[Attention],
    kernel_size: Union[int, Sequence[int]],
    shifts: str,
    generator: torch.Generator,
) -> Dict[str, Tensor]:
    """Shifts of each layer's heads. Layers that share their position bias have the same."""
    drawn = draw_shifts([attention.num_heads for attention in chosen], kernel_size, shifts, generator)
    first: Dict[int, Tensor] = {}
    found = {}
    for attention, of_layer in zip(chosen, drawn):
        bias = bias_of(network, attention)
        found[attention.name] = of_layer if bias is None else first.setdefault(id(bias), of_layer)
    return found


def _start_gaussian(
    network: Any,
    attentions: List[Attention],
    chosen: List[Attention],
    shifts: Dict[str, Any],
    encodings: Dict[str, str],
    alpha: float,
    embedding: str,
    images: Tensor,
    generator: torch.Generator,
) -> None:
    groups: Dict[str, List[Tuple[Attention, Tensor]]] = dict(absolute=[], relative=[], rotary=[])
    for attention in chosen:
        groups[encodings[attention.name]].append((attention, shifts[attention.name]))
    for attention, of_layer in groups['relative']:
        start_relative(bias_of(network, attention), attention, of_layer, alpha)
    handles = []
    try:
        if groups['rotary']:
            size = embedding_grid(network)
            handles += start_rotary(network, attentions, groups['rotary'], alpha, size, generator)
        if groups['absolute']:
            size = embedding_grid(network)
            handles += start_absolute(network, attentions, groups['absolute'], alpha, size, embedding, generator)
        if handles:
            with evaluating(network):
                network(images)
    finally:
        for handle in handles:
            handle.remove()


def _grid(network: Any, attention: Attention) -> Size:
    bias = bias_of(network, attention)
    return embedding_grid(network) if bias is None else window_of(bias)
