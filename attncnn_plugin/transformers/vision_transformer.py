"""Finds the vision transformer in a model, and its attention, by the names that libraries give to the parts.

What a model computes does not say which of its weights are queries. A start proves what it sets, by the attention that
the model then computes.
"""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn


class Layout(NamedTuple):
    """The names of a transformer's parts, with dots for those of modules inside.

    Attributes:
        patches (str): The patch embedding, a convolution or a module with some.
        blocks (tuple[str, ...]): Modules that hold blocks; one is enough.
        tokens (tuple[str, ...]): Parameters of class, distillation and register tokens, before the patches.
        position (str): The learned embedding of absolute positions.
        rope (str): The module with rotations.
        needs (str): A module that tells it from other networks with these names.
    """

    patches: str
    blocks: Tuple[str, ...]
    tokens: Tuple[str, ...] = ()
    position: str = ''
    rope: str = ''
    needs: str = ''


LAYOUTS = (
    # timm and mmpretrain
    Layout(
        'patch_embed', ('blocks', 'layers', 'stages'), ('cls_token', 'dist_token', 'reg_token'), 'pos_embed', 'rope'
    ),
    # Hugging Face transformers
    Layout(
        'embeddings.patch_embeddings',
        ('layer', 'layers', 'encoder.layer', 'encoder.layers', 'model.layer'),
        ('embeddings.cls_token', 'embeddings.distillation_token', 'embeddings.register_tokens'),
        'embeddings.position_embeddings',
        'rope_embeddings',
    ),
    # SwinBackbone, which has its SwinModel shift windows that fill the grid; called without, that stops it for good
    Layout('swin.embeddings.patch_embeddings', ('swin.encoder.layers',), needs='hidden_states_norms'),
    # torchvision
    Layout('conv_proj', ('encoder.layers',), ('class_token',), 'encoder.pos_embedding'),
    Layout('features.0', ('features',), needs='features.1.0.attn'),
)


def part_of(module: Any, name: str) -> Any:
    """Returns an attribute by its dotted name, or None if a part of the way is missing."""
    for own in name.split('.'):
        module = getattr(module, own, None)
    return module


