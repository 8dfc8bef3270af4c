"""Every kind of attention layer, small: 4 channels, for tokens ``(B, H, W, 4)`` or, by their names, images."""

from functools import partial

import torch
from torch import nn

from attncnn_plugin import attention as layers
from attncnn_plugin.attention.window import Window
from attncnn_plugin.convert import conv_to_mhsa

with torch.random.fork_rng():  # drawn alike whatever was imported before
    torch.manual_seed(0)
    CONV = nn.Conv2d(4, 6, 3, padding=1)
WINDOW = Window.of(CONV)
TOKENS = {  # by their dimensions and their number of heads
    'quadratic': layers.QuadraticAttention,
    'generalized': layers.GeneralizedQuadraticAttention,
    'learned': layers.LearnedAttention,
    'content': layers.ContentAttention,
}
LAYERS = {
    **{name: partial(make, 4, 3) for name, make in TOKENS.items()},
    'patches_grid': lambda: layers.PatchAttention(4, 9, layers.GridBias(9, (2, 2))),
    'patches_narrow': lambda: layers.PatchAttention(
        4, 2, layers.GridBias(2, (1, 2), null_key=False), head_dim=(1, 3), qk_dim=2
    ),
    'hard_image': lambda: layers.QuadraticImageAttention(4, 6, 9, WINDOW),
    'soft_image': lambda: layers.WindowImageAttention(4, 6, 5, WINDOW),
    'content_image': lambda: conv_to_mhsa(CONV, content='additive')[0],
    'content_image_near': lambda: conv_to_mhsa(CONV, content='gated', window_size=3)[0],
    'content_image_groups': lambda: conv_to_mhsa(
        nn.Conv2d(4, 6, 3, padding=1, groups=2), content='gated', window_size=3
    )[0],
    'converted_hard': lambda: conv_to_mhsa(CONV)[0],
    'converted_soft': lambda: conv_to_mhsa(CONV, position='table', alpha=2)[0],
}


def with_outputs(layer, channels, bias=True):
    """Attention over a grid of tokens with an output of other channels than a token."""
    setattr(
        layer, layer.output_name, nn.Linear(layer.output.in_features, channels, bias, dtype=layer.output.weight.dtype)
    )
    return layer


def takes_images(name):
    """Whether a layer takes images ``(B, 4, H, W)``."""
    return 'image' in name or 'converted' in name
