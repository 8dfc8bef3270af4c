"""Writes docs/tables/transformers.md: one small model of every architecture, what is seen, and what is right.

Run by hand, ``python docs/transformers_table.py [GLOB …]``; a slow test runs a few rows of it.
"""

import contextlib
import copy
import fnmatch
import importlib
import sys
import tempfile
import warnings
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple
from unittest import mock

import torch
from torch import Tensor, nn
from transformers_models import CLASSES, HUGGING_FACE, OTHERS, TIMM

from attncnn_plugin import follow_state_dict, rollout
from attncnn_plugin.heads.seen import watching
from attncnn_plugin.pruning import prunable_heads, prune_heads


class Row(NamedTuple):
    """A model of the table."""

    library: str
    name: str
    build: Callable[[bool], nn.Module]  # fused or not
    inputs: Any
    there: int
    own: Callable[..., Any] = lambda model, inputs: call(model, inputs) is None or []


class Result(NamedTuple):
    """What a model showed; the fields are columns."""

    seen: int
    compared: int
    difference: float
    changed: bool
    rollout: str
    pruned: str
    loaded: str


def timm_row(file: str, name: str, settings: Dict[str, Any], size: int, there: int) -> Row:
    """Returns a model of timm."""
    import timm

    def build(fused: bool) -> nn.Module:
        model: nn.Module = timm.create_model(name, **CLASSES, **settings)
        return model

    return Row('timm', f'{file}: {name}', build, torch.Size((2, 3, size, size)), there)


def enlarged(model: nn.Module) -> nn.Module:
    """Draws weights so large that no attention is uniform."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.numel():
            nn.init.normal_(parameter, std=1.5 * parameter[0].numel() ** -0.5)
        elif parameter.numel() and parameter.abs().max() < 0.1 and parameter.any():
            nn.init.ones_(parameter)  # scales of layers
    model.eval()  # mmpretrain's returns None
    return model


def with_weights(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Asks ``nn.MultiheadAttention`` for the weights of each head."""
    return args, {**kwargs, 'need_weights': True, 'average_attn_weights': False}


def recording(function: Any, found: List[Tensor], position: Optional[int] = None) -> Any:
    """Returns a function that adds its output, or the argument at a position, to what was found."""

    def record(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = function(*args, **kwargs)
        found.append((output if position is None else args[position]).detach().clone())
        return output

    return record


@contextlib.contextmanager
def computed(model: nn.Module) -> Iterator[List[Tensor]]:
    """Yields what an unfused model gives to dropout and to values: its library's own numbers."""
    found: List[Tensor] = []
    handles: List[Any] = []

    def before_dropout(module: nn.Module, args: Any) -> None:
        if args and args[0].ndim > 2:
            found.append(args[0].detach().clone())

    fused = 'scaled_dot_product_attention'
    for name, module in model.named_modules():
        if getattr(module, fused, None) is nn.functional.scaled_dot_product_attention:
            setattr(module, fused, unfused_attention)
        if isinstance(module, nn.MultiheadAttention):
            handles += [
                module.register_forward_pre_hook(with_weights, with_kwargs=True),
                module.register_forward_hook(lambda module, args, output: found.append(output[1])),
            ]
        elif 'drop' in name.rpartition('.')[2]:
            handles.append(module.register_forward_pre_hook(before_dropout))
        elif name.endswith('talking_head2'):
            handles.append(module.register_forward_hook(lambda module, args, output: found.append(output)))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.functional, fused, unfused_attention))
        for module in {sys.modules[type(own).__module__] for own in model.modules()}:
            if getattr(module, 'einsum', None) is torch.einsum:
                stack.enter_context(mock.patch.object(module, 'einsum', recording(torch.einsum, found, 1)))
        for owner in (torch, torch.Tensor, nn.functional):
            stack.enter_context(mock.patch.object(owner, 'softmax', recording(owner.softmax, found)))
        yield found
    for handle in handles:
        handle.remove()


