"""The attention of any model, seen at the functions of PyTorch that compute it, whatever the classes around them are.

Attention is a softmax whose result multiplies values: ``scaled_dot_product_attention``, or a ``softmax`` that a product
takes up after dropout, casts, reshapes and mixtures of heads. A softmax that routes, gates or ends in a loss is none.
"""

import math
import threading
import types
import warnings
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

from ..attention import AttentionLayer
from ..attention.images import ContentImageAttention, GroupedLinear
from ..attention.neighbourhoods import join_tiles
from ..attention.patches import PatchAttention
from ..attention.precision import at_least_float32, full_precision
from ..attention.tokens import GridAttention
from .kernels import dot_products, shown_to_modes
from .places import MOVES, WRITES, Followed, Places, axes_of, first_of, flat, is_one_of, places_of_grid

Visit = Callable[[str, Tensor, Places], None]
VisitOwn = Callable[[str, Any, Tensor], None]
Touch = Callable[['AnyAttention', Tensor], Tensor]

HOOKS = ('_forward_pre_hooks', '_forward_hooks', '_backward_pre_hooks', '_backward_hooks')
SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax, F.gumbel_softmax}
LOG_SOFTMAX = {torch.log_softmax, Tensor.log_softmax, F.log_softmax, torch.special.log_softmax}
EXP = {torch.exp, Tensor.exp, Tensor.exp_}
DIVISION = {torch.div, torch.true_divide, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__}
TURNED = {Tensor.__rmatmul__}  # takes what comes second first
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm, *TURNED}
PRODUCTS |= {torch.linalg.matmul}
DROPOUT = {torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
PARTS = {Tensor.__getitem__, Tensor.narrow, Tensor.select, Tensor.chunk, torch.chunk, Tensor.split, torch.split}
PARTS |= {Tensor.gather, torch.gather, Tensor.index_select, torch.index_select}
SUMS = {torch.sum, Tensor.sum}
JOINS = {torch.cat, torch.concat, torch.concatenate}
LIKE_ANOTHER = {Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.reshape_as}  # of which they take no value
WITH_FAST_PATH = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder

# PyTorch's own function. It asks whether a mode is active before all else, and leaves it the work; this one computes,
# and the mode sees the functions that it calls.
_multi_head_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), 'has_torch_function': lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


