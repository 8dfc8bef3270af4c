"""How much the loss depends on each head: "Are Sixteen Heads Really Better than One?" (Michel et al. 2019), 3.1.

A gate ξ_h multiplies the output of head h, ξ_h = 1 (their eq. 1). The importance of the head is the expectation over
the images of |∂L(x)/∂ξ_h| (eq. 2), the loss of an image without the head, to first order.
"""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, Tuple

import torch
from torch import Tensor, nn

from ..attention.evaluation_mode import evaluating
from ..attention.images import GroupedLinear
from .heads import Heads, prunable_heads

Loss = Callable[[nn.Module, Any], Tensor]


class HeadGradients:
    """Sums over images of |∂L(x)/∂ξ_h| of the heads of a layer.

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
        self.gates: List[Tensor] = []
        self._width = _widths(layer)

    def gate(self, output: nn.Module, args: Tuple[Tensor]) -> Tensor:
        """The outputs of the heads times gates of 1, one for each row of the batch: images, or windows of images."""
        (heads,) = args
        gates = torch.ones(len(heads), self.layer.num_heads, dtype=heads.dtype, device=heads.device, requires_grad=True)
        self.gates.append(gates)
        if isinstance(output, GroupedLinear):  # (B, N_h, Q, C)
            return heads * gates[:, :, None, None]
        of_channels = gates.repeat_interleave(self._width, dim=1)  # (B, Σ D_h)
        return heads * of_channels.view(len(heads), *[1] * (heads.ndim - 2), -1)

    def add(self, gradients: List[Tensor], images: int) -> None:
        """Adds the gradients of the mean loss over some images, for :attr:`gates`.

        A call of the layer has rows for all images, and windows of an image lie one after the other. It can compute
        some images at a time; a layer can be called several times in one pass.
        """
        of_images = torch.zeros(images, len(self.total), dtype=torch.float64, device=self.total.device)
        of_call: List[Tensor] = []
        for gradient in gradients:
            of_call.append(gradient.double())
            if sum(map(len, of_call)) % images == 0:
                of_images += images * torch.cat(of_call).unflatten(0, (images, -1)).sum(1)
                of_call = []
        if of_call:
            raise ValueError(
                f'a layer got {sum(map(len, gradients))} rows for {images} images: as many rows of each were expected'
            )
        self.total += of_images.abs().sum(0)
        self.count += images

    def mean(self, normalize: bool) -> Tensor:
        """The importance of each head, ``(N_h,)``, divided by its l2 norm over the layer's heads if ``normalize``."""
        mean = self.total / self.count
        norm = mean.norm()
        return mean / norm if normalize and norm > 0 else mean


@torch.enable_grad()
def add_gradients(gradients: Dict[str, HeadGradients], model: nn.Module, batch: Any, loss: Loss) -> None:
    """Adds a batch to the gradients of layers.

    Args:
        gradients (dict[str, HeadGradients]): By the name of the layer.
        model (nn.Module): The model, called once by ``loss``, with a batch of images first.
        batch: What ``loss`` takes.
        loss (Callable): ``loss(model, batch)`` is the mean loss of the batch's images, a scalar.

    Raises:
        ValueError: ``loss`` does not call the model with images, or not all layers are used.
    """
    images: List[int] = []
    with _gated(gradients), counting(model, images):
        value = loss(model, batch)
        gates_of = {name: list(own.gates) for name, own in gradients.items()}
        gates = [gate for own in gates_of.values() for gate in own]
        # Checkpointing computes blocks again here, with gates that the loss does not depend on.
        found = dict(zip(map(id, gates), torch.autograd.grad(value, gates, allow_unused=True)))
    if len(images) != 1:
        raise ValueError(f'loss(model, batch) called the model {len(images)} times, but once with images was expected')
    for name, own in gradients.items():
        of_layer = [gradient for gradient in (found[id(gate)] for gate in gates_of[name]) if gradient is not None]
        own.gates = []
        if not of_layer:
            raise ValueError(f'the loss does not depend on the heads of {name}: they have no importance')
        own.add(of_layer, images[0])


def head_importance(model: nn.Module, batches: Iterable[Any], loss: Loss, normalize: bool = True) -> Dict[str, Tensor]:
    """The importance of each head, E_x |∂L(x)/∂ξ_h| (Michel et al. 2019, eq. 2).

    The model runs in evaluation mode, and is as before afterwards; no gradients of parameters are computed.

    Args:
        model (nn.Module): A model with attention whose heads can be removed, see
            :func:`~attncnn_plugin.pruning.prunable_heads`.
        batches (Iterable): Some batches of training images.
        loss (Callable): ``loss(model, batch)`` is the mean loss of the batch's images, a scalar; it calls the model
            once, with the images first.
        normalize (bool): Whether the importances of a layer's heads are divided by their l2 norm, so that those of
            different layers can be compared (Michel et al. 2019, after Molchanov et al. 2017). Defaults to True.

    Returns:
        dict[str, Tensor]: By the name of the layer ``(N_h,)``, float64.

    Raises:
        ValueError: There are no such layers, or no batches; or ``loss`` does not use the model as above.

    Examples:
        >>> import timm
        >>> from torch.nn.functional import cross_entropy
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1)
        >>> batches = [(torch.rand(4, 3, 32, 32), torch.arange(4))]
        >>> importance = head_importance(model, batches, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
        >>> importance['blocks.0.attn'].shape, importance['blocks.0.attn'].norm().item()
        (torch.Size([3]), 1.0)
    """
    layers = {name: layer for name, layer in prunable_heads(model).items() if layer.num_heads > 0}
    if not layers:
        raise ValueError(f'model is a {type(model).__name__} without attention whose heads can be removed')
    gradients = {name: HeadGradients(layer) for name, layer in layers.items()}
    with evaluating(model):
        for batch in batches:
            add_gradients(gradients, model, batch, loss)
    if not all(own.count for own in gradients.values()):
        raise ValueError('batches are none, but at least one is needed')
    return {name: own.mean(normalize) for name, own in gradients.items()}


@contextmanager
def _gated(gradients: Dict[str, HeadGradients]) -> Iterator[None]:
    handles = [own.layer.output.register_forward_pre_hook(own.gate) for own in gradients.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def counting(model: nn.Module, images: List[int]) -> Iterator[None]:
    """Appends the number of images of each call of the model."""

    def count(module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        batch = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        images.extend([] if batch is None else [len(batch)])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _widths(layer: Heads) -> Tensor:
    """Channels D_h of each head's output, ``(N_h,)``."""
    widths = [len(layer.output_entries([head])) for head in range(layer.num_heads)]
    return torch.tensor(widths, dtype=torch.long, device=layer.output.weight.device)
