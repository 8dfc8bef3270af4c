"""Attention probabilities of every layer of a model on images (Cordonnier et al. 2020 (C20), eq. 1 and 8).

A model is any module with the attention of this package inside: a network, a timm model, a classifier or a backbone of
mmpretrain. Images are what its forward pass takes, normalized as in training.
"""

import re
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..attention import AttentionLayer
from ..attention.evaluation_mode import evaluating
from ..transformers.vision_transformer import is_vit

Scores = Callable[[AttentionLayer, Tensor], Optional[Tensor]]


def attention_layers(model: nn.Module) -> Dict[str, AttentionLayer]:
    """The attention layers of a model by name, in the order of its blocks.

    The names are those of ``model.named_modules()``. A CMHSA in the convolution phase has none.

    Examples:
        >>> import timm, attncnn_plugin
        >>> list(attention_layers(timm.create_model('sa_quadratic_cifar', depth=2)))
        ['blocks.0.attn', 'blocks.1.attn']
    """
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, AttentionLayer)}


def require_attention_layers(model: nn.Module) -> Dict[str, AttentionLayer]:
    """As :func:`attention_layers`, at least one, of a model that is no vision transformer of timm or mmpretrain.

    Raises:
        ValueError: The model has none, as a CMHSA in the convolution phase.

    Examples:
        >>> require_attention_layers(nn.Linear(2, 2))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: the model, of type Linear, has no attention layers of this package ...
    """
    layers = attention_layers(model)
    if not layers:
        raise ValueError(
            f'the model, of type {type(model).__name__}, has no attention layers of this package (a CMHSA in the '
            'convolution phase gets them with its transition), and is no vision transformer of timm or mmpretrain, '
            'with a patch_embed and blocks, layers or stages'
        )
    return layers


def layer_label(name: str) -> str:
    """A short name of a layer for figures.

    Args:
        name (str): Its name in the model.

    Examples:
        >>> layer_label('backbone.blocks.2.attn'), layer_label('attention')
        ('block 2', 'attention')
        >>> layer_label('stages.0.blocks.1.attn.w_msa')  # of a Swin transformer
        'stage 0 block 1'
    """
    staged = re.search(r'(?:^|\.)(?:stages|layers)\.(\d+)\.blocks\.(\d+)\.', name)
    if staged:
        return f'stage {staged[1]} block {staged[2]}'
    block = re.search(r'(?:^|\.)(?:blocks|layers)\.(\d+)\.', name)  # mmpretrain calls them layers
    return f'block {block[1]}' if block else name


def layer_labels(names: Iterable[str]) -> Dict[str, str]:
    """The :func:`layer_label` of each layer, or its name where others have the same label.

    Args:
        names (Iterable[str]): The names of the layers in the model.

    Examples:
        >>> layer_labels(['blocks.0.attn', 'blocks.1.conv1', 'blocks.1.conv2'])
        {'blocks.0.attn': 'block 0', 'blocks.1.conv1': 'blocks.1.conv1', 'blocks.1.conv2': 'blocks.1.conv2'}
    """
    labels = {name: layer_label(name) for name in names}
    count = Counter(labels.values())
    return {name: label if count[label] == 1 else name for name, label in labels.items()}


@torch.no_grad()
def visit_layers(
    model: nn.Module, images: Tensor, names: Iterable[str], visit: Callable[[str, AttentionLayer, Tensor], None]
) -> None:
    """Calls ``visit(name, layer, x)`` with the input of each layer in one pass of the images.

    The model runs in evaluation mode, without gradients; afterwards its modules are in the modes they were in. Of a
    detector, or another model whose forward pass asks for more than images, only the ``forward_features`` of its
    network runs.

    Args:
        model (nn.Module): The model.
        images (Tensor): ``(B, C, H, W)``.
        names (Iterable[str]): The layers to visit, some of :func:`attention_layers`. Without any the model does not
            run.
        visit (Callable): Takes a layer's name, the layer, and its tokens ``(B, H, W, D)``, or image ``(B, C, H, W)`` in
            the place of a convolution.

    Raises:
        ValueError: A layer that the model does not run on images.

    Examples:
        >>> import timm, attncnn_plugin
        >>> model = timm.create_model('sa_quadratic_cifar', embed_dim=12, depth=2, num_heads=3)
        >>> visit_layers(model, torch.rand(1, 3, 8, 8), ['blocks.1.attn'], lambda name, layer, x: print(name, x.shape))
        blocks.1.attn torch.Size([1, 4, 4, 12])
    """
    layers = {name: model.get_submodule(name) for name in names}
    if not layers:
        return
    seen = set()

    def see(name: str, layer: Any, args: Any) -> None:
        seen.add(name)
        visit(name, layer, args[0])

    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(partial(see, name))
            stack.callback(handle.remove)
        stack.enter_context(evaluating(model))
        _features_of(model, layers.values())(images)
    for name in layers:
        if name not in seen:
            raise ValueError(f'{name} is attention that the model does not run on images: there is nothing to show')


