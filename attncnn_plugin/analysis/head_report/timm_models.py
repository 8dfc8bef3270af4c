"""Head reports of timm's vision transformers: how convolutional is their attention?"""

import dataclasses
from contextlib import ExitStack, contextmanager
from typing import Dict, Iterator, List, Tuple

import torch
from torch import Tensor, nn

from ..attention_maps import evaluating, mean_over_images, relative_entropy_of
from .layer import TOLERANCE, maps_report
from .report import LayerReport

BATCH_SIZE = 4


def timm_attention(model: nn.Module, images: Tensor) -> Tuple[Dict[str, Tensor], Dict[str, Tensor]]:
    """The attention of patches to patches in every layer of a timm vision transformer.

    Class, distillation and register tokens come before the patches in timm's models: as many tokens as a layer has
    beyond the patches of the image are left out at the front, as queries and as keys. What a patch gives to the other
    patches is renormalized to 1.

    Args:
        model (nn.Module): A model with ``patch_embed`` and ``blocks``, whose attention has its probabilities pass
            through ``attn_drop``: ViT, DeiT, BEiT, EVA, ConViT and their relatives. Fused attention is off meanwhile.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model.

    Returns:
        tuple[dict, dict]: By the name of the attention, the probabilities ``(B, N_h, patches, patches)``, and what
        patches give to the tokens left out, mean over patches, ``(B, N_h)``.

    Raises:
        ValueError: The model is built in another way: windows, pooled keys, attention over channels, mixed heads.
    """
    height, width = patch_grid(model, images)
    seen = {}
    with torch.no_grad(), evaluating(model), ExitStack() as stack:
        for name, module in _attention_modules(model).items():
            stack.enter_context(_unfused(module))
            handle = module.attn_drop.register_forward_pre_hook(
                lambda _, args, name=name: seen.setdefault(name, []).append(args[0])
            )
            stack.callback(handle.remove)
        model(images)
    probs, prefix_mass = {}, {}
    for name, module in _attention_modules(model).items():
        times = len(seen.get(name, ()))
        if times != 1:
            raise _other_structure(model, f'{name} hands its probabilities to attn_drop {times} times')
        expected = len(images), module.num_heads, height * width
        probs[name], prefix_mass[name] = _of_patches(model, name, seen[name][0].float(), *expected)
    return probs, prefix_mass


def timm_reports(model: nn.Module, images: Tensor, tolerance: float = TOLERANCE) -> List[LayerReport]:
    """The reports of the attention of each layer, averaged over images.

    The errors of convolutions are those of the attention maps, each head with an output of its own: the values of the
    heads do not count.

    Args:
        model (nn.Module), images (Tensor): See :func:`timm_attention`; at least one image.
        tolerance (float): Residual up to which a shift is expressible. Defaults to 1e-6.

    Returns:
        list[LayerReport]: In the order of the blocks; ``prefix_mass`` of a head is what was left out.

    Raises:
        ValueError: See :func:`timm_attention`.
    """
    size = patch_grid(model, images)
    reports = []
    for name, (probs, entropy, prefix_mass) in mean_over_images(
        lambda batch: _with_entropy(*timm_attention(model, batch)), images, BATCH_SIZE
    ).items():
        report = maps_report(probs, *size, num_images=len(images), relative_entropy=entropy, tolerance=tolerance)
        left_out = prefix_mass.tolist()
        heads = tuple(dataclasses.replace(head, prefix_mass=left_out[head.head]) for head in report.heads)
        reports.append(dataclasses.replace(report, name=name, heads=heads))
    return reports


def _with_entropy(probs: Dict[str, Tensor], prefix_mass: Dict[str, Tensor]) -> Dict[str, Tuple[Tensor, ...]]:
    return {name: (maps, relative_entropy_of(maps), prefix_mass[name]) for name, maps in probs.items()}


def patch_grid(model: nn.Module, images: Tensor) -> Tuple[int, int]:
    """Height and width of the grid of patches.

    Raises:
        ValueError: The model does not cut images into a grid of patches, or the grid has a single one.
    """
    embed = getattr(model, 'patch_embed', None)
    if not hasattr(embed, 'grid_size') or not hasattr(model, 'blocks'):
        raise _other_structure(model, 'it has no patch_embed with a grid, or no blocks')
    size = embed.grid_size
    if hasattr(embed, 'dynamic_feat_size'):  # images of another size than the model's own
        size = embed.dynamic_feat_size(tuple(images.shape[-2:]))
    if size is None or size[0] * size[1] < 2:
        raise _other_structure(model, f'its grid is {size}')
    return tuple(size)


def _attention_modules(model: nn.Module) -> Dict[str, nn.Module]:
    modules = {
        f'blocks.{name}': module
        for name, module in model.blocks.named_modules()
        if hasattr(module, 'num_heads') and isinstance(getattr(module, 'attn_drop', None), nn.Module)
    }
    if not modules:
        raise _other_structure(model, 'its blocks have no attention with num_heads and attn_drop')
    return modules


@contextmanager
def _unfused(module: nn.Module) -> Iterator[None]:
    """The path that has the probabilities."""
    fused = getattr(module, 'fused_attn', False)
    if fused:
        module.fused_attn = False
    try:
        yield
    finally:
        if fused:
            module.fused_attn = fused


def _of_patches(
    model: nn.Module,
    name: str,
    probs: Tensor,
    batch: int,
    num_heads: int,
    patches: int,
) -> Tuple[Tensor, Tensor]:
    """The probabilities between patches, renormalized, and the mass left out."""
    allowed = getattr(model, 'num_prefix_tokens', int(getattr(model, 'cls_token', None) is not None))
    prefix = probs.shape[-1] - patches
    # A layer may come before the class token is added, as in ConViT. Differential attention has two maps a head.
    if (
        probs.ndim != 4
        or probs.shape[:2] != (batch, num_heads)
        or probs.shape[2] != probs.shape[3]
        or prefix not in (0, allowed)
    ):
        raise _other_structure(
            model,
            f'the probabilities of {name} have shape {tuple(probs.shape)}, but (B, N_h, N, '
            f'N) with N_h = {num_heads}, the {patches} patches and up to {allowed} other '
            'tokens are needed',
        )
    if (probs < 0).any() or not torch.allclose(probs.sum(-1), probs.new_ones(()), atol=1e-3):
        raise _other_structure(model, f'the probabilities of {name} do not add up to 1')
    kept = probs[:, :, prefix:, prefix:]
    total = kept.sum(-1, keepdim=True)
    return kept / total.clamp(min=torch.finfo(kept.dtype).tiny), 1 - total.mean((2, 3))


def _other_structure(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f'model is a {type(model).__name__}, whose attention cannot be reported: {reason}. What works is a plain '
        'vision transformer of timm (ViT, DeiT, BEiT, EVA, ConViT), with attention of all patches to all patches'
    )