class watching(threading.local):  # noqa: N801
    """Calls ``visit(name, probs, places)`` for all attention that runs in modules of a model.

    The model computes what it does unwatched, to the last bit, in training too; its random numbers, buffers, gradients
    and hooks are the same. A compiled model runs uncompiled.

    Args:
        model (nn.Module): Any model.
        visit (Callable, optional): Takes the name of the module in which attention runs, its probabilities before
            dropout, ``(B, N_h, Q, K)`` for Q queries and K keys, at least float32, without gradients, and their
            places. Further attention of a module in one forward pass of the model has ``#2``, ``#3``, … after the
            name. Windows are further images in B, as they are computed. Defaults to None: no probabilities.
        wanted (Callable): Says of a name whether attention is visited or touched. Defaults to all.
        touch (Callable, optional): ``touch(attention, output)`` returns what takes the place of the outputs of all
            heads, of an :class:`Attention`, or :class:`OwnAttention` of this package. Defaults to None.
        end (Callable): ``end(functions, output)`` is called after a forward pass of the model, or of a part by itself.
        again (bool): Whether to see what gradient checkpointing computes again, too. Defaults to False.
        visit_own (Callable, optional): ``visit_own(name, layer, x)`` visits layers of this package, with their input,
            in place of ``visit``. Defaults to None.
        one (bool): Whether to refuse modules that compute several attentions in a run. Defaults to False: only with
            ``touch``, and only where it cannot be one and the same heads each time.

    Attributes:
        functions (FunctionsSeen | None): What is seen of the forward pass that runs, of the model or of a part of it.
        running (list[tuple[nn.Module, str | None]]): The modules that run in a thread, from the outermost to the
            innermost, with their names; None where nothing is seen.
    """

    def __init__(
        self,
        model: nn.Module,
        visit: Optional[Visit] = None,
        wanted: Callable[[str], bool] = lambda name: True,
        touch: Optional[Touch] = None,
        end: Callable[['FunctionsSeen', Any], None] = lambda functions, output: None,
        again: bool = False,
        visit_own: Optional[VisitOwn] = None,
        one: bool = False,
    ) -> None:
        self.model, self.visit, self.wanted, self.touch, self.end = model, visit, wanted, touch, end
        self.again, self.visit_own, self.one = again, visit_own, one
        self.names: Dict[nn.Module, Optional[str]] = {module: name for name, module in model.named_modules()}
        self.running: List[Tuple[nn.Module, Optional[str]]] = []
        self.functions: Optional[FunctionsSeen] = None
        self.native: Optional[nn.Module] = None  # runs without a mode, as PyTorch's fast path demands
        self.own: Dict[nn.Module, OwnAttention] = {}  # by the maps of their outputs

    def __enter__(self) -> 'watching':
        self.stack = ExitStack()
        self.stack.enter_context(torch.compiler.set_stance('force_eager'))
        self.stack.enter_context(shown_to_modes())
        self.stack.callback(register_module_forward_pre_hook(self.enter).remove)
        self.stack.callback(register_module_forward_hook(self.leave, with_kwargs=True, always_call=True).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()
        if self.functions is not None and self.native is None:  # after an error in a hook
            self.functions.__exit__(None, None, None)

    def enter(self, module: nn.Module, args: Any) -> Any:
        """Notes that a module begins to run; returns what the map of a layer of this package gets instead."""
        own = self.own.pop(module, None)
        if own is not None and self.touch is not None:
            self.running.append((module, None))
            return (self.touch(own, args[0]),)
        if not self.running and getattr(module, '_is_replica', False) and type(module) is type(self.model):
            self.names = {own: name for name, own in module.named_modules()}  # a copy by nn.DataParallel
            self.model = module
        if self.running and module not in self.names and not is_function(module):
            self.names[module] = None  # of another model, or it came while the model ran
            self.names.update({own: name for name, own in self.model.named_modules()})
        name = self.names.get(module)
        # In a backward pass gradient checkpointing computes layers again.
        again = torch._C._current_graph_task_id() != -1
        if self.native is not None or not self.running and (name is None or again and not self.again):
            return None
        if self.functions is None:
            self.functions = FunctionsSeen(self, module is self.model, again)
            self.functions.__enter__()
            for own in flat(args)[::-1]:
                self.functions.places.begin(own)
                self.functions.images = len(own) if own.ndim and len(own) else 1
        # Of another model, or inside of such; or its own hook runs it.
        inside = [own for own, _ in self.running]
        if inside and (name is None or self.running[-1][1] is None or module in inside):
            name = self.running[-1][1] if is_function(module) else None
        self.running.append((module, name))
        if name is None:
            return None
        if isinstance(module, AttentionLayer):
            self.running[-1] = module, None
            self.enter_own(module, self.functions.numbered(name), args[0])
        elif self.touch is None and has_fast_path(module) and _get_current_function_mode() is self.functions:
            self.native = module
            self.functions.__exit__(None, None, None)
        return None

    def enter_own(self, layer: AttentionLayer, name: str, x: Tensor) -> None:
        """Visits a layer of this package, and notes which map gets the outputs of its heads."""
        if not self.wanted(name):
            return
        own = OwnAttention(name, layer, x)
        if self.visit_own is not None:
            self.visit_own(name, layer, x)
        elif self.visit is not None:
            own.probs = layer.probs_of(x)
            self.visit(name, own.probs, own.places)
        if self.touch is not None:
            self.own[layer.output] = own

    def leave(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        """Notes that a module has run, or, without keyword arguments, has failed."""
        if self.functions is None or not self.running or self.running[-1][0] is not module:
            return
        functions, has_run = self.functions, len(kwargs_and_output) == 2
        if self.native is module:
            self.native = None
            functions.__enter__()
            if has_run:
                with torch.no_grad():
                    again = module.forward(*args, **kwargs_and_output[0])  # for what the fast path hides
                functions.places.take_over([again], kwargs_and_output[1:])
        elif has_run and isinstance(module, AttentionLayer):  # which moves no tokens
            like = F.linear if module.window is None else F.conv2d
            functions.places.follow(like, args, {}, kwargs_and_output[1])
        self.running.pop()
        functions.close(module, has_run)
        if not self.running:
            functions.__exit__(None, None, None)
            self.functions = None
            if has_run:
                self.end(functions, kwargs_and_output[1])


@contextmanager
def watching_outputs(
    model: nn.Module,
    see: Callable[[str, 'AnyAttention', Tensor], None],
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[None]:
    """Calls ``see(name, attention, output)`` after each pass of a model, when it is known which axes are heads.

    The name is that of the module in which the attention runs, once more for each time it does.
    """
    noted: List[Tuple[AnyAttention, Tensor]] = []

    def touch(attention: 'AnyAttention', output: Tensor) -> Tensor:
        noted.append((attention, output.detach()))
        return output

    def end(functions: 'FunctionsSeen', output: Any) -> None:
        for attention, own in noted:
            if not attention.is_linear:
                see(attention.name.partition('#')[0], attention, own)
        noted.clear()

    with watching(model, wanted=wanted, touch=touch, end=end):
        yield


@dataclass(eq=False)
class Attention:
    """Attention that has run.

    Attributes:
        name (str): Its name.
        owner (nn.Module): The module that runs.
        product (Callable): Computes the output for other weights, ``(…, Q, K)``.
        batch (list[str]): The labels of the axes that output and weights share, in the order of the weights.
        labels (list[str]): Those of all axes of the output; ``'q'`` are the queries, ``'d'`` the channels.
        shape (torch.Size): The shape of the output.
        probs (Tensor | None): The probabilities, ``(…, Q, K)``; None where they are not wanted.
        numbers (tuple[Tensor | None, Tensor | None]): Those of queries and keys, ``(…, Q)`` and ``(…, K)``.
        heads (Tensor | None): Which entries of the flat batch are the heads of an image, ``(B, N_h)``; None until the
            output shows them.
        is_single (bool): Whether a linear map takes the channels of the output, no more than those of one head.
        of_map (bool): Whether its weights are those of a linear map, not of products of queries and keys.
        is_linear (bool): Whether it has turned out to be a half of linear attention, which counts for none.
        images (int): How many images the model got, 1 where that is unknown.
        number (int): Of the outputs of heads in a run of its module, which this is, from 0.
        run (list[bool]): Of each of these, whether it is that of another attention.
        is_mapped (bool): Whether a map has taken its output.
        again (list[Attention]): What the same probabilities gave with other values.
    """

    name: str
    owner: nn.Module
    product: Callable[[Tensor], Tensor]
    batch: List[str]
    labels: List[str]
    shape: torch.Size
    numbers: Tuple[Optional[Tensor], Optional[Tensor]]
    probs: Optional[Tensor] = None
    heads: Optional[Tensor] = None
    is_single: bool = False
    of_map: bool = False
    is_linear: bool = False
    images: int = 1
    number: int = 0
    run: List[bool] = field(default_factory=list)
    is_mapped: bool = False
    again: List['Attention'] = field(default_factory=list)

    @property
    def sizes(self) -> Dict[str, int]:
        """The size of each axis of the output by its label."""
        return dict(zip(self.labels, self.shape))

    def of_batch(self, tensor: Tensor, ndim: int) -> Tensor:
        """Returns ``(…, )`` with ``ndim`` more dimensions, expanded to the batch."""
        return tensor.expand(*(self.sizes[label] for label in self.batch), *tensor.shape[tensor.ndim - ndim :])

    @property
    def key(self) -> Tuple[Any, ...]:
        """Its name and the sizes of its batch, which have the same heads in each pass."""
        return (self.name, *(self.sizes[label] for label in self.batch))

    def rows(self, device: Any) -> Tensor:
        """Returns which entries of the flat batch are the heads of an image, ``(B, N_h)``."""
        if self.heads is not None:
            return self.heads.to(device)
        sizes = self.key[1:]  # nothing has joined them: one head, or the second axis, as most libraries have it
        index = torch.arange(math.prod(sizes), device=device).view(sizes)
        some = [] if self.is_single or 1 in sizes[1:] else range(1, len(sizes))
        is_usual = sizes[0] % self.images == 0 and sizes[1] != self.images if len(some) == 1 else False
        if some and not is_usual and 'heads' not in self.batch:
            warnings.warn(
                f'which axis of the attention of {self.name}, of sizes {list(sizes)} before queries and keys, is its '
                f'heads is not seen: taken is the second, of {sizes[1]}',
                stacklevel=2,
            )
        return index.movedim(1, -1).flatten(0, -2) if some else index.reshape(-1, 1)

    def by_heads(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the batch, ``(…, N)``, as ``(B, N_h, N)``, with any number of dimensions N."""
        rows, flat_batch = self.rows(tensor.device), tensor.reshape(-1, *tensor.shape[len(self.batch) :])
        in_order = torch.equal(rows.flatten(), torch.arange(len(flat_batch), device=rows.device))
        return flat_batch.unflatten(0, rows.shape) if in_order else flat_batch[rows]

    @property
    def order(self) -> List[int]:
        """The axes of the output as the batch, then queries, then channels."""
        axes = [self.labels.index(label) for label in self.batch]
        axes += [axis for axis, label in enumerate(self.labels) if label == 'q']
        return axes + [axis for axis in range(len(self.labels)) if axis not in axes]

    def in_order(self, output: Tensor) -> Tensor:
        """Returns an output as the batch, then queries, then channels, ``(…, Q, d)``."""
        tensor = output.permute(self.order)
        return tensor.reshape(*tensor.shape[: len(self.batch)], -1, tensor.shape[-1])

    def numbered(self, output: Tensor) -> Tensor:
        """Returns a number for each entry of an output, in that order, in its shape."""
        shape = [output.shape[axis] for axis in self.order]
        dtype = torch.int32 if output.numel() < 2**31 else torch.int64
        numbers = torch.arange(output.numel(), dtype=dtype, device=output.device).view(shape)
        return numbers.permute([self.order.index(axis) for axis in range(output.ndim)])

    def split(self, numbers: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Returns the entries of the flat batch, the queries and the channels that numbers stand for."""
        channels = self.shape[self.order[-1]]
        queries = math.prod(self.shape) // math.prod(self.key[1:]) // channels
        return numbers // channels // queries, numbers // channels % queries, numbers % channels

    def has_queries(self, numbers: Tensor) -> bool:
        """Says whether the last axis of the numbers has several queries."""
        _, of_queries, _ = self.split(numbers.reshape(-1, numbers.shape[-1])[0])
        return bool((of_queries != of_queries[:1]).any())

    def joined(self, numbers: Tensor) -> Optional[Tensor]:
        """Returns the heads, ``(B, N_h)``, where the last axis of the numbers has them beside channels; or None."""
        entries = numbers.reshape(-1, numbers.shape[-1])
        batch, _, of_channels = (own.tolist() for own in self.split(entries[0]))  # of one query, all heads and channels
        heads = sorted({own: place for place, own in reversed([*enumerate(batch)])}.values())  # the first entry of each
        is_one_channel = self.shape[self.order[-1]] > 1 and len({*of_channels}) == 1
        if self.has_queries(numbers) or len(heads) == 1 or is_one_channel:
            return None
        rows, of_queries, _ = self.split(entries[:, heads])
        rows = rows[of_queries[:, 0] == of_queries[0, 0]]
        return rows[rows.amin(1).argsort()].long() if rows.numel() == math.prod(self.key[1:]) else None

    @property
    def num_heads(self) -> int:
        """Number of heads N_h."""
        return self.rows('cpu').shape[1]

    def of_heads(self, output: Tensor) -> Sequence[Tensor]:
        """Returns the output of each head, ``(B, Q, d)``."""
        return self.by_heads(self.in_order(output)).unbind(1)

    @property
    def is_query(self) -> Optional[Tensor]:
        """Which queries are no padding, ``(B, Q)``; None for all."""
        return None if self.numbers[0] is None else self.by_heads(self.of_batch(self.numbers[0], 1) != 0)[:, 0]

    def where(self, heads: Sequence[int], value: Tensor, output: Tensor) -> Tensor:
        """Returns an output with that of some heads replaced by a value, ``(d,)``, or ``(1,)`` for all channels."""
        sizes = [self.sizes[label] for label in self.batch]
        chosen = torch.zeros(math.prod(sizes), dtype=torch.bool, device=output.device)
        chosen[self.rows(output.device)[:, list(heads)]] = True
        order = [self.batch.index(label) for label in self.labels if label in self.batch]
        of_batch = [self.sizes[label] if label in self.batch else 1 for label in self.labels]
        of_value = [len(value) if label == 'd' else 1 for label in self.labels]
        chosen = chosen.view(sizes).permute(order).reshape(of_batch)
        return torch.where(chosen, value.to(output).view(of_value), output)

    @property
    def places(self) -> Places:
        """The places of its queries and keys."""
        return Places(*(None if own is None else self.by_heads(own)[:, 0] for own in self.numbers))


class OwnAttention:
    """Attention of a layer of this package that runs; the input of its output map shows the heads apart.

    Attributes:
        name (str): Its name.
        owner (AttentionLayer): The layer.
        size (tuple[int, ...]): Height and width of the grid of tokens, or of the image.
        probs (Tensor | None): The probabilities, ``(B, N_h, Q, K)``, without a null key; None where none are visited.
    """

    heads: Any = None  # of :class:`Attention`
    is_query = None
    is_linear = False
    number = 0
    probs: Optional[Tensor] = None

    def __init__(self, name: str, owner: Any, x: Tensor) -> None:
        self.name, self.owner, self.x, self.key = name, owner, x, (name,)
        self.size = owner.grid_of(x)

    @property
    def places(self) -> Places:
        """The places of its queries and keys."""
        return places_of_grid(len(self.x), self.size, self.owner.window)

    def by_heads(self, tensor: Tensor) -> Tensor:
        """Returns a tensor ``(B, N_h, …)``."""
        return tensor

    def product(self, weights: Tensor) -> Tensor:
        """Computes the outputs of all heads for other weights, ``(B, N_h, Q, K)``."""
        tokens = self.x.flatten(1, 2)
        if isinstance(self.owner, GridAttention):
            values: Sequence[Tensor] = [tokens] * self.owner.num_heads
        elif isinstance(self.owner, PatchAttention):
            values = self.owner.value(tokens).split(self.owner.head_dims, 2)
        else:
            raise TypeError(f'{self.name} is a {type(self.owner).__name__}, of a network without tokens')
        heads = [own @ value for own, value in zip(weights.unbind(1), values)]
        return torch.cat(heads, -1).unflatten(1, self.size)

    def of_heads(self, output: Tensor) -> Sequence[Tensor]:
        """Returns the output of each head, ``(B, Q, D_h)``."""
        layer, is_grouped = self.owner, isinstance(self.owner.output, GroupedLinear)
        tiles = layer.tiles(self.size) if isinstance(layer, ContentImageAttention) else None
        if is_grouped:  # (…, N_h, Q, C)
            output = output.transpose(-3, -2).flatten(-2)
        if tiles is not None:  # without queries that fill up the last tile
            output = join_tiles(output, tiles).flatten(2).mT
        widths = layer.in_channels if is_grouped else layer.output_widths
        return [own.flatten(1, -2) for own in output.split(widths, -1)]

    def where(self, heads: Sequence[int], value: Tensor, output: Tensor) -> Tensor:
        """Returns the outputs of all heads with those of some replaced by a value, ``(D_h,)`` or ``(1,)``."""
        is_grouped = isinstance(self.owner.output, GroupedLinear)
        parts = output.split(1, -3) if is_grouped else output.split(self.owner.output_widths, -1)
        chosen = [value.to(own).expand_as(own) if head in heads else own for head, own in enumerate(parts)]
        return torch.cat(chosen, -3 if is_grouped else -1)


AnyAttention = Union[Attention, OwnAttention]


def known_heads(attention: AnyAttention, known: Mapping[Tuple[Any, ...], Any]) -> Any:
    """Returns the heads that attention has shown in an earlier pass, by its key.

    Raises:
        ValueError: It has not run on a batch of these sizes.
    """
    if attention.key not in known:
        raise ValueError(
            f'{attention.name} runs on a batch of sizes {list(attention.key[1:])}, on which it has not been seen: its '
            'heads are unknown there'
        )
    return known[attention.key]


class FunctionsSeen(TorchFunctionMode):
    """Sees the functions of PyTorch that a forward pass calls, and finds attention among them.

    Attributes:
        whole (bool): Whether the model itself runs, not only a part of it.
        again (bool): Whether gradient checkpointing computes a part again, in a backward pass.
    """

    def __init__(self, watch: watching, whole: bool, again: bool) -> None:
        super().__init__()
        self.watch, self.whole, self.again = watch, whole, again
        self.counts: Dict[str, int] = {}
        self.weights: Any = WeakTensorKeyDictionary()  # of softmax, and what else they were before dropout
        self.unnormalized: Any = WeakTensorKeyDictionary()  # exponentials; True of logarithms of softmax
        self.outputs: Any = WeakTensorKeyDictionary()  # of attention: it, and the numbers of their entries
        self.maps: Any = WeakTensorKeyDictionary()  # what depends on one linear map
        self.uses: Any = WeakTensorKeyDictionary()  # weights: a list of the shape of softmax, and their first product
        self.open: List[Attention] = []  # whose heads are unknown yet
        self.runs: Dict[nn.Module, List[bool]] = {}  # of each attention that a module computes, whether it is another
        self.places = Followed()
        self.images = 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.watch.running or self.watch.running[-1][1] is None:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _multi_head_attention(*args, **kwargs)
        output = func(*args, **kwargs)
        if isinstance(output, Tensor) and (output.is_nested or torch._C._functorch.is_batchedtensor(output)):
            return output
        is_empty = isinstance(output, Tensor) and not output.numel()  # of no images
        with torch.no_grad():
            self.places.follow(func, args, kwargs, output)
            attention = None if is_empty else self.see(func, args, kwargs, output)
        if attention is None or self.watch.touch is None or not self.watch.wanted(attention.name):
            return output
        several = isinstance(output, tuple)  # with statistics of the softmax
        first = output[0] if several else output
        touched = self.watch.touch(attention, first)
        self.outputs[touched] = self.outputs[first]
        if first in self.places.numbers:
            self.places.numbers[touched] = self.places.numbers[first]
        return (touched, *output[1:]) if several else touched

    @property
    def innermost(self) -> Tuple[nn.Module, Optional[str]]:
        """The innermost module that runs, and its name."""
        running = self.watch.running
        return next((own for own in reversed(running) if not is_function(own[0])), running[0])

    def see(self, func: Any, args: Any, kwargs: Any, output: Any) -> Optional[Attention]:
        """Finds out whether a call was attention, and returns it then."""
        if func is F.scaled_dot_product_attention:
            return self.see_fused(probs_of_dot_products, output, *args, **kwargs)
        if getattr(func, '__name__', '') == 'flex_attention':
            return self.see_fused(probs_of_flex_attention, output[0], *args[:6])
        if hasattr(func, 'kernel'):
            return self.see_kernel(func.kernel, args, kwargs, output)
        tensors = flat((*args, *kwargs.values()))
        self.follow_maps(func, tensors, output)
        if func in SOFTMAX and output.ndim > 1 or self.is_softmax_by_hand(func, args, output):
            self.weights[output], self.uses[output] = None, [output.shape]
            return None
        if not self.weights and not self.outputs:
            return None
        weights = [own for own in tensors if own in self.weights]
        counts = self.watch.touch is not None and not self.watch.one
        followed = [own for own in tensors if own in self.outputs and (counts or self.outputs[own][0] in self.open)]
        floats = [own for own in tensors if own.is_floating_point()]
        if counts and followed:
            self.note_parts(floats, func, args, kwargs, output)
        if followed:
            self.follow(followed, floats, func, args, kwargs, output)
            if any(self.outputs[own][0].is_linear for own in followed):
                return None
        attention = None
        if func in PRODUCTS and len(weights) == 1:
            return self.multiply(tensors[::-1] if func in TURNED else tensors, weights[0], output)
        if func is torch.einsum and len(weights) == 1:
            attention = self.sum_up(args, tensors, weights[0], output)
        if weights and attention is None:
            self.carry(tensors, weights, func, args, kwargs, output)
        return attention

    def follow_maps(self, func: Any, tensors: Sequence[Tensor], output: Any) -> None:
        """Follows what depends on the output of one linear map alone, such as queries; scores depend on two."""
        given = [own for own in tensors if not isinstance(own, nn.Parameter)]
        is_map = func is F.linear or (func in PRODUCTS or func is torch.einsum) and len(tensors) > 1
        if len(given) == 1 and (is_map or 'conv' in func.__name__ or given[0] in self.maps):
            for own in flat([output]):
                self.maps[own] = True

    def is_softmax_by_hand(self, func: Any, args: Any, output: Any) -> bool:
        """Says whether a call gives exponentials divided by sums along an axis, or those of logarithms of softmax."""
        first, other = (*args, None, None)[:2]
        if not isinstance(output, Tensor) or not isinstance(first, Tensor):
            return False
        if func in LOG_SOFTMAX or func in EXP and first not in self.unnormalized:
            self.unnormalized[output] = func in LOG_SOFTMAX
        elif func in EXP:
            return bool(self.unnormalized[first])
        elif func in DIVISION and first in self.unnormalized and isinstance(other, Tensor):
            return first.ndim == other.ndim > 1 and sum(map(int.__ne__, first.shape, other.shape)) == 1
        return False

    def see_fused(
        self, probs: Any, output: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Attention:
        """Sees ``scaled_dot_product_attention`` or ``flex_attention``."""
        queries, keys = first_of(self.places.of(query)), first_of(self.places.of(key))
        groups = query.shape[-3] // key.shape[-3] if query.ndim > 3 and key.ndim > 3 else 1
        if queries is not None:
            self.places.numbers[output] = queries[..., None].expand(output.shape)
        if groups > 1 and key.shape[-3] > 1:
            value = value.repeat_interleave(groups, -3)
            keys = None if keys is None else keys.repeat_interleave(groups, -2)
        batch = batch_axes(output)
        return self.begin(
            lambda: probs(query, key, value, *args, **kwargs),
            lambda weights: weights @ value,
            batch,
            [*batch, 'q', 'd'],
            output,
            (queries, keys),
        )

    def see_kernel(self, kernel: Any, args: Any, kwargs: Any, output: Any) -> Attention:
        """Sees a function outside of PyTorch, whose output is ``(B, Q, N_h, D_h)``."""
        output = output[0] if isinstance(output, tuple) else output
        queries, keys = (first_of(self.places.of(own)) for own in flat((*args, *kwargs.values()))[:2])
        if queries is not None:
            self.places.numbers[output] = queries[..., None].expand(output.shape)
        heads = output.shape[2]  # keys can have fewer
        numbers = tuple(None if own is None else own[..., 0][:, None].expand(-1, heads, -1) for own in (queries, keys))
        return self.begin(
            lambda: softmax(kernel(*args, **kwargs)[0]),
            lambda weights: (weights @ kernel(*args, **kwargs)[1]).movedim(1, -2),
            ['images', 'heads'],
            ['images', 'q', 'heads', 'd'],
            output,
            numbers,
        )

    def multiply(self, tensors: Sequence[Tensor], weights: Tensor, output: Tensor) -> Optional[Attention]:
        """Sees the product of weights with values; the weights come second where both are transposed."""
        turned = tensors[0] is not weights
        values, batch = tensors[not turned], batch_axes(output)
        if isinstance(values, nn.Parameter) or output.ndim < 2 or values.ndim < min(weights.ndim, 3):
            return None  # a table that all inputs share
        before, (queries, keys) = self.before_dropout(weights), map(self.places.of, (weights, values))
        if not turned:
            numbers = first_of(queries), first_of(keys)
            if are_one(numbers[1]):
                return None  # a router, which mixes what experts make of a place
            product, labels = lambda own: own @ values, [*batch, 'q', 'd']
            return self.begin(lambda: before, product, batch, labels, output, numbers, weights, [weights.ndim - 2])
        if queries is not None:
            self.places.numbers[output] = queries[..., :1, :].expand(output.shape)
        numbers = tuple(None if own is None else own[..., 0, :] for own in (queries, keys))
        product, labels = lambda own: values @ own.mT, [*batch, 'd', 'q']
        return self.begin(lambda: before.mT, product, batch, labels, output, numbers, weights, [weights.ndim - 1])

    def sum_up(self, args: Any, tensors: Sequence[Tensor], weights: Tensor, output: Tensor) -> Optional[Attention]:
        """Sees weights and values whose products are summed up, as by ``torch.einsum('bhqk,bhkd->bhqd', …)``."""
        inputs, of_output = axes_of(args[0], tensors)
        if len(tensors) != 2 or len(inputs) != 2:
            return None
        first = tensors[0] is weights
        values = tensors[first]
        own, of_values = inputs[:: 1 if first else -1]
        keys = [axis for axis in own if axis in of_values and axis not in of_output]
        others = [axis for axis in own if axis in of_output]
        queries = [axis for axis in others if axis not in of_values]
        if self.uses[weights][1:] and self.uses[weights][2] == layout_of(weights):
            queries = [own[axis] for axis in self.uses[weights][3]]
        elif len(queries) > len(keys):  # heads that share values, or images that share a table
            queries = others[-len(keys) :]
        batch = [axis for axis in others if axis not in queries]
        channels = [axis for axis in of_values if axis not in own and axis in of_output]
        if isinstance(values, nn.Parameter) or not keys or not channels or len(others + keys) < len(own):
            return None
        sizes = dict(zip(own, weights.shape))
        before, numbers = self.before_dropout(weights), (self.places.of(weights), self.places.of(values))
        shared = [axis for axis in batch if axis not in of_values]
        if numbers[1] is not None:
            numbers = numbers[0], numbers[1].expand(*(sizes[axis] for axis in shared), *values.shape)
        labels = {**dict.fromkeys(queries, 'q'), channels[-1]: 'd', **{axis: f'axis {axis}' for axis in batch}}

        def product(other: Tensor) -> Tensor:
            other = other.reshape([sizes[axis] for axis in [*batch, *queries, *keys]])
            return torch.einsum(f'{"".join([*batch, *queries, *keys])},{of_values}->{of_output}', other, values)

        return self.begin(
            lambda: with_axes(before, own, batch, queries, keys),
            product,
            [labels[axis] for axis in batch],
            [labels.get(axis, axis) for axis in of_output],
            output,
            (
                None if numbers[0] is None or not queries else with_axes(numbers[0], own, batch, queries),
                None if numbers[1] is None else with_axes(numbers[1], ''.join(shared) + of_values, batch, keys),
            ),
            weights,
            [own.index(axis) for axis in queries],
        )

    def before_dropout(self, weights: Tensor) -> Tensor:
        """Returns the weights before dropout."""
        before = self.weights[weights]
        return weights if before is None else before

    def carry(
        self, tensors: Sequence[Tensor], weights: Sequence[Tensor], func: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Follows weights through a function after which they are still weights.

        Its output has as many entries, or is a part, and all else that it takes is less: a scale, a mask, a map of
        heads.
        """
        number = max(own.numel() for own in weights)
        others = [own for own in tensors if own not in self.weights and own.is_floating_point()]
        if func not in LIKE_ANOTHER and any(own.numel() >= number for own in others):
            return
        if func is F.linear and ((self.before_dropout(weights[0]).sum(-1) - 1).abs() < 1e-3).all():
            return  # a linear map of what softmax chose, not of heads
        changed = func not in DROPOUT and any(self.weights[own] is not None for own in weights)
        before: Any = self.before_dropout(weights[0]) if func in DROPOUT else None
        if changed:
            copies = {id(own): self.before_dropout(own).clone() for own in weights}
            before = func(*replaced(args, copies), **kwargs)
        several = isinstance(output, (list, tuple))
        sizes = number, sum(own.numel() for own in weights)  # the second of those that are joined
        for position, own in enumerate(output if several else [output]):
            is_part = isinstance(own, Tensor) and own.is_floating_point() and (own.numel() in sizes or func in PARTS)
            if is_part and (own not in self.weights or changed):
                self.weights[own] = before[position] if several and changed else before
                self.uses[own] = self.uses[weights[0]] if own.numel() == number else [own.shape]

    def begin(
        self,
        probs: Callable[[], Tensor],
        product: Callable[[Tensor], Tensor],
        batch: List[str],
        labels: List[str],
        output: Tensor,
        numbers: Any,
        weights: Any = None,
        queries: Any = None,
    ) -> Optional[Attention]:
        """Notes attention that gave an output, see :class:`Attention`.

        Weights that multiply once more, such as a table of relative values, are the same attention.

        Raises:
            ValueError: They do in another order of axes, and outputs of heads are wanted, or the first order was that.
        """
        module, name = self.innermost
        run, uses = self.runs.setdefault(module, []), [] if weights is None else self.uses[weights]
        if uses[1:] and uses[1].owner is module:
            before = uses[1]
            if uses[2:] == [layout_of(weights), queries]:
                again = replace(before, product=product, batch=batch, labels=labels, shape=output.shape, again=[])
                again.number = len(run)
                run.append(False)
                before.again.append(again)
                self.outputs[output] = again, again.numbered(output)
                return again
            if self.watch.wanted(before.name) and (self.watch.touch is not None or weights.shape == uses[0]):
                raise ValueError(
                    f'{before.name} multiplies its probabilities in two orders of their axes, as for relative values '
                    "by a transposed matmul: use torch.einsum('bhqk,qkd->bhqd', …) there"
                )
            return None
        attention = Attention(self.numbered(name or ''), module, product, batch, labels, output.shape, numbers)
        attention.images = self.images
        if self.watch.visit is not None and self.watch.wanted(attention.name):
            with full_precision(output.device.type):
                attention.probs = attention.of_batch(at_least_float32(probs().detach()), 2)
            attention.numbers = tuple(None if own is None else attention.of_batch(own, 1) for own in numbers)
        if weights is not None:
            uses[1:] = attention, layout_of(weights), queries
            attention.of_map = weights in self.maps
        attention.run, attention.number = run, len(run)
        run.append(self.watch.wanted(attention.name))
        self.open.append(attention)
        self.outputs[output] = attention, attention.numbered(output)
        return attention

    def follow(
        self, tensors: Sequence[Tensor], floats: Sequence[Tensor], func: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Follows the entries of an output, by their numbers, up to where heads and channels are joined."""
        attention, numbers = self.outputs[tensors[0]]
        channels, moved = attention.sizes['d'], None
        attention.is_mapped |= func is F.linear or func in PRODUCTS or func is torch.einsum
        others = {id(own): self.outputs[own][1] for own in tensors if self.outputs[own][0] is attention}
        is_alone = all(id(own) in others for own in floats)  # without other tensors, or other attention
        if is_alone and is_one_of(func, MOVES - {'max', 'amax'}):
            with suppress(RuntimeError, TypeError, ValueError, IndexError):
                moved = func(*replaced(args, others), **kwargs)
        elif func is torch.einsum:
            moved = self.follow_einsum(attention, numbers, tensors[0], floats, args)
        elif func in PRODUCTS and len(floats) == 2 and numbers.ndim > 1:
            is_first = floats[func in TURNED] is tensors[0]
            self.take_up(attention, numbers if is_first else numbers.mT, floats)
            if is_first and output.shape[:-1] == numbers.shape[:-1] != output.shape:
                moved = numbers[..., torch.arange(output.shape[-1], device=numbers.device) % numbers.shape[-1]]
        elif (
            func in SUMS and numbers.ndim > 1 and isinstance(kwargs.get('dim', (*args[1:], None)[0]), int)
        ):  # over heads
            self.show_joined(attention, numbers.movedim(kwargs.get('dim', args[-1]), -2).flatten(-2))
        elif func is F.linear and numbers.shape[-1] == channels and numbers.shape.numel() == attention.shape.numel():
            attention.is_single |= bool((numbers[..., -1] - numbers[..., 0] == channels - 1).all())
        for own, new in zip(flat([output]), flat([numbers if moved is None else moved])):
            if own.shape != new.shape:
                continue
            self.outputs[own] = attention, new
            for axis in range(1, new.ndim) if moved is not None else ():
                if (channels > 1 or axis == new.ndim - 1) and self.show_joined(attention, new.movedim(axis, -1)):
                    return

    def follow_einsum(
        self, attention: Attention, numbers: Tensor, output: Tensor, floats: Sequence[Tensor], args: Any
    ) -> Optional[Tensor]:
        """Takes up an output that ``torch.einsum`` sums up, or returns its numbers with the axes in the new order."""
        operands = flat(args[1:])
        inputs, of_output = axes_of(args[0], operands)
        axes = next((axes for own, axes in zip(operands, inputs) if own is output), '')
        summed = [axes.index(axis) for axis in axes if axis not in of_output]
        if summed:
            kept = [axes.index(axis) for axis in axes if axis in of_output]
            self.take_up(attention, numbers.permute(kept + summed).flatten(len(kept)), floats)
        elif len(of_output) == len(axes) > 0:
            return numbers.permute([axes.index(axis) for axis in of_output])
        return None

    def take_up(self, attention: Attention, numbers: Tensor, tensors: Sequence[Tensor]) -> None:
        """Takes up the output of attention in a sum along its last axis, of heads, channels or queries.

        What softmax sums up over keys, and another one over queries, softmax(Q) (softmax(K)ᵀ V), is linear attention.
        """
        are_values = any(own in self.weights for own in tensors)  # of another attention
        if are_values and attention.of_map and attention in self.open and attention.has_queries(numbers):
            attention.is_linear = True
            attention.run.pop(attention.number)
            self.open.remove(attention)
        else:
            attention.run[attention.number] &= not are_values
            self.show_joined(attention, numbers)

    def note_parts(self, tensors: Sequence[Tensor], func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Notes attention with the same heads as another of its module: of further queries, or which is added to it."""
        known = [self.outputs[own] for own in tensors if own in self.outputs]
        first, numbers = known[0]
        parts = [own for own, _ in known if own is not first and own.owner is first.owner]
        if is_one_of(func, WRITES):
            differ = [axis for axis, side in enumerate(args[0].shape) if numbers.shape[axis : axis + 1] != (side,)]
            parts = [first] if len(differ) == 1 and args[0].ndim == numbers.ndim else []
        else:
            differ = [kwargs.get('dim', (*args[1:], 0)[0])] if func in JOINS else []
        if differ and parts and not first.has_queries(numbers.movedim(differ[0], -1)):
            return
        adds = not is_one_of(func, MOVES) and not first.is_mapped
        for own in parts:
            if differ or adds and not own.is_mapped and math.prod(own.key[2:]) > 1:
                own.run[own.number] = False

    def show_joined(self, attention: Attention, numbers: Tensor) -> bool:
        """Shows attention, if the last axis of what became of its output joins heads and channels."""
        heads = attention.joined(numbers) if attention in self.open else None
        if heads is not None:
            self.show(attention, heads)
        return heads is not None

    def numbered(self, name: str) -> str:
        """Returns the name of the attention that runs next in a module: of the second one it ends with ``#2``."""
        self.counts[name] = count = self.counts.get(name, 0) + 1
        return name if count == 1 else f'{name}#{count}'

    def show(self, attention: Attention, heads: Optional[Tensor] = None) -> None:
        """Shows attention whose heads are known, or will not be.

        Raises:
            ValueError: They are not those of an earlier pass on a batch of the same sizes.
        """
        self.open.remove(attention)
        if attention.heads is not None and heads is not None and not torch.equal(attention.rows(heads.device), heads):
            raise ValueError(
                f'{attention.name} runs on batches of sizes {list(attention.key[1:])} in two ways, with its heads in '
                'another order: what is a head is known for one'
            )
        for own in (attention, *attention.again):
            own.heads = own.heads if heads is None else heads
        if attention.probs is not None:
            self.watch.visit(attention.name, attention.by_heads(attention.probs), attention.places)
            attention.probs = None

    def close(self, module: nn.Module, has_run: bool) -> None:
        """Shows the attention of a module that has run, or has failed, whose heads nothing has joined.

        Raises:
            ValueError: It has computed several attentions, and not parts of one.
        """
        for attention in [own for own in self.open if own.owner is module]:
            self.show(attention)
        number = sum(self.runs.pop(module, []))
        if has_run and number > 1 and (self.watch.one or self.watch.touch is not None):
            raise ValueError(
                f'{self.watch.names.get(module) or type(module).__name__} computes {number} attentions in a run, such '
                'as its heads one after another: rollout, importance, ablation, masks and pruning need one, or a '
                'module for each; attention_maps has all'
            )


def is_function(module: nn.Module) -> bool:
    """Says whether a module of PyTorch stands for a function, such as ``nn.Softmax`` or ``nn.Dropout``."""
    return type(module).__module__.startswith('torch.nn.modules.') and not any(True for _ in module.children())


def has_fast_path(module: nn.Module) -> bool:
    """Says whether PyTorch may run a module by a kernel for all of it, which does not run where functions are seen."""
    return type(module) in WITH_FAST_PATH and not any(
        own.training or not type(own).__module__.startswith('torch.nn.') or any(getattr(own, hooks) for hooks in HOOKS)
        for own in module.modules()
    )


def batch_axes(output: Tensor) -> List[str]:
    """Returns labels of the axes of an output before its last two."""
    return [f'axis {axis}' for axis in range(output.ndim - 2)]


def layout_of(tensor: Tensor) -> Tuple[torch.Size, Tuple[int, ...]]:
    """Returns shape and strides of a tensor."""
    return tensor.shape, tensor.stride()


def are_one(keys: Optional[Tensor]) -> bool:
    """Says whether there are several keys, all of the same place."""
    return keys is not None and keys.shape[-1] > 1 and bool(((keys == keys[..., :1]) & (keys > 0)).all())


def replaced(values: Any, others: Dict[int, Tensor]) -> Any:
    """Replaces values, also in lists, by others that are given by their ids."""
    if isinstance(values, (list, tuple)) and not isinstance(values, torch.Size):
        return type(values)(replaced(own, others) for own in values)
    return others.get(id(values), values)


def with_axes(tensor: Tensor, axes: str, batch: List[str], *groups: List[str]) -> Tensor:
    """Returns a tensor with the axes of the batch, then each group as one; of all others it takes the first entry."""
    for axis in [axis for axis in axes if axis not in batch and not any(axis in group for group in groups)]:
        tensor, axes = tensor.select(axes.index(axis), 0), axes.replace(axis, '')
    tensor = tensor.permute([axes.index(axis) for axis in [*batch, *sum(groups, [])]])
    sizes = iter(tensor.shape[len(batch) :])
    joined = [math.prod(next(sizes) for _ in group) for group in groups]
    return tensor.reshape(*tensor.shape[: len(batch)], *joined)


def probs_of_dot_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes softmax(Q Kᵀ/√d + B), the probabilities of ``scaled_dot_product_attention``, ``(…, Q, K)``."""
    if type(attn_mask) not in (type(None), Tensor, nn.Parameter):  # such as a CausalBias, which is no tensor of scores
        eye = torch.eye(key.shape[-2], device=value.device, dtype=value.dtype).expand(*key.shape[:-1], -1)
        return F.scaled_dot_product_attention(query, key, eye, attn_mask, scale=scale, enable_gqa=enable_gqa)
    scores = dot_products(query, key, scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores.masked_fill_(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores += attn_mask
    return softmax(scores, masked=attn_mask is not None)


def probs_of_flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float
) -> Tensor:
    """Computes the probabilities of ``flex_attention``, whose scores and mask are functions of (image, head, q, k)."""
    scores = dot_products(query, key, scale)
    sees = block_mask[-1]
    for axis in (4, 3, 2, 1):
        dims = [0 if own == axis else None for own in range(1, 5)]
        score_mod = torch.vmap(score_mod, in_dims=(0, *dims))
        sees = torch.vmap(sees, in_dims=tuple(dims))
    places = [torch.arange(side, device=scores.device) for side in scores.shape]
    return softmax(score_mod(scores, *places).masked_fill(~sees(*places), -torch.inf))


def softmax(scores: Tensor, masked: bool = True) -> Tensor:
    """Computes the softmax in the memory of the scores; it is 0 where a mask of −inf hides all keys from a query."""
    sees_none = scores.amax(-1, keepdim=True) == -torch.inf if masked else None
    probs = torch.softmax(scores, -1, out=scores if type(scores) is Tensor else None)
    return probs if sees_none is None else probs.masked_fill_(sees_none, 0)
