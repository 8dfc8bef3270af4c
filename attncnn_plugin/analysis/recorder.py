"""The attention that a model computes on images, and its rollout from the first layer to the last."""

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..attention import AttentionLayer
from ..attention.evaluation_mode import evaluating
from ..attention.patches import PatchAttention
from ..attention.softmax import softmax
from ..attention.tokens import GridAttention
from ..attention.window import shown
from ..pruning.prune import prunable_heads, split_heads
from ..transformers.adapters import Attention, find_attention
from ..transformers.attention import TokenPlaces, visited_attention
from ..transformers.transformer_heads import TransformerHeads
from ..transformers.vision_transformer import find_transformer, images_for, is_vit
from .layer_maps import attention_layers, features_of

Reduce = Union[str, Callable[[Tensor], Tensor], None]
Visit = Callable[[str, Tensor], None]


def attention_maps(model: nn.Module, images: Tensor, reduce: Reduce = None) -> Dict[str, Tensor]:
    """Returns the attention probabilities of every layer of a model, as it computes them in evaluation mode.

    The fused kernels stay, and the model is as it was afterwards.

    Args:
        model (nn.Module): A vision transformer of timm, mmpretrain, Hugging Face transformers or torchvision, a model
            with attention of this package, or a model with one of these inside; compiled and distributed ones too.
        images (Tensor): ``(B, C, H, W)``, normalized as in training. They are brought to the model's device and dtype.
        reduce (str | Callable, optional): What is kept of the probabilities ``(B, N_h, N, N)`` of a layer before the
            next one is computed: ``'class_token'``, what the first token gives to all, ``(B, N_h, N)``, or a function
            of them, such as their mean over images. Defaults to None, all of them, which a large model at a high
            resolution may have no memory for.

    Returns:
        dict[str, Tensor]: By the name of the layer in the model, ``(B, N_h, N, N)`` of queries and keys, at least
        float32. Tokens are in the model's order, class tokens before patches. In windows, all tokens of the grid are
        there, with 0 between windows. What goes to a null key or to the padding of windows is left out.

    Raises:
        ValueError: The model has no attention that is known, or its layers run not once; the images are not for it;
            an unknown ``reduce``.
        TypeError: ``reduce`` gives no tensor.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2)
        >>> maps = attention_maps(model, torch.rand(2, 3, 64, 64))
        >>> maps['blocks.0.attn'].shape  # a class token and 4·4 patches
        torch.Size([2, 3, 17, 17])
        >>> attention_maps(model, torch.rand(2, 3, 64, 64), reduce='class_token')['blocks.1.attn'].shape
        torch.Size([2, 3, 17])
    """
    model, kept = unwrap_model(model), _reduction(reduce)
    maps: Dict[str, List[Tensor]] = {name: [] for name in attention_of(model)}
    with torch.no_grad(), evaluating(model), visiting(model, lambda name, probs: maps[name].append(kept(probs))):
        run(model, images)
    for name, own in maps.items():
        if len(own) != 1:
            raise ValueError(f'{name} of a {type(model).__name__} runs {len(own)} times, but once was needed')
    return {name: own for name, (own,) in maps.items()}


