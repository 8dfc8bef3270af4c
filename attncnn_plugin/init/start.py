"""A vision transformer that starts as a convolution."""

from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor, nn

from ..analysis.vision_transformer import find_transformer, patch_grid
from ..layers.evaluation_mode import evaluating
from ..layers.window import shown
from .absolute import start_absolute
from .embeddings import EMBEDDINGS, embedding_grid, set_sine_cosine_embedding
from .images import random_images
from .impulse import start_impulse
from .measure import measure
from .mimetic import set_mimetic_queries_and_keys
from .parts import Attention, find_attention
from .relative_tables import bias_of, start_relative, window_of
from .report import ConvolutionalStart, HeadStart, LayerStart
from .rotary import start_rotary
from .shifts import Size, draw_shifts, gaussian_scores
from .values import Values, check_values, set_values, value_error

METHODS = ('gaussian', 'impulse', 'mimetic')
HARD = 1e3  # α of the attention that impulses are compared with


class _Layer(NamedTuple):
    attention: Attention
    encoding: str
    bias: Any  # the module with its relative position bias, or None
    grid: Size
    shifts: Tensor  # (N_h, 2)


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
    overwrite: bool = False,
) -> ConvolutionalStart:
    """Sets the attention of a vision transformer, in place, so that each head looks at one shift of a kernel.

    It is for a model before training: a trained one would lose what it has learned. A model counts as trained where the
    weights, or the biases, of a norm are not all the same number, as a new model's are. A start leaves them alone, so
    a second one replaces the first. A checkpoint that is loaded afterwards replaces all of it.

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
        images (Tensor | None): ``(B, C, H, W)``, normalized as for the model and of the size that it was built for, on
            which the start is calibrated and measured. Defaults to :func:`random_images`.
        overwrite (bool): Whether the attention of a trained model may be overwritten. Defaults to False.

    Returns:
        ConvolutionalStart: The shift of each head, and how near its attention is to the wanted one.

    Raises:
        ValueError: An argument is not one of these, the model is trained, or its attention cannot be started: the
            message says what was looked at, and the model stays as it was.

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
    _, network = find_transformer(model)
    attentions = find_attention(model)
    if not overwrite:
        _check_new(network)
    generator = torch.Generator().manual_seed(seed)
    chosen = _choose(network, attentions, layers, kernel_size, shifts, generator)
    others = [layer for layer in chosen if layer.encoding != 'absolute']
    if method == 'impulse' and others:
        raise ValueError(
            f'method={method!r} needs an embedding of absolute positions, and {others[0].attention.name} has a '
            f'{others[0].encoding} one: Gaussian heads with a large alpha are impulses there'
        )
    if method == 'gaussian':
        _check_shared(network, attentions, chosen, layers)
    images = random_images(model, seed=seed) if images is None else images
    if any(layer.encoding != 'relative' for layer in chosen):
        _check_size(network, images)
    with _all_or_nothing(model):
        return _start(network, attentions, chosen, method, alpha, values, embedding, images, generator)


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """An error inside leaves the parameters and buffers of the model as they were."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    except BaseException:
        for tensor, own in zip(tensors, before):
            tensor.data.copy_(own)
        raise


def _start(
    network: Any,
    attentions: List[Attention],
    chosen: List[_Layer],
    method: str,
    alpha: float,
    values: Values,
    embedding: str,
    images: Tensor,
    generator: torch.Generator,
) -> ConvolutionalStart:
    """Sets the chosen layers, and measures them."""
    wants_shifts = method != 'mimetic'
    for layer in chosen:
        set_values(layer.attention, values, layer.shifts if wants_shifts else None, generator)
    if method == 'gaussian':
        scale_values = values in ('default', 'mimetic')  # not those that are given
        _start_gaussian(network, attentions, chosen, alpha, embedding, scale_values, images, generator)
    elif method == 'impulse':
        start_impulse(network, [(x.attention, x.shifts) for x in chosen], chosen[0].grid, generator)
    else:
        if embedding == 'sine-cosine' and any(layer.encoding == 'absolute' for layer in chosen):
            set_sine_cosine_embedding(network)
        for layer in chosen:
            set_mimetic_queries_and_keys(layer.attention, generator)

    width = HARD if method == 'impulse' else alpha
    wanted = [gaussian_scores(layer.shifts, width, layer.grid) for layer in chosen]
    found = measure(network, images, [(x.attention, x.grid, scores) for x, scores in zip(chosen, wanted)])
    reports = []
    for layer in chosen:
        variations, share = found[layer.attention.name]
        heads = [HeadStart()] * len(variations)
        if wants_shifts:
            heads = [HeadStart((d[0], d[1]), tv) for d, tv in zip(layer.shifts.tolist(), variations.tolist())]
        error = value_error(layer.attention, values, layer.shifts)
        reports.append(LayerStart(layer.attention.name, layer.encoding, layer.grid, tuple(heads), share, error))
    return ConvolutionalStart(method, alpha if method == 'gaussian' else None, tuple(reports))


