"""Where attention of other libraries has its queries, keys and values, for those who set them: a table of classes.

To start a class of yours as a convolution, add it to ``ADAPTERS`` under the name of its module and its own.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .vision_transformer import Transformer, part_of

KNOWN = (
    'the classes that are known are in attncnn_plugin.transformers.ADAPTERS, those of the ViT, DeiT, DINOv2, DINOv3, '
    'BEiT, EVA and Swin of timm, mmpretrain, Hugging Face transformers and torchvision'
)


@dataclass(frozen=True)
class Adapter:
    """The parts of attention of a class.

    Names are those of attributes of the module, with dots for those of modules inside. A module may lack some of them,
    or have None there.

    Attributes:
        maps (tuple[str, ...]): Linear maps: one to queries, keys and values, which lie map by map and head by head, or
            three. Modules, or the beginning of the names of two parameters, ``in_proj`` for ``in_proj_weight``.
        biases (tuple[str, ...]): Biases of queries, keys and values beside these maps.
        output (str): The linear map that takes the outputs of the heads.
        num_heads (str): The number of heads N_h.
        called (str): The module inside that gets the tokens; the module itself by default.
        refused (str): Why its heads cannot be given a shift; empty where they can.
    """

    maps: Tuple[str, ...] = ('qkv', 'q_proj', 'k_proj', 'v_proj')
    biases: Tuple[str, ...] = ('q_bias', 'k_bias', 'v_bias')
    output: str = 'proj'
    num_heads: str = 'num_heads'
    called: str = ''
    refused: str = ''


ANGLE = Adapter(refused='it compares queries and keys by their angle (Swin v2): bounded scores cannot be a Gaussian')
HUGGING_FACE = Adapter(('q_proj', 'k_proj', 'v_proj'), output='o_proj', num_heads='num_attention_heads')
MMPRETRAIN = 'mmpretrain.models.utils.attention'
TIMM, TRANSFORMERS = 'timm.models', 'transformers.models'
ADAPTERS: Dict[str, Adapter] = {
    'timm.layers.attention.Attention': Adapter(),
    'timm.layers.attention.AttentionRope': Adapter(),
    f'{TIMM}.eva.EvaAttention': Adapter(),
    f'{TIMM}.beit.Attention': Adapter(),
    f'{TIMM}.vision_transformer_relpos.RelPosAttention': Adapter(),
    f'{TIMM}.swin_transformer.WindowAttention': Adapter(),
    f'{TIMM}.swin_transformer_v2.WindowAttention': ANGLE,
    f'{TIMM}.swin_transformer_v2_cr.WindowMultiHeadAttention': ANGLE,
    f'{TIMM}.convit.MHSA': Adapter(),
    f'{TIMM}.convit.GPSA': Adapter(refused='its probabilities are no softmax of scores'),
    f'{MMPRETRAIN}.MultiheadAttention': Adapter(),
    f'{MMPRETRAIN}.BEiTAttention': Adapter(),
    f'{MMPRETRAIN}.WindowMSA': Adapter(),
    f'{MMPRETRAIN}.WindowMSAV2': ANGLE,
    'mmpretrain.models.backbones.vit_eva02.AttentionWithRoPE': Adapter(
        refused='its rotations are inside of it, where their angles cannot be read: give a model of timm'
    ),
    f'{TRANSFORMERS}.vit.modeling_vit.ViTAttention': HUGGING_FACE,
    f'{TRANSFORMERS}.deit.modeling_deit.DeiTAttention': HUGGING_FACE,
    f'{TRANSFORMERS}.dinov2.modeling_dinov2.Dinov2Attention': HUGGING_FACE,
    f'{TRANSFORMERS}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersAttention': HUGGING_FACE,
    f'{TRANSFORMERS}.dinov3_vit.modeling_dinov3_vit.DINOv3ViTAttention': replace(HUGGING_FACE, num_heads='num_heads'),
    # Its table of biases is beside the attention, in its block.
    f'{TRANSFORMERS}.beit.modeling_beit.BeitLayer': Adapter(
        ('attention.q_proj', 'attention.k_proj', 'attention.v_proj'),
        output='attention.o_proj',
        num_heads='attention.num_attention_heads',
        called='attention',
    ),
    f'{TRANSFORMERS}.swin.modeling_swin.SwinAttention': HUGGING_FACE,
    'torch.nn.modules.activation.MultiheadAttention': Adapter(('in_proj',), output='out_proj'),
    'torchvision.models.swin_transformer.ShiftedWindowAttention': Adapter(),
    'torchvision.models.swin_transformer.ShiftedWindowAttentionV2': ANGLE,
}


def adapter_of(module: nn.Module) -> Optional[Adapter]:
    """Returns the entry of a module's class, or of one whose forward pass it inherits; None without one."""
    cls: Any
    for cls in type(module).__mro__:
        adapter = ADAPTERS.get(f'{cls.__module__}.{cls.__qualname__}')
        if adapter is not None:
            return adapter if type(module).forward is cls.forward else None
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
        self.shifts = torch.empty(0, 2, device='cpu')

    @property
    def num_heads(self) -> int:
        """Number of heads N_h."""
        return int(self.part(self.adapter.num_heads))

    @property
    def head_dim(self) -> int:
        """Channels d of a head."""
        return int(self.output.in_features // self.num_heads)

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

    def tokens(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Returns the tokens ``(B, N, D)`` of a call, its first argument."""
        first = list(inspect.signature(type(self.called).forward).parameters)[1]
        x = args[0] if args else kwargs[first]
        return x.transpose(0, 1) if getattr(self.module, 'batch_first', True) is False else x


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
