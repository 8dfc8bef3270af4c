"""A vision transformer that starts as a convolution."""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention.evaluation_mode import evaluating
from ..attention.window import Sizes, check_choice, per_axis, shown
from ..change import all_or_nothing, table
from ..heads.places import Places, cells
from ..heads.seen import watching
from .embeddings import check_new
from .gaussian import STARTS
from .mimetic import start_mimetic
from .vision_transformer import KNOWN, Attention, Transformer, find_attention, find_transformer

METHODS = ('gaussian', 'mimetic')
SHIFTS = ('ordered', 'random')
MOST_ELSEWHERE = 0.5  # of the attention of a Gaussian head: then it does not look where it was asked to


class HeadStart(NamedTuple):
    """A head at the start.

    Attributes:
        shift (tuple[float, float] | None): Δ, (row, column) in patches; None where no shift is wanted.
        total_variation (float | None): ½ Σ_k |P[q, k] − P*[q, k]| between the head's attention P and the wanted P*,
            among patches, mean over images and queries; from 0 to 1. None where none is wanted.
    """

    shift: Optional[Tuple[float, float]] = None
    total_variation: Optional[float] = None


class LayerStart(NamedTuple):
    """A layer at the start.

    Attributes:
        name (str): Name of its attention in the model.
        encoding (str): ``'absolute'``, ``'relative'`` or ``'rotary'``.
        grid (tuple[int, int]): Height and width of the patches among which it attends: those of a window, or all.
        heads (tuple[HeadStart, ...]): Its heads.
        prefix_share (float): What patches give to class and register tokens, mean over images, heads and patches.
    """

    name: str
    encoding: str
    grid: Tuple[int, int]
    heads: Tuple[HeadStart, ...]
    prefix_share: float


class ConvolutionalStart(NamedTuple):
    """The report of :func:`init_as_convolution`; as a string, a table with a row for each head.

    Attributes:
        layers (tuple[LayerStart, ...]): The layers, in the order of the model.
    """

    layers: Tuple[LayerStart, ...]

    def __str__(self) -> str:
        rows = [('layer', 'encoding', 'grid', 'head', 'shift', 'total variation', 'to other tokens')]
        for layer in self.layers:
            of_layer, share = (layer.name, layer.encoding, '×'.join(map(str, layer.grid))), f'{layer.prefix_share:.2g}'
            for number, head in enumerate(layer.heads):
                shift = 'none' if head.shift is None else '({:g}, {:g})'.format(*head.shift)
                variation = 'none' if head.total_variation is None else f'{head.total_variation:.2g}'
                rows.append((*of_layer, str(number), shift, variation, share))
        return table(rows)


