"""Head reports of vision transformers, those of timm and of mmpretrain: how convolutional is their attention?

Cordonnier et al. 2020, section 4, asks it of attention layers trained on images; L21 (Li et al. 2021) of transformers.

They are told by their parts: timm's have ``patch_embed`` and ``blocks``, mmpretrain's ``patch_embed``, ``layers`` and
``patch_resolution``. They may be inside of another model, such as the backbone of a classifier.
"""

import dataclasses
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ...pruning import relative_entropy_of_maps
from ..attention_maps import evaluating
from ..image_means import ImageMeans
from .layer import TOLERANCE, maps_report
from .report import LayerReport

BATCH_SIZE = 4  # images in a pass

Visit = Callable[[str, Tensor, Tensor], None]


def is_vit(model: nn.Module) -> bool:
    """Whether a vision transformer as those of timm or mmpretrain is in a model.

    Examples:
        >>> import timm
        >>> is_vit(timm.create_model('vit_tiny_patch16_224', depth=1)), is_vit(timm.create_model('resnet18'))
        (True, False)
    """
    return _find_transformer(model) is not None


def vit_attention(model: nn.Module, images: Tensor) -> Tuple[Dict[str, Tensor], Dict[str, Tensor]]:
    """The attention of patches to patches in every layer of a vision transformer.

    Class, distillation and register tokens come before the patches: as many tokens as a layer has beyond the patches
    of the image are left out at the front, as queries and as keys. The probabilities that a patch gives to patches are
    renormalized to 1.

    Args:
        model (nn.Module): A model of timm or mmpretrain, or one with such a backbone, whose attention has its
            probabilities pass through ``attn_drop``, or is computed by its ``scaled_dot_product_attention``: ViT,
            DeiT, BEiT, EVA, ConViT and their relatives. timm's fused attention is off meanwhile.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model.

    Returns:
        tuple[dict, dict]: By the name of the attention, the probabilities ``(B, N_h, patches, patches)``, and what
        patches give to the tokens left out, mean over patches, ``(B, N_h)``.

    Raises:
        ValueError: The model is built in another way: windows, pooled keys, attention over channels, mixed heads.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=12, num_heads=3, depth=1)
        >>> probs, prefix_mass = vit_attention(model, torch.rand(2, 3, 32, 32))
        >>> probs['blocks.0.attn'].shape, prefix_mass['blocks.0.attn'].shape
        (torch.Size([2, 3, 4, 4]), torch.Size([2, 3]))
    """
    probs, prefix_mass = {}, {}

    def keep(name: str, own: Tensor, mass: Tensor) -> None:
        probs[name], prefix_mass[name] = own, mass

    _visit_attention(model, images, keep)
    return probs, prefix_mass


def mean_vit_attention(model: nn.Module, images: Tensor) -> Dict[str, Tensor]:
    """The mean over images of :func:`vit_attention`, without all of them in memory.

    Args:
        model (nn.Module): See :func:`vit_attention`.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model, at least one.

    Returns:
        dict[str, Tensor]: ``(N_h, patches, patches)`` by the name of the attention, float32.

    Raises:
        ValueError: See :func:`vit_attention`.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=12, num_heads=3, depth=1)
        >>> mean_vit_attention(model, torch.rand(9, 3, 32, 32))['blocks.0.attn'].shape
        torch.Size([3, 4, 4])
    """
    return {name: probs for name, (probs, _, _) in _means(model, images).items()}


def vit_reports(model: nn.Module, images: Tensor, tolerance: float = TOLERANCE) -> List[LayerReport]:
    """Reports the attention of each layer of a vision transformer, averaged over images.

    The errors of convolutions are those of the attention maps, each head with an output of its own: the values of the
    heads do not count.

    Args:
        model (nn.Module): See :func:`vit_attention`.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model, at least one.
        tolerance (float): Residual up to which a shift is expressible. Defaults to 1e-6.

    Returns:
        list[LayerReport]: In the order of the blocks; ``prefix_mass`` of a head is what was left out.

    Raises:
        ValueError: See :func:`vit_attention`.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=96, embed_dim=12, num_heads=3, depth=1)
        >>> (report,) = vit_reports(model, torch.rand(2, 3, 96, 96))
        >>> report.name, report.grid, report.num_heads, report.num_images
        ('blocks.0.attn', (6, 6), 3, 2)
    """
    size = patch_grid(model, images)
    reports = []
    for name, (probs, entropy, prefix_mass) in _means(model, images).items():
        report = maps_report(probs, size, num_images=len(images), relative_entropy=entropy, tolerance=tolerance)
        heads = tuple(
            dataclasses.replace(head, prefix_mass=mass) for head, mass in zip(report.heads, prefix_mass.tolist())
        )
        reports.append(dataclasses.replace(report, name=name, heads=heads))
    return reports


def _means(model: nn.Module, images: Tensor) -> Dict[str, Tuple[Tensor, ...]]:
    """By the name of the attention: probabilities, relative entropies and what is left out, means over images."""
    means = ImageMeans()

    def add(name: str, probs: Tensor, prefix_mass: Tensor) -> None:
        means.add(name, probs, relative_entropy_of_maps(probs), prefix_mass)

    for batch in images.split(BATCH_SIZE):
        _visit_attention(model, batch, add)
    return dict(means.items())


