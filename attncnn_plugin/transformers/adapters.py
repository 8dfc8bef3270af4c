"""The attention of other libraries: a table of their classes, and what each of them computes.

All are P V with P = softmax(Q Kᵀ + B) of some heads, and a linear map of the heads' outputs, one after the other. An
:class:`Adapter` says where a class has its maps, and what it adds to the scores. To support a class of yours, add it to
``ADAPTERS`` under the name of its module and its own.
"""

import inspect
import math
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Deque, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vision_transformer import Transformer, part_of

Call = Dict[str, Any]  # the arguments of a call after the tokens, by name
Windows = Tuple[Tuple[int, int], Tuple[int, int], Tuple[int, int], bool]
MAX_LOGIT_SCALE = math.log(100)  # of Swin v2
KNOWN = (
    'the classes that are known are in attncnn_plugin.transformers.ADAPTERS, those of the ViT, DeiT, DINOv2, DINOv3, '
    'BEiT, EVA, ConViT and Swin of timm, mmpretrain, torchvision and Hugging Face transformers, from its 5.20 on'
)


def scaled(module: Any, head_dim: int) -> Any:
    """Returns 1/√d, or the factor that a module has instead."""
    return getattr(module, 'scale', head_dim**-0.5)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The parts of attention of a class: where it has its heads, and what it computes with them.

    Names are those of attributes of the module, with dots for those of modules inside. A module may lack some of them,
    or have None there.

    Attributes:
        maps (tuple[str, ...]): Linear maps: one to queries, keys and values, which lie map by map and head by head, or
            three, or none where P is no such softmax. Modules, or the beginning of the names of two parameters,
            ``in_proj`` for ``in_proj_weight``.
        biases (tuple[str, ...]): Biases of queries, keys and values beside these maps.
        norms (tuple[str, str]): Norms of each query and each key.
        turned (callable | None): ``turned(module, x, call)`` computes what queries, or keys, ``(B, N_h, N, d)`` are
            compared by, such as their rotations.
        scale (callable): ``scale(module, head_dim)`` is the factor of Q Kᵀ, a number or ``(N_h, 1, 1)``.
        added (tuple[callable, ...]): ``added(module, query, call)`` gives a part of B, ``(…, N, N)``, or None.
        mask (callable | None): ``mask(module, None, call)`` is what is added to the scores of each window of an
            image, ``(windows, N, N)``, or None.
        queries (int | None): How many of the first tokens attend; None for all.
        gate (str): A linear map whose sigmoid multiplies the outputs of the heads.
        output (str): The linear map that takes the outputs of the heads.
        after (tuple[str, ...]): Modules that come after it.
        tables (Mapping[str, int]): Other parameters with an entry for each head, and its dimension.
        num_heads (str): The number of heads N_h.
        windows (callable | None): ``windows(owner, args)`` says how the module around cuts its input into windows: the
            size of the grid, of a window, its shift, and whether the grid is padded before it is shifted. It is asked
            once the attention runs.
        drop (str): The dropout of the probabilities, a module or a rate.
        key_bias (bool): Whether the bias of the one map is for the keys too.
        cuts (bool): Whether it cuts the windows itself, of a grid ``(B, H, W, D)``.
        called (str): The module inside that gets the tokens; the module itself by default.
        forward (str): What the module's own forward pass can do. ``'sizes'``: it reads all sizes off the parameters,
            so that it needs no other where heads are gone. ``'modules'``: it calls the map ``output``. ``'functions'``:
            it takes only the weights.
        returns_pair (bool): Whether it returns its output and its probabilities, or None for them.
    """

    maps: Tuple[str, ...] = ('qkv', 'q_proj', 'k_proj', 'v_proj')
    biases: Tuple[str, ...] = ('q_bias', 'k_bias', 'v_bias')
    norms: Tuple[str, str] = ('q_norm', 'k_norm')
    turned: Optional[Callable[[Any, Tensor, Call], Tensor]] = None
    scale: Callable[[Any, int], Any] = scaled
    added: Tuple[Callable[[Any, Tensor, Call], Optional[Tensor]], ...] = ()
    mask: Optional[Callable[[Any, Any, Call], Optional[Tensor]]] = None
    queries: Optional[int] = None
    gate: str = 'gate'
    output: str = 'proj'
    after: Tuple[str, ...] = ('proj_drop',)
    tables: Mapping[str, int] = field(default_factory=dict)
    num_heads: str = 'num_heads'
    windows: Optional[Callable[[Any, Any], Windows]] = None
    drop: str = 'attn_drop'
    key_bias: bool = True
    cuts: bool = False
    called: str = ''
    forward: str = 'modules'
    returns_pair: bool = False


def argument(name: str) -> Callable[[Any, Any, Call], Optional[Tensor]]:
    """Returns the part of B, or the mask of windows, that is an argument of the call."""
    return lambda module, query, call: call.get(name)


def masks(module: Any, query: Tensor, call: Call) -> Optional[Tensor]:
    """Returns ``attn_mask``, where a bool says whether a key is seen, or −∞ for keys after the query."""
    mask: Optional[Tensor] = call.get('attn_mask')
    if call.get('is_causal'):
        mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return mask


def masks_of_torch(module: Any, query: Tensor, call: Call) -> Optional[Tensor]:
    """Returns ``attn_mask`` and ``key_padding_mask`` together, where a bool says whether a key is hidden."""
    total: Optional[Tensor] = None
    for name in ('attn_mask', 'key_padding_mask'):
        mask = call.get(name)
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf)
        if name == 'key_padding_mask':
            mask = mask[:, None, None]  # (B, N)
        elif mask.ndim == 3:
            mask = mask.unflatten(0, (len(query), -1))  # (B·N_h, N, N)
        total = mask if total is None else total + mask
    return total


def own_table(module: Any, query: Tensor, call: Call) -> Optional[Tensor]:
    """Returns b_δ of the module's own table ``(shifts, N_h)``."""
    table = module.relative_position_bias_table
    return None if table is None else by_shifts(module, table)


