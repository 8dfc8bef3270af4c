"""Head reports of vision transformers, those of timm and of mmpretrain: how convolutional is their attention?

Cordonnier et al. 2020, section 4, asks it of attention layers trained on images; L21 (Li et al. 2021) of transformers.
"""

import dataclasses
from typing import Dict, List

import torch
from torch import Tensor, nn

from ...transformers.attention import BATCH_SIZE, TokenPlaces, visit_vit_attention
from ...transformers.image_means import ImageMeans
from .layer import TOLERANCE, maps_report
from .report import LayerReport


def vit_reports(model: nn.Module, images: Tensor, tolerance: float = TOLERANCE) -> List[LayerReport]:
    """Reports the attention of each layer of a vision transformer, averaged over images.

    The errors of convolutions are those of the attention maps, each head with an output of its own: the values of the
    heads do not count. Windows are on the grid of the image: keys outside of a query's window have 0, and the relative
    entropy is that to attention to all keys alike that a query sees.

    Args:
        model (nn.Module): See :func:`~attncnn_plugin.analysis.vit_attention`.
        images (Tensor): ``(B, C, H, W)``, normalized as for the model, at least one.
        tolerance (float): Residual up to which a shift is expressible. Defaults to 1e-6.

    Returns:
        list[LayerReport]: In the order of the blocks; ``prefix_mass`` of a head is what was left out.

    Raises:
        ValueError: See :func:`~attncnn_plugin.analysis.vit_attention`.

    Examples:
        >>> import timm, torch
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=96, embed_dim=12, num_heads=3, depth=1)
        >>> (report,) = vit_reports(model, torch.rand(2, 3, 96, 96))
        >>> report.name, report.grid, report.num_heads, report.num_images
        ('blocks.0.attn', (6, 6), 3, 2)
    """
    means = ImageMeans()
    places: Dict[str, TokenPlaces] = {}
    largest: Dict[str, float] = {}  # entropy

    def add(name: str, probs: Tensor, where: TokenPlaces) -> None:
        own, prefix_mass = where.of_patches(probs)
        entropy, largest[name] = where.entropies(own)
        means.add(name, own, entropy, prefix_mass)
        places[name] = where

    for batch in images.split(BATCH_SIZE):
        visit_vit_attention(model, batch, add)
    reports = []
    for name, (own, entropy, prefix_mass) in means.items():
        report = maps_report(
            places[name].on_grid(own.cpu()),
            places[name].grid,
            num_images=len(images),
            relative_entropy=(entropy / max(largest[name], torch.finfo(torch.float).tiny)).clamp(max=1),
            tolerance=tolerance,
        )
        heads = tuple(
            dataclasses.replace(head, entropy=nats, prefix_mass=mass)
            for head, nats, mass in zip(report.heads, entropy.tolist(), prefix_mass.tolist())
        )
        reports.append(dataclasses.replace(report, name=name, heads=heads))
    return reports
