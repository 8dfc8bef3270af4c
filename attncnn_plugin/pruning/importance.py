"""The importance of heads: "Are Sixteen Heads Really Better than One?" (Michel et al. 2019), 3.1.

A gate ξ_h multiplies the output of head h, ξ_h = 1 (their eq. 1). The importance of the head is the expectation over
the images of |∂L(x)/∂ξ_h| (eq. 2), the loss of an image without the head, to first order. How many of the least
important heads go is said by a threshold, by a number to keep, or by a share of the multiply-adds.
"""

import itertools
from contextlib import ExitStack, contextmanager
from numbers import Integral, Real
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from ..attention.evaluation_mode import evaluating
from ..attention.window import shown
from ..change import held_by
from ..heads.choice import Layers, chosen_by
from ..heads.found import find_entries, is_in, seen_heads
from ..heads.places import Places, cells
from ..heads.seen import AnyAttention, watching

Loss = Callable[[nn.Module, Any], Union[Tensor, Tuple[Tensor, Any]]]
AMOUNTS: Dict[str, Tuple[str, Callable[[Any], bool]]] = {  # what each must be
    'threshold': ('a number of at least 0', lambda value: value >= 0),
    'keep': (
        'a number of heads, or a share of them above 0 and below 1',
        lambda value: isinstance(value, Integral) and int(value) >= 0 or 0 < value < 1,
    ),
    'multiply_adds': ('a share above 0, up to 1', lambda value: 0 < value <= 1),
}