def _checked(method: str, alpha: float, values: Optional[Values], embedding: str) -> Values:
    """The values that are meant, once the arguments are known to be possible."""
    if method not in METHODS:
        raise ValueError(f'method={shown(method)} must be one of {METHODS}')
    if not 0 < alpha < float('inf'):
        raise ValueError(f'alpha={shown(alpha)} must be a number above 0')
    if embedding not in EMBEDDINGS:
        raise ValueError(f'embedding={shown(embedding)} must be one of {EMBEDDINGS}')
    if values is None:
        return 'default' if method == 'gaussian' else 'mimetic'
    check_values(values)
    return values


def _check_new(network: Any) -> None:
    """Refuses a trained network, told by its norms: all other weights may be drawn, those of new norms never are."""
    kind = type(network).__name__
    norms = {name: norm for name, norm in network.named_modules() if 'norm' in type(norm).__name__.lower()}
    parameters = {f'{name}.{own}': of for name, norm in norms.items() for own, of in norm.named_parameters('', False)}
    drawn = [name for name, values in parameters.items() if (values != values.flatten()[0]).any()]
    if drawn or not parameters:
        looked_at = f'{drawn[0]} of {kind} holds different numbers' if drawn else f'no norm of {kind} has parameters'
        raise ValueError(
            f'{looked_at}, so that model may be trained, and would lose what its attention has learned: '
            'give a model before training, or overwrite=True'
        )


def _choose(
    network: Any,
    attentions: List[Attention],
    pattern: str,
    kernel_size: Union[int, Sequence[int]],
    shifts: str,
    generator: torch.Generator,
) -> List[_Layer]:
    """The layers to be started, each with shifts; those that share their position bias have the same."""
    chosen = [attention for attention in attentions if fnmatchcase(attention.name, pattern)]
    if not chosen:
        raise ValueError(f'layers={pattern!r} matches none of {", ".join(attention.name for attention in attentions)}')
    drawn = draw_shifts([attention.num_heads for attention in chosen], kernel_size, shifts, generator)
    of_bias: Dict[int, Tensor] = {}
    layers = []
    for attention, own in zip(chosen, drawn):
        bias = bias_of(network, attention)
        if bias is None:
            layers.append(_Layer(attention, _encoding(network, attention), bias, embedding_grid(network), own))
        else:
            layers.append(_Layer(attention, 'relative', bias, window_of(bias), of_bias.setdefault(id(bias), own)))
    return layers


def _check_shared(network: Any, attentions: List[Attention], chosen: List[_Layer], pattern: str) -> None:
    """Refuses a part of the layers that share their position bias."""
    names = {layer.attention.name for layer in chosen}
    biases = {id(layer.bias) for layer in chosen if layer.bias is not None}
    left = [x.name for x in attentions if x.name not in names and id(bias_of(network, x)) in biases]
    if left:
        raise ValueError(
            f'layers={pattern!r} leaves out {", ".join(left)}, which share their position bias with those that are to '
            'be started: it can be set for all of them alone'
        )


def _check_size(network: Any, images: Tensor) -> None:
    """Refuses images that have another grid than that for which positions are set."""
    wanted, found = embedding_grid(network), patch_grid(network, images)
    if found != wanted:
        raise ValueError(
            f'images of shape {tuple(images.shape)} have {found[0]}×{found[1]} patches, but the '
            f'{type(network).__name__} was built for {wanted[0]}×{wanted[1]}: give images of that size, or build the '
            'model with the img_size of these'
        )


def _encoding(network: Any, attention: Attention) -> str:
    if getattr(network, 'rope', None) is not None:
        return 'rotary'
    if isinstance(getattr(network, 'pos_embed', None), nn.Parameter):
        return 'absolute'
    raise ValueError(
        f'{attention.name} of a {type(network).__name__} has no position encoding that is known: a relative position '
        'bias of the attention (relative_position_bias_table, rel_pos) or of all layers (shared_rel_pos, '
        'rel_pos_bias), rotations (rope) and an embedding of absolute positions (pos_embed) were looked for'
    )


def _start_gaussian(
    network: Any,
    attentions: List[Attention],
    layers: List[_Layer],
    alpha: float,
    embedding: str,
    scale_values: bool,
    images: Tensor,
    generator: torch.Generator,
) -> None:
    for layer in layers:
        if layer.encoding == 'relative':
            start_relative(layer.bias, layer.attention, layer.shifts, alpha)
    # The others are of one kind, that of the network.
    others = [layer for layer in layers if layer.encoding != 'relative']
    if not others:
        return
    chosen, size = [(layer.attention, layer.shifts) for layer in others], others[0].grid
    with evaluating(network):
        if others[0].encoding == 'rotary':
            handles = start_rotary(network, attentions, chosen, alpha, size, scale_values, generator)
        else:
            handles = start_absolute(network, attentions, chosen, alpha, size, embedding, scale_values, generator)
        try:
            network(images)
        finally:
            for handle in handles:
                handle.remove()