@torch.no_grad()
def init_as_convolution(
    model: nn.Module,
    kernel_size: Sizes = 3,
    method: str = 'gaussian',
    alpha: float = 2.0,
    seed: int = 0,
    overwrite: bool = False,
    shifts: str = 'ordered',
) -> ConvolutionalStart:
    """Sets the attention of a vision transformer, in place, so that each head looks at one shift of a kernel.

    It is for a model before training: a trained one would lose what it has learned. A model counts as trained where the
    weights, or the biases, of a norm are not all the same number, as a new model's are, or other biases are neither
    that nor as libraries draw them. Where a library draws biases as PyTorch does, and norms were frozen, few steps
    cannot be told. A second start replaces the first. A checkpoint that is loaded afterwards replaces all of it.

    Args:
        model (nn.Module): A vision transformer of another library, or a model with one, just built: with embeddings
            of absolute positions (ViT, DeiT), tables of relative position biases (BEiT, Swin) or rotary embeddings
            (timm's EVA02, DINOv3 and their relatives).
        kernel_size (int | tuple[int, int]): Of the kernel, in patches. With 1, all heads look at the centre. Defaults
            to 3.
        method (str): ``'gaussian'``, a head is P[q, k] = softmax_k(−α‖k − q − Δ‖²) (C20, eq. 9); ``'mimetic'``,
            Trockman and Kolter 2023, without shifts. Defaults to ``'gaussian'``.
        alpha (float): α of Gaussian heads, in 1/patches². Defaults to 2: a head has 0.62 of its attention at Δ.
        seed (int): Of all that is random. Defaults to 0.
        overwrite (bool): Whether the attention of a trained model may be overwritten. Defaults to False.
        shifts (str): Which position of the kernel a head gets. ``'ordered'``: the first head of each layer gets the
            centre, the next ones up, right, left and down, then the corners row by row, as in the released code of
            Zheng et al. 2025. Larger kernels go on by the distance from the centre. Further heads begin again with the
            centre. ``'random'``: each head gets any position, by the seed. Defaults to ``'ordered'``.

    Returns:
        ConvolutionalStart: The shift of each head, and how near its attention is to the wanted one on random images.

    Raises:
        ValueError: An argument is not one of these, the model is trained, or its attention cannot be started, also
            where a Gaussian head would have a total variation above 0.5 to the wanted one: the message says what was
            looked at, and the model stays as it was.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2)
        >>> report = init_as_convolution(model, kernel_size=3, seed=0)
        >>> [head.shift for head in report.layers[1].heads]
        [(0.0, 0.0), (-1.0, 0.0), (0.0, 1.0)]
        >>> max(head.total_variation for layer in report.layers for head in layer.heads) < 0.1
        True
    """
    check_choice('method', method, METHODS)
    check_choice('shifts', shifts, SHIFTS)
    if not 0 < alpha < float('inf'):
        raise ValueError(f'alpha={shown(alpha)} must be a number above 0')
    network = find_transformer(model)
    if any(parameter.is_meta for parameter in network.module.parameters()):
        raise ValueError(f'model is a {network.kind} on the meta device, without values: build it on another device')
    attentions = find_attention(network)
    if not overwrite:
        check_new(network)
    encoding = _encoding(network, attentions)
    generator = torch.Generator().manual_seed(seed)
    _set_shifts(attentions, kernel_size, shifts, generator)
    images = random_images(network, seed)
    with all_or_nothing([], values=model.parameters()), evaluating(network.module):
        if method == 'mimetic':
            start_mimetic(network, attentions, encoding == 'absolute', generator)
        else:
            # Autocast keeps the weights that it has cast, and would not see that they are set.
            with torch.autocast(images.device.type, enabled=False):
                STARTS[encoding](network, attentions, alpha, images, generator)
        layers = _report(model, network, attentions, encoding, alpha, images)
        for layer in layers if method == 'gaussian' else ():
            worst = max(head.total_variation or 0.0 for head in layer.heads)
            if not worst <= MOST_ELSEWHERE:
                raise ValueError(
                    f'{layer.name} cannot start as a convolution: a head of it has the total variation {worst:.2g} '
                    f'to the wanted one, but {MOST_ELSEWHERE} is the most; build the model with wider heads, give '
                    'another alpha, or leave out what changes its scores'
                )
    if method == 'mimetic':
        layers = [layer._replace(heads=(HeadStart(),) * len(layer.heads)) for layer in layers]
    return ConvolutionalStart(tuple(layers))


def _encoding(network: Transformer, attentions: List[Attention]) -> str:
    """Returns how a network encodes positions: ``'relative'``, ``'rotary'`` or ``'absolute'``."""
    if all(attention.positions is not None for attention in attentions):
        return 'relative'
    if network.rope is not None:
        return 'rotary'
    if network.position is not None:
        return 'absolute'
    raise ValueError(f'a {network.kind} has no position encoding that is known: relative, rotary or learned absolute')


