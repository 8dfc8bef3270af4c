"""Tokens that are wider or narrower than the patches that a convolution works on (Li et al. 2021 has D = P²·C)."""

import math
from typing import Optional

import torch
from torch import Tensor

from ..layers.precision import Device, Dtype


def patch_embedding(
    patch_size: int, channels: int, embed_dim: int, device: Device = None, dtype: Dtype = None
) -> Optional[Tensor]:
    """Returns E from patches to tokens, ``(D, P²·C)``, whose transpose goes from tokens to patches.

    With D > P²·C, EᵀE = I: the pixels, and further channels of zeros. With D < P²·C, EEᵀ = I: the cosines of the D
    lowest frequencies of a patch (the discrete cosine transform), the channels of a frequency side by side. The
    convolution then sees a smoothed image.

    Args:
        patch_size (int): P.
        channels (int): Channels C of the image.
        embed_dim (int): D.

    Returns:
        Tensor | None: E; None for D = P²·C, where tokens are the patches.

    Examples:
        >>> E = patch_embedding(patch_size=4, channels=3, embed_dim=24)
        >>> E.shape, torch.allclose(E @ E.T, torch.eye(24), atol=1e-6)
        (torch.Size([24, 48]), True)
        >>> patch = torch.ones(48)  # the lowest frequency
        >>> torch.allclose(E.T @ (E @ patch), patch, atol=1e-6)
        True
    """
    patch_dim = patch_size**2 * channels
    if embed_dim == patch_dim:
        return None
    if embed_dim > patch_dim:
        return torch.eye(embed_dim, patch_dim, device=device, dtype=dtype)
    frequency = torch.arange(patch_size, dtype=torch.float64, device='cpu')
    # √(2/P)·cos(π(s + 1/2)u/P), and √(1/P) for u = 0: orthonormal rows, one for each frequency u.
    cosines = torch.cos(math.pi / patch_size * frequency[:, None] * (frequency + 0.5)) * math.sqrt(2 / patch_size)
    cosines[0] /= math.sqrt(2)
    waves = torch.einsum('us,vt->uvst', cosines, cosines).flatten(2).flatten(0, 1)  # (u·v, s·t)
    lowest = (frequency[:, None] ** 2 + frequency**2).flatten().argsort(stable=True)
    rows = torch.einsum('fs,cd->fcds', waves[lowest], torch.eye(channels, dtype=torch.float64, device='cpu'))
    embedding = rows.flatten(2).flatten(0, 1)[:embed_dim]
    return embedding.to(device=device, dtype=torch.get_default_dtype() if dtype is None else dtype)