def unfused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Optional[float] = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Computes what PyTorch documents of ``scaled_dot_product_attention``."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    bias = torch.zeros(query.shape[-2], key.shape[-2])
    if is_causal:
        bias.masked_fill_(~torch.ones_like(bias, dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None:
        own = attn_mask.dtype == torch.bool
        bias = bias.masked_fill(~attn_mask, -torch.inf) if own else bias + attn_mask
    if enable_gqa:
        key, value = (own.repeat_interleave(query.shape[-3] // own.shape[-3], -3) for own in (key, value))
    return torch.softmax(query @ key.mT * scale + bias, -1) @ value


def distance(one: Tensor, others: List[Tensor]) -> float:
    """Returns how far maps are from the nearest, in any order of the batch; inf where none are of the size."""
    nearest = [float('inf')]
    for other in others:
        other = other if other.ndim < 2 or one.shape[-2:] == other.shape[-2:] else other.mT
        if one.numel() == other.numel() and one.shape[-2:] == other.shape[-2:]:
            own, its = (each.reshape(-1, one.shape[-2:].numel()) for each in (one, other))
            nearest.append(torch.cdist(own, its, p=float('inf')).amin(1).max().item())
    return min(nearest)


def call(model: nn.Module, inputs: Any) -> Any:
    """Runs a model on images, or on keyword arguments."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def flat(output: Any) -> List[Tensor]:
    """Returns all tensors of an output."""
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else []
    return [own for part in parts for own in flat(part)]


def inputs_of(row: Row) -> Any:
    """Returns what a model takes."""
    torch.manual_seed(1)
    return torch.randn(row.inputs) if isinstance(row.inputs, torch.Size) else row.inputs


def pruned(row: Row, fresh: Executor) -> Tuple[str, str]:
    """Removes a head of all layers that have two, and loads the model in another process; says what came of it."""
    model, inputs = enlarged(row.build(True)), inputs_of(row)
    try:
        heads = {name: [0] for name, own in prunable_heads(model, inputs).items() if own.num_heads > 1}
        if not heads:
            return '–', '–'
        difference = prune_heads(model, heads, inputs).difference
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error), '–'
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        torch.save(model.state_dict(), f'{folder}/pruned.pth')
        torch.manual_seed(2)
        torch.save(flat(call(model, inputs)), f'{folder}/outputs.pth')
        return f'{difference:.0e}', fresh.submit(loaded, ROWS.index(row), folder).result()


@torch.no_grad()
def loaded(number: int, folder: str) -> str:
    """Builds the model of a row, and loads what was pruned into it; says whether its outputs are the same."""
    warnings.filterwarnings('ignore')
    model, state = ROWS[number].build(True), torch.load(f'{folder}/pruned.pth', weights_only=True)
    try:
        follow_state_dict(model, state)
        model.load_state_dict(state)
        model.eval()
    except (RuntimeError, TypeError) as error:
        return str(error)
    inputs = inputs_of(ROWS[number])
    torch.manual_seed(2)
    outputs = zip(flat(call(model, inputs)), torch.load(f'{folder}/outputs.pth', weights_only=True))
    return (
        'yes' if all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in outputs) else 'other outputs'
    )


@torch.no_grad()
def result(row: Row, fresh: Executor) -> Result:
    """Runs a model unwatched, watched and unfused, and pruned, and pruned in a fresh process."""
    from timm.layers import set_fused_attn

    model = enlarged(row.build(True))
    inputs = inputs_of(row)
    maps: Dict[str, Tensor] = {}
    torch.manual_seed(2)
    before = flat(call(model, inputs))
    torch.manual_seed(2)
    with watching(model, lambda name, probs, places: maps.update({name: probs})):
        after = flat(call(model, inputs))
    changed = not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(before, after))
    set_fused_attn(False)
    try:
        unfused = row.build(False)
    finally:
        set_fused_attn(True)
    unfused.load_state_dict(model.state_dict(), strict=False)  # which mmpretrain's Swin v2 refuses
    torch.manual_seed(2)
    unfused.eval()
    with computed(unfused) as own:
        official = row.own(unfused, inputs)
    differences = [distance(one, own + official) for one in maps.values()]
    differences = [one for one in differences if one < float('inf')]
    compared = len(differences)
    there = [distance(one, list(maps.values())) for one in official]
    differences += [one for one in there if one < float('inf')]
    try:
        rolled = 'yes' if rollout(model, inputs).isfinite().all() else 'not finite'
    except ValueError as error:
        rolled = str(error)
    return Result(len(maps), compared, max(differences, default=float('nan')), changed, rolled, *pruned(row, fresh))


def hugging_face_row(name: str, settings: Dict[str, Any], inputs: Any, there: int) -> Row:
    """Returns a model of Hugging Face's transformers."""
    import transformers

    def build(fused: bool) -> nn.Module:
        kind = getattr(transformers, name)
        eager = {} if fused else dict(attn_implementation='eager')
        model: nn.Module = kind(kind.config_class(**copy.deepcopy(settings), **eager))
        return model

    def own(model: Any, inputs: Any) -> List[Tensor]:
        try:
            return attentions_of(model(**inputs, output_attentions=True))
        except TypeError:
            return call(model, inputs) and []

    return Row('Hugging Face', name, build, inputs, there, own)


def other_row(path: str, settings: Dict[str, Any], inputs: Any, there: int) -> Row:
    """Returns a model of a class anywhere."""
    module, _, name = path.rpartition('.')

    def build(fused: bool) -> nn.Module:
        model: nn.Module = getattr(importlib.import_module(module), name)(**copy.deepcopy(settings))
        return model

    return Row(path.partition('.')[0], path.partition('.')[2], build, inputs, there)


def attentions_of(output: Any) -> List[Tensor]:
    """Returns what an output of Hugging Face has in fields of attentions."""
    found: List[Tensor] = []
    for name, value in output.items():
        if 'attentions' in name:
            found += flat(value)
        elif hasattr(value, 'items'):
            found += attentions_of(value)
    return found


def line_of(row: Row, result: Result) -> str:
    """Returns a line of the table."""
    cells = [
        row.library,
        f'`{row.name}`',
        f'{result.seen} of {row.there}',
        '–' if not result.compared else f'{result.difference:.0e}' if result.difference else '0',
        'changed' if result.changed else 'same',
        next((short for part, short in REFUSALS.items() if part in result.pruned), result.pruned.replace('0e+00', '0')),
        next((short for part, short in REFUSALS.items() if part in result.loaded), result.loaded),
        next(short for part, short in REFUSALS.items() if part in result.rollout),
    ]
    return f'| {" | ".join(cells)} |'


REFUSALS = {
    'yes': 'yes',
    'no attention': '–',
    'of the layers before': 'other tokens',
    'attentions in a run': 'several',
    'a rollout ends there': 'pooled before',
    'give grid': 'needs `grid`',
    'of single heads': 'shared',
    'cannot be removed': 'refused',
    'does not support backward': 'no gradient',
    'Missing key': 'refuses its own',
}
HEADER = """| library | model | seen | difference | output | pruned | loaded | rollout |
| ------- | ----- | ---- | ---------- | ------ | ------ | ------ | ------- |
"""
ROWS = [timm_row(*own) for own in TIMM]
ROWS += [hugging_face_row(*own) for own in HUGGING_FACE] + [other_row(*own) for own in OTHERS]


def main() -> None:
    """Prints the lines of models that globs choose; of all, writes them into the page too."""
    warnings.filterwarnings('ignore')
    lines, whole, with_softmax, with_heads, again = [], 0, 0, 0, 0
    with ProcessPoolExecutor(1, mp_context=get_context('spawn')) as fresh:
        for row in ROWS:
            if any(fnmatch.fnmatch(f'{row.library}.{row.name}', glob) for glob in sys.argv[1:] or ['*']):
                own = result(row, fresh)
                lines.append(line_of(row, own))
                print(lines[-1], own.rollout, own.pruned if len(sys.argv) > 1 else '', flush=True)
                with_softmax += row.there > 0
                whole += row.there > 0 and own.seen == row.there
                with_heads += own.pruned != '–'
                again += own.loaded == 'yes'
    if len(sys.argv) == 1:
        page = Path(__file__).parent / 'tables/transformers.md'
        before, _, rest = page.read_text(encoding='utf-8').partition('<!-- table -->\n')
        after = rest.partition('<!-- end -->')[2]
        share = f'All attention is seen of {whole} of the {with_softmax} models that have softmax attention.'
        share += f'\n{again} of the {with_heads} with several heads are pruned and loaded again.'
        table = HEADER + '\n'.join(lines)
        text = f'{before}<!-- table -->\n\n{share}\n\n{table}\n\n<!-- end -->{after}'
        page.write_text(text, encoding='utf-8')


if __name__ == '__main__':
    main()