class Transformer:
    """A vision transformer in a model.

    Args:
        name (str): Its name in the model, empty for the model itself.
        module (nn.Module): The transformer.
        layout (Layout): The names of its parts.

    Attributes:
        kind (str): The name of its class.
        rope (nn.Module | None): The module with its rotations.
        position (nn.Parameter | None): The learned embedding of absolute positions.
        tokens (list[nn.Parameter]): The class, distillation and register tokens that are learned.
        num_prefix_tokens (int): Number of tokens before the patches.
        prefix (str): What the names of its modules begin with in the model.
    """

    def __init__(self, name: str, module: Any, layout: Layout) -> None:
        self.name, self.module, self.layout, self.kind = name, module, layout, type(module).__name__
        self.embed, self.rope = part_of(module, layout.patches), part_of(module, layout.rope)
        position, *tokens = (part_of(module, own) for own in (layout.position, *layout.tokens))
        self.position: Any = position if isinstance(position, nn.Parameter) else None
        self.tokens = [token for token in tokens if isinstance(token, nn.Parameter)]
        self.num_prefix_tokens = sum(own.shape[-2] for own in self.tokens)
        self.prefix = f'{name}.' if name else ''

    def in_blocks(self, name: str) -> bool:
        """Says whether a module of this name in the model is in the blocks."""
        return any(f'{name}.'.startswith(f'{self.prefix}{blocks}.') for blocks in self.layout.blocks)

    def rotates_halves(self, attention: 'Attention') -> bool:
        """Says whether channel i of a head is rotated with channel i + d/2, not 2i with 2i + 1."""
        return bool(getattr(attention.module, 'rotate_half', hasattr(self.module, 'rope_embeddings')))

    def rotation_angles(self, layer: int, in_halves: bool, images: Tensor) -> Tensor:
        """Returns the angle by which each pair of channels is rotated at each patch, ``(N_h or 1, patches, d/2)``."""
        if hasattr(self.rope, 'get_embed'):
            given = dict(shape=self.grid) if getattr(self.rope, 'feat_shape', None) is None else {}
            embedding = self.rope.get_embed(**given).double()
        else:
            try:
                cosines, sines = self.rope(images)  # of Hugging Face
            except TypeError as error:
                raise ValueError(f'a {type(self.rope).__name__} has no angles to read: give a model of timm') from error
            embedding = torch.cat([sines, cosines], -1).double()
        if embedding.ndim == 4:  # a layer has angles of its own
            embedding = embedding[layer]
        sines, cosines = embedding.reshape(-1, *embedding.shape[-2:]).chunk(2, -1)
        angles = torch.atan2(sines, cosines)
        return angles[..., : angles.shape[-1] // 2] if in_halves else angles[..., ::2]

    @property
    def patch_convolutions(self) -> List[nn.Conv2d]:
        """The convolutions of the patch embedding: the first takes the images, the last makes tokens of patches."""
        found = [module for module in self.embed.modules() if isinstance(module, nn.Conv2d)]
        if not found:
            raise ValueError(f'the {self.layout.patches} of {self.kind} has no convolution that makes tokens')
        return found

    @property
    def grid(self) -> Tuple[int, int]:
        """Height and width of the grid of patches that the transformer was built for."""
        size = self._built_for('grid_size', 'init_out_size')
        if size is None:
            images, patches = self._built_for('img_size', 'image_size'), self._built_for('patch_size', 'patch_size')
            if images is None or patches is None:
                what = f'the {self.layout.patches} of {self.kind}'
                raise ValueError(f'{what} does not say for which grid it is: build it with an image size')
            size = images[0] // patches[0], images[1] // patches[1]
        return size

    @property
    def img_size(self) -> Tuple[int, int]:
        """Height and width in pixels of the images that the transformer was built for; 224 where it does not say."""
        return self._built_for('img_size', 'init_input_size', 'image_size') or (224, 224)

    def _built_for(self, *names: str) -> Optional[Tuple[int, int]]:
        """Returns the first such size that the patch embedding, the transformer or its configuration has."""
        owners = self.embed, self.module, getattr(self.module, 'config', None)
        sizes = (getattr(owner, name, None) for owner in owners for name in names)
        size = next((own for own in sizes if own is not None), None)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return None if size is None else (int(height), int(width))


def find_transformer(model: nn.Module) -> Transformer:
    """Returns the vision transformer in a model, the first module with the parts of one of ``LAYOUTS``.

    Raises:
        ValueError: There is none.
    """
    containers = nn.ModuleList, nn.Sequential
    for name, module in model.named_modules():
        if '_orig_mod' in module._modules:  # torch.compile's, which gives attributes of the module inside as its own
            continue
        for layout in LAYOUTS:
            if (
                isinstance(part_of(module, layout.patches), nn.Module)
                and any(isinstance(part_of(module, blocks), containers) for blocks in layout.blocks)
                and (not layout.needs or part_of(module, layout.needs) is not None)
            ):
                return Transformer(name, module, layout)
    looked_for = '; '.join(f'{own.patches} and {" or ".join(own.blocks)}' for own in LAYOUTS)
    raise ValueError(
        f'model is a {type(model).__name__} without a vision transformer as those of timm, mmpretrain, Hugging '
        f'Face transformers or torchvision: no module has a patch embedding and blocks ({looked_for})'
    )


# Attributes of attention as libraries name them; of each kind it has one. Maps are modules, or the beginning of the
# names of parameters, in_proj for in_proj_weight. Those of one lie map by map, and head by head.
NUMBERS = 'num_heads', 'num_attention_heads', 'heads'
MAPS = ('qkv',), ('in_proj',), ('q_proj', 'k_proj', 'v_proj'), ('query', 'key', 'value'), ('to_q', 'to_k', 'to_v')
BIASES = 'q_bias', 'k_bias', 'v_bias'  # beside a map of all three
OUTPUTS = 'proj', 'o_proj', 'out_proj', 'to_out'
KNOWN = (
    f'attention that can start has {" or ".join(NUMBERS)}, the linear maps '
    f'{" or ".join(", ".join(names) for names in MAPS)}, and the linear map {" or ".join(OUTPUTS)}'
)
# Modules with biases of relative positions: of an attention, its block, or the whole transformer for all its layers.
POSITIONS = 'rel_pos', 'relative_position_bias', 'shared_rel_pos', 'rel_pos_bias', 'shared_position_bias'


def _of_map(module: nn.Module, name: str, own: str) -> Any:
    """Returns the ``'weight'`` or the ``'bias'`` of a linear map, or None if it has none."""
    part = getattr(module, name, None)
    return getattr(part, own, None) if isinstance(part, nn.Module) else getattr(module, f'{name}_{own}', None)


def parts_of_attention(module: Any) -> Tuple[Any, Any, Any]:
    """Returns the number of heads, the names of the maps, and the map of the outputs; None for what is not there."""
    numbers, outputs = ([getattr(module, name, None) for name in names] for names in (NUMBERS, OUTPUTS))
    number = next((own for own in numbers if isinstance(own, int) and own), None)
    maps = next((own for own in MAPS if all(_of_map(module, name, 'weight') is not None for name in own)), None)
    return number, maps, next((own for own in outputs if hasattr(own, 'in_features')), None)


class Attention:
    """An attention module of another library.

    Args:
        network (Transformer): The transformer.
        name (str): The name of the module in it.

    Attributes:
        name (str): Its name in the model.
        block (nn.Module): The module that it is a child of.
        num_heads (int): Number of heads N_h.
        maps (tuple[str, ...]): The map to queries, keys and values, or three.
        output (nn.Module): The linear map that takes the outputs of all heads, which lie one after the other.
        head_dim (int): Channels d of a head.
        width (int): Channels D of a token.
        has_own_maps (bool): Whether each head has queries, keys and values of its own, as the output takes.
        positions (nn.Module | None): The module that holds its biases of relative positions, which can be itself.
        window (tuple[int, int] | None): Height and width of the window, or of the whole grid, that these cover.
        shifts (Tensor): Δ of each head at which a start lets it look, ``(N_h, 2)``; none to begin with.
    """

    def __init__(self, network: Transformer, name: str) -> None:
        self.module: Any = network.module.get_submodule(name)
        self.name, self.block = network.prefix + name, network.module.get_submodule(name.rpartition('.')[0])
        self.num_heads, self.maps, self.output = parts_of_attention(self.module)
        weights = [_of_map(self.module, own, 'weight') for own in self.maps]
        self.head_dim = int(self.output.in_features // self.num_heads)
        self.width = int(weights[0].shape[1])
        self.has_own_maps = {*map(len, weights)} == {self.num_heads * self.head_dim * 3 // len(weights)}
        owners = self.module, self.block, network.module
        biases = (getattr(owner, own, None) for owner in owners for own in POSITIONS)
        self.positions: Any = next((own for own in biases if isinstance(own, nn.Module)), None)
        if isinstance(getattr(self.module, 'relative_position_bias_table', None), nn.Parameter):
            self.positions = self.module
        size = getattr(self.positions, 'window_size', None)
        self.window = None if size is None else (int(size[0]), int(size[1]))
        self.shifts = torch.empty(0, 2, device='cpu')

    def table(self) -> Tuple[nn.Parameter, Tensor, Tuple[int, int]]:
        """Returns the table of biases, ``(entries, N_h)``, the entry of each pair of tokens, ``(N, N)``, and the size.

        Raises:
            ValueError: Something else than a table gives the biases.
        """
        table, index = (getattr(self.positions, f'relative_position_{own}', None) for own in ('bias_table', 'index'))
        if hasattr(self.positions, 'generate_relative_position_index'):  # Hugging Face's BEiT does it for each image
            index = self.positions.generate_relative_position_index(self.window)
        if not (self.window and isinstance(table, nn.Parameter) and table.ndim == 2 and isinstance(index, Tensor)):
            raise ValueError(
                f'the relative positions of {self.name} are a {type(self.positions).__name__} without a table of '
                "biases: a start needs one (BEiT, Swin, timm's rel_pos_type='bias'), rotations, or absolute positions"
            )
        tokens = round(index.numel() ** 0.5)
        return table, index.reshape(tokens, tokens), self.window

    def weight(self, which: str) -> Tensor:
        """Returns the map to queries ``'q'``, keys ``'k'`` or values ``'v'``, a view, ``(N_h, d, D)``."""
        return self._of_heads([_of_map(self.module, name, 'weight') for name in self.maps], which)

    def bias(self, which: str) -> Optional[Tensor]:
        """Returns the bias of this map, a view, ``(N_h, d)``, or None if none is trained."""
        found = [_of_map(self.module, name, 'bias') for name in self.maps]
        if found == [None]:
            found = [getattr(self.module, name, None) for name in BIASES]  # that of the keys can be a buffer of zeros
        if len(found) == 3 and not isinstance(found['qkv'.index(which)], nn.Parameter):
            return None
        return self._of_heads(found, which)

    def _of_heads(self, found: Sequence[Any], which: str) -> Tensor:
        number = 'qkv'.index(which)
        rows: Tensor = found[0].data.chunk(3)[number] if len(found) == 1 else found[number].data
        return rows.unflatten(0, (self.num_heads, self.head_dim))

    def set_maps(self, which: str, *weights: Tensor) -> None:
        """Sets the weights of the maps ``'qk'`` or ``'v'``, ``(N_h, d, D)`` each; their biases become 0."""
        for name, weight in zip(which, weights):
            self.weight(name).copy_(weight)
            bias = self.bias(name)
            if bias is not None:
                bias.zero_()


def find_attention(network: Transformer) -> List[Attention]:
    """Returns the attention layers in the blocks of a vision transformer, in order.

    Raises:
        ValueError: None has the parts that are known, or the heads of one cannot get a shift.
    """
    names = [name for name, own in network.module.named_modules() if None not in parts_of_attention(own)]
    found = [Attention(network, name) for name in names if network.in_blocks(network.prefix + name)]
    if not found:
        raise ValueError(f'model is a {network.kind} whose blocks have no such attention: {KNOWN}')
    for own in found:
        what = f'{own.name} is a {type(own.module).__name__} that cannot start as a convolution:'
        if not isinstance(getattr(own.module, 'q_norm', None), (nn.Identity, type(None))):
            raise ValueError(f'{what} it normalizes queries and keys, which then have no scale: give qk_norm=False')
        if not own.has_own_maps:
            raise ValueError(f'{what} its heads share queries, keys or values, or have no weights of their own there')
    return found
