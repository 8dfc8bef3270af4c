"""Small vision transformers, and their attention computed here."""

import timm
import torch


def small_vit(name='vit_tiny_patch16_224', size=(3, 4), double=True, **kwargs):
    """A grid of ``size`` patches, two heads of 16 channels."""
    settings = dict(patch_size=4, img_size=(4 * size[0], 4 * size[1]), embed_dim=32, num_heads=2, depth=3)
    model = timm.create_model(name, pretrained=False, **{**settings, 'num_classes': 4, **kwargs})
    return model.double() if double else model


def gaussian(shift, alpha, size):
    """softmax_k(−α‖k − q − Δ‖²), a query and a key at a time: ``(patches, patches)``."""
    pixels = [(row, column) for row in range(size[0]) for column in range(size[1])]
    scores = [
        [-alpha * ((k[0] - q[0] - shift[0]) ** 2 + (k[1] - q[1] - shift[1]) ** 2) for k in pixels] for q in pixels
    ]
    return torch.tensor(scores, dtype=torch.float64).softmax(-1)


def total_variation(probs, wanted):
    """Of the patches, which come last, among themselves: mean over images and queries."""
    patches = len(wanted)
    own = probs[:, -patches:, -patches:]
    return ((own / own.sum(-1, keepdim=True) - wanted).abs().sum(-1) / 2).mean().item()
