"""ConViT's gated positional self-attention (d'Ascoli et al. 2021) as attention of this package, weights and all."""

from typing import Any, List, Optional, Tuple

import torch
from torch import nn

from ..layers.content_attention import ContentAttention
from .report import GatedHead, GatedReport

PARTS = ('qk', 'v', 'proj', 'pos_proj')


@torch.no_grad()
def gpsa_to_attention(gpsa: nn.Module) -> Tuple[ContentAttention, GatedReport]:
    """Builds the layer that computes what a ``GPSA`` of timm's ConViT does.

    The score by position, pos_proj of (δ2, δ1, ‖δ‖²), becomes v·r_δ with a free v: training can have turned a head
    from a Gaussian to one that prefers the farthest keys, so that the layer says nothing of centres; the report does,
    for the heads that have one. The bias of pos_proj adds the same to all keys and is left out. That of the values
    becomes a part of the bias of the output, since probabilities add up to 1; with attention dropout, in training, this
    is so on average alone.

    Args:
        gpsa (nn.Module): With ``qk``, ``v``, ``proj``, ``pos_proj``, ``gating_param``, ``num_heads`` and ``attn_drop``,
            as timm's ``blocks[i].attn`` of a ``convit_*`` has them for the first blocks.

    Returns:
        tuple[ContentAttention, GatedReport]: The layer, from ``(B, H, W, D)`` to the same for any H and W, where GPSA
        has tokens ``(B, N, D)`` of a square; and what its heads look at. It has the dtype, device and mode of ``gpsa``,
        and parameters of its own.

    Raises:
        TypeError: ``gpsa`` has not these parts, or they are no plain linear layers.
        ValueError: Dropout after the output map, for which the layer has no place.

    Examples:
        >>> import timm
        >>> convit = timm.create_model('convit_tiny', depth=2, local_up_to_layer=1).eval()
        >>> gpsa = convit.blocks[0].attn
        >>> attention, report = gpsa_to_attention(gpsa)
        >>> x = torch.randn(1, 6, 6, 192)
        >>> torch.allclose(attention(x), gpsa(x.flatten(1, 2)).view(x.shape), atol=1e-5)
        True
        >>> print(report)
        head  by position  alpha   centre
        0     0.731        1       (-0.50, -0.50)
        1     0.731        1       (0.50, -0.50)
        2     0.731        1       (-0.50, 0.50)
        3     0.731        1       (0.50, 0.50)
    """
    _check(gpsa)
    own: Any = gpsa
    dim, num_heads = own.proj.weight.shape[1], own.num_heads
    weight = own.proj.weight
    attention = ContentAttention(
        dim,
        num_heads,
        position='relative_free_quadratic',
        gated=True,
        qk_dim=dim // num_heads,
        qk_bias=own.qk.bias is not None,
        head_dim=dim // num_heads,
        attn_drop=own.attn_drop.p,
        device=weight.device,
        dtype=weight.dtype,
    )
    for linear, matrix in zip((attention.query, attention.key), own.qk.weight.chunk(2)):
        linear.weight.copy_(matrix)
    if own.qk.bias is not None:
        for linear, bias in zip((attention.query, attention.key), own.qk.bias.chunk(2)):
            linear.bias.copy_(bias)
    attention.value_proj.weight.copy_(own.v.weight)
    attention.value.load_state_dict(own.proj.state_dict())
    if own.v.bias is not None:  # W_out (P (X W + b)) = W_out P X W + W_out b
        attention.value.bias.add_(weight @ own.v.bias)
    attention.encoding.weight.copy_(own.pos_proj.weight.flip(1))  # (‖δ‖², δ1, δ2), which timm has the other way round
    attention.gate.copy_(own.gating_param)
    attention.train(gpsa.training)
    return attention, _report(attention)


def _check(gpsa: nn.Module) -> None:
    wrong = [name for name in PARTS if type(getattr(gpsa, name, None)) is not nn.Linear]
    wrong += [name for name in ('gating_param', 'num_heads', 'attn_drop') if not hasattr(gpsa, name)]
    if wrong:
        raise TypeError(
            f'gpsa is a {type(gpsa).__name__}, whose {", ".join(wrong)} are missing or no plain linear layers: give '
            "the attn of one of the first blocks of timm's convit_*"
        )
    drop = getattr(getattr(gpsa, 'proj_drop', None), 'p', 0.0)
    if drop:
        raise ValueError(
            f'proj_drop={drop} of gpsa is dropout after its output map, which ContentAttention has not: set it to 0, '
            'and put nn.Dropout after the layer'
        )


def _report(attention: ContentAttention) -> GatedReport:
    shares: Any = attention.position_share()
    heads: List[GatedHead] = []
    for share, (square, *linear) in zip(shares.tolist(), attention.encoding.weight.tolist()):
        center: Optional[Tuple[float, float]] = None
        if square < 0:  # −α‖δ − Δ‖² = −α‖δ‖² + 2αΔ·δ − α‖Δ‖²
            center = -linear[0] / (2 * square), -linear[1] / (2 * square)
        heads.append(GatedHead(share, center, -square))
    return GatedReport(tuple(heads))
