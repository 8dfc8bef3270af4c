"""Functions outside of PyTorch that compute attention, of flash_attn, xformers and NATTEN, and what they compute."""

import itertools
import sys
import threading
from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..attention.precision import at_least_float32

Kernel = Callable[..., Tuple[Tensor, Tensor]]
_lock = threading.Lock()
_replaced: List[Tuple[Dict[str, Any], str, Any, Any]] = []
_watching = 0


def scores_of_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    **options: Any,
) -> Tuple[Tensor, Tensor]:
    """Computes the scores of ``flash_attn.flash_attn_func``, of ``(B, N, N_h, D_h)``; the last query sees all keys."""
    scores, value = with_values(q, k, v, softmax_scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    queries, keys = scores.shape[-2:]
    shift = torch.arange(keys, device=q.device) - torch.arange(keys - queries, keys, device=q.device)[:, None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * shift.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros_like(shift, dtype=torch.bool)
    if left >= 0:
        hidden |= shift < -left
    if right >= 0:
        hidden |= shift > right
    return scores.masked_fill(hidden, -torch.inf), value


def scores_of_xformers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    **options: Any,
) -> Tuple[Tensor, Tensor]:
    """Computes the scores of ``xformers.ops.memory_efficient_attention``, ``(B, N, N_h, D_h)`` or ``(B, N, D_h)``."""
    if query.ndim == 3:
        query, key, value = query[:, :, None], key[:, :, None], value[:, :, None]
    scores, value = with_values(query, key, value, scale)
    if hasattr(attn_bias, 'materialize'):
        attn_bias = attn_bias.materialize(tuple(scores.shape), device=scores.device)
    return scores if attn_bias is None else scores + attn_bias, value


def scores_of_natten(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Union[int, Sequence[int]],
    stride: Union[int, Sequence[int]] = 1,
    dilation: Union[int, Sequence[int]] = 1,
    is_causal: Union[bool, Sequence[bool]] = False,
    scale: Optional[float] = None,
    **options: Any,
) -> Tuple[Tensor, Tensor]:
    """Computes the scores of ``natten.na2d``, of ``(B, H, W, N_h, D_h)``; at borders the window moves inwards.

    Raises:
        NotImplementedError: A stride, or causal masks.
    """
    if stride not in (1, (1, 1)) or is_causal not in (False, (False, False)):
        raise NotImplementedError(
            f'maps of na2d with stride={stride}, is_causal={is_causal}: only 1 and False are known'
        )
    sides = query.shape[1:3]
    sizes, steps = ((own, own) if isinstance(own, int) else own for own in (kernel_size, dilation))
    near = []
    for side, size, step in zip(sides, sizes, steps):
        place = torch.arange(side, device=query.device)
        group, rank = place % step, place // step
        last = (side - 1 - group) // step + 1 - size  # the last window of the places of a group
        start = torch.minimum((rank - size // 2).clamp(min=0), last)[:, None]
        near.append((group[:, None] == group) & (rank >= start) & (rank < start + size))
    sees = (near[0][:, None, :, None] & near[1][:, None]).flatten(2).flatten(0, 1)
    scores, value = with_values(query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2), scale)
    return scores.masked_fill(~sees, -torch.inf), value


def with_values(query: Tensor, key: Tensor, value: Tensor, scale: Optional[float]) -> Tuple[Tensor, Tensor]:
    """Returns Q Kᵀ/√d of ``(B, N, N_h, D_h)``, ``(B, N_h, Q, K)``, and the values ``(B, N_h, K, D_h)``."""
    query, key, value = (own.movedim(-2, 1) for own in (query, key, value))
    return dot_products(query, key, scale), value.repeat_interleave(query.shape[1] // value.shape[1], 1)


def dot_products(query: Tensor, key: Tensor, scale: Optional[float]) -> Tensor:
    """Computes Q Kᵀ/√d, where heads may share keys."""
    query, key = at_least_float32(query), at_least_float32(key)
    if query.ndim > 3 and key.ndim > 3 and 1 < key.shape[-3] < query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT


#: By the name of a function, what takes its arguments and returns its scores before softmax, ``(B, N_h, Q, K)``, −inf
#: where a query does not see a key, and its values ``(B, N_h, K, D_h)``. Its output has the heads next to last.
KERNELS: Dict[str, Kernel] = {
    'flash_attn.flash_attn_func': scores_of_flash,
    'xformers.ops.memory_efficient_attention': scores_of_xformers,
    'natten.na2d': scores_of_natten,
}


@contextmanager
def shown_to_modes() -> Iterator[None]:
    """Lets a ``TorchFunctionMode`` see the calls of these functions wherever a module has them by name."""
    global _watching
    with _lock:
        _watching += 1
        if _watching == 1:
            for name, kernel in KERNELS.items():
                module, _, function = name.rpartition('.')
                own = getattr(sys.modules.get(module), function, None)
                if own is not None:
                    _replace(own, kernel)
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            while not _watching and _replaced:
                namespace, key, own, shown = _replaced.pop()
                if namespace.get(key) is shown:
                    namespace[key] = own


def _replace(own: Any, kernel: Kernel) -> None:
    @wraps(own)
    def shown(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in itertools.chain(args, kwargs.values()) if isinstance(each, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(shown, tensors, *args, **kwargs)
        return own(*args, **kwargs)

    shown.kernel = kernel  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        namespace = getattr(module, '__dict__', {})
        for key in [key for key, value in list(namespace.items()) if value is own]:
            namespace[key] = shown
            _replaced.append((namespace, key, own, shown))
