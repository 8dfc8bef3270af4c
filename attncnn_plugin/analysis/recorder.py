"""The attention that a model computes on its inputs, and its rollout from the first layer to the last."""

import dataclasses
import types
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..attention import AttentionLayer
from ..attention.evaluation_mode import evaluating
from ..attention.window import shown
from ..heads.choice import Layers, chosen_by
from ..heads.found import Call, called
from ..heads.places import Places, cells, flat
from ..heads.seen import AnyAttention, FunctionsSeen, Visit, VisitOwn, watching

Reduce = Union[str, Callable[[Tensor], Tensor], None]


def attention_maps(
    model: nn.Module, inputs: Any, reduce: Reduce = None, layers: Layers = None, call: Call = None
) -> Dict[str, Tensor]:
    """Returns the attention probabilities of every layer of a model, as it computes them in evaluation mode.

    The model runs once, as its user runs it, with its fused kernels, and is as it was afterwards.

    Args:
        model (nn.Module): Any model with softmax attention inside; compiled and distributed ones too.
        inputs (Any): What the model takes: images ``(B, C, H, W)``, normalized as in training, or a dict or
            ``BatchFeature`` of keyword arguments. Tensors are brought to the model's device, floats to its dtype.
        reduce (str | Callable, optional): What is kept of the probabilities ``(B, N_h, Q, K)`` of a layer before the
            next one is computed: ``'class_token'``, what the token that the model reads gives to all, ``(B, N_h, K)``,
            or a function of them, such as their mean over images. Defaults to None, all of them, which a large model at
            a high resolution may have no memory for.
        layers (str | Iterable[str] | callable, optional): Names of attention, globs such as ``'blocks.1?.*'``, several
            of these, or a function that says of a name whether it is wanted. Defaults to None, all.
        call (Callable, optional): ``call(model, inputs)`` runs the model. Defaults to None: ``model(inputs)``, or
            ``model(**inputs)``.

    Returns:
        dict[str, Tensor]: By the name of the module in which attention runs, ``(B, N_h, Q, K)`` of queries and keys, at
        least float32; further attention of one module has ``#2``, ``#3``, … after its name. Probabilities are those
        that multiply values, before dropout. Tokens are in the model's order, with class tokens and registers where
        the model has them. Of windows, as in Swin transformers, all tokens of the grid are there, row-major, with 0
        between windows and without padding; where windows are not such parts of a grid they are further images, as
        they are computed. What goes to a null key of this package's layers is left out.

    Raises:
        ValueError: No attention is seen, or ``layers`` chooses none; with ``'class_token'``, the model reads no token;
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
    recorder = AttentionRecorder(model, reduce, layers)
    with torch.no_grad(), evaluating(recorder.model), recorder:
        called(recorder.model, inputs, call)
    if len(recorder.passes) > 1:
        raise ValueError(
            f'a {type(recorder.model).__name__} ran {len(recorder.passes)} times, but once was needed: use '
            'AttentionRecorder, which has all passes'
        )
    if not recorder.passes:
        raise no_attention(recorder.model)
    return recorder.passes[0]


class AttentionRecorder:
    """Records the attention of every forward pass of a model inside a ``with``, in training too.

    Probabilities are those before dropout, without gradients. The model computes what it does without the recorder, to
    the last bit; a compiled model runs uncompiled. What gradient checkpointing computes again is not recorded.

    Args:
        model (nn.Module): As of :func:`attention_maps`.
        reduce (str | Callable, optional): As of :func:`attention_maps`. Defaults to None.
        layers (str | Iterable[str] | callable, optional): As of :func:`attention_maps`. Defaults to None.

    Attributes:
        passes (list[dict[str, Tensor]]): For each forward pass of the model that has attention what
            :func:`attention_maps` returns. Of parts that run by themselves, such as ``forward_features``, a layer that
            runs again begins another one.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2)
        >>> with AttentionRecorder(model) as recorder:
        ...     loss = model(torch.rand(2, 3, 64, 64)).square().mean()
        >>> [maps['blocks.1.attn'].shape for maps in recorder.passes]
        [torch.Size([2, 3, 17, 17])]
    """

    def __init__(self, model: nn.Module, reduce: Reduce = None, layers: Layers = None) -> None:
        self.model, self.reduce, self.wanted = unwrap_model(model), reduce, chosen_by(layers)
        if reduce is not None and reduce != 'class_token' and not callable(reduce):
            raise ValueError(f"reduce={shown(reduce)} must be 'class_token', or a function of a tensor")
        self.passes: List[Dict[str, Tensor]] = []
        self._of: Dict[Any, Dict[str, Any]] = {}  # the pass of each run of the model; None for parts of it

    def __enter__(self) -> 'AttentionRecorder':
        self._watching = watching(self.model, self._record, self.wanted, end=self._end).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watching.__exit__(*error)
        del self._watching  # a cycle of references would keep the maps
        if error[0] is None:
            self.wanted.check()

    def _record(self, name: str, probs: Tensor, places: Places) -> None:
        functions: Any = self._watching.functions
        key = functions if functions.whole else None
        own = self._of.get(key)
        if own is None or key is None and name in own:
            own = self._of[key] = {}
            self.passes.append(own)
        if self.reduce == 'class_token':
            own[name] = beside_the_grid(probs, places)
        else:
            on_grid = places.on_grid(probs) if places.are_windows else None
            own[name] = reduced(self.reduce, probs if on_grid is None else on_grid[0])

    def _end(self, functions: FunctionsSeen, output: Any) -> None:
        own = self._of.pop(functions, None) if functions.whole else self._of.get(None)
        if self.reduce != 'class_token' or not own:
            return
        token = token_read(functions, output) if functions.whole else None
        for name, rows in own.items():
            if token not in rows:
                what = 'reads no single token' if token is None else f'reads a token that is not in {name}'
                raise ValueError(
                    f"reduce='class_token', but a {type(self.model).__name__} {what}: choose layers that have the "
                    'token, or give a function, such as lambda probs: probs.mean(2), the mean over queries'
                )
            own[name] = rows[token]


@torch.no_grad()
def observe(
    model: nn.Module,
    inputs: Any,
    visit: Visit,
    layers: Layers = None,
    call: Call = None,
    visit_own: Optional[VisitOwn] = None,
    one: bool = False,
) -> Optional[float]:
    """Runs a model in evaluation mode, and calls ``visit`` for all of its attention.

    Args:
        model (nn.Module): The model.
        inputs (Any): As of :func:`attention_maps`.
        visit (Callable): As of :func:`~attncnn_plugin.heads.seen.watching`.
        layers (str | Iterable[str] | callable, optional): As of :func:`attention_maps`. Defaults to None.
        call (Callable, optional): As of :func:`attention_maps`. Defaults to None.
        visit_own (Callable, optional): As of :func:`~attncnn_plugin.heads.seen.watching`. Defaults to None.
        one (bool): As there. Defaults to False.

    Returns:
        float | None: The number of the token that the model reads; None for several or none.

    Raises:
        ValueError: With ``visit_own``, a layer of this package does not run, or has not two axes; ``layers`` chooses
            none.
    """
    read: List[Optional[float]] = [None]
    wanted, own_layers = chosen_by(layers), () if visit_own is None else attention_layers(model)
    end = lambda functions, output: read.append(token_read(functions, output))  # noqa: E731
    with evaluating(model), watching(model, visit, wanted, end=end, visit_own=visit_own, one=one):
        called(model, inputs, call)
    for name in own_layers:
        if name not in wanted.answers and wanted(name):
            raise ValueError(f'{name} is attention that the model does not run on images: there is nothing to show')
    wanted.check()
    return read[-1]


def attention_layers(model: nn.Module) -> Dict[str, AttentionLayer]:
    """Returns the attention layers of this package in a model by name, in the order of its modules.

    Raises:
        ValueError: One has one or three axes of pixels.

    Examples:
        >>> import timm, attncnn_plugin
        >>> list(attention_layers(timm.create_model('sa_quadratic_cifar', depth=2)))
        ['blocks.0.attn', 'blocks.1.attn']
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, AttentionLayer)}
    for name, layer in layers.items():
        if layer.window is not None and layer.window.ndim != 2:
            raise ValueError(f'{name or "layer"} has {layer.window.ndim} axes of pixels, but heads are shown for two')
    return layers


