"""Finds the vision transformer in a model by its parts: patch embedding, prefix tokens, positions and blocks."""

from typing import Any, List, NamedTuple, Optional, Tuple

from torch import nn


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
    """

    def __init__(self, name: str, module: Any, layout: Layout) -> None:
        self.name, self.module, self.layout, self.kind = name, module, layout, type(module).__name__
        self.embed, self.rope = part_of(module, layout.patches), part_of(module, layout.rope)
        position, *tokens = (part_of(module, own) for own in (layout.position, *layout.tokens))
        self.position: Any = position if isinstance(position, nn.Parameter) else None
        self.tokens = [token for token in tokens if isinstance(token, nn.Parameter)]
        numbers = (getattr(module, own, None) for own in ('num_prefix_tokens', 'num_extra_tokens'))  # timm, mmpretrain
        number = next((own for own in numbers if own is not None), None)
        self.num_prefix_tokens = sum(own.shape[-2] for own in self.tokens) if number is None else int(number)

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
