"""How many heads go: by a threshold of their importance, a number to keep, or a share of the multiply-adds."""

from contextlib import ExitStack
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..attention.window import shown
from ..transformers.heads import TransformerHeads
from .heads import Heads, prunable_heads

AMOUNTS = {
    'threshold': 'a number of at least 0',
    'keep': 'a number of heads',
    'multiply_adds': 'a share above 0, up to 1',
}


@torch.no_grad()
def head_costs(model: nn.Module, run: Callable[[], Any]) -> Tuple[int, Dict[str, Tensor]]:
    """Multiply-adds of a model, and those of each of its heads.

    All that attention computes is in proportion to its heads. Heads of other widths share it by their weights.

    Args:
        model (nn.Module): The model, in evaluation mode.
        run (Callable): Calls it or a part of it, for instance ``lambda: model(images)``.

    Returns:
        tuple[int, dict[str, Tensor]]: Those of the whole model, and by the name of the layer those of its heads,
        ``(N_h,)``, float64.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1).eval()
        >>> total, costs = head_costs(model, lambda: model(torch.rand(1, 3, 32, 32)))
        >>> tokens, width = 5, 64
        >>> costs['blocks.0.attn'][0].item() == tokens * width * (4 * 192 + 2 * tokens)
        True
    """
    layers, counter = prunable_heads(model), FlopCounterMode(display=False)
    flops = dict.fromkeys(layers, 0)

    def count(name: str, sign: int) -> None:
        flops[name] += sign * counter.get_total_flops()

    with ExitStack() as stack:
        for name, layer in layers.items():
            module = _module_of(layer)
            before = module.register_forward_pre_hook(lambda *_, name=name: count(name, -1))
            after = module.register_forward_hook(lambda *_, name=name: count(name, 1))
            stack.callback(before.remove)
            stack.callback(after.remove)
        # Fused kernels on the CPU are not counted by every version of PyTorch; the plain products are.
        with counter, sdpa_kernel(SDPBackend.MATH):
            run()
    costs = {}
    for name, layer in layers.items():
        weights = torch.tensor([_weights_of(layer, head) for head in range(layer.num_heads)], dtype=torch.float64)
        costs[name] = flops[name] / 2 * weights / weights.sum()
    return counter.get_total_flops() // 2, costs


def least_important(
    importance: Mapping[str, Tensor],
    threshold: Optional[float] = None,
    keep: Optional[int] = None,
    multiply_adds: Optional[float] = None,
    costs: Optional[Tuple[float, Mapping[str, Tensor]]] = None,
    allow_empty: bool = False,
) -> Dict[str, List[int]]:
    """The heads to remove, the least important first, over all layers (Michel et al. 2019, section 4).

    Args:
        importance (Mapping[str, Tensor]): Of each head by the name of the layer, of
            :func:`~attncnn_plugin.pruning.head_importance`.
        threshold (float, optional): Removes all heads below it. Defaults to None.
        keep (int, optional): The number of heads of the whole model that stay. Defaults to None.
        multiply_adds (float, optional): The share of the model's multiply-adds that stays, above 0, up to 1. Defaults
            to None.
        costs (tuple, optional): Of :func:`head_costs`, for ``multiply_adds``. Defaults to None.
        allow_empty (bool): Whether all heads of a layer may go; otherwise its most important one stays. Defaults to
            False.

    Returns:
        dict[str, list[int]]: By the name of the layer, rising; layers that lose none are left out.

    Raises:
        ValueError: Not one of the three is given, or it cannot be reached; an importance that is not finite.

    Examples:
        >>> importance = {'a': torch.tensor([0.1, 0.9, 0.2]), 'b': torch.tensor([0.4, 0.3])}
        >>> least_important(importance, threshold=0.35)
        {'a': [0, 2], 'b': [1]}
        >>> least_important(importance, keep=4)
        {'a': [0]}
    """
    check_amount(threshold, keep, multiply_adds)
    for name, own in importance.items():
        if not (own < torch.inf).all():
            raise ValueError(
                f'the importance of the heads of {name} is {own.tolist()}, which has no order: there were no images, '
                'or the loss of some is not a finite number'
            )
    ranked = sorted((value, name, head) for name, own in importance.items() for head, value in enumerate(own.tolist()))
    if not allow_empty:
        best = {(name, int(own.argmax())) for name, own in importance.items() if len(own)}
        ranked = [entry for entry in ranked if entry[1:] not in best]
    heads = sum(len(own) for own in importance.values())
    if threshold is not None:
        chosen = [entry for entry in ranked if entry[0] < threshold]
    elif keep is not None:
        if keep > heads:
            raise ValueError(f'keep={keep} must be at most {heads}, the number of heads')
        if not heads - len(ranked) <= keep:
            raise ValueError(
                f'keep={keep} heads of {heads} cannot be reached: one of each of the {len(importance)} layers stays'
            )
        chosen = ranked[: heads - keep]
    else:
        assert multiply_adds is not None
        if costs is None:
            raise ValueError(f'multiply_adds={multiply_adds} needs costs, those of head_costs')
        chosen = _until(ranked, multiply_adds, costs)
    found: Dict[str, List[int]] = {}
    for _, name, head in chosen:
        found.setdefault(name, []).append(head)
    return {name: sorted(found[name]) for name in importance if name in found}


def check_amount(threshold: Optional[float], keep: Optional[int], multiply_adds: Optional[float]) -> None:
    """Whether exactly one of these says how many heads go, and is possible.

    Raises:
        ValueError: It is not so.
    """
    given = {
        name: value
        for name, value in dict(threshold=threshold, keep=keep, multiply_adds=multiply_adds).items()
        if value is not None
    }
    if len(given) != 1:
        raise ValueError(f'{given or "nothing"} says how many heads go: give one of threshold, keep and multiply_adds')
    ((name, value),) = given.items()
    is_number = isinstance(value, int if name == 'keep' else (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= 0 or name == 'multiply_adds' and not 0 < value <= 1:
        raise ValueError(f'{name}={shown(value)} must be {AMOUNTS[name]}')


def _until(
    ranked: List[Tuple[float, str, int]], share: float, costs: Tuple[float, Mapping[str, Tensor]]
) -> List[Tuple[float, str, int]]:
    """As many of the ranked heads as bring the multiply-adds down to a share."""
    total, of_heads = costs
    left, chosen = float(total), []
    for entry in ranked:
        if left <= share * total:
            break
        left -= float(of_heads[entry[1]][entry[2]])
        chosen.append(entry)
    if left > share * total:
        raise ValueError(
            f'multiply_adds={share} cannot be reached: without the {len(chosen)} heads that may go, '
            f'{left / total:.3f} of the multiply-adds are left'
        )
    return chosen


def _module_of(layer: Heads) -> nn.Module:
    return layer.module if isinstance(layer, TransformerHeads) else layer


def _weights_of(layer: Heads, head: int) -> int:
    """The number of entries of a head in all parameters."""
    parameters = dict(_module_of(layer).named_parameters())
    return sum(
        len(index) * (parameters[name].numel() // max(1, parameters[name].shape[dim]))
        for name, (dim, index) in layer.head_entries([head]).items()
        if name in parameters
    )