def _set_shifts(attentions: List[Attention], kernel_size: Sizes, order: str, generator: torch.Generator) -> None:
    """Gives each head a position of the kernel, in the order of ``init_as_convolution`` or at random."""
    sizes = per_axis('kernel_size', kernel_size, 2)
    # As those of a convolution with padding 'same'.
    kernel = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64, device='cpu') - (n - 1) // 2 for n in sizes))
    heads = [attention.num_heads for attention in attentions]
    if order == 'ordered':
        # As released for 3×3: the centre, up, right, left, down, and the corners row by row. Larger kernels go on so.
        positions = sorted(kernel.tolist(), key=lambda d: (d[0] ** 2 + d[1] ** 2, d[0], d[1] if d[0] else -d[1]))
        shifts = torch.tensor([positions[i % len(kernel)] for n in heads for i in range(n)], device='cpu')
    else:
        shifts = kernel[torch.randint(len(kernel), (sum(heads),), generator=generator, device='cpu')]
    of_positions: Dict[Any, Tensor] = {}
    for attention, own in zip(attentions, shifts.split(heads)):  # layers that share biases have the same shifts
        attention.shifts = of_positions.setdefault(attention.positions or attention, own)


def random_images(network: Transformer, seed: int = 0) -> Tensor:
    """Draws four images for a network, whose amplitude falls as 1/f, as that of photos does (Field 1987).

    They have the mean 0 and the deviation 1.
    """
    height, width = network.img_size
    weight = network.patch_convolutions[0].weight
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(4, weight.shape[1], height, width, generator=generator, dtype=torch.float64, device='cpu')
    rows, columns = (torch.fft.fftfreq(n, device='cpu') for n in (height, width))
    frequency = (rows[:, None] ** 2 + columns**2).sqrt().clamp(min=1 / max(height, width))
    images = torch.fft.ifft2(torch.fft.fft2(noise) / frequency).real
    return ((images - images.mean()) / images.std()).to(weight)


def _report(
    model: nn.Module, network: Transformer, attentions: List[Attention], encoding: str, alpha: float, images: Tensor
) -> List[LayerStart]:
    """Compares the attention of the patches among patches with the wanted one, in one pass of the images.

    Windows that hide keys from a query, shifted ones, hide them from the wanted attention too.
    """
    by_name, layers, unknown = {attention.name: attention for attention in attentions}, {}, []

    def compare(name: str, probs: Tensor, places: Places) -> None:
        if name not in by_name:
            unknown.append(name)
        if places.queries is None or places.keys is None or unknown:
            return
        attention = by_name[name]
        (_, query, whole), (_, key, _) = cells(places.queries), cells(places.keys)
        of_query, of_key = (torch.stack([own // whole[1], own % whole[1]], -1) for own in (query, key))
        shifts = of_key[:, None] - of_query[:, :, None]
        own = probs.double().masked_fill((key < 0)[:, None, None], 0)
        total = own.sum(-1, keepdim=True)
        own = own / total.clamp(min=torch.finfo(own.dtype).tiny)
        wanted = attention.shifts.to(own.device)[:, None, None]
        scores = -alpha * (shifts[:, None] - wanted).double().square().sum(-1)  # (B, N_h, Q, K)
        wanted = scores.masked_fill(~places.sees(probs)[:, None], -torch.inf).softmax(-1)
        of_patches = (query >= 0)[:, None].expand(own.shape[:-1])
        number = of_patches.sum((0, 2))
        variations = ((own - wanted).abs().sum(-1) / 2).where(of_patches, 0).sum((0, 2)) / number
        share = max(0.0, float(1 - total[of_patches].mean())) if (key < 0).any() else 0.0  # and no rounding error
        heads = tuple(HeadStart((i, j), x) for (i, j), x in zip(attention.shifts.tolist(), variations.tolist()))
        layers[name] = LayerStart(name, encoding, attention.window or whole, heads, share)

    with watching(model, compare, network.in_blocks):
        network.module(images)
    for name in unknown[:1]:
        kind = type(model.get_submodule(name.partition('#')[0]))
        raise ValueError(f'{name} of a {network.kind} is a {kind.__name__} of {kind.__module__}: {KNOWN}')
    missing = [name for name in by_name if name not in layers]
    if missing:
        raise ValueError(f'{missing[0]} is attention that a {network.kind} does not run on patches')
    return [layers[name] for name in by_name]