def table_of_module(module: Any, query: Tensor, call: Call) -> Tensor:
    """Returns b_δ of the module ``relative_position_bias``."""
    return module.relative_position_bias()


def by_shifts(module: Any, table: Tensor) -> Tensor:
    """Returns the entries of a table ``(shifts, N_h)`` for each query and key, ``(N_h, N, N)``."""
    index = module.relative_position_index
    tokens = math.isqrt(index.numel())
    return table[index.flatten()].view(tokens, tokens, table.shape[1]).permute(2, 0, 1)


def module_of_biases(module: Any, query: Tensor, call: Call) -> Optional[Tensor]:
    """Returns B of the module ``rel_pos``, a table or an MLP of the shifts."""
    return None if module.rel_pos is None else module.rel_pos.get_bias()


def bounded_biases(module: Any, query: Tensor, call: Call) -> Tensor:
    """Computes 16 σ(MLP(δ)) (Swin v2)."""
    table = module.cpb_mlp(module.relative_coords_table).view(-1, query.shape[1])
    return 16 * by_shifts(module, table).sigmoid()


def biases_of_meta_network(module: Any, query: Tensor, call: Call) -> Tensor:
    """Returns MLP(δ) (timm's Swin v2 CR)."""
    return module._relative_positional_encodings()


def direction(module: Any, x: Tensor, call: Call) -> Tensor:
    """Computes x/‖x‖: queries and keys are compared by their angle."""
    return F.normalize(x, dim=-1)


def logit_scale(module: Any, head_dim: int) -> Tensor:
    """Computes the learned factor of each head, ``(N_h, 1, 1)``, at most 100."""
    return module.logit_scale.view(-1, 1, 1).clamp(max=MAX_LOGIT_SCALE).exp()


def scale_of_mmpretrain(module: Any, head_dim: int) -> float:
    """Returns 1/√d, or √d: with ``qk_scale`` mmpretrain's function divides by 1/√d, whatever ``qk_scale`` is."""
    return head_dim ** (0.5 if hasattr(module.scaled_dot_product_attention, 'keywords') else -0.5)


