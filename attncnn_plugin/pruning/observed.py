"""Degenerate heads of attention that depends on content: by their attention on images, in means over these.

A mean of attention maps would call two heads alike that look at different things in each image. So the criteria are
means over images themselves.
"""

import torch
from torch import Tensor

from .criteria import map_distances, relative_entropy_of_maps


class ObservedAttention:
    """Means over images of what the criteria of degenerate heads ask for.

    Args:
        num_heads (int): Number of heads N_h.

    Attributes:
        entropy (Tensor): Sum over images of each head's entropy, relative to that of uniform attention, ``(N_h,)``.
        from_uniform (Tensor): The same of its distance from uniform attention in total variation, ``(N_h,)``.
        distances (Tensor): The same of the distances between heads, ``(N_h, N_h)``.
        count (Tensor): The number of images, or of windows of images. All are of float64, on the CPU.

    Examples:
        >>> observed = ObservedAttention(2)
        >>> observed.add(torch.stack([torch.eye(4), torch.full((4, 4), 0.25)])[None])
        >>> observed.mean('entropy'), observed.mean('distances')[0, 1].item()
        (tensor([0., 1.], dtype=torch.float64), 0.75)
    """

    def __init__(self, num_heads: int) -> None:
        self.entropy = torch.zeros(num_heads, dtype=torch.float64)
        self.from_uniform = torch.zeros(num_heads, dtype=torch.float64)
        self.distances = torch.zeros(num_heads, num_heads, dtype=torch.float64)
        self.count = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def add(self, probs: Tensor) -> None:
        """Adds the probabilities of some images, ``(B, N_h, Q, K)``."""
        self.entropy += relative_entropy_of_maps(probs).double().sum(0).cpu()
        self.from_uniform += ((probs - 1 / probs.shape[-1]).abs().sum(-1).mean(-1) / 2).double().sum(0).cpu()
        for maps in probs:
            self.distances += map_distances(maps).double().cpu()
        self.count += len(probs)

    def mean(self, name: str) -> Tensor:
        """The mean over images of one of the sums."""
        return getattr(self, name) / self.count