def beside_the_grid(probs: Tensor, places: Places) -> Dict[float, Tensor]:
    """Returns the probabilities of queries beside the grid, such as class tokens, ``(B, N_h, K)``, by their numbers."""
    numbers = [] if places.queries is None else places.queries[0].tolist()
    return {number: probs[:, :, index].clone() for index, number in enumerate(numbers) if number < 0}


def token_read(functions: FunctionsSeen, output: Any) -> Optional[float]:
    """Returns the number of the token that a model's logits, or pooled features, are of; None for several or none."""
    if dataclasses.is_dataclass(output):
        output = vars(output)
    values = list(output.values()) if isinstance(output, Mapping) else [output]
    for own in flat(values):
        numbers = functions.places.of(own)
        if own.ndim == 2 and numbers is not None and numbers[0, 0] < 0:
            return float(numbers[0, 0])
    return None


def no_attention(model: nn.Module, others: Mapping[str, Sequence[int]] = types.MappingProxyType({})) -> ValueError:
    """Returns the error for a model in which no attention is seen, or only ``others``, of these shapes."""
    if others:
        shapes = ', '.join(f'{name} {tuple(shape)}' for name, shape in others.items())
        return ValueError(
            f'no attention of a {type(model).__name__} is between all patches of a grid, without negative weights: its '
            f'shapes are {shapes}; attention_maps returns it as it is computed'
        )
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    return ValueError(
        f'no attention of a {type(model).__name__} was seen for these inputs. It is seen where PyTorch computes it, by '
        'scaled_dot_product_attention or a softmax whose result multiplies values'
        + (f'; {scripted[0] or "the model"} is scripted, which hides it' if scripted else '')
        + '. Convolutions, mixers and linear attention have none, nor have layers without heads, or a CMHSA in the '
        'convolution phase'
    )