def rope_of_timm(module: Any, x: Tensor, call: Call) -> Tensor:
    """Rotates queries, or keys, of patches by the angles of their positions."""
    rope: Optional[Tensor] = call.get('rope')
    if rope is None:
        return x
    prefix = module.num_prefix_tokens
    return torch.cat([x[:, :, :prefix], rotated(x[:, :, prefix:], rope, getattr(module, 'rotate_half', False))], 2)


def rope_of_mmpretrain(module: Any, x: Tensor, call: Call) -> Tensor:
    """Rotates queries, or keys, of patches by the module ``rope``."""
    if not module.rope:
        return x
    prefix = int(module.with_cls_token)
    return torch.cat([x[:, :, :prefix], module.rope(x[:, :, prefix:], call['patch_resolution'])], 2)


def rotated(x: Tensor, rope: Tensor, half: bool) -> Tensor:
    """Rotates pairs of channels of ``(…, N, d)``, (a, b) to (a cos − b sin, b cos + a sin).

    ``rope`` has sines, then cosines, ``(N, 2·d)``; with ``half`` a pair is one channel of each half, not two in a row.
    """
    sine, cosine = rope.chunk(2, -1)
    if half:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cosine + turned * sine


def rope_of_hugging_face(module: Any, x: Tensor, call: Call) -> Tensor:
    """Rotates queries, or keys, of patches, the last tokens, by the angles of ``position_embeddings``."""
    cosine, sine = call['position_embeddings']
    prefix = x.shape[2] - cosine.shape[-2]
    return torch.cat([x[:, :, :prefix], rotated(x[:, :, prefix:], torch.cat([sine, cosine], -1), half=True)], 2)


def windows_of_timm(block: Any, args: Any) -> Windows:
    """Returns the windows of a block that gets ``(B, H, W, D)``."""
    return tuple(args[0].shape[1:3]), tuple(block.window_size), tuple(block.shift_size), False


def windows_of_mmpretrain(owner: Any, args: Any) -> Windows:
    """Returns the windows of a ``ShiftWindowMSA``, which gets tokens and the size of their grid."""
    grid, size = tuple(args[1]), owner.window_size
    shift = 0 if min(grid) == size and not owner.pad_small_map else owner.shift_size
    return grid, (size, size), (shift, shift), True


def windows_of_hugging_face(layer: Any, args: Any) -> Windows:
    """Returns the windows of a ``SwinLayer``, which gets tokens and the size of their grid, and sets its own then."""
    size, shift = layer.window_size, layer.shift_size
    return tuple(args[1]), (size, size), (shift, shift), True


def windows_of_torchvision(module: Any, args: Any) -> Windows:
    """Returns the windows of attention that gets ``(B, H, W, D)``, and does not shift along an axis of one window."""
    grid, window = args[0].shape[1:3], module.window_size
    height, width = (0 if w >= n else shift for n, w, shift in zip(grid, window, module.shift_size))
    return tuple(grid), tuple(window), (height, width), True


def mask_of_torchvision(module: Any, query: Any, call: Call) -> Optional[Tensor]:
    """Returns −100 between tokens of a window that come from both sides of a shifted grid, ``(windows, N, N)``."""
    grid, window, shift, _ = call['windows']
    if not any(shift):
        return None
    regions = torch.zeros(1, 1, dtype=torch.long)
    for axis, (n, w, s) in enumerate(zip(grid, window, shift)):
        place = torch.arange(n + -n % w)
        own = ((place >= len(place) - w) * 1 + (place >= len(place) - s) * 1) if s else place * 0
        regions = 3 * regions + (own[:, None] if axis == 0 else own)
    rows = in_windows(regions, window)
    return torch.where(rows[:, :, None] == rows[:, None], 0.0, -100.0)


