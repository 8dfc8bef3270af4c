"""The vision transformer in a model of timm or mmpretrain, told by its parts: patches and the tokens beside them."""

from typing import Any, List, Optional, Tuple

from torch import Tensor, nn

BLOCKS = ('blocks', 'layers', 'stages')  # modules that hold all blocks


def is_vit(model: nn.Module) -> bool:
    """Says whether a vision transformer as those of timm or mmpretrain is in a model.

    Examples:
        >>> import timm
        >>> is_vit(timm.create_model('vit_tiny_patch16_224', depth=1)), is_vit(timm.create_model('resnet18'))
        (True, False)
    """
    return _find(model) is not None


def find_transformer(model: nn.Module) -> Tuple[str, Any]:
    """Returns the vision transformer in a model, the first module with a ``patch_embed`` and blocks, and its name.

    Raises:
        ValueError: There is none.
    """
    found = _find(model)
    if found is None:
        raise ValueError(
            f'model is a {type(model).__name__} in which no module has a patch_embed, and blocks, layers or stages: '
            'give a vision transformer of timm or mmpretrain, or a model with such a backbone'
        )
    return found


def _find(model: nn.Module) -> Optional[Tuple[str, Any]]:
    containers = nn.ModuleList, nn.Sequential
    for name, module in model.named_modules():
        if isinstance(getattr(module, 'patch_embed', None), nn.Module) and any(
            isinstance(getattr(module, blocks, None), containers) for blocks in BLOCKS
        ):
            return name, module
    return None


def num_prefix_tokens(network: Any) -> int:
    """Returns the number of class, distillation and register tokens, which come before the patches."""
    class_tokens = int(getattr(network, 'cls_token', None) is not None)
    return int(getattr(network, 'num_prefix_tokens', getattr(network, 'num_extra_tokens', class_tokens)))


def prefix_names(network: Any) -> List[str]:
    """Returns short names of the tokens before the patches, in their order: ``cls``, ``dist``, ``reg 1``, …."""
    names = [name for name in ('cls', 'dist') if getattr(network, f'{name}_token', None) is not None]
    count = num_prefix_tokens(network)
    return [*names, *(f'reg {i + 1}' for i in range(count - len(names)))][:count]


def patch_grid(network: Any, images: Tensor, embedded: Any) -> Tuple[int, int]:
    """Returns height and width of the grid of patches that images were cut into, which ``patch_embed`` embedded.

    Raises:
        ValueError: The model does not cut images into a grid of patches, or the grid has a single one.
    """
    embed, size = network.patch_embed, None
    if hasattr(embed, 'dynamic_feat_size'):  # of timm; images of another size than the model's own
        size = embed.dynamic_feat_size(tuple(images.shape[-2:]))
    elif hasattr(embed, 'grid_size'):
        size = embed.grid_size
    elif hasattr(embed, 'init_out_size'):  # of mmpretrain
        size = embedded[1]
    if size is None or size[0] * size[1] < 2:
        raise ValueError(
            f'model has a {type(network).__name__}, whose patch_embed gives no grid of at least 2 patches for images '
            f'of {images.shape[-2]}x{images.shape[-1]}: its grid is {size}'
        )
    return int(size[0]), int(size[1])


def patch_convolutions(network: Any) -> List[nn.Conv2d]:
    """Returns the convolutions of the patch embedding: the first takes the images, the last makes tokens of patches."""
    convolutions = [module for module in network.patch_embed.modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        raise ValueError(f'the patch_embed of {type(network).__name__} has no convolution that makes tokens of patches')
    return convolutions


def grid_of(network: Any) -> Tuple[int, int]:
    """Returns height and width of the grid of patches that a network was built for."""
    return built_for(network, 'grid_size', 'init_out_size')


def built_for(network: Any, of_timm: str, of_mmpretrain: str) -> Tuple[int, int]:
    """Returns height and width of what a network was built for, under timm's or mmpretrain's name for it."""
    size = getattr(network.patch_embed, of_timm, None) or getattr(network.patch_embed, of_mmpretrain, None)
    if size is None:
        raise ValueError(
            f'the patch_embed of {type(network).__name__} has no {of_timm} or {of_mmpretrain}: give it an image size'
        )
    return int(size[0]), int(size[1])