def reduced(reduce: Any, probs: Tensor) -> Tensor:
    """Applies ``reduce`` to probabilities; the result keeps no larger tensor in memory."""
    own = probs if reduce is None else reduce(probs)
    if not isinstance(own, Tensor):
        raise TypeError(f'reduce={shown(reduce)} gives a {type(own).__name__}, but a tensor is needed')
    return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own  # a view would keep all


@torch.no_grad()
def rollout(
    model: nn.Module,
    inputs: Any,
    target: Union[int, Sequence[int], Tensor, None] = None,
    grid: Optional[Tuple[int, int]] = None,
    call: Call = None,
) -> Tensor:
    """Computes how much each patch of an image reaches the output, through the attention of all layers.

    Without ``target`` it is the attention rollout of Abnar and Zuidema 2020: the product over the layers of
    ½ (A + I), where A is the mean of the heads. With it, it is the relevance for a class of Chefer et al. 2021 (eq. 5
    and 6): R ← R + Ā R, where Ā is the mean over heads of the positive part of A times the gradient of the class's
    logit by A.

    Args:
        model (nn.Module): As of :func:`attention_maps`, with a residual connection around every attention. With
            ``target`` it returns logits, ``(B, classes)``, or something with ``logits``.
        inputs (Any): As of :func:`attention_maps`.
        target (int | Sequence[int], optional): The class, for all images or for each. Defaults to None.
        grid (tuple[int, int], optional): Height and width of the grid of patches, which are the last tokens, where it
            cannot be seen which token is which patch. Defaults to None: as it is seen.
        call (Callable, optional): As of :func:`attention_maps`. Defaults to None.

    Returns:
        Tensor: ``(B, height, width)`` in patches: of the token that the model reads, of its attention pooling, or the
        mean over all patches, as where it pools them.

    Raises:
        ValueError: Layers have other tokens than those before, as those of Swin transformers; a module computes several
            attentions; ``target`` is no class of the model; the grid cannot be seen; see :func:`attention_maps`.
        TypeError: With ``target``, attention of this package instead of a convolution.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2)
        >>> rollout(model, torch.rand(2, 3, 64, 64)).shape
        torch.Size([2, 4, 4])
        >>> rollout(model, torch.rand(2, 3, 64, 64), target=[7, 281]).shape
        torch.Size([2, 4, 4])
    """
    model = unwrap_model(model)
    rolled = Rollout()

    def visit(name: str, probs: Tensor, places: Places) -> None:
        rolled.add(name, probs.mean(1) / 2, 0.5, places)

    if target is None:
        token = observe(model, inputs, visit, call=call, one=True)
    else:
        token = _visit_by_gradients(model, inputs, target, call, rolled)
    if rolled.joint is None:
        raise no_attention(model)
    return rolled.on_grid(token, grid)


