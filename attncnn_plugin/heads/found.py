"""The heads of any model: which entries of which parameter are theirs, found by gradients, and masks for them.

With the output of one head of an attention alone, all others at zero, the gradient of what the model gives is not zero
just in the entries that this head is made of, its queries, keys, values and biases, in those that read it, and in what
all heads share.
"""

import itertools
import operator
import os
import re
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from numbers import Integral
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..attention.attention_layer import AttentionLayer, set_parameter
from ..attention.evaluation_mode import evaluating
from ..attention.window import shown
from ..change import Successor, held_by, succession, undone
from .seen import AnyAttention, known_heads, watching, watching_outputs
from .sizes import compute_anew, record_of

Run = Callable[[], Any]
Call = Optional[Callable[[nn.Module, Any], Any]]
Owners = Tuple[int, Tensor]  # a dimension, and whose heads each entry there is, (entries, N_h), bool
# The number of a block in the name of its attention: timm's blocks.0., mmpretrain's layers.0., Hugging Face's layer.0.
# and torchvision's layers.encoder_layer_0.
BLOCK = r'(?:^|\.)(?:blocks|layers?)\.(?:encoder_layer_)?({})(?:\.|$)'


@dataclass(eq=False)
class Heads:
    """The heads of one attention of a model, of this package or of another library.

    Attributes:
        name (str): The name of the module in which it runs.
        model (nn.Module): The model.
        num_heads (int): Number of heads N_h.
        axes (dict[tuple, Any]): Which entries of its batches are heads, by the name of each run and the batch's sizes.
        owners (dict[str, tuple[int, Tensor]]): Of each parameter or buffer of the model with entries for single heads,
            by name: the dimension, and which heads have each entry, ``(entries, N_h)``. Those of other libraries are
            empty until :func:`find_entries` has found them.
    """

    name: str
    model: nn.Module
    num_heads: int
    axes: Dict[Tuple[Any, ...], Any] = field(default_factory=dict)
    owners: Dict[str, Owners] = field(default_factory=dict)

    @property
    def layer(self) -> Any:
        """The attention layer of this package; None for attention of another library."""
        module = self.model.get_submodule(self.name)
        return module if isinstance(module, AttentionLayer) else None

    @property
    def home(self) -> str:
        """The name of the smallest module that has the attention and all entries of its heads."""
        paths = [self.name, *(name.rpartition('.')[0] for name in self.owners)]
        return '.'.join(os.path.commonprefix([path.split('.') for path in paths]))

    @property
    def built_heads(self) -> int:
        """Number of heads that it was built with."""
        path = self.name.split('.')
        around = [record_of(self.model.get_submodule('.'.join(path[:end]))) for end in range(len(path), -1, -1)]
        built = getattr(self.layer, 'built_heads', self.num_heads)
        return next((record[0] for record in around if record is not None), built)

    @property
    def readers(self) -> Dict[str, Tensor]:
        """The weights that take the outputs of heads, by name, and which heads each of their columns belongs to."""
        return {name: own for name, (dim, own) in self.owners.items() if dim == 1 and name.endswith('.weight')}

    @property
    def output(self) -> Any:
        """The linear map that takes the outputs of all heads; None where another module does."""
        modules = [self.model.get_submodule(name.rpartition('.')[0]) for name in self.readers]
        return modules[0] if len(modules) == 1 and isinstance(modules[0], nn.Linear) else None

    def output_entries(self, heads: Sequence[int]) -> Tensor:
        """Returns the columns of the weight of :attr:`output` that take the outputs of some heads, ``(n,)``."""
        (owners,) = self.readers.values()
        return owners[:, list(heads)].any(1).nonzero().flatten()

    def kept(self, heads: Sequence[int]) -> Dict[str, Tuple[int, Tensor]]:
        """Returns, for each parameter, the dimension of heads and the entries that stay when some heads go.

        An entry goes with the last of its heads.
        """
        left = [head for head in range(self.num_heads) if head not in heads]
        return {
            name: (dim, (owners[:, left].any(1) | ~owners.any(1)).nonzero().flatten())
            for name, (dim, owners) in self.owners.items()
        }

    def cut(self, heads: Sequence[int]) -> Dict[nn.Parameter, Successor]:
        """Cuts the entries of some heads out of the model; returns what replaced each parameter.

        A layer of this package then has fewer heads; for attention of other libraries see
        :func:`~attncnn_plugin.heads.sizes.set_sizes`.

        Raises:
            ValueError: A parameter has a hook or an attribute that may not fit what takes its place.
        """
        replaced, buffers = {}, dict(self.model.named_buffers())
        for name, (dim, index) in self.kept(heads).items():
            select = partial(_select, dim, index)
            if name in buffers:
                path, _, leaf = name.rpartition('.')
                module, new = self.model.get_submodule(path), select(buffers[name])
                if (new == new.flatten()[0]).all():
                    setattr(module, leaf, new)
                else:  # state dicts have it from now on: no other model knows which entries are left
                    module.register_buffer(leaf, new)
                continue
            old = self.model.get_parameter(name)
            new = nn.Parameter(select(old), requires_grad=old.requires_grad)
            new.grad = None if old.grad is None else select(old.grad)
            replaced[old] = succession(old, {name: new}, new, select)
            set_parameter(self.model, name, new)
        if self.layer is not None:
            self.layer.note_kept([head for head in range(self.num_heads) if head not in heads])
        return replaced


