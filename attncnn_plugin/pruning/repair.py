"""Two ways to repair degenerate heads: a penalty on singular ones, and drawing heads anew.

The penalty is this package's own. Cordonnier et al. 2020 (C20) add the mean of (κ − 1)² for the condition numbers κ to
the loss in their code, which has no bound and is largest for heads that are not round.
"""

import copy
import math
from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from ..attention.attention_layer import AttentionLayer
from ..attention.positions import GeneralizedQuadraticEncoding, LearnedEncoding, QuadraticEncoding
from ..attention.tokens import GridAttention
from ..attention.window import shown
from .criteria import determinant, gaussian_factor


def singular_penalty(layer: AttentionLayer, max_condition: float = 100.0, min_eigenvalue: float = 1e-3) -> Tensor:
    """Computes a penalty on Gaussian heads that come near a singular Σ⁻¹, uniform or a stripe.

        Σ_h max(0, 1 − u_h/u₀)²,    u = 2√(λ₁λ₂) / (λ₁ + λ₂ + 2ε) = 2|det M| / (‖M‖² + 2ε)

    u is 2√κ/(κ + 1) for a condition number κ and λ ≫ ε, and λ/(λ + ε) for λ₁ = λ₂ = λ. u₀ and ε are such that the
    penalty begins at κ = ``max_condition`` for the first and at λ = ``min_eigenvalue`` for the second. A head adds 1 at
    most.

    It has a gradient wherever M ≠ 0, also where det M = 0; at M = 0 the gradient is 0, and :func:`reset_heads` helps.
    At a learning rate of 0.1 a weight of 0.01 repairs a head within some tens of steps of SGD.

    Args:
        layer (AttentionLayer): ``QuadraticAttention``, whose heads have κ = 1, or ``GeneralizedQuadraticAttention``.
        max_condition (float): κ up to which a head is free of it, above 1. Defaults to 100.
        min_eigenvalue (float): λ in 1/tokens² from which on a round head is free of it. Defaults to 1e-3, a
            standard deviation of 32 tokens.

    Returns:
        Tensor: A scalar, differentiable, at least float32.

    Raises:
        TypeError: The heads of ``layer`` are not Gaussian.
        ValueError: A setting out of range; heads that do not have two axes.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=3)
        >>> layer.encoding.sqrt_precision.data = torch.tensor([1.0, 0.0, 0.5])  # the second is uniform
        >>> singular_penalty(layer).item()
        1.0
    """
    if not 1 < max_condition < math.inf:
        raise ValueError(f'max_condition={max_condition} must be a number above 1')
    if not 0 < min_eigenvalue < math.inf:
        raise ValueError(f'min_eigenvalue={min_eigenvalue} must be a number above 0')
    factor = gaussian_factor(layer)
    if factor.shape[-1] != 2:
        raise ValueError(f'the heads of layer have {factor.shape[-1]} axes, but the penalty is for two')
    least = 2 * math.sqrt(max_condition) / (max_condition + 1)  # u₀
    epsilon = min_eigenvalue * (1 / least - 1)  # λ/(λ + ε) = u₀
    det = determinant(factor)
    # |det M| with the slope 1 at 0, where that of abs() is 0: an exact stripe has a way out.
    det = torch.where(det >= 0, det, -det)
    roundness = 2 * det / (factor.square().sum((1, 2)) + 2 * epsilon)
    return (1 - roundness / least).clamp(min=0).square().sum()


@torch.no_grad()
def reset_heads(layer: AttentionLayer, heads: Sequence[int], generator: Optional[torch.Generator] = None) -> None:
    """Draws some heads anew, as when the layer was built: centre and width, or v for the learned encoding, and values.

    The values are the head's slice of the value matrices, which learned to go with the old map; with scores of content,
    its queries and keys are drawn too. The released code of C20 (``reset_heads``) means to redraw centres, widths and
    values, but writes centres and values into copies, which changes nothing, and redraws the widths of all heads; no
    run of the paper has it.

    In place, and nothing else changes: not the other heads, not the bias, not an optimizer's momentum. The numbers are
    drawn on the CPU: equal generators give equal heads on every rank and device.

    Args:
        layer (AttentionLayer): ``QuadraticAttention``, ``GeneralizedQuadraticAttention`` or ``LearnedAttention``, or
            ``ContentAttention`` with quadratic positions.
        heads (Sequence[int]): The heads, from 0 to N_h − 1.
        generator (torch.Generator, optional): Of the CPU; one number is drawn from it. Defaults to PyTorch's own.

    Raises:
        TypeError: ``layer`` has none of these encodings.
        ValueError: A head that is not there.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> layer = QuadraticAttention(dim=8, num_heads=2)
        >>> layer.encoding.sqrt_precision.data = torch.zeros(2)
        >>> reset_heads(layer, [1])
        >>> layer.encoding.sqrt_precision.round(decimals=1).tolist()
        [0.0, 1.0]
    """
    encoding = getattr(layer, 'encoding', None)
    encodings = (QuadraticEncoding, GeneralizedQuadraticEncoding, LearnedEncoding)
    if not isinstance(layer, GridAttention) or not isinstance(encoding, encodings):
        raise TypeError(
            f'layer is a {type(layer).__name__}, but only heads with a quadratic, a generalized quadratic '
            'or a learned encoding can be reset'
        )
    heads = list(heads)
    if any(type(head) is not int or not 0 <= head < layer.num_heads for head in heads):
        raise ValueError(f'heads={shown(heads)} must be heads from 0 to {layer.num_heads - 1}')
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    fresh, entries = copy.deepcopy(layer).cpu(), layer.head_entries(heads)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the devices
        for owner in dict.fromkeys(name.rpartition('.')[0] for name in entries):
            reset: Any = fresh.get_submodule(owner)
            reset.reset_parameters()
    for name, (dim, index) in entries.items():
        own, new = layer.get_parameter(name), fresh.get_parameter(name)
        own.index_copy_(dim, index, new.index_select(dim, index.cpu()).to(own.device))