class Rollout:
    """The product of the attention of the layers so far.

    Attributes:
        joint (Tensor | None): How much each token has of each token of the first layer, ``(B, N, M)``.
        tokens (Tensor | None): The numbers of the tokens now, ``(N,)``.
        first (Tensor | None): Those of the tokens of the first layer, ``(M,)``, and of all that came later.
        pooled (Tensor | None): The rows of attention pooling, ``(B, Q, M)``.
    """

    joint: Any = None
    tokens: Any = None
    first: Any = None
    pooled: Optional[Tensor] = None

    def add(self, name: str, weights: Tensor, keep: float, places: Places) -> None:
        """Multiplies by the weights of a layer, ``(B, Q, K)``, and adds ``keep`` of what was there.

        Raises:
            ValueError: Its tokens are not those of the layers before.
        """
        if self.pooled is not None:
            raise ValueError(f'{name} comes after attention that pools all tokens: a rollout ends there')
        queries, keys = (None if own is None else own[0] for own in (places.queries, places.keys))
        batch, rows, number = weights.shape
        if self.joint is None:
            self.joint = torch.eye(number, device=weights.device, dtype=weights.dtype).expand(batch, -1, -1)
            self.tokens = self.first = keys
        if not self._brought(batch, number, keys):
            raise self._other(name, number)
        same = None if queries is None or keys is None else queries[:, None] == keys
        if rows == number and (queries is keys or same is not None and bool(same.diagonal().all())):
            self.joint = weights @ self.joint + keep * self.joint
        elif same is not None and keys is not None and (same & (keys < 0)).any(1).all():
            some = same.long().argmax(1)  # tokens that attend to all, as class tokens do
            self.joint = self.joint.index_copy(1, some, weights @ self.joint + keep * self.joint[:, some])
        elif rows <= number and (queries is None or (queries <= 0).all()):
            self.pooled = weights @ self.joint
        else:
            raise self._other(name, f'{rows} to {number}')

    def _brought(self, batch: int, number: int, keys: Optional[Tensor]) -> bool:
        """Brings the tokens into the order of these keys, with those that are new; says whether they are the same."""
        before = self.joint
        if keys is None or self.tokens is None or torch.equal(keys, self.tokens):
            return number == before.shape[1] and batch == len(before)
        same = keys[:, None] == self.tokens
        new = ~same.any(1)
        if batch != len(before) or not same.any(0).all() or not (same.sum(1) <= 1).all():
            return False
        joint = before.new_zeros(batch, number, before.shape[2] + int(new.sum()))
        joint[:, ~new, : before.shape[2]] = before[:, same[~new].long().argmax(1)]
        joint[:, new, before.shape[2] :] = torch.eye(int(new.sum()), device=before.device, dtype=before.dtype)
        self.joint, self.tokens, self.first = joint, keys, torch.cat([self.first, keys[new]])
        return True

    def _other(self, name: str, number: Any) -> ValueError:
        return ValueError(
            f'{name} has attention of {number} tokens that are not the {self.joint.shape[1]} of the layers before: a '
            'rollout needs the same tokens in all layers; use attention_maps'
        )

    def on_grid(self, token: Optional[float], grid: Optional[Tuple[int, int]]) -> Tensor:
        """Returns the row of a token, of the pooling, or the mean over all places, on the grid, ``(B, H, W)``."""
        if grid is not None:
            number, tokens = grid[0] * grid[1], self.joint.shape[2]
            if number > tokens:
                raise ValueError(f'grid={grid} has {number} patches, but there are {tokens} tokens')
            order, of_places = (torch.arange(n - number, n, device='cpu') for n in (tokens, self.joint.shape[1]))
        elif self.first is not None and self.tokens is not None:
            _, place, grid = cells(self.first[None])
            order = place[0].argsort()[(place[0] < 0).sum() :]
            of_places = (self.tokens > 0).nonzero().flatten()
        if grid is None or len(order) != grid[0] * grid[1] or not len(order):
            raise ValueError(
                'which token is which patch could not be seen: give grid, the height and width in patches, which are '
                'the last tokens'
            )
        if self.pooled is not None:
            row = self.pooled.mean(1)
        elif token is not None and self.tokens is not None and (self.tokens == token).any():
            row = self.joint[:, self.tokens == token][:, 0]
        else:
            row = self.joint[:, of_places].mean(1)
        return row[:, order].unflatten(1, grid)