class AttentionRecorder:
    """Records the attention of every forward pass of a model inside a ``with``, in training too.

    Probabilities are those before dropout, without gradients. A compiled model runs uncompiled inside. What gradient
    checkpointing computes again is not recorded.

    Args:
        model (nn.Module): As of :func:`attention_maps`.
        reduce (str | Callable, optional): As of :func:`attention_maps`. Defaults to None.

    Attributes:
        passes (list[dict[str, Tensor]]): For each forward pass of the model, or of its ``forward_features``, what
            :func:`attention_maps` returns. A layer that runs again begins another one, as in a model that calls its
            backbone twice, or whose blocks share a layer.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2)
        >>> with AttentionRecorder(model) as recorder:
        ...     loss = model(torch.rand(2, 3, 64, 64)).square().mean()
        >>> [maps['blocks.1.attn'].shape for maps in recorder.passes]
        [torch.Size([2, 3, 17, 17])]
    """

    def __init__(self, model: nn.Module, reduce: Reduce = None) -> None:
        self.model, self.kept = unwrap_model(model), _reduction(reduce)
        self.passes: List[Dict[str, Tensor]] = []

    def __enter__(self) -> 'AttentionRecorder':
        with ExitStack() as stack:
            stack.enter_context(self.model.register_forward_pre_hook(self._begin))
            stack.enter_context(visiting(self.model, self._record))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _begin(self, *_: Any) -> None:
        if not _in_backward():
            self.passes.append({})

    def _record(self, name: str, probs: Tensor) -> None:
        if _in_backward():
            return
        if not self.passes or name in self.passes[-1]:  # of a part of the model, such as forward_features
            self.passes.append({})
        self.passes[-1][name] = self.kept(probs)


def _in_backward() -> bool:
    """Says whether a backward pass runs, where gradient checkpointing computes layers again."""
    return torch._C._current_graph_task_id() != -1


def _reduction(reduce: Reduce) -> Callable[[Tensor], Tensor]:
    """Returns the function that ``reduce`` stands for."""
    if reduce is None:
        return lambda probs: probs
    function = (lambda probs: probs[:, :, 0]) if reduce == 'class_token' else reduce
    if not callable(function):
        raise ValueError(f"reduce={shown(reduce)} must be 'class_token', or a function of a tensor")

    def kept(probs: Tensor) -> Tensor:
        own = function(probs)
        if not isinstance(own, Tensor):
            raise TypeError(f'reduce={shown(reduce)} gives a {type(own).__name__}, but a tensor is needed')
        return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own  # a view would keep all

    return kept


def attention_of(model: nn.Module) -> Mapping[str, Any]:
    """Returns the attention of this package in a model by name, or that of other libraries where there is none.

    Raises:
        ValueError: There is none, or some is of an unknown class, or along one or three axes.
    """
    if any(isinstance(layer, AttentionLayer) for layer in model.modules()):
        return attention_layers(model)
    return {attention.name: attention for attention in find_attention(model)}


@contextmanager
def visiting(model: nn.Module, visit: Visit) -> Iterator[None]:
    """Calls ``visit(name, probs)`` whenever attention of a model has run, with ``(B, N_h, N, N)``."""

    def see(name: str, layer: AttentionLayer, args: Any) -> None:
        with torch.no_grad():
            visit(name, probs_of(layer, args[0]))

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance('force_eager'))  # compiled modules do not call new hooks
        for name, layer in attention_of(model).items():
            if isinstance(layer, Attention):
                stack.enter_context(visited_attention(layer, partial(_visit_tokens, visit, name)))
            else:
                stack.enter_context(layer.register_forward_pre_hook(partial(see, name)))
        yield


def _visit_tokens(visit: Visit, name: str, probs: Tensor, places: Optional[TokenPlaces]) -> None:
    visit(name, probs if places is None else places.on_grid(places.by_window(probs)))


def probs_of(layer: AttentionLayer, x: Tensor) -> Tensor:
    """Returns the probabilities of a layer of this package for an input, without a null key, ``(B, N_h, Q, K)``."""
    height, width = layer.grid_of(x)
    if layer.depends_on_content:
        return softmax(layer.attention_scores(x))[..., : height * width]
    return layer.attention_probs((height, width)).expand(len(x), -1, -1, -1)


def run(model: nn.Module, images: Tensor) -> Any:
    """Runs the part of a model that has the attention on images, on its device and in its dtype."""
    images = images_for(model, images)
    if not is_vit(model):
        return features_of(model, [layer for layer in model.modules() if isinstance(layer, AttentionLayer)])(images)
    network = find_transformer(model)
    network.check_images(images)
    return network.module(images)