def _select(dim: int, index: Tensor, x: Tensor) -> Tensor:
    return x.index_select(dim, index.to(x.device))


def own_heads(model: nn.Module) -> Dict[str, Heads]:
    """Returns the heads of the layers of this package in a model, by their names."""
    layers = {name: own for name, own in model.named_modules() if isinstance(own, AttentionLayer)}
    found = {}
    for name, layer in layers.items():
        owners = {f'{name}.{key}'.lstrip('.'): own for key, own in layer.head_owners().items()}
        found[name] = Heads(name, model, layer.num_heads, owners=owners)
    return found


def called(model: nn.Module, inputs: Any, call: Call = None) -> Any:
    """Runs a model on inputs, on its device and in its dtype."""
    if isinstance(inputs, Tensor) and not inputs.numel():
        raise ValueError(f'inputs={shown(inputs)} are none, but at least one is needed')
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)

    def brought(own: Any) -> Any:
        if not isinstance(own, Tensor) or like is None:
            return own
        own = own.clone() if own.is_inference() else own
        return own.to(like.device, like.dtype if own.is_floating_point() else None)

    if call is not None:
        return call(model, inputs)
    if isinstance(inputs, Mapping):
        return model(**{name: brought(own) for name, own in inputs.items()})
    return model(brought(inputs))


