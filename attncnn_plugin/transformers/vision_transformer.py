"""The vision transformer in a model, told by its parts: patches, the tokens beside them, positions, blocks."""

from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

from torch import Tensor, nn

from ..attention.window import shown


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
        return part_of(self.module, self.layout.rope) if self.layout.rope else None

    @property
    def position(self) -> Any:
        """The learned embedding of absolute positions; None, or no parameter, without it."""
        return part_of(self.module, self.layout.position) if self.layout.position else None

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
    def prefix_names(self) -> List[str]:
        """Short names of the tokens before the patches, in their order: ``cls``, ``dist``, ``reg 1``, …."""
        single = [part_of(self.module, name) is not None for name in self.layout.tokens[:2]]
        names = [name for name, has in zip(('cls', 'dist'), single) if has]
        count = self.num_prefix_tokens
        return [*names, *(f'reg {i + 1}' for i in range(count - len(names)))][:count]

    @property
    def reads_class_token(self) -> bool:
        """Whether there is a class token, and the output is not the mean, or all, of the patches."""
        pool = getattr(self.module, 'global_pool', None)  # of timm; empty for all tokens
        of_patches = getattr(self.module, 'out_type', None) in ('avg_featmap', 'featmap')  # of mmpretrain
        of_patches |= bool(part_of(self.module, 'config.use_mean_pooling'))  # of Hugging Face
        return self.prefix_names[:1] == ['cls'] and (pool or 'token') == 'token' and not of_patches

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

    def check_images(self, images: Tensor) -> None:
        """Refuses what are no images for the patch embedding, by a ValueError."""
        channels = self.patch_convolutions[0].in_channels
        if images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f'images have shape {tuple(images.shape)}, but a {self.kind} takes (B, {channels}, H, W): batches of '
                f'images with {channels} channels'
            )

    def grid_of_patches(self, embedded: Tensor) -> Tuple[int, int]:
        """Returns height and width of the grid of patches in what the last of :attr:`patch_convolutions` gave.

        Raises:
            ValueError: The grid has a single patch.
        """
        height, width = embedded.shape[-2:]
        if height * width < 2:
            raise ValueError(
                f'model has a {self.kind}, whose {self.layout.patches} gives no grid of at least 2 patches for these '
                f'images: its grid is {(height, width)}'
            )
        return height, width

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

    def is_in_blocks(self, name: str) -> bool:
        """Says whether a module is in the blocks, by its name in the transformer."""
        return any(f'{name}.'.startswith(f'{blocks}.') for blocks in self.layout.blocks)


def is_vit(model: nn.Module) -> bool:
    """Says whether a vision transformer is in a model.

    Examples:
        >>> import timm
        >>> is_vit(timm.create_model('vit_tiny_patch16_224', depth=1)), is_vit(timm.create_model('resnet18'))
        (True, False)
    """
    return _find(model) is not None


def images_for(model: nn.Module, images: Tensor) -> Tensor:
    """Returns images on the device and in the dtype of a model.

    Raises:
        ValueError: There are none.
    """
    if not images.numel():
        raise ValueError(f'images={shown(images)} are none, but at least one is needed')
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    return images if like is None else images.to(like)


def find_transformer(model: nn.Module) -> Transformer:
    """Returns the vision transformer in a model, the first module with the parts of one of ``LAYOUTS``.

    Raises:
        ValueError: There is none.
    """
    found = _find(model)
    if found is None:
        looked_for = '; '.join(f'{own.patches} and {" or ".join(own.blocks)}' for own in LAYOUTS)
        raise ValueError(
            f'model is a {type(model).__name__} without a vision transformer as those of timm, mmpretrain, Hugging '
            f'Face transformers or torchvision: no module has a patch embedding and blocks ({looked_for})'
        )
    return found


def _find(model: nn.Module) -> Optional[Transformer]:
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
    return None
