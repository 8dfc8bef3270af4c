"""The models that are measured, and those that they are measured against."""

import copy
import math
from typing import Any, NamedTuple, Tuple

import timm
import torch
from original import DenseAttention, DenseContent, DenseGeneralizedQuadratic, DenseLearned, DenseQuadratic
from torch import Tensor, nn

import attncnn_plugin  # noqa: F401
from attncnn_plugin.layers import ContentAttention, GeneralizedQuadraticAttention, LearnedAttention, QuadraticAttention

DENSE = {
    ContentAttention: DenseContent,
    GeneralizedQuadraticAttention: DenseGeneralizedQuadratic,
    LearnedAttention: DenseLearned,
    QuadraticAttention: DenseQuadratic,
}
QUICK_SA = dict(embed_dim=16, num_heads=3, mlp_dim=24)
QUICK_CMHSA = dict(patch_size=4, img_size=32, depth=2, mlp_dim=24)
QUICK_PEER = dict(patch_size=8, img_size=32, depth=2, num_heads=2, embed_dim=16)


class Settings(NamedTuple):
    """What is the same for all measurements of a run.

    Attributes:
        device (str): ``'cpu'`` or ``'cuda'``. Defaults to ``'cpu'``.
        quick (bool): Whether models and images are as small as possible: to see that everything runs, not to measure.
            Defaults to False.
    """

    device: str = 'cpu'
    quick: bool = False


def sa_model(settings: Settings, name: str, side: int, depth: int = 2, **kwargs: Any) -> nn.Module:
    """One of the self-attention networks of C20, 10 classes.

    Args:
        settings (Settings): Of the run.
        name (str): Its name in timm.
        side (int): Height and width of the largest grid in tokens.
        depth (int): Number of blocks. They all take as long, so that two will do in comparisons. Defaults to 2.
        kwargs: Of ``timm.create_model``.
    """
    size = dict(img_size=2 * side) if 'learned' in name else {}
    small = QUICK_SA if settings.quick else {}
    return timm.create_model(name, depth=depth, **size, **small, **kwargs).to(settings.device)


@torch.no_grad()
def draw_covariances(model: nn.Module, largest_condition: float = 10.0) -> None:
    """Gives generalized quadratic heads random covariances, as they have after some training.

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


def with_dense_original(model: nn.Module, side: int) -> nn.Module:
    """A copy of a self-attention network with the same weights and the dense original's attention.

    Args:
        model (nn.Module): A network of this package, in timm's or mmpretrain's form.
        side (int | tuple[int, int]): Height and width of the grid in tokens.
    """
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attn = dense_original(block.attn, *((side, side) if isinstance(side, int) else side))
    return model


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


def cmhsa(settings: Settings, phase: str, **kwargs: Any) -> nn.Module:
    """CMHSA-5, 100 classes."""
    small = QUICK_CMHSA if settings.quick else {}
    return timm.create_model('cmhsa5_patch16_224', phase=phase, num_classes=100, **small, **kwargs).to(settings.device)


def vision_transformer(settings: Settings, name: str) -> nn.Module:
    """A vision transformer of timm, 100 classes."""
    return timm.create_model(name, num_classes=100, **(QUICK_PEER if settings.quick else {})).to(settings.device)


def resnet18(settings: Settings) -> nn.Module:
    """ResNet-18 for images of 32x32: timm's, with the stem that CIFAR's have."""
    model = timm.create_model('resnet18', num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model.to(settings.device)


def batch(settings: Settings, size: int, pixels: int, num_classes: int = 10) -> Tuple[Tensor, Tensor]:
    """Random images ``(size, 3, pixels, pixels)`` and labels ``(size,)``."""
    images = torch.randn(size, 3, pixels, pixels, device=settings.device)
    return images, torch.randint(num_classes, (size,), device=settings.device)