def _features_of(model: nn.Module, layers: Iterable[nn.Module]) -> Callable[[Tensor], Any]:
    """The ``forward_features`` of the network that holds all of these layers; the model itself without a network."""
    for module in model.modules():
        forward_features = getattr(module, 'forward_features', None)
        if callable(forward_features) and set(layers) <= set(module.modules()):
            return forward_features
    return model


def attention_probs_of(model: nn.Module, images: Tensor) -> Dict[str, Tensor]:
    """The probabilities of every layer whose scores depend on content, by content and position, on some images.

    Args:
        model (nn.Module): The model; see :func:`visit_layers` for how it runs.
        images (Tensor): ``(B, C, H, W)``.

    Returns:
        dict[str, Tensor]: ``(B, N_h, H*W, H*W)`` by the layer's name, H and W in tokens, float32, in the place of a
        convolution ``(B, N_h, Q, H*W)`` with its Q outputs. With a null key, as of CMHSA, the rows add up to less than
        1. Empty for a model of position-only attention.

    Raises:
        ValueError: The attention is that of a vision transformer of timm or mmpretrain.

    Examples:
        >>> import timm, attncnn_plugin
        >>> model = timm.create_model('sa_learned_content_cifar', embed_dim=12, depth=1, num_heads=3)
        >>> {name: tuple(probs.shape) for name, probs in attention_probs_of(model, torch.rand(2, 3, 8, 8)).items()}
        {'blocks.0.attn': (2, 3, 16, 16)}
    """
    return _probs_of(model, images, lambda layer, x: layer.attention_scores(x))


def content_only_probs_of(model: nn.Module, images: Tensor) -> Dict[str, Tensor]:
    """As :func:`attention_probs_of`, by the term without position, q·k of C20's eq. 8.

    The position bias of CMHSA and its null key are left out too. In the place of a convolution the keys are those that
    a query sees, the zeros of a padding too, so that rows can add up to less than 1.

    Examples:
        >>> import timm, attncnn_plugin
        >>> model = timm.create_model('sa_learned_content_cifar', embed_dim=12, depth=1, num_heads=3)
        >>> {name: tuple(probs.shape) for name, probs in content_only_probs_of(model, torch.rand(2, 3, 8, 8)).items()}
        {'blocks.0.attn': (2, 3, 16, 16)}
    """
    return _probs_of(model, images, lambda layer, x: layer.content_scores(x))


def position_only_probs_of(model: nn.Module, images: Tensor) -> Dict[str, Tensor]:
    """As :func:`attention_probs_of`, by the term with relative position, q·r_δ or v·r_δ of C20's eq. 8.

    The former depends on the content of the query, not on that of the keys. For CMHSA this is the position bias.

    Examples:
        >>> import timm, attncnn_plugin
        >>> model = timm.create_model('sa_learned_content_cifar', embed_dim=12, depth=1, num_heads=3)
        >>> {name: tuple(probs.shape) for name, probs in position_only_probs_of(model, torch.rand(2, 3, 8, 8)).items()}
        {'blocks.0.attn': (2, 3, 16, 16)}
    """
    return _probs_of(model, images, lambda layer, x: layer.position_scores(x))


def probs_of_scores(scores: Tensor, size: Tuple[int, int]) -> Tensor:
    """The softmax of the scores of an input, without the null key, float32.

    Args:
        scores (Tensor): ``(B, N_h, Q, H*W)``, with a null key ``(B, N_h, Q, H*W + 1)``.
        size (tuple[int, int]): Height and width of the grid of keys.

    Returns:
        Tensor: ``(B, N_h, Q, H*W)``.

    Examples:
        >>> probs_of_scores(torch.zeros(1, 1, 1, 2), size=(1, 1))
        tensor([[[[0.5000]]]])
    """
    return scores.float().softmax(-1)[..., : size[0] * size[1]]


def _probs_of(model: nn.Module, images: Tensor, scores_of: Scores) -> Dict[str, Tensor]:
    """The probabilities by some scores, of the layers that depend on content and have such scores."""
    if not attention_layers(model) and is_vit(model):
        raise ValueError(
            f'the model, of type {type(model).__name__}, has no attention of this package: that of a vision '
            'transformer of timm or mmpretrain is given by vit_attention, which cannot part content from position'
        )
    probs = {}

    def keep(name: str, layer: AttentionLayer, x: Tensor) -> None:
        scores = scores_of(layer, x)
        if scores is not None:
            probs[name] = probs_of_scores(scores, layer.grid_of(x))

    visit_layers(model, images, content_layers(model), keep)
    return probs


def content_layers(model: nn.Module) -> List[str]:
    """Names of the layers whose probabilities depend on their input."""
    return [name for name, layer in attention_layers(model).items() if layer.depends_on_content]