@torch.no_grad()
def rollout(model: nn.Module, images: Tensor, target: Union[int, Sequence[int], Tensor, None] = None) -> Tensor:
    """Computes how much each patch of an image reaches the output, through the attention of all layers.

    Without ``target`` it is the attention rollout of Abnar and Zuidema 2020: the product over the layers of
    ½ (A + I), where A is the mean of the heads. With it, it is the relevance for a class of Chefer et al. 2021 (eq. 5
    and 6): R ← R + Ā R, where Ā is the mean over heads of the positive part of A times the gradient of the class's
    logit by A.

    Args:
        model (nn.Module): As of :func:`attention_maps`, with a residual connection around every attention. With
            ``target`` it returns logits, ``(B, classes)``, or something with ``logits``.
        images (Tensor): ``(B, C, H, W)``, normalized as in training.
        target (int | Sequence[int], optional): The class, for all images or for each. Defaults to None.

    Returns:
        Tensor: ``(B, height, width)`` in patches, of the class token where the model reads it, otherwise the mean over
        all patches, as where it pools them.

    Raises:
        ValueError: Layers have other tokens than those before, as those of Swin transformers; ``target`` is no class of
            the model; see :func:`attention_maps`.
        TypeError: With ``target``, attention whose heads share something, or that has no values.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2)
        >>> rollout(model, torch.rand(2, 3, 64, 64)).shape
        torch.Size([2, 4, 4])
        >>> rollout(model, torch.rand(2, 3, 64, 64), target=[7, 281]).shape
        torch.Size([2, 4, 4])
    """
    model = unwrap_model(model)
    joint: List[Tensor] = []  # the product so far, (B, N, N)

    def add(name: str, weights: Tensor, keep: float) -> None:
        """Multiplies by the weights of a layer, and adds ``keep`` of what was there."""
        before = joint.pop() if joint else torch.eye(weights.shape[-1]).to(weights).expand_as(weights)
        added = weights.shape[-1] - before.shape[-1]
        if added and is_vit(model) and added == find_transformer(model).num_prefix_tokens:  # as in ConViT
            before = nn.functional.pad(before, (added, 0, added, 0))
            before[:, range(added), range(added)] = 1
        if not weights.shape[-2] == weights.shape[-1] == before.shape[-1]:
            raise ValueError(
                f'{name} has attention of {weights.shape[-2]} to {weights.shape[-1]} tokens after '
                f'{before.shape[-1]} tokens: a rollout needs the same tokens in all layers; use attention_maps'
            )
        joint.append(weights @ before + keep * before)

    def add_mean(name: str, probs: Tensor) -> None:
        if probs.shape[1]:
            add(name, probs.mean(1) / 2, 0.5)
        else:  # a layer without heads mixes no tokens
            add(name, probs.sum(1), 1.0)

    with evaluating(model), _grids(model) as grids:
        if target is None:
            with visiting(model, add_mean):
                run(model, images)
        else:
            for name, weights in _weighted_by_gradients(model, images, target):
                add(name, weights, 1.0)
    (rows,), grid = joint, grids[-1]
    prefix = rows.shape[-1] - grid[0] * grid[1]
    of_class = prefix > 0 and is_vit(model) and find_transformer(model).reads_class_token
    return (rows[:, 0] if of_class else rows[:, prefix:].mean(1))[:, prefix:].unflatten(1, grid)


@contextmanager
def _grids(model: nn.Module) -> Iterator[List[Tuple[int, int]]]:
    """Collects height and width of the patches of a model while it runs."""
    grids: List[Tuple[int, int]] = []
    own = [layer for layer in attention_of(model).values() if isinstance(layer, AttentionLayer)]
    with ExitStack() as stack:
        for layer in own:
            stack.enter_context(
                layer.register_forward_pre_hook(lambda layer, args: grids.append(layer.grid_of(args[0])))
            )
        if not own:
            network = find_transformer(model)
            see = lambda module, args, output: grids.append(network.grid_of_patches(output))  # noqa: E731
            stack.enter_context(network.patch_convolutions[-1].register_forward_hook(see))
        yield grids