@contextmanager
def same_numbers() -> Iterator[None]:
    """Draws the same random numbers inside each time, and restores PyTorch's at the end."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(0)
        yield


def seen_heads(model: nn.Module, run: Run) -> Dict[str, Heads]:
    """Returns the heads of all attention that runs, by its names."""
    found: Dict[str, Heads] = {}
    own = own_heads(model)

    def see(name: str, attention: AnyAttention, output: Tensor) -> None:
        heads = found.setdefault(name, own.get(name) or Heads(name, model, len(attention.of_heads(output))))
        heads.axes[attention.key] = attention.heads

    with evaluating(model), same_numbers(), torch.no_grad(), watching_outputs(model, see):
        run()
    return found


def layer_names(layers: Mapping[str, Heads], heads: Mapping[Union[str, int], Any]) -> Dict[str, List[int]]:
    """Returns heads by the names of layers, where names, those of modules around, or numbers of blocks are given.

    Raises:
        ValueError: A name or a number that no layer has, or several have; a head that is not there.
    """
    named: Dict[str, List[int]] = {}
    for key, own in heads.items():
        matches = re.compile(BLOCK.format(key)).search if isinstance(key, Integral) else None
        found = [name for name in layers if (matches(name) if matches else name == key)]
        if not found and matches is None:
            found = [name for name in layers if name.startswith(f'{key}.')]
        if len(found) != 1:
            raise ValueError(
                f'heads of {key!r} were given, but there are {len(found)} attention layers of that name or block '
                f'that are seen to run: name one of {", ".join(layers) or "none at all"}'
            )
        if found[0] in named:
            raise ValueError(f'heads={dict(heads)} names a layer twice')
        named[found[0]] = as_integers(own, layers[found[0]].num_heads)
    return named


def as_integers(heads: Iterable[Any], num_heads: int) -> List[int]:
    """Returns heads, which may come from an array, as integers.

    Raises:
        ValueError: Heads that a layer of ``num_heads`` does not have.
    """
    heads = list(heads)
    with suppress(TypeError):  # what is no integer is refused below
        heads = [operator.index(head) for head in heads]
    if any(not isinstance(head, int) or not 0 <= head < num_heads for head in heads) or len(set(heads)) < len(heads):
        raise ValueError(f'heads={heads} must be different heads from 0 to {num_heads - 1}')
    return heads


@contextmanager
def masked_heads(model: nn.Module, heads: Mapping[Union[str, int], Sequence[int]]) -> Iterator[None]:
    """Sets the outputs of heads to zero inside, as if they were removed, in training too.

    The first time that it, or a part by itself, runs there on inputs of some shapes, it runs once more before, so that
    its heads are seen.

    Args:
        model (nn.Module): Any model with softmax attention, see :func:`attncnn_plugin.attention_maps`.
        heads (Mapping[str | int, Sequence[int]]): By the name of the attention, or the number of its block, the heads.

    Raises:
        ValueError: When the model runs, or at the end where just parts of it did: a layer or a head that is not there.

    Examples:
        >>> import timm
        >>> from attncnn_plugin.pruning import prune_heads
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1).eval()
        >>> images = torch.rand(1, 3, 32, 32)
        >>> with masked_heads(model, {'blocks.0.attn': [1]}):
        ...     masked = model(images)
        >>> change = prune_heads(model, {'blocks.0.attn': [1]})
        >>> torch.allclose(model(images), masked, atol=1e-5)
        True
    """
    layers: Dict[str, Heads] = {}
    masked: Dict[str, List[int]] = {}
    shapes = set()

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        """Sees, before the first pass of the model, or of a part by itself, which axes are heads."""
        given = module, *(own.shape for _, _, own, _ in held_by((args, kwargs)) if isinstance(own, Tensor))
        if [own for own, _ in watch.running] != [module] or watch.functions.again or given in shapes:
            return
        for name, own in seen_heads(model, lambda: module(*args, **kwargs)).items():
            layers.setdefault(name, own).axes.update(own.axes)
        for some in [heads] if module is model else [{key: own} for key, own in heads.items()]:
            with nullcontext() if module is model else suppress(ValueError):  # the layer may be in another part
                masked.update(layer_names(layers, some))
        shapes.add(given)

    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(module.register_forward_pre_hook(look, with_kwargs=True))
        watch, _ = stack.enter_context(masking(model, layers, masked))
        yield
    if shapes:
        layer_names(layers, heads)


@contextmanager
def masking(
    model: nn.Module, layers: Mapping[str, Heads], heads: Mapping[str, Sequence[int]]
) -> Iterator[Tuple[Any, Dict[str, List[Tensor]]]]:
    """Sets outputs of heads to zero, where heads are known; yields what watches, and the outputs by layers."""
    masked: Dict[str, List[Tensor]] = {}

    def touch(attention: AnyAttention, output: Tensor) -> Tensor:
        name = attention.name.partition('#')[0]
        if not heads.get(name):
            return output
        attention.heads = known_heads(attention, layers[name].axes)
        masked.setdefault(name, []).append(attention.where(heads[name], output.new_zeros(1), output))
        return masked[name][-1]

    with watching(model, touch=touch, again=True) as watch:
        yield watch, masked


@torch.inference_mode(False)
def find_entries(model: nn.Module, layers: Sequence[Heads], run: Run) -> None:
    """Finds the entries of heads of other libraries in the parameters, and float buffers, near attention.

    What is near is replaced by random values meanwhile: an entry that is 0 by chance would hide others.
    """
    left = [(own, own.name.rpartition('.')[0]) for own in layers if not own.owners and own.num_heads > 1]
    while left:
        chosen: Dict[str, Heads] = {}  # those with nothing in common
        for own, near in left:
            if not any(is_in(near, other) or is_in(other, near) for other in chosen):
                chosen[near] = own
        left = [(own, near) for own, near in left if chosen.get(near) is not own]
        with undone([*map(model.get_submodule, chosen)]), evaluating(model), torch.enable_grad():
            with same_numbers():
                tensors = {name: _randomized(model, name) for name in chosen}
            for name, own in chosen.items():  # without other attention, whose bias of keys has rounding errors
                inside = tuple(f'{other.name}.' for other in layers if not f'{own.name}.'.startswith(f'{other.name}.'))
                tensors[name] = {key: x for key, x in tensors[name].items() if not key.startswith(inside)}
            with _Alive():
                for near in chosen:
                    compute_anew(model.get_submodule(near))
            upstream: Set[str] = set()
            influence = partial(_influence, model, chosen, tensors, run, upstream)
            none, first, second = map(influence, (-1, 0, 1))
            for name, own in list(chosen.items()):
                found = [_owners([of[key] for of, _ in (first, second)]) for key in tensors[name]]
                is_read = any(owners is not None and owners[0] for owners in found)
                if name and not is_read and not _are_mixed(*(outputs[name] for _, outputs in (none, first, second))):
                    left.append((own, name.rpartition('.')[0]))  # what reads the heads is farther away
                    del chosen[name], tensors[name]
            most = max((own.num_heads for own in chosen.values()), default=0)
            of_heads = [of for of, _ in (first, second, *map(influence, range(2, most)))]
        for name, own in chosen.items():
            shared = set()
            for key in tensors[name]:
                owners = _owners([of[key] for of in of_heads[: own.num_heads]])
                if owners is not None:
                    own.owners[key] = owners
                elif any(entries.any() for of in of_heads[: own.num_heads] for entries in of[key]):
                    shared.add(key)
            _complete(own, model.get_submodule(name), name, upstream, shared)


def _are_mixed(none: Sequence[Tensor], *alone: Sequence[Tensor]) -> bool:
    """Says whether an entry depends on both of two heads, by the outputs without heads, and with each of them alone."""
    for outputs in zip(none, *alone):
        if len({own.shape for own in outputs}) == 1 and outputs[0].numel():
            nearest = torch.stack([(own - other).abs() for own, other in itertools.combinations(outputs, 2)]).amin(0)
            if (nearest > 1e-5 * outputs[0].abs().amax()).any():
                return True
    return False


def is_in(name: str, other: str) -> bool:
    """Says whether a module is another or inside of it, by their names."""
    return not other or f'{name}.'.startswith(f'{other}.')


class _Alive(TorchFunctionMode):
    """Replaces activations that are 0 somewhere by one that is not: behind a dead unit no gradient would be left."""

    FLAT = {
        *(F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6, F.threshold),
        *(F.hardtanh, F.hardswish, F.hardsigmoid),
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:  # of what is kept for evaluation, too
            return None
        return F.silu(args[0]) if func in self.FLAT else func(*args, **(kwargs or {}))


def _randomized(model: nn.Module, near: str) -> Dict[str, Tensor]:
    """Replaces the parameters and buffers of a module that heads may have entries of; returns the new ones by name."""
    module, found = model.get_submodule(near), {}
    for path, own in module.named_modules(prefix=near):
        is_norm = isinstance(own, nn.modules.batchnorm._NormBase)  # whose statistics cannot be differentiated
        for tensors in (own._parameters, {} if is_norm else own._buffers):
            for leaf, tensor in tensors.items():
                is_dense = tensor is not None and tensor.layout == torch.strided
                if is_dense and tensor.is_floating_point() and tensor.numel():
                    new = torch.empty_like(tensor, requires_grad=False).normal_(std=0.1)
                    new = nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new.requires_grad_()
                    tensors[leaf] = found[f'{path}.{leaf}'.lstrip('.')] = new  # type: ignore[index]
    return found


def _influence(
    model: nn.Module,
    layers: Mapping[str, Heads],
    tensors: Mapping[str, Mapping[str, Tensor]],
    run: Run,
    upstream: Set[str],
    head: int,
) -> Tuple[Dict[str, List[Tensor]], Dict[str, List[Tensor]]]:
    """Returns, by dimension, in which entries of tensors an output changes where one head of some layers is alone.

    The names of tensors that the heads themselves are made of are added to ``upstream``. The second are the outputs of
    the modules near the layers.
    """
    others = {own.name: [other for other in range(own.num_heads) if other != head] for own in layers.values()}

    def gradients(outputs: Iterable[Any], given: Sequence[Tensor]) -> Sequence[Any]:
        found = [own for own in outputs if isinstance(own, Tensor) and own.requires_grad]
        random = [torch.randn_like(own) for own in found]
        return torch.autograd.grad(found, given, random, True, allow_unused=True) if found else [None] * len(given)

    everything = [(name, own) for near in tensors.values() for name, own in near.items()]
    near_outputs: Dict[str, List[Tensor]] = {near: [] for near in layers}
    with same_numbers(), ExitStack() as stack:
        for near, own in near_outputs.items():
            see = lambda module, args, output, own=own: own.extend(islice(floats_in(output), 1))  # noqa: E731
            stack.enter_context(model.get_submodule(near).register_forward_hook(see))
        stack.enter_context(_Alive())
        _, alone = stack.enter_context(masking(model, {own.name: own for own in layers.values()}, others))
        outputs = [*floats_in(run())]  # of which one may be the keys of all heads, cached
        of_layers = [gradients(alone.get(layers[near].name, ()), list(own.values())) for near, own in tensors.items()]
        found = zip(
            itertools.chain(*of_layers),
            gradients([*itertools.chain(*near_outputs.values()), *outputs], [own for _, own in everything]),
        )
    influence = {}
    for (name, own), both in zip(everything, found):
        before, after = (torch.zeros_like(own) if gradient is None else gradient for gradient in both)
        if before.any():
            upstream.add(name)
        changed = (before if before.any() else after) != 0
        influence[name] = [changed.movedim(dim, 0).reshape(own.shape[dim], -1).any(1) for dim in range(own.ndim)]
    return influence, {near: [own.detach() for own in some] for near, some in near_outputs.items()}


def floats_in(output: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors in what a module gives."""
    return (own for _, _, own, _ in held_by(output) if isinstance(own, Tensor) and own.is_floating_point())