TABLE = {'relative_position_bias_table': 1}
SWIN = Adapter(added=(own_table,), mask=argument('mask'), tables=TABLE, windows=windows_of_timm)
SWIN_V2 = replace(
    SWIN,
    turned=direction,
    scale=logit_scale,
    added=(bounded_biases,),
    tables={'logit_scale': 0, 'cpb_mlp.2.weight': 0},
)
IN_TORCHVISION: Dict[str, Any] = dict(
    mask=mask_of_torchvision,
    windows=windows_of_torchvision,
    drop='attention_dropout',
    cuts=True,
    after=(),
    forward='functions',
)
HUGGING_FACE = Adapter(
    maps=('q_proj', 'k_proj', 'v_proj'),
    added=(argument('attention_mask'),),
    output='o_proj',
    after=(),
    num_heads='num_attention_heads',
    forward='sizes',
    returns_pair=True,
)
MMPRETRAIN = 'mmpretrain.models.utils.attention'
ADAPTERS: Dict[str, Adapter] = {
    'timm.layers.attention.Attention': Adapter(added=(masks,)),
    'timm.layers.attention.AttentionRope': Adapter(turned=rope_of_timm, added=(masks,)),
    'timm.models.eva.EvaAttention': Adapter(turned=rope_of_timm, added=(masks,)),
    'timm.models.beit.Attention': Adapter(added=(own_table, argument('shared_rel_pos_bias')), tables=TABLE),
    'timm.models.vision_transformer_relpos.RelPosAttention': Adapter(
        added=(module_of_biases, argument('shared_rel_pos')),
        tables={'rel_pos.relative_position_bias_table': 1, 'rel_pos.mlp.fc2.weight': 0, 'rel_pos.mlp.fc2.bias': 0},
    ),
    'timm.models.swin_transformer.WindowAttention': SWIN,
    'timm.models.swin_transformer_v2.WindowAttention': SWIN_V2,
    'timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention': Adapter(
        turned=direction,
        scale=logit_scale,
        added=(biases_of_meta_network,),
        mask=argument('mask'),
        tables={'logit_scale': 0, 'meta_mlp.fc2.weight': 0, 'meta_mlp.fc2.bias': 0},
        windows=windows_of_timm,
    ),
    'timm.models.cait.ClassAttn': Adapter(maps=('q', 'k', 'v'), queries=1),
    'timm.models.convit.MHSA': Adapter(),
    'timm.models.convit.GPSA': Adapter(maps=()),
    f'{MMPRETRAIN}.MultiheadAttention': Adapter(scale=scale_of_mmpretrain, after=('proj_drop', 'gamma1', 'out_drop')),
    f'{MMPRETRAIN}.BEiTAttention': Adapter(added=(own_table, argument('rel_pos_bias')), tables=TABLE),
    f'{MMPRETRAIN}.WindowMSA': replace(SWIN, windows=windows_of_mmpretrain),
    f'{MMPRETRAIN}.WindowMSAV2': replace(SWIN_V2, windows=windows_of_mmpretrain),
    'mmpretrain.models.backbones.vit_eva02.AttentionWithRoPE': Adapter(turned=rope_of_mmpretrain),
    **{
        f'transformers.models.{folder}.modeling_{folder}.{name}Attention': HUGGING_FACE
        for folder, name in [
            ('vit', 'ViT'),
            ('deit', 'DeiT'),
            ('dinov2', 'Dinov2'),
            ('dinov2_with_registers', 'Dinov2WithRegisters'),
        ]
    },
    'transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTAttention': replace(
        HUGGING_FACE, turned=rope_of_hugging_face, num_heads='num_heads'
    ),
    # Its table of biases is beside the attention, in its block.
    'transformers.models.beit.modeling_beit.BeitLayer': replace(
        HUGGING_FACE,
        called='attention',
        maps=('attention.q_proj', 'attention.k_proj', 'attention.v_proj'),
        output='attention.o_proj',
        num_heads='attention.num_attention_heads',
        tables={'relative_position_bias.relative_position_bias_table': 1},
    ),
    'transformers.models.swin.modeling_swin.SwinAttention': replace(
        HUGGING_FACE,
        added=(table_of_module,),
        mask=argument('attention_mask'),
        tables={'relative_position_bias.relative_position_bias_table': 1},
        windows=windows_of_hugging_face,
    ),
    'torch.nn.modules.activation.MultiheadAttention': Adapter(
        maps=('in_proj',),
        added=(masks_of_torch,),
        output='out_proj',
        after=(),
        drop='dropout',
        forward='functions',
        returns_pair=True,
    ),
    'torchvision.models.swin_transformer.ShiftedWindowAttention': replace(SWIN, **IN_TORCHVISION),
    'torchvision.models.swin_transformer.ShiftedWindowAttentionV2': replace(SWIN_V2, **IN_TORCHVISION, key_bias=False),
}