def _weighted_by_gradients(model: nn.Module, images: Tensor, target: Any) -> Iterator[Tuple[str, Tensor]]:
    """Yields the name of each layer and E_h[(∂y/∂A ∘ A)⁺] (Chefer et al. 2021, eq. 5), ``(B, N, N)``.

    The outputs of a head are A V, so that ∂y/∂A = ∂y/∂(A V) Vᵀ.
    """
    attentions = attention_of(model)
    layers = {name: layer for name, layer in prunable_heads(model).items() if name in attentions}
    inputs: Dict[str, Tuple[Any, Any]] = {}
    outputs: Dict[str, Tensor] = {}
    maps: Dict[str, Tuple[Tensor, Optional[TokenPlaces]]] = {}

    def see_heads(name: str, output: nn.Module, args: Any) -> Tensor:
        outputs[name] = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
        return outputs[name]

    def see_inputs(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[name] = args, kwargs

    def see_probs(name: str, probs: Tensor, places: Optional[TokenPlaces]) -> None:
        maps[name] = probs, places

    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        for name, layer in layers.items():
            called: Any = layer
            if isinstance(layer, TransformerHeads):
                if layer.shared() is not None:
                    raise TypeError(f'{name} is a {type(layer.module).__name__}: {layer.shared()}: leave out target')
                called = layer.called
                stack.enter_context(visited_attention(attentions[name], partial(see_probs, name)))
            stack.enter_context(layer.output_called())
            stack.enter_context(called.register_forward_pre_hook(partial(see_inputs, name), with_kwargs=True))
            stack.enter_context(layer.output.register_forward_pre_hook(partial(see_heads, name)))
        logits = model(images.to(next(model.parameters()), copy=True))  # copies are no inference tensors
        logits = getattr(logits, 'logits', logits)
        classes = torch.as_tensor(target, device=images.device).clone()
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise ValueError(f'target={shown(target)} needs a model with logits, not a {type(model).__name__}')
        fits = classes.ndim == 0 or classes.shape == logits.shape[:1]
        if not fits or classes.is_floating_point() or not ((classes >= 0) & (classes < logits.shape[1])).all():
            raise ValueError(
                f'target={shown(target)} must be a class from 0 to {logits.shape[1] - 1}, or one for each image'
            )
        chosen = logits.gather(1, classes.to(logits.device).expand(len(logits))[:, None]).sum()
        gradients = torch.autograd.grad(chosen, list(outputs.values()))
    for name, gradient in zip(outputs, gradients):
        layer, (args, kwargs) = layers[name], inputs[name]
        if isinstance(layer, TransformerHeads):
            (probs, places), (x, call) = maps[name], layer.tokens(args, kwargs)
            values: Sequence[Tensor] = layer.queries_keys_values(x, call)[2].unbind(1)
            gate = layer.part(layer.adapter.gate)
            gradient = gradient if gate is None else gradient * gate(x).sigmoid()
        else:
            probs, places, values = probs_of(layer, args[0]), None, _values(name, layer, args[0])
        of_heads = [own.flatten(1, -2) for own in split_heads(layer, gradient)]
        weights = probs.sum(1, keepdim=True)  # 0 without heads
        if layer.num_heads:
            of_probs = torch.stack([own @ value.mT for own, value in zip(of_heads, values)], 1)  # ∂y/∂(A V) Vᵀ
            weights = (of_probs * probs).clamp(min=0).mean(1, keepdim=True)
        yield name, (weights if places is None else places.on_grid(places.by_window(weights)))[:, 0]


def _values(name: str, layer: Any, x: Tensor) -> Sequence[Tensor]:
    """Returns the values V of each head of a layer over a grid, ``(B, N, D_h)``, which its probabilities mix."""
    if isinstance(layer, GridAttention):
        return [x.flatten(1, 2)] * layer.num_heads
    if isinstance(layer, PatchAttention):
        return layer.value(x.flatten(1, 2)).split(layer.head_dims, 2)
    raise TypeError(f'{name} is a {type(layer).__name__}, of a network without tokens: leave out target')
