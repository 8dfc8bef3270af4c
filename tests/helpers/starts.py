"""Small vision transformers, and their attention computed here."""

from contextlib import contextmanager

import pytest
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


def attention_of(model, images):
    """What each attention of timm multiplies its values by, in the order of the model: ``(B, N_h, N, N)``."""
    found, handles = [], []
    for module in model.modules():
        if hasattr(module, 'attn_drop') and hasattr(module, 'num_heads'):
            module.fused_attn = False
            handles.append(module.attn_drop.register_forward_pre_hook(lambda _, args: found.append(args[0].detach())))
    model.eval()(images)
    for handle in handles:
        handle.remove()
    return found


def total_variation(probs, wanted):
    """Of the patches, which come last, among themselves: mean over images and queries."""
    patches = len(wanted)
    own = probs[:, -patches:, -patches:]
    return ((own / own.sum(-1, keepdim=True) - wanted).abs().sum(-1) / 2).mean().item()


@contextmanager
def refused(model, message, error=ValueError):
    """Expects an error inside, which leaves every entry of the model as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        yield
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
