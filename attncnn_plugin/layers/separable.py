"""Attention along rows, then along columns, and the linear map of the heads: Σ_h (P1_h ⊗ P2_h) X V_hᵀ.

The order of the contractions, by multiply-adds a token, head and channel: H + W for the mixing, D for the linear map,
whichever comes first. Attention comes first, because the backward pass needs what enters the linear map: P_h X can be
computed again for H + W (at 16x16 tokens and D = 400 2% of a training step), which keeps nothing but X, where X V_hᵀ
would cost D, or N_h tensors of the size of X. Heads are in the outer loop, so that a head's tensors are still in the
cache when they are used, and the map of all heads needs no transposed copy.
"""

from typing import Any, Iterable, Iterator, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .linear import LinearMap, is_exporting
from .precision import matmul_dtype


def mix_rows(probs: Tensor, x: Tensor) -> Tensor:
    """Σ_k1 P1[q1, k1] X[k1, k2]: ``(H, H)`` and ``(B, H, W, D)`` to ``(B, H, W, D)``."""
    batch, height, width, dim = x.shape
    mixed = torch.bmm(probs.expand(batch, height, height), x.reshape(batch, height, width * dim))
    return mixed.reshape(x.shape)


def mix_columns(probs: Tensor, x: Tensor) -> Tensor:
    """Σ_k2 P2[q2, k2] X[k1, k2]: ``(W, W)`` and ``(B, H, W, D)`` to ``(B, H, W, D)``."""
    batch, height, width, dim = x.shape
    mixed = torch.bmm(probs.expand(batch * height, width, width), x.reshape(batch * height, width, dim))
    return mixed.reshape(x.shape)


def mix_values(values: Tensor, row_probs: Tensor, column_probs: Tensor) -> Tensor:
    """(P1_h ⊗ P2_h) V_h, for heads with values of their own.

    Args:
        values (Tensor): V of all heads, ``(B, H, W, N_h, D_h)``.
        row_probs (Tensor): P1, ``(N_h, H, H)``.
        column_probs (Tensor): P2, ``(N_h, W, W)``.

    Returns:
        Tensor: As ``values``, in their dtype, or that of autocast.
    """
    dtype = matmul_dtype(values)
    mixed = values.to(dtype).permute(0, 3, 1, 2, 4)  # (B, N_h, H, W, D_h)
    mixed = torch.matmul(row_probs.to(dtype), mixed.flatten(3)).unflatten(3, mixed.shape[3:])
    return torch.matmul(column_probs.to(dtype)[:, None], mixed).permute(0, 2, 3, 1, 4)


def separable_heads(x: Tensor, row_probs: Tensor, column_probs: Tensor) -> Iterator[Tensor]:
    """(P1_h ⊗ P2_h) X of one head after the other, ``(B, H, W, D)``; arguments as of :func:`attend_separable`."""
    dtype = matmul_dtype(x)
    for rows, columns in zip(row_probs.to(dtype), column_probs.to(dtype)):
        yield mix_columns(columns, mix_rows(rows, x.to(dtype)))


def map_heads(heads: Iterable[Tensor], output_map: Union[LinearMap, nn.Module]) -> Tensor:
    """Σ_h Y_h V_hᵀ + b.

    Args:
        heads (Iterable[Tensor]): Y_h of one head at a time, ``(B, H, W, D)``, at least one.
        output_map (LinearMap | nn.Module): V of all heads, ``(D_out, N_h·D)``, and b; or a module that maps the
            concatenated heads.

    Returns:
        Tensor: ``(B, H, W, D_out)``.
    """
    if not isinstance(output_map, LinearMap):
        return output_map(torch.cat(list(heads), dim=-1))
    output: Any = None
    start = 0
    for head in heads:
        value = output_map.weight[:, start : start + head.shape[3]]
        start += head.shape[3]
        tokens = head.flatten(0, 2)
        first = output is None
        output = LinearMap(value, output_map.bias)(tokens) if first else torch.addmm(output, tokens, value.T)
    return output.reshape(*head.shape[:3], len(output_map.weight))


def attend_separable(
    x: Tensor,
    row_probs: Tensor,
    column_probs: Tensor,
    output_map: Union[LinearMap, nn.Module],
) -> Tensor:
    """Σ_h Σ_k1 Σ_k2 P1_h[q1, k1] P2_h[q2, k2] X[k1, k2] V_hᵀ + b.

    Args:
        x (Tensor): ``(B, H, W, D)``.
        row_probs (Tensor): P1, ``(N_h, H, H)``, at least one head.
        column_probs (Tensor): P2, ``(N_h, W, W)``.
        output_map (LinearMap | nn.Module): See :func:`map_heads`.

    Returns:
        Tensor: ``(B, H, W, D_out)``, in the dtype of x, or that of autocast.
    """
    if not isinstance(output_map, LinearMap):
        return map_heads(separable_heads(x, row_probs, column_probs), output_map)
    dtype = matmul_dtype(x)
    output_map = output_map.to(dtype)
    tensors = x.to(dtype), row_probs.to(dtype), column_probs.to(dtype), output_map.weight, output_map.bias
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if learns and not is_exporting() and not torch.jit.is_tracing():
        return _SeparableAttention.apply(*tensors)
    return _SeparableAttention.forward(*tensors)


class _SeparableAttention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, row_probs: Tensor, column_probs: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        return map_heads(separable_heads(x, row_probs, column_probs), LinearMap(weight, bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        x, row_probs, column_probs, weight = ctx.saved_tensors
        needs_x, needs_rows, needs_columns, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grad.flatten(0, 2)
        grad_x, grad_rows, grad_columns, grad_weight = torch.zeros_like(x), [], [], []
        for rows, columns, value in zip(row_probs, column_probs, weight.split(x.shape[3], dim=1)):
            # Y = P1 X, Z = P2 Y, output += Z Vᵀ.
            mixed: Any = mix_rows(rows, x) if needs_columns or needs_weight else None
            if needs_weight:
                grad_weight.append(grad.T @ mix_columns(columns, mixed).flatten(0, 2))
            if not (needs_x or needs_rows or needs_columns):
                continue
            grad_head = (grad @ value).reshape(x.shape)
            if needs_columns:
                grad_columns.append(_outer_sum(grad_head.flatten(0, 1), mixed.flatten(0, 1)))
            grad_mixed = mix_columns(columns.T, grad_head)
            if needs_rows:
                grad_rows.append(_outer_sum(grad_mixed.flatten(2), x.flatten(2)))
            if needs_x:
                grad_x = grad_x + mix_rows(rows.T, grad_mixed)
        return (
            grad_x if needs_x else None,
            torch.stack(grad_rows) if needs_rows else None,
            torch.stack(grad_columns) if needs_columns else None,
            torch.cat(grad_weight, dim=1) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def _outer_sum(grad: Tensor, x: Tensor) -> Tensor:
    """Σ_b G_b X_bᵀ of ``(B, n, d)`` and ``(B, n, d)``, ``(n, n)``."""
    return torch.bmm(grad, x.mT).sum(0)