@torch.no_grad()
def _visit_attention(model: nn.Module, images: Tensor, visit: Visit) -> None:
    """Calls ``visit(name, probs, prefix_mass)`` for each attention in one pass, see :func:`vit_attention`."""
    prefix, network = _transformer(model)
    height, width = patch_grid(network, images)
    modules = _attention_modules(prefix, network)
    times = dict.fromkeys(modules, 0)

    def visit_probs(name: str, probs: Tensor) -> None:
        times[name] += 1
        visit(name, *_of_patches(network, name, probs.float(), len(images), modules[name].num_heads, height * width))

    with evaluating(network), ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(visited_attention(module, partial(visit_probs, name)))
        network(images)
    for name, count in times.items():
        if count != 1:
            raise _other_structure(network, f'{name} has its probabilities computed {count} times')


def patch_grid(model: nn.Module, images: Tensor) -> Tuple[int, int]:
    """Height and width of the grid of patches.

    Args:
        model (nn.Module): See :func:`vit_attention`.
        images (Tensor): ``(B, C, H, W)``.

    Raises:
        ValueError: The model does not cut images into a grid of patches, or the grid has a single one.

    Examples:
        >>> import timm
        >>> patch_grid(timm.create_model('vit_tiny_patch16_224', depth=1), torch.rand(1, 3, 224, 224))
        (14, 14)
    """
    _, network = _transformer(model)
    embed: Any = network.patch_embed
    if hasattr(network, 'patch_resolution'):  # mmpretrain: what it returns beside the patches
        with torch.no_grad():
            size = embed(images[:1])[1]
    elif hasattr(embed, 'dynamic_feat_size'):  # images of another size than the model's own
        size = embed.dynamic_feat_size(tuple(images.shape[-2:]))
    else:
        size = embed.grid_size
    if size is None or size[0] * size[1] < 2:
        raise _other_structure(network, f'its grid is {size}')
    return tuple(size)


def _find_transformer(model: nn.Module) -> Optional[Tuple[str, Any]]:
    """The vision transformer in a model, and what the names of its modules begin with; None if there is none."""
    for name, module in model.named_modules():
        of_timm = hasattr(module, 'blocks') and hasattr(getattr(module, 'patch_embed', None), 'grid_size')
        of_mmpretrain = all(hasattr(module, part) for part in ('patch_embed', 'layers', 'patch_resolution'))
        if of_timm or of_mmpretrain:
            return f'{name}.' if name else '', module
    return None


def _transformer(model: nn.Module) -> Tuple[str, Any]:
    found = _find_transformer(model)
    if found is None:
        raise _other_structure(model, 'it has no patch_embed with a grid, or no blocks')
    return found


def _attention_modules(prefix: str, network: nn.Module) -> Dict[str, Any]:
    blocks = 'blocks' if hasattr(network, 'blocks') else 'layers'
    modules = {
        f'{prefix}{blocks}.{name}': module
        for name, module in network.get_submodule(blocks).named_modules()
        if hasattr(module, 'num_heads')
        and (isinstance(getattr(module, 'attn_drop', None), nn.Module) or _computes_by_function(module))
    }
    if not modules:
        raise _other_structure(network, 'its blocks have no attention with num_heads and attn_drop')
    return modules


def _computes_by_function(module: nn.Module) -> bool:
    """Whether attention is computed by a function of its own, as mmpretrain's ``MultiheadAttention`` has it."""
    return callable(getattr(module, 'scaled_dot_product_attention', None))


@contextmanager
def visited_attention(module: Any, visit: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls ``visit(probs)`` inside, whenever the attention is computed."""
    if _computes_by_function(module):
        function = module.scaled_dot_product_attention

        def attend(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
            every_key = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
            visit(function(query, key, every_key, **kwargs))  # P·I = P
            return function(query, key, value, **kwargs)

        module.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            module.scaled_dot_product_attention = function
        return
    fused = getattr(module, 'fused_attn', False)
    if fused:
        module.fused_attn = False  # the other path has the probabilities
    handle = module.attn_drop.register_forward_pre_hook(lambda _, args: visit(args[0]))
    try:
        yield
    finally:
        handle.remove()
        if fused:
            module.fused_attn = fused


def _of_patches(
    network: nn.Module,
    name: str,
    probs: Tensor,
    batch: int,
    num_heads: int,
    patches: int,
) -> Tuple[Tensor, Tensor]:
    """The probabilities between patches, renormalized, and the mass left out."""
    class_tokens = int(getattr(network, 'cls_token', None) is not None)
    allowed = getattr(network, 'num_prefix_tokens', getattr(network, 'num_extra_tokens', class_tokens))
    prefix = probs.shape[-1] - patches
    # A layer may come before the class token is added, as in ConViT. Differential attention has two maps a head.
    if (
        probs.ndim != 4
        or probs.shape[:2] != (batch, num_heads)
        or probs.shape[2] != probs.shape[3]
        or prefix not in (0, allowed)
    ):
        raise _other_structure(
            network,
            f'the probabilities of {name} have shape {tuple(probs.shape)}, but (B, N_h, N, '
            f'N) with N_h = {num_heads}, the {patches} patches and up to {allowed} other '
            'tokens are needed',
        )
    if (probs < 0).any() or not torch.allclose(probs.sum(-1), probs.new_ones(()), atol=1e-3):
        raise _other_structure(network, f'the probabilities of {name} do not add up to 1')
    kept = probs[:, :, prefix:, prefix:]
    total = kept.sum(-1, keepdim=True)
    return kept / total.clamp(min=torch.finfo(kept.dtype).tiny), 1 - total.mean((2, 3))


def _other_structure(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f'model is a {type(model).__name__}, whose attention cannot be reported: {reason}. Give a plain '
        'vision transformer of timm or mmpretrain (ViT, DeiT, BEiT, EVA, ConViT), with attention of all patches to '
        'all patches'
    )