def of_images(of_calls: Sequence[Tuple[Tensor, Places]], images: int) -> Tensor:
    """Returns ∂L/∂ξ of the loss of each image, ``(images, N_h)``, by those of the mean loss in each call.

    A call has rows for all images. Which image a row is of, such as a window, its places say; where they are unknown,
    windows of an image lie one after the other. Attention can be called several times in one pass.
    """
    total = of_calls[0][0].new_zeros(images, of_calls[0][0].shape[1])
    for rows, places in of_calls if images else ():
        if len(rows) % images:
            raise ValueError(f'a layer got {len(rows)} rows for {images} images: as many rows of each were expected')
        image = torch.arange(images, device=rows.device).repeat_interleave(len(rows) // images)
        if places.queries is not None:
            image = cells(places.queries)[0].amax(1).where((places.queries > 0).any(1), image)
        total.index_add_(0, image, images * rows)
    return total


@torch.enable_grad()
def loss_and_gradients(
    model: nn.Module, batch: Any, loss: Loss, wanted: Callable[[str], bool]
) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Returns the loss of a batch, and by the names of attention ∂L/∂ξ of each image and head, ``(images, N_h)``."""
    outputs: List[Tuple[AnyAttention, Tensor]] = []

    def touch(attention: AnyAttention, output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()  # nothing before it is trained
        outputs.append((attention, output))
        return output

    with called_once(model) as images, watching(model, wanted=wanted, touch=touch):
        value, _ = loss_and_right(loss(model, batch))
        # Checkpointing computes blocks again here, with outputs that the loss does not depend on.
        seen = [own for own in outputs if not own[0].is_linear]
        found = torch.autograd.grad(value, [y for _, y in seen], allow_unused=True) if seen else ()
    of_calls: Dict[str, List[Tuple[Tensor, Places]]] = {}
    for (attention, y), gradient in zip(seen, found):
        calls = of_calls.setdefault(attention.name.partition('#')[0], [])
        if gradient is not None:
            of_heads = attention.of_heads(y.detach().double() * gradient.double())
            rows = torch.stack([own.flatten(1).sum(1) for own in of_heads], 1)  # ∂L/∂ξ = Σ y ∂L/∂y
            calls.append((rows, attention.places))
    for name, calls in of_calls.items():
        if not calls:
            raise ValueError(f'the loss does not depend on the heads of {name}: they have no importance')
    return value, {name: of_images(calls, images[0]) for name, calls in of_calls.items()}


@torch.inference_mode(False)
def head_importance(
    model: nn.Module, batches: Iterable[Any], loss: Loss, normalize: bool = True, layers: Layers = None
) -> Dict[str, Tensor]:
    """Computes the importance of each head, E_x |∂L(x)/∂ξ_h| (Michel et al. 2019, eq. 2).

    The model runs in evaluation mode, and is as before afterwards; no gradients of parameters are computed.

    Args:
        model (nn.Module): Any model with softmax attention, see :func:`attncnn_plugin.attention_maps`.
        batches (Iterable): Some batches of training images.
        loss (Callable): ``loss(model, batch)`` is the mean loss of the batch's images, a scalar, or a pair that begins
            with it, as for :func:`~attncnn_plugin.pruning.head_ablation`; it calls the model once, with the images
            first.
        normalize (bool): Whether the importances of a layer's heads are divided by their l2 norm, so that those of
            different layers can be compared (Michel et al. 2019, after Molchanov et al. 2017). Defaults to True.
        layers (str | Iterable[str] | callable, optional): As of :func:`attncnn_plugin.attention_maps`. Defaults to
            None, all attention.

    Returns:
        dict[str, Tensor]: By the name of the layer ``(N_h,)``, float64, on the CPU.

    Raises:
        ValueError: No attention is seen, or there are no batches; or ``loss`` does not use the model as above, or is
            not a finite number.

    Examples:
        >>> import timm
        >>> from torch.nn.functional import cross_entropy
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1)
        >>> batches = [(torch.rand(4, 3, 32, 32), torch.arange(4))]
        >>> importance = head_importance(model, batches, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
        >>> importance['blocks.0.attn'].shape, round(importance['blocks.0.attn'].norm().item(), 6)
        (torch.Size([3]), 1.0)
    """
    total: Dict[str, Tensor] = {}
    number, images = -1, 0
    with evaluating(model):
        for number, batch in enumerate(batches):
            value, gradients = loss_and_gradients(model, batch, loss, chosen_by(layers))
            check_finite(value, number)
            for name, own in gradients.items():
                total[name] = total.get(name, 0) + own.abs().sum(0).cpu()
            images += max(map(len, gradients.values()), default=0)
    if number < 0:
        raise ValueError('batches are none, but at least one is needed')
    if not total:
        raise ValueError(f'no attention of a {type(model).__name__} was seen with layers={shown(layers)}')
    return {name: normalized(own) if normalize else own / images for name, own in total.items()}


def normalized(importance: Tensor) -> Tensor:
    """Divides the importances of a layer's heads, ``(N_h,)``, by their l2 norm; those that are all 0 stay."""
    return importance / (importance.norm() or 1)


def loss_and_right(value: Any) -> Tuple[Tensor, Optional[float]]:
    """Returns the loss and the number of right predictions of what a loss function gave."""
    mean, right = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        raise ValueError(
            f'loss(model, batch) gave {shown(value)}, but the mean loss is needed, a tensor with one entry and without '
            '.item(), or a pair of it and the number of right predictions'
        )
    return mean, None if right is None else float(right)


def check_finite(loss: Tensor, number: int) -> None:
    """Raises ``ValueError`` for the loss of a batch, by its number, that is not a finite number."""
    if not loss.isfinite():
        raise ValueError(
            f'loss(model, batch) is {loss.item()} for batch {number}: a finite number is needed; look for wrong images '
            'or labels in it, or use a wider dtype'
        )


@contextmanager
def called_once(model: nn.Module) -> Iterator[List[int]]:
    """Yields a list that gets the number of images of the model's call; refuses all but one call."""
    images: List[int] = []
    with counting(model, images):
        yield images
    if len(images) != 1:
        raise ValueError(
            f'loss(model, batch) called the model {len(images)} times with a tensor, but once was expected'
        )


def counting(model: nn.Module, images: List[int]) -> RemovableHandle:
    """Appends the number of images of each call of the model, until the handle is left as a context."""

    def count(module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        tensors = (own for _, _, own, _ in held_by((args, kwargs)) if isinstance(own, Tensor) and own.ndim)
        images.extend(len(batch) for batch in itertools.islice(tensors, 1))

    return model.register_forward_pre_hook(count, with_kwargs=True)


@contextmanager
def plain_products() -> Iterator[None]:
    """Lets PyTorch compute attention by products of matrices: its counter takes fused kernels of the CPU for 0."""
    with ExitStack() as stack, sdpa_kernel(SDPBackend.MATH):
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # of nn.MultiheadAttention and nn.TransformerEncoderLayer
        yield


@torch.no_grad()
def count_multiply_adds(
    model: nn.Module, run: Callable[[], Any], modules: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Tuple[int, Dict[str, int]]:
    """Counts the multiply-adds of a model in products of matrices and convolutions.

    Args:
        model (nn.Module): The model, in evaluation mode.
        run (Callable): Calls it or a part of it, for instance ``lambda: model(images)``.
        modules (Mapping[str, Sequence[str]]): By any name, those of some modules. Defaults to none.

    Returns:
        tuple[int, dict[str, int]]: Those of the whole model, and by these names those of the modules together.

    Examples:
        >>> layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        >>> count_multiply_adds(layers, lambda: layers(torch.rand(5, 8)), {'second': ['1']})
        (200, {'second': 40})
    """
    counter = FlopCounterMode(display=False)
    flops = dict.fromkeys(modules, 0)

    def count(name: str, sign: int) -> None:
        flops[name] += sign * counter.get_total_flops()

    with ExitStack() as stack:
        for parameter in [own for own in model.parameters() if own.requires_grad]:
            stack.callback(parameter.requires_grad_)
            parameter.requires_grad_(False)  # the counter refuses a slice of it, which has no history here
        for name, path in [(name, path) for name, paths in modules.items() for path in paths]:
            module = model.get_submodule(path)
            stack.enter_context(module.register_forward_pre_hook(lambda *_, name=name: count(name, -1)))
            stack.enter_context(module.register_forward_hook(lambda *_, name=name: count(name, 1)))
        with counter, plain_products():
            run()
    return counter.get_total_flops() // 2, {name: own // 2 for name, own in flops.items()}


def head_costs(model: nn.Module, run: Callable[[], Any]) -> Tuple[int, Dict[str, Tensor]]:
    """Counts the multiply-adds of a model, and those of each of its heads.

    Those of attention, and of maps beside its module with entries of its heads, are in proportion to these (nearly so
    in Swin v2, whose biases have a hidden layer); heads share them by the numbers of their entries in parameters.

    Args:
        model, run: As of :func:`count_multiply_adds`.

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
    layers = seen_heads(model, run)
    find_entries(model, list(layers.values()), run)
    modules = {}
    for name, layer in layers.items():
        paths = {own.rpartition('.')[0] for own in layer.owners}
        modules[name] = [name, *(own for own in paths if not is_in(own, name) and not is_in(name, own))]
    total, of_layers = count_multiply_adds(model, run, modules)
    costs = {}
    for name, layer in layers.items():
        weights = torch.zeros(layer.num_heads, dtype=torch.float64, device='cpu')
        for at, (dim, owners) in layer.owners.items():
            weights += owners.sum(0).cpu() * attrgetter(at)(model).select(dim, 0).numel()
        weights = weights if weights.any() else weights + 1  # heads that share all parameters
        costs[name] = of_layers[name] * weights / weights.sum()
    return total, costs


def least_important(
    importance: Mapping[str, Tensor],
    threshold: Optional[float] = None,
    keep: Optional[float] = None,
    multiply_adds: Optional[float] = None,
    costs: Optional[Tuple[float, Mapping[str, Tensor]]] = None,
) -> Dict[str, List[int]]:
    """Returns the heads to remove, the least important first, over all layers (Michel et al. 2019, section 4).

    The most important head of a layer stays.

    Args:
        importance (Mapping[str, Tensor]): Of each head by the name of the layer, of
            :func:`~attncnn_plugin.pruning.head_importance`.
        threshold (float, optional): Removes all heads below it. Defaults to None.
        keep (int | float, optional): The number of heads of the whole model that stay, or their share, above 0 and
            below 1. Defaults to None.
        multiply_adds (float, optional): The share of the model's multiply-adds that stays, above 0, up to 1. Defaults
            to None.
        costs (tuple, optional): Of :func:`head_costs`, for ``multiply_adds``. Defaults to None.

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
        >>> least_important(importance, keep=0.6)  # 3 of 5
        {'a': [0, 2]}
    """
    check_amount(threshold, keep, multiply_adds)
    for name, own in importance.items():
        if not (own < torch.inf).all():
            raise ValueError(
                f'the importance of the heads of {name} is {own.tolist()}, which has no order: there were no images, '
                'or the loss of some is not a finite number'
            )
    ranked = sorted((value, name, head) for name, own in importance.items() for head, value in enumerate(own.tolist()))
    best = {(name, int(own.argmax())) for name, own in importance.items() if len(own)}
    ranked = [entry for entry in ranked if entry[1:] not in best]
    number = sum(map(len, importance.values()))
    if threshold is not None:
        chosen = [entry for entry in ranked if entry[0] < threshold]
    elif keep is not None:
        goal = keep if isinstance(keep, Integral) else round(keep * number)
        if goal > number:
            raise ValueError(f'keep={keep} must be at most {number}, the number of heads')
        of_heads = {name: torch.ones_like(own) for name, own in importance.items()}
        chosen = _until(ranked, goal, number, of_heads, f'keep={keep}', 'heads')
    elif costs is not None and multiply_adds is not None:
        chosen = _until(ranked, multiply_adds * costs[0], *costs, f'multiply_adds={multiply_adds}', 'multiply-adds')
    else:
        raise ValueError(f'multiply_adds={multiply_adds} needs costs, those of head_costs')
    found = {name: sorted(head for _, layer, head in chosen if layer == name) for name in importance}
    return {name: heads for name, heads in found.items() if heads}


def check_amount(threshold: Optional[float], keep: Optional[float], multiply_adds: Optional[float]) -> None:
    """Checks that exactly one of these is given, and is possible.

    Raises:
        ValueError: None is given, or several, or an impossible one.
    """
    amounts = dict(threshold=threshold, keep=keep, multiply_adds=multiply_adds)
    given = {name: value for name, value in amounts.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f'{given or "nothing"} says how many heads go: give one of threshold, keep and multiply_adds')
    ((name, value),) = given.items()
    words, is_possible = AMOUNTS[name]
    if not isinstance(value, Real) or isinstance(value, bool) or not is_possible(value):
        raise ValueError(f'{name}={shown(value)} must be {words}')


def _until(
    ranked: List[Tuple[float, str, int]], goal: float, total: float, costs: Mapping[str, Tensor], asked: str, unit: str
) -> List[Tuple[float, str, int]]:
    """Returns the first of the ranked heads, as many as it takes to bring a total down to a goal."""
    left, chosen = float(total), []
    for entry in ranked:
        if left <= goal:
            break
        left -= float(costs[entry[1]][entry[2]])
        chosen.append(entry)
    if left > goal:
        raise ValueError(
            f'{asked} cannot be reached: without the {len(chosen)} heads that may go, {left:.4g} of {total:.4g} '
            f'{unit} are left'
        )
    return chosen
