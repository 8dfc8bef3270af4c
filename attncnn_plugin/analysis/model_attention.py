"""The attention of any model: of this package, or a vision transformer of timm or mmpretrain."""

from typing import Any, Dict, List, Tuple

from torch import Tensor, nn

from ..attention import AttentionLayer
from ..transformers.attention import mean_vit_attention, vit_grids, vit_layers, vit_layers_in_windows
from ..transformers.image_means import ImageMeans, few_images
from ..transformers.vision_transformer import is_vit
from .attention_maps import attention_layers, content_layers, probs_of_scores, require_attention_layers, visit_layers


def shown_layers(model: nn.Module) -> Dict[str, Any]:
    """The attention whose heads can be shown, by name, in the order of the blocks; each has ``num_heads``.

    Args:
        model (nn.Module): A model with attention of this package, which are its layers, or a vision transformer of timm
            or mmpretrain, whose modules are seen while they run on images.

    Raises:
        ValueError: The model has neither.

    Examples:
        >>> import timm, torch, attncnn_plugin
        >>> list(shown_layers(timm.create_model('sa_quadratic_cifar', depth=1)))
        ['blocks.0.attn']
        >>> shown_layers(timm.create_model('vit_tiny_patch16_224', depth=1))['blocks.0.attn'].num_heads
        3
    """
    if is_other_vit(model):
        return vit_layers(model)
    return dict(require_attention_layers(model))


def grid_of(model: nn.Module, images: Tensor) -> Tuple[int, int]:
    """Height and width of the grid of tokens that the first attention layer of a model works on.

    Args:
        model (nn.Module): See :func:`shown_layers`.
        images (Tensor): ``(B, C, H, W)``; the first one is run.

    Raises:
        ValueError: The model has no attention layers, as a CMHSA in the convolution phase.

    Examples:
        >>> import timm, torch, attncnn_plugin
        >>> grid_of(timm.create_model('sa_quadratic_cifar', depth=1), torch.rand(1, 3, 32, 32))
        (16, 16)
    """
    return next(iter(grids_of(model, images).values()))


def grids_of(model: nn.Module, images: Tensor) -> Dict[str, Tuple[int, int]]:
    """Height and width of the grid of keys of every attention layer by name, as :func:`grid_of`.

    Raises:
        ValueError: There is no such layer, or one that the model does not run on images.

    Examples:
        >>> import timm, torch, attncnn_plugin
        >>> grids_of(timm.create_model('sa_quadratic_cifar', depth=2), torch.rand(1, 3, 32, 32))
        {'blocks.0.attn': (16, 16), 'blocks.1.attn': (16, 16)}
    """
    if is_other_vit(model):
        return vit_grids(model, images)
    grids: Dict[str, Tuple[int, int]] = {}

    def keep(name: str, layer: AttentionLayer, x: Tensor) -> None:
        grids[name] = layer.grid_of(x)

    visit_layers(model, images[:1], require_attention_layers(model), keep)
    return grids


def layers_in_windows(model: nn.Module) -> List[str]:
    """Names of the attention of a model that is computed in windows; none is in this package's own models.

    Args:
        model (nn.Module): See :func:`shown_layers`.

    Examples:
        >>> import timm
        >>> layers_in_windows(timm.create_model('vit_tiny_patch16_224', depth=1))
        []
    """
    return vit_layers_in_windows(model) if is_other_vit(model) else []


def mean_attention_probs_of(model: nn.Module, images: Tensor, batch_size: int = 10) -> Dict[str, Tensor]:
    """The attention of every layer whose scores depend on content, mean over images, without all of them in memory.

    Of a vision transformer of timm or mmpretrain it is that of patches to patches, see
    :func:`~attncnn_plugin.analysis.vit_attention`; of other models, the mean of
    :func:`~attncnn_plugin.analysis.attention_probs_of`.

    Args:
        model (nn.Module): See :func:`shown_layers`.
        images (Tensor): ``(B, C, H, W)``, at least one.
        batch_size (int): Images in a pass. Defaults to 10.

    Returns:
        dict[str, Tensor]: ``(N_h, H*W, H*W)`` by the layer's name, float32.

    Examples:
        >>> import timm, torch, attncnn_plugin
        >>> model = timm.create_model('sa_learned_content_cifar', embed_dim=12, depth=1, num_heads=3)
        >>> {name: tuple(probs.shape) for name, probs in mean_attention_probs_of(model, torch.rand(9, 3, 8, 8)).items()}
        {'blocks.0.attn': (3, 16, 16)}
    """
    if is_other_vit(model):
        return mean_vit_attention(model, images, batch_size)
    means = ImageMeans()

    def add(name: str, layer: AttentionLayer, x: Tensor) -> None:
        for part in few_images(layer, x):
            means.add(name, probs_of_scores(layer.attention_scores(part), layer.grid_of(part)))

    for batch in images.split(batch_size):
        visit_layers(model, batch, content_layers(model), add)
    return {name: probs for name, (probs,) in means.items()}


def is_other_vit(model: nn.Module) -> bool:
    """Whether a model has the attention of a vision transformer of timm or mmpretrain, and none of this package."""
    return not attention_layers(model) and is_vit(model)
