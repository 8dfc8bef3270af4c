"""Embeddings of absolute positions by sines and cosines."""

from typing import Any, Tuple

import torch
from torch import Tensor, nn

from ..analysis.vision_transformer import find_transformer
from .parts import position_embedding

EMBEDDINGS = ('sine-cosine', 'own')
TEMPERATURE = 10000.0


def sine_cosine_embedding(size: Tuple[int, int], channels: int) -> Tensor:
    """Sines and cosines of rows and columns, a quarter of the channels each (Vaswani et al. 2017, 3.5, on two axes).

    The frequencies are 10000^(−i/n), i = 0 … n − 1, for n = channels // 4; channels beyond 4n are 0.

    Returns:
        Tensor: ``(height*width, channels)``, float64.

    Examples:
        >>> sine_cosine_embedding((1, 2), 5)  # of rows: 0, of columns: 0 and 1
        tensor([[0.0000, 1.0000, 0.0000, 1.0000, 0.0000],
                [0.0000, 1.0000, 0.8415, 0.5403, 0.0000]], dtype=torch.float64)
    """
    quarter = channels // 4
    frequencies = TEMPERATURE ** (-torch.arange(quarter, dtype=torch.float64) / max(quarter, 1))
    grid = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in size))  # (patches, 2)
    angles = grid[:, :, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], -1).flatten(1)
    return nn.functional.pad(waves, (0, channels - waves.shape[1]))


@torch.no_grad()
def set_sine_cosine_embedding(model: nn.Module) -> None:
    """Sets the learned embedding of a vision transformer's patches to :func:`sine_cosine_embedding`.

    Args:
        model (nn.Module): A vision transformer with ``pos_embed``, or a model with one.

    Raises:
        ValueError: It has no such embedding.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=1)
        >>> set_sine_cosine_embedding(model)
        >>> round(model.pos_embed[0, 1:].square().mean().item(), 3)
        0.5
    """
    _, network = find_transformer(model)
    size = embedding_grid(network)
    rows = position_embedding(network, size[0] * size[1])
    rows[-size[0] * size[1] :] = sine_cosine_embedding(size, rows.shape[1]).to(rows)


def embedding_grid(network: Any) -> Tuple[int, int]:
    """Height and width of the patches of the image size that the network was built for.

    Raises:
        ValueError: The network does not say.
    """
    grid = getattr(network.patch_embed, 'grid_size', None) or getattr(network.patch_embed, 'init_out_size', None)
    if grid is None:
        raise ValueError(
            f'the patch_embed of {type(network).__name__} has neither grid_size nor init_out_size: it does not say for '
            'how many patches the model was built'
        )
    return int(grid[0]), int(grid[1])