def _visit_by_gradients(model: nn.Module, inputs: Any, target: Any, call: Call, rolled: Rollout) -> Optional[float]:
    """Adds E_h[(∂y/∂A ∘ A)⁺] of all layers (Chefer et al. 2021, eq. 5) to a rollout, and returns the token read."""
    seen: Dict[str, Tuple[AnyAttention, Any, Tensor]] = {}
    read: List[Optional[float]] = [None]

    def touch(attention: AnyAttention, output: Tensor) -> Tensor:
        """Adds E V, where E is 0, so that ∂y/∂E = ∂y/∂A."""
        probs: Any = attention.probs
        if attention.name not in seen:
            seen[attention.name] = attention, probs, torch.zeros_like(probs, dtype=output.dtype).requires_grad_()
        return output + attention.product(seen[attention.name][2])

    visit = lambda name, probs, places: None  # noqa: E731
    end = lambda functions, output: read.append(token_read(functions, output))  # noqa: E731
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model):
        with watching(model, visit, touch=touch, end=end, one=True):
            logits = called(model, inputs, call)
        logits = getattr(logits, 'logits', logits)
        classes = torch.as_tensor(target, device='cpu').clone()
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise ValueError(f'target={shown(target)} needs a model with logits, not a {type(model).__name__}')
        fits = classes.ndim == 0 or classes.shape == logits.shape[:1]
        if not fits or classes.is_floating_point() or not ((classes >= 0) & (classes < logits.shape[1])).all():
            raise ValueError(
                f'target={shown(target)} must be a class from 0 to {logits.shape[1] - 1}, or one for each image'
            )
        if not seen:
            raise no_attention(model)
        chosen = logits.gather(1, classes.to(logits.device).expand(len(logits))[:, None]).sum()
        gradients = torch.autograd.grad(chosen, [change for *_, change in seen.values()], materialize_grads=True)
    for (attention, probs, _), gradient in zip(seen.values(), gradients):
        if attention.is_linear:
            continue
        weights = (attention.by_heads(gradient) * attention.by_heads(probs)).clamp(min=0).mean(1)
        rolled.add(attention.name, weights, 1.0, attention.places)
    return read[-1]
