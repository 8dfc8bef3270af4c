"""The importance of heads: "Are Sixteen Heads Really Better than One?" (Michel et al. 2019), 3.1.

A gate ξ_h multiplies the output of head h, ξ_h = 1 (their eq. 1). The importance of the head is the expectation over
the images of |∂L(x)/∂ξ_h| (eq. 2), the loss of an image without the head, to first order. How many of the least
important heads go is said by a threshold, by a number to keep, or by a share of the multiply-adds.
"""

import itertools
from contextlib import ExitStack, contextmanager
from numbers import Integral, Real
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from ..attention.evaluation_mode import evaluating
from ..attention.window import shown
from ..change import held_by
from ..transformers.vision_transformer import part_of
from .prune import Heads, prunable_heads, split_heads

Loss = Callable[[nn.Module, Any], Union[Tensor, Tuple[Tensor, Any]]]
AMOUNTS = {
    'threshold': 'a number of at least 0',
    'keep': 'a number of heads',
    'multiply_adds': 'a share above 0, up to 1',
}


class HeadGradients:
    """Sums up over images |∂L(x)/∂ξ_h| of the heads of a layer.

    Args:
        layer (PrunableHeads | TransformerHeads): The attention layer.

    Attributes:
        total (Tensor): The sum, ``(N_h,)`` in float64.
        count (Tensor): The number of images, a scalar in float64.
    """

    def __init__(self, layer: Heads) -> None:
        self.layer = layer
        device = layer.output.weight.device
        self.total = torch.zeros(layer.num_heads, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.heads: List[Tensor] = []

    def see(self, output: nn.Module, args: Tuple[Tensor]) -> Tensor:
        """Keeps the heads' outputs that the linear map gets, one row for each image, or for each window of one."""
        (heads,) = args
        heads = heads if heads.requires_grad else heads.detach().requires_grad_()  # nothing before it is trained
        self.heads.append(heads)
        return heads

    def add(self, heads: Sequence[Tensor], gradients: Sequence[Optional[Tensor]], images: int) -> None:
        """Adds the gradients of the mean loss over some images by the heads' outputs.

        A call of the layer has rows for all images, and windows of an image lie one after the other. It can compute
        some images at a time; a layer can be called several times in one pass.
        """
        if images == 0:
            return
        of_images = torch.zeros(images, len(self.total), dtype=torch.float64, device=self.total.device)
        of_call: List[Tensor] = []
        for own, gradient in zip(heads, gradients):
            if gradient is None:
                continue
            products = split_heads(self.layer, own.detach().double() * gradient.double())
            of_call.append(torch.stack([product.flatten(1).sum(1) for product in products], 1))  # ∂L/∂ξ = Σ y ∂L/∂y
            if sum(map(len, of_call)) % images == 0:
                of_images += images * torch.cat(of_call).unflatten(0, (images, -1)).sum(1)
                of_call = []
        if of_call:
            raise ValueError(
                f'a layer got {sum(map(len, heads))} rows for {images} images: as many rows of each were expected'
            )
        self.total += of_images.abs().sum(0)
        self.count += images

    def mean(self, normalize: bool) -> Tensor:
        """Returns the importance of each head, ``(N_h,)``, by its l2 norm over the layer's if ``normalize``."""
        mean = (self.total / self.count).cpu()
        norm = mean.norm()
        return mean / norm if normalize and norm > 0 else mean


@torch.enable_grad()
def add_gradients(gradients: Dict[str, HeadGradients], model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """Adds a batch to the gradients of layers, given by their names, and returns its loss.

    Arguments and errors: see :func:`head_importance`.
    """
    with called_once(model) as images, ExitStack() as stack:
        for own in gradients.values():
            own.heads = []
            stack.enter_context(own.layer.output_called())
            stack.enter_context(own.layer.output.register_forward_pre_hook(own.see))
        value, _ = loss_and_right(loss(model, batch))
        # Checkpointing computes blocks again here, with outputs that the loss does not depend on.
        heads = {name: list(own.heads) for name, own in gradients.items()}
        found = iter(torch.autograd.grad(value, [x for own in heads.values() for x in own], allow_unused=True))
    for name, own in gradients.items():
        of_layer = [gradient for _, gradient in zip(heads[name], found)]
        if all(gradient is None for gradient in of_layer):
            raise ValueError(f'the loss does not depend on the heads of {name}: they have no importance')
        own.add(heads[name], of_layer, images[0])
        own.heads = []
    return value


@torch.inference_mode(False)
def head_importance(model: nn.Module, batches: Iterable[Any], loss: Loss, normalize: bool = True) -> Dict[str, Tensor]:
    """Computes the importance of each head, E_x |∂L(x)/∂ξ_h| (Michel et al. 2019, eq. 2).

    The model runs in evaluation mode, and is as before afterwards; no gradients of parameters are computed.

    Args:
        model (nn.Module): A model with attention whose heads can be removed, see
            :func:`~attncnn_plugin.pruning.prunable_heads`.
        batches (Iterable): Some batches of training images.
        loss (Callable): ``loss(model, batch)`` is the mean loss of the batch's images, a scalar, or a pair that begins
            with it, as for :func:`~attncnn_plugin.pruning.head_ablation`; it calls the model once, with the images
            first.
        normalize (bool): Whether the importances of a layer's heads are divided by their l2 norm, so that those of
            different layers can be compared (Michel et al. 2019, after Molchanov et al. 2017). Defaults to True.

    Returns:
        dict[str, Tensor]: By the name of the layer ``(N_h,)``, float64, on the CPU.

    Raises:
        ValueError: There are no such layers, or no batches; or ``loss`` does not use the model as above, or is not a
            finite number.

    Examples:
        >>> import timm
        >>> from torch.nn.functional import cross_entropy
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1)
        >>> batches = [(torch.rand(4, 3, 32, 32), torch.arange(4))]
        >>> importance = head_importance(model, batches, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
        >>> importance['blocks.0.attn'].shape, round(importance['blocks.0.attn'].norm().item(), 6)
        (torch.Size([3]), 1.0)
    """
    gradients = {name: HeadGradients(layer) for name, layer in with_heads(model).items()}
    with evaluating(model):
        for number, batch in enumerate(batches):
            check_finite(add_gradients(gradients, model, batch, loss), number)
    if not all(own.count for own in gradients.values()):
        raise ValueError('batches are none, but at least one is needed')
    return {name: own.mean(normalize) for name, own in gradients.items()}


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


def with_heads(model: nn.Module) -> Dict[str, Heads]:
    """Returns those of :func:`prunable_heads` that have some; raises a ValueError without any."""
    layers = {name: layer for name, layer in prunable_heads(model).items() if layer.num_heads > 0}
    if not layers:
        raise ValueError(f'model is a {type(model).__name__} without attention whose heads can be removed')
    return layers


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
def head_costs(model: nn.Module, run: Callable[[], Any]) -> Tuple[int, Dict[str, Tensor]]:
    """Counts the multiply-adds of a model, and those of each of its heads.

    It counts products of matrices and convolutions. Those of attention are in proportion to its heads (nearly so in
    Swin v2, whose biases have a hidden layer); heads of other widths share them by their weights.

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
        for parameter in [own for own in model.parameters() if own.requires_grad]:
            stack.callback(parameter.requires_grad_)
            parameter.requires_grad_(False)  # the counter refuses a slice of it, which has no history here
        for name, layer in layers.items():
            module: Any = getattr(layer, 'called', layer)
            stack.enter_context(module.register_forward_pre_hook(lambda *_, name=name: count(name, -1)))
            stack.enter_context(module.register_forward_hook(lambda *_, name=name: count(name, 1)))
        with counter, plain_products():
            run()
    costs = {}
    for name, layer in layers.items():
        module, weights = model.get_submodule(name), torch.zeros(layer.num_heads, dtype=torch.float64)
        for head in range(layer.num_heads):
            for part, (dim, index) in layer.head_entries([head]).items():
                weights[head] += len(index) * part_of(module, part).select(dim, 0).numel()
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
    """Returns the heads to remove, the least important first, over all layers (Michel et al. 2019, section 4).

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
    number = sum(map(len, importance.values()))
    if keep is not None and keep > number:
        raise ValueError(f'keep={keep} must be at most {number}, the number of heads')
    if threshold is not None:
        chosen = [entry for entry in ranked if entry[0] < threshold]
    elif keep is not None:
        of_heads = {name: torch.ones(len(own)) for name, own in importance.items()}
        chosen = _until(ranked, keep, number, of_heads, f'keep={keep}', 'heads')
    elif costs is not None and multiply_adds is not None:
        goal = multiply_adds * costs[0]
        chosen = _until(ranked, goal, *costs, f'multiply_adds={multiply_adds}', 'multiply-adds')
    else:
        raise ValueError(f'multiply_adds={multiply_adds} needs costs, those of head_costs')
    found = {name: sorted(head for _, layer, head in chosen if layer == name) for name in importance}
    return {name: heads for name, heads in found.items() if heads}


def check_amount(threshold: Optional[float], keep: Optional[int], multiply_adds: Optional[float]) -> None:
    """Refuses anything but one of these that is possible.

    Raises:
        ValueError: None is given, or several, or an impossible one.
    """
    amounts = dict(threshold=threshold, keep=keep, multiply_adds=multiply_adds)
    given = {name: value for name, value in amounts.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f'{given or "nothing"} says how many heads go: give one of threshold, keep and multiply_adds')
    ((name, value),) = given.items()
    is_number = isinstance(value, Integral if name == 'keep' else Real) and not isinstance(value, bool)
    if not is_number or not value >= 0 or name == 'multiply_adds' and not 0 < value <= 1:
        raise ValueError(f'{name}={shown(value)} must be {AMOUNTS[name]}')


def _until(
    ranked: List[Tuple[float, str, int]], goal: float, total: float, costs: Mapping[str, Tensor], asked: str, unit: str
) -> List[Tuple[float, str, int]]:
    """Returns as many of the ranked heads as bring a total down to a goal."""
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
