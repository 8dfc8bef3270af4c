"""Small models of every kind, for the tests."""

from contextlib import contextmanager, suppress

import pytest
import timm
import torch
from torch import nn

from attncnn_plugin.convert import conv_to_mhsa
from attncnn_plugin.pruning import prunable_heads

TIMM_KINDS = ['sa_quadratic_cifar', 'sa_generalized_cifar', 'sa_learned_cifar', 'sa_learned_content_cifar']
SMALL = dict(embed_dim=16, depth=2, num_heads=3, mlp_dim=24)
SMALL_ARCH = dict(embed_dims=16, num_layers=2, num_heads=3, feedforward_channels=24)
SMALL_CMHSA = dict(type='CMHSA', patch_size=2, img_size=16, num_layers=2, feedforward_channels=24)
CMHSA_KINDS = {
    'cmhsa_conv': dict(phase='conv'),
    'cmhsa_attn': dict(phase='attn'),
    'cmhsa_narrow': dict(phase='attn', head_dim='exact', qk_dim=4),
}
KINDS = [*TIMM_KINDS, *CMHSA_KINDS]


def small_timm(name, **kwargs):
    return timm.create_model(name, **{**SMALL, **kwargs})


def small_cmhsa(phase, name='cmhsa3_patch16_224', **kwargs):
    return timm.create_model(
        name, phase=phase, **{**dict(patch_size=2, img_size=16, depth=2, mlp_dim=24, num_classes=10), **kwargs}
    )


def small_model(kind, **kwargs):
    """One of ``KINDS``, for images of 16x16 pixels and ten classes, which become 8x8 tokens."""
    return small_cmhsa(**CMHSA_KINDS[kind], **kwargs) if kind in CMHSA_KINDS else small_timm(kind, **kwargs)


def small_mixed():
    """A convolution as attention, a vision transformer, and attention of this package over its patches."""
    return Mixed().eval()


class Mixed(nn.Module):
    """Attention of this package and of another library, for images of 16x16 pixels, which become 4x4 tokens."""

    def __init__(self):
        super().__init__()
        self.stem = conv_to_mhsa(nn.Conv2d(3, 3, 3, padding=1), content='additive', alpha=1)[0]
        self.patches = small_timm('sa_learned_content_cifar').blocks[0].attn
        self.vit = timm.create_model(
            'vit_tiny_patch16_224', img_size=16, patch_size=4, embed_dim=16, num_heads=4, depth=2
        )

    def forward(self, x):
        x = self.vit.patch_embed(self.stem(x))
        x = x + self.patches(x.unflatten(1, (4, 4))).flatten(1, 2)
        return self.vit.blocks(x).mean(1)


def trained_like(model):
    """Weights as after some training: no zeros, no ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@contextmanager
def refused(model, message, error=ValueError):
    """Expects an error inside, which leaves every entry of the model as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        yield
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(value, before[name]) for name, value in after.items())


def numbers(model):
    """How many heads each layer has that can lose some; none where convolutions are to become attention."""
    with suppress(ValueError):
        return [layer.num_heads for layer in prunable_heads(model).values()]
    return []


def model_with_head(center, name='sa_quadratic_cifar', sqrt_precision=1.0):
    """Its first head is as given in every layer."""
    model = small_timm(name)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.encoding.center[0] = torch.tensor(center)
            block.attn.encoding.sqrt_precision[0] = torch.tensor(sqrt_precision)
    return model


def save_degenerate(path):
    """A checkpoint of the small SAGeneralized for the digits: head 1 of layer 0 is uniform, 2 of layer 1 a stripe."""
    torch.manual_seed(0)
    model = small_timm('sa_generalized_cifar', in_chans=1)
    with torch.no_grad():
        model.blocks[0].attn.encoding.sqrt_precision[1] = 0
        model.blocks[1].attn.encoding.sqrt_precision[2] = torch.tensor([[3.0, 0.0], [0.0, 1e-6]])
    state = {name if name.startswith('head') else f'backbone.{name}': v for name, v in model.state_dict().items()}
    torch.save(dict(state_dict=state, meta={}), path)
    return str(path)
