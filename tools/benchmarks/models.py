"""The models that are measured, and those that they are measured against."""

import copy
import math
from pathlib import Path
from typing import Optional, Tuple

import timm
import torch
from original import DenseAttention, DenseContent, DenseGeneralizedQuadratic, DenseLearned, DenseQuadratic
from settings import Settings
from torch import Tensor, nn

import attncnn_plugin  # noqa: F401
from attncnn_plugin.layers import ContentAttention, GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention
from attncnn_plugin.utils.frameworks import import_problem

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
DENSE = {
    ContentAttention: DenseContent,
    GeneralizedQuadraticAttention: DenseGeneralizedQuadratic,
    LearnedAttention: DenseLearned,
    QuadraticAttention: DenseQuadratic,
}
QUICK_SA = dict(embed_dim=16, depth=2, num_heads=3, mlp_dim=24)
QUICK_CMHSA = dict(patch_size=4, img_size=32, depth=2, mlp_dim=24)
QUICK_PEER = dict(patch_size=8, img_size=32, depth=2, num_heads=2, embed_dim=16)


def sa_model(settings: Settings, name: str, pixels: int, **kwargs) -> nn.Module:
    """One of the self-attention networks of C20, 10 classes, for square images.

    Args:
        settings (Settings): The device, and whether the model is a small one.
        name (str): Its name in timm.
        pixels (int): Height and width of the largest image.
        kwargs: Of ``timm.create_model``.
    """
    size = dict(img_size=pixels) if 'learned' in name else {}
    model = timm.create_model(name, **size, **(QUICK_SA if settings.quick else {}), **kwargs)
    return model.to(settings.device)


def dense_original(attention: nn.Module, height: int, width: int) -> DenseAttention:
    """The dense layer that computes the same function, for one grid, with the same weights.

    Args:
        attention (nn.Module): ``QuadraticAttention``, ``GeneralizedQuadraticAttention``, ``LearnedAttention`` with
            learned tables, or ``ContentAttention`` with its default terms.
        height, width (int): The grid in tokens.
    """
    tables = {}
    if isinstance(attention, (ContentAttention, LearnedAttention)):
        owner = attention if isinstance(attention, ContentAttention) else attention.encoding
        tables = dict(zip(('max_height', 'max_width'), owner.tables.max_size))
    dense = DENSE[type(attention)](
        attention.dim, attention.num_heads, height, width, attn_drop=attention.attn_drop.p, **tables
    )
    dense.to(attention.value.weight).train(attention.training)
    dense.load_state_dict({original_name(name): value for name, value in attention.state_dict().items()})
    return dense


def original_name(name: str) -> str:
    """The name of a parameter of a layer, in its dense original."""
    return name.replace('encoding.', '').replace('tables.', '')


def with_original_attention(model: nn.Module, height: int, width: int) -> nn.Module:
    """A copy of a self-attention network with the same weights and the dense original's attention.

    Args:
        model (nn.Module): A network of this package, in timm's or mmpretrain's form.
        height, width (int): Size of the images in pixels.
    """
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attn = dense_original(block.attn, height // model.stem.reduction, width // model.stem.reduction)
    return model


@torch.no_grad()
def draw_covariances(model: nn.Module, largest_condition: float = 10.0) -> None:
    """Gives the heads of a generalized quadratic network random covariances.

    Eigenvalues are log-uniform around 1, with a ratio of at most ``largest_condition``; orientations are uniform.
    """
    for block in model.blocks:
        factor = block.attn.encoding.sqrt_precision  # Σ^(−1/2) = R diag(λ^(−1/2))
        limit = math.log(largest_condition) / 2
        eigenvalues = torch.empty(len(factor), 2).uniform_(-limit, limit).exp()
        angle = torch.empty(len(factor)).uniform_(0, math.pi)
        cosine, sine = angle.cos(), angle.sin()
        rotation = torch.stack([torch.stack([cosine, -sine], -1), torch.stack([sine, cosine], -1)], dim=-2)
        factor.copy_(rotation * eigenvalues.rsqrt()[:, None, :])


def cmhsa(settings: Settings, phase: str, **kwargs) -> nn.Module:
    """CMHSA-5, 100 classes."""
    size = QUICK_CMHSA if settings.quick else {}
    model = timm.create_model('cmhsa5_patch16_224', phase=phase, num_classes=100, **size, **kwargs)
    return model.to(settings.device)


def peer(settings: Settings, name: str) -> nn.Module:
    """A vision transformer of timm, 100 classes."""
    return timm.create_model(name, num_classes=100, **(QUICK_PEER if settings.quick else {})).to(settings.device)


def resnet18(settings: Settings) -> Optional[nn.Module]:
    """mmpretrain's ResNet18 for images of 32x32, as the config has it; None where mmpretrain cannot be imported."""
    if import_problem() is not None:
        return None
    from mmengine.config import Config
    from mmengine.registry import init_default_scope
    from mmpretrain.registry import MODELS

    init_default_scope('mmpretrain')
    return MODELS.build(Config.fromfile(CONFIGS / 'resnet18_cifar10.py').model).to(settings.device)


def batch(settings: Settings, size: int, pixels: int, num_classes: int) -> Tuple[Tensor, Tensor]:
    """Random images ``(size, 3, pixels, pixels)`` and labels ``(size,)``."""
    images = torch.randn(size, 3, pixels, pixels, device=settings.device)
    return images, torch.randint(num_classes, (size,), device=settings.device)
