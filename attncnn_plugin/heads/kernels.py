"""Functions outside of PyTorch that compute attention, of flash_attn and xformers, and what they compute."""

import itertools
import sys
import threading
from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

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
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    **options: Any,
) -> Tuple[Tensor, Tensor]:
    """Computes the scores of ``flash_attn.flash_attn_func``, of ``(B, N, N_h, D_h)``; the last query sees all keys.

    Raises:
        NotImplementedError: A window, a cap or slopes, as of language models.
    """
    if tuple(window_size) != (-1, -1) or softcap or alibi_slopes is not None:
        raise NotImplementedError('maps of flash_attn_func with window_size, softcap or alibi_slopes are unknown')
    scores, value = with_values(q, k, v, softmax_scale)
    queries, keys = scores.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
    return scores.masked_fill(hidden, -torch.inf) if causal else scores, value


def scores_of_xformers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    **options: Any,
) -> Tuple[Tensor, Tensor]:
    """Computes the scores of ``xformers.ops.memory_efficient_attention``, ``(B, N, N_h, D_h)``."""
    scores, value = with_values(query, key, value, scale)
    if hasattr(attn_bias, 'materialize'):
        attn_bias = attn_bias.materialize(tuple(scores.shape), device=scores.device)
    return scores if attn_bias is None else scores + attn_bias, value


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
#: where a query does not see a key, and its values ``(B, N_h, K, D_h)``. Its output is ``(B, Q, N_h, D_h)``.
KERNELS: Dict[str, Kernel] = {
    'flash_attn.flash_attn_func': scores_of_flash,
    'xformers.ops.memory_efficient_attention': scores_of_xformers,
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