def adapter_of(module: nn.Module) -> Optional[Adapter]:
    """Returns the entry of a module's class, or of one whose forward pass it inherits.

    None without one, and for a module of another release of its library, which has other parts.
    """
    cls: Any
    for cls in type(module).__mro__:
        adapter = ADAPTERS.get(f'{cls.__module__}.{cls.__qualname__}')
        if adapter is not None:
            is_known = type(module).forward is cls.forward and part_of(module, adapter.num_heads) is not None
            return adapter if is_known else None
    return None


class Attention:
    """An attention module of another library, read by the entry of its class.

    Args:
        module (nn.Module): Of a class in ``ADAPTERS``.
        name (str): Its name in the model. Defaults to empty.
        block (nn.Module, optional): The module that it is a child of. Defaults to None.

    Attributes:
        shifts (Tensor): Δ of each head at which a start lets it look, ``(N_h, 2)``; none to begin with.
    """

    def __init__(self, module: Any, name: str = '', block: Any = None) -> None:
        adapter = adapter_of(module)
        if adapter is None:
            raise TypeError(f'the attention is a {unknown_class(module)}')
        self.module, self.name, self.block, self.adapter = module, name, block, adapter
        self.shifts = torch.empty(0, 2)

    @property
    def num_heads(self) -> int:
        """Number of heads N_h."""
        return int(self.part(self.adapter.num_heads))

    @property
    def head_dim(self) -> int:
        """Channels d of a head."""
        # Without any heads a module does not tell: prune_heads wrote it down.
        return int(getattr(self.module, 'pruned_from', (0, 0))[1] or self.output.in_features // self.num_heads)

    @property
    def called(self) -> Any:
        """Returns the module that gets the tokens."""
        return self.part(self.adapter.called) if self.adapter.called else self.module

    @property
    def output(self) -> Any:
        """Returns the linear map that takes the outputs of all heads, which lie one after the other."""
        return self.part(self.adapter.output)

    @property
    def width(self) -> int:
        """Channels D of a token."""
        return int(self.of_map(self.map_names[0], 'weight').shape[1])

    @property
    def map_names(self) -> List[str]:
        """Returns the names of the maps that there are, one or three."""
        return [name for name in self.adapter.maps if self.of_map(name, 'weight') is not None]

    def runs_in(self, name: str) -> str:
        """Returns the name of :attr:`called` in a model that has the module by this name."""
        return f'{name}.{self.adapter.called}'.strip('.')

    def part(self, name: str) -> Any:
        """Returns an attribute of the module, or of one inside; None without it."""
        return part_of(self.module, name)

    def name_of(self, name: str, own: str) -> str:
        """Returns the name of the ``'weight'`` or ``'bias'`` of a map: of a module, or a parameter."""
        return f'{name}.{own}' if isinstance(self.part(name), nn.Module) else f'{name}_{own}'

    def of_map(self, name: str, own: str) -> Any:
        """Returns the ``'weight'`` or ``'bias'`` of a map; None without it."""
        return self.part(self.name_of(name, own))

    def mapped(self, name: str, x: Tensor) -> Tensor:
        """Computes a map of tokens."""
        module = self.part(name)
        return F.linear(x, self.of_map(name, 'weight'), self.of_map(name, 'bias')) if module is None else module(x)

    def weight(self, which: str) -> Tensor:
        """Returns the map to queries ``'q'``, keys ``'k'`` or values ``'v'``, a view, ``(N_h, d, D)``."""
        return self._of_maps([self.of_map(name, 'weight') for name in self.map_names], which)

    def bias(self, which: str) -> Optional[Tensor]:
        """Returns the bias of this map, a view, ``(N_h, d)``; None where there is none to be trained."""
        found = [self.of_map(name, 'bias') for name in self.map_names]
        if found[0] is None and len(found) == 1:
            found = [self.part(name) for name in self.adapter.biases]  # that of the keys can be a buffer of zeros
        if len(found) == 3 and not isinstance(found['qkv'.index(which)], nn.Parameter):
            return None
        return self._of_maps(found, which)

    def _of_maps(self, found: Sequence[Any], which: str) -> Tensor:
        number = 'qkv'.index(which)
        if len(found) == 1:
            return found[0].data.unflatten(0, (3, self.num_heads, self.head_dim))[number]
        return found[number].data.unflatten(0, (self.num_heads, self.head_dim))

    def set_maps(self, which: str, *weights: Tensor) -> None:
        """Sets the weights of the maps ``'qk'`` or ``'v'``, ``(N_h, d, D)`` each; their biases become 0."""
        for name, weight in zip(which, weights):
            self.weight(name).copy_(weight)
            bias = self.bias(name)
            if bias is not None:
                bias.zero_()

    @property
    def unknown_keys(self) -> Optional[str]:
        """Returns why its keys cannot be known; None where they can."""
        if self.adapter.maps and not self.map_names:  # wrapped, or for keys of another width
            return f'it has no {" or ".join(self.adapter.maps)} with weights of its own'
        adds_keys = self.part('bias_k') is not None or self.part('add_zero_attn')
        return 'it has keys beside those of its tokens' if adds_keys else None

    def tokens(self, args: Sequence[Any], kwargs: Call) -> Tuple[Tensor, Call]:
        """Returns the tokens ``(B, N, D)`` of a call, of windows ``(B·windows, N, D)``, and its other arguments.

        Raises:
            ValueError: The keys are unknown.
        """
        call = by_name(self.called, args, kwargs)
        x = call.pop(next(iter(call)))
        if self.unknown_keys is not None:
            raise ValueError(f'{self.name or "attention"} is a {type(self.module).__name__}: {self.unknown_keys}')
        if self.adapter.cuts and self.adapter.windows is not None:
            call['windows'] = self.adapter.windows(self.module, (x,))
            x = cut_windows(x, numbers_in_windows(*call['windows']))
        if getattr(self.module, 'batch_first', True) is False:
            x = x.transpose(0, 1)
        return x, call

    def queries_keys_values(self, x: Tensor, call: Call) -> Tuple[Tensor, Tensor, Tensor]:
        """Computes Q times the scale, K and V of tokens ``(B, N, D)``, ``(B, N_h, N, d)`` each."""
        names = self.map_names
        if len(names) == 1:
            found = self.mapped(names[0], x).chunk(3, -1)
            if not self.adapter.key_bias and self.num_heads:
                found = found[0], found[1] - self.of_map(names[0], 'bias').chunk(3)[1], found[2]
        else:
            inputs = x[:, : self.adapter.queries], x, x
            found = tuple(map(self.mapped, names, inputs))
        biases = [self.part(name) for name in self.adapter.biases]
        query, key, value = (
            (own if bias is None else own + bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for own, bias in zip(found, biases)
        )
        turned, (of_queries, of_keys) = self.adapter.turned, map(self.part, self.adapter.norms)
        query = query if of_queries is None else of_queries(query)
        key = key if of_keys is None else of_keys(key)
        if turned is not None and self.num_heads:
            query, key = turned(self.module, query, call), turned(self.module, key, call)
        query = query * self.adapter.scale(self.module, self.head_dim)
        groups = self.part('num_kv_groups') or 1  # of heads that share their keys and values
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return query.type_as(value), key.type_as(value), value

    def added(self, query: Tensor, call: Call) -> Optional[Tensor]:
        """Returns B, what is added to the scores, of a shape that expands to ``(B, N_h, N, N)``; None for nothing."""
        total: Optional[Tensor] = None
        for own in self.adapter.added if self.num_heads else ():
            term = own(self.module, query, call)
            if term is not None:
                total = term if total is None else total + term
        mask = None if self.adapter.mask is None else self.adapter.mask(self.module, None, call)
        if mask is not None:  # the windows of an image lie one after the other
            mask = mask.to(query).repeat(len(query) // len(mask), 1, 1)[:, None]
            total = mask if total is None else total + mask
        return total

    @contextmanager
    def windows_seen(self) -> Iterator[Callable[[], Optional[Windows]]]:
        """Yields a function that says how the module around cut its input, once for each call; None if it did not."""
        owner, windows = self.module if self.adapter.cuts else self.block, self.adapter.windows
        last: Deque[Any] = deque(maxlen=1)  # arguments
        if windows is None or owner is None:
            yield lambda: None
            return
        with owner.register_forward_pre_hook(lambda _, args: last.append(args)):
            yield lambda: windows(owner, last.pop()) if last else None


def numbers_in_windows(
    grid: Tuple[int, int], window: Tuple[int, int], shift: Tuple[int, int], pads_first: bool
) -> Tensor:
    """Returns the numbers of the tokens in each window of a grid that is shifted and padded, ``(windows, M)``.

    Tokens are row-major; padding is H·W. The grid is rolled up and left by ``shift``, and padded at the bottom and on
    the right, before if ``pads_first``.

    Examples:
        >>> numbers_in_windows((1, 3), (1, 2), (0, 1), pads_first=False)  # 3 is padding
        tensor([[1, 2],
                [0, 3]])
    """
    tokens = grid[0] * grid[1]
    numbers = torch.arange(tokens).view(grid)
    if not pads_first:
        numbers = numbers.roll((-shift[0], -shift[1]), (0, 1))
    numbers = F.pad(numbers, (0, -grid[1] % window[1], 0, -grid[0] % window[0]), value=tokens)
    if pads_first:
        numbers = numbers.roll((-shift[0], -shift[1]), (0, 1))
    return in_windows(numbers, window)


def in_windows(values: Tensor, window: Tuple[int, int]) -> Tensor:
    """Returns the values of a grid ``(H, W)`` by windows, ``(windows, M)``."""
    rows = values.unflatten(0, (-1, window[0])).unflatten(2, (-1, window[1]))  # (…, height, …, width)
    return rows.transpose(1, 2).flatten(2).flatten(0, 1)


def cut_windows(x: Tensor, numbers: Tensor) -> Tensor:
    """Returns the tokens of ``(B, H, W, D)`` in windows, ``(B·windows, M, D)``, zeros for padding."""
    return F.pad(x.flatten(1, 2), (0, 0, 0, 1))[:, numbers.to(x.device)].flatten(0, 1)


def join_windows(x: Tensor, numbers: Tensor, grid: Tuple[int, int]) -> Tensor:
    """Returns windows ``(B·windows, M, D)`` as a grid ``(B, H, W, D)``, without padding."""
    tokens = x.unflatten(0, (-1, len(numbers))).flatten(1, 2)
    order = numbers.flatten().argsort()[: grid[0] * grid[1]].to(x.device)
    return tokens[:, order].unflatten(1, grid)


def by_name(module: nn.Module, args: Sequence[Any], kwargs: Call) -> Call:
    """Returns the arguments of a call by their names, the tokens first."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    call = {**dict(zip(names, args)), **kwargs}
    return {names[0]: call.pop(names[0]), **call}


def find_attention(network: Transformer) -> List[Attention]:
    """Returns the attention in the blocks of a vision transformer, in their order.

    Raises:
        ValueError: There is none, or some is of a class that is not in ``ADAPTERS``.
    """
    modules = {name: module for name, module in network.module.named_modules() if network.is_in_blocks(name)}
    known = [name for name, module in modules.items() if adapter_of(module) is not None]
    for name, module in modules.items():
        apart = not any(f'{name}.'.startswith(f'{own}.') or own.startswith(f'{name}.') for own in known)
        if apart and (hasattr(module, 'num_heads') or hasattr(module, 'num_attention_heads')):
            raise ValueError(f'{name} of a {network.kind} is a {unknown_class(module)}')
    if not known:
        raise ValueError(
            f'model is a {network.kind}, whose blocks have no attention with num_heads (those of a CMHSA in the '
            f'convolution phase get it with its transition): {KNOWN}'
        )
    before = f'{network.name}.' if network.name else ''
    return [
        Attention(modules[name], before + name, network.module.get_submodule(name.rpartition('.')[0])) for name in known
    ]


def unknown_class(module: nn.Module) -> str:
    """Returns the class of a module in words, and which are known."""
    return f'{type(module).__name__} of {type(module).__module__}: {KNOWN}'