def _owners(masks: Sequence[Sequence[Tensor]]) -> Optional[Owners]:
    """Returns the dimension whose entries are of single heads, or of groups of them, and whose they are.

    None where heads share all entries. What some share at random is a rounding error, such as behind a dead unit.
    """
    for dim, of_heads in enumerate(zip(*masks)):
        owners = torch.stack(of_heads, 1)
        of_some = owners[owners.any(1) & ~owners.all(1)].unique(dim=0)
        if len(of_some) and (of_some.sum(0) == 1).all():
            return dim, owners
    return None


def _complete(own: Heads, near: nn.Module, prefix: str, upstream: Set[str], shared: Set[str]) -> None:
    """Gives bias and other tensors of a map to heads the same owners as its weight, and the weight those of its bias.

    To a bias of keys softmax is blind, but for rounding errors; of what is always 0 a map gives its bias; and the
    statistics of a norm cannot be differentiated.
    """
    for path, module in near.named_modules(prefix=prefix):
        tensors: Dict[str, Any] = {'weight': None, 'bias': None, **module._parameters, **module._buffers}
        weight, bias = f'{path}.weight'.lstrip('.'), f'{path}.bias'.lstrip('.')
        if weight in shared:
            own.owners.pop(bias, None)
        dim, owners = own.owners.get(weight, own.owners.get(bias, (0, None)))
        maps = [own.owners.get(f'{path}.{kind}_proj_weight'.lstrip('.')) for kind in 'qkv']
        if isinstance(module, nn.MultiheadAttention) and None not in maps and module.in_proj_bias is not None:
            own.owners[f'{path}.in_proj_bias'.lstrip('.')] = 0, torch.cat([of_map[1] for of_map in maps])
        is_map = isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
        if tensors['weight'] is None or owners is None or dim and is_map:
            continue
        if tensors['weight'].ndim == 1 or upstream & {weight, bias}:
            own.owners.setdefault(weight, (dim, owners))
            for leaf, tensor in tensors.items():
                if leaf != 'weight' and tensor is not None and tensor.shape == (len(owners),):
                    own.owners[f'{path}.{leaf}'.lstrip('.')] = 0, owners
    for name, (dim, owners) in own.owners.items():
        known = owners.any(1)
        for _, other in own.owners.values():
            if dim == 0 and not known.all() and other.shape == owners.shape and other.any(1).all():
                own.owners[name] = (dim, other) if torch.equal(other[known], owners[known]) else (dim, owners)
