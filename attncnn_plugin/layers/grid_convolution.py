"""A convolution over a grid of tokens."""

from torch import Tensor, nn


class GridConvolution(nn.Module):
    """The convolution of ``mhsa_to_conv`` in the place of an attention layer.

    Args:
        conv (nn.Conv2d): From D to D_out channels, one output for each pixel.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to ``(B, H, W, D_out)``."""
        return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
