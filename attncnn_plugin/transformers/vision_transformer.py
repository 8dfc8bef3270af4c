"""The vision transformer in a model, told by its parts: patches, the tokens beside them, positions, blocks."""

from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

from torch import nn


@dataclass(frozen=True)
class Layout:
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
        ('layers', 'encoder.layer', 'encoder.layers', 'model.layer'),
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
    """Returns an attribute of a module, or of one inside; None without it."""
    for own in name.split('.'):
        module = getattr(module, own, None)
    return module


@dataclass(frozen=True)
class Transformer:
    """A vision transformer in a model.

    Attributes:
        name (str): Its name in the model, empty for the model itself.
        module (nn.Module): The transformer.
        layout (Layout): The names of its parts.
    """

    name: str
    module: Any
    layout: Layout

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.module).__name__

    @property
    def rope(self) -> Any:
        """The module with its rotations; None without it."""
        return part_of(self.module, self.layout.rope)

    @property
    def position(self) -> Any:
        """The learned embedding of absolute positions; None, or no parameter, without it."""
        return part_of(self.module, self.layout.position)

    @property
    def tokens(self) -> List[nn.Parameter]:
        """The class, distillation and register tokens that are learned, which come before the patches."""
        found = [part_of(self.module, name) for name in self.layout.tokens]
        return [token for token in found if isinstance(token, nn.Parameter)]

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        for name in ('num_prefix_tokens', 'num_extra_tokens'):  # timm's and mmpretrain's
            if hasattr(self.module, name):
                return int(getattr(self.module, name))
        return sum(token.shape[-2] for token in self.tokens)

    @property
    def patch_convolutions(self) -> List[nn.Conv2d]:
        """The convolutions of the patch embedding: the first takes the images, the last makes tokens of patches."""
        embed = part_of(self.module, self.layout.patches)
        convolutions = [module for module in embed.modules() if isinstance(module, nn.Conv2d)]
        if not convolutions:
            raise ValueError(
                f'the {self.layout.patches} of {self.kind} has no convolution that makes tokens of patches'
            )
        return convolutions

    @property
    def grid(self) -> Tuple[int, int]:
        """Height and width of the grid of patches that the transformer was built for."""
        size = self._built_for('grid_size', 'init_out_size')
        if size is None:
            images, patches = self._built_for('img_size', 'image_size'), self._built_for('patch_size', 'patch_size')
            if images is None or patches is None:
                raise ValueError(
                    f'the {self.layout.patches} of {self.kind} does not say for which grid it is: build it with an '
                    'image size'
                )
            size = images[0] // patches[0], images[1] // patches[1]
        return size

    @property
    def img_size(self) -> Tuple[int, int]:
        """Height and width in pixels of the images that the transformer was built for; 224 where it does not say."""
        return self._built_for('img_size', 'init_input_size', 'image_size') or (224, 224)

    def _built_for(self, *names: str) -> Optional[Tuple[int, int]]:
        """Returns the first of these sizes that the patch embedding has, the transformer, or its configuration."""
        embed = part_of(self.module, self.layout.patches)
        for owner in (embed, self.module, getattr(self.module, 'config', None)):
            for name in names:
                size = getattr(owner, name, None)
                if size is not None:
                    height, width = size if isinstance(size, (tuple, list)) else (size, size)
                    return int(height), int(width)
        return None


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
