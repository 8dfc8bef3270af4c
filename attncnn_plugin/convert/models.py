"""A CNN's convolutions as attention (C20, Theorem 1; d'Ascoli et al. 2021, arXiv 2106.05795), any model's."""

from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from ..layers.image_attention import ImageAttention
from .kernels import Convolution
from .model_layers import Layers, check_replaceable, find_convolutions, number_of_parameters, replace_layers
from .model_report import LayerConversion, LayerRun, ModelConversionReport
from .model_runs import compare_runs
from .origins import Origin
from .pixels import conv_to_mhsa
from .report import ConversionReport
from .succession import Replaced, to_attention
from .untouched import random_numbers_on_failure

MEMORY_LIMIT = 2**30


def convs_to_attention(
    model: nn.Module,
    layers: Layers,
    num_heads: Optional[int] = None,
    alpha: Optional[float] = None,
    content: Optional[str] = None,
    position: Optional[str] = None,
    window_size: Union[int, Sequence[int], None] = None,
    qk_dim: Optional[int] = None,
    generator: Optional[torch.Generator] = None,
    inputs: Any = None,
    dry_run: bool = False,
    memory_limit: Optional[int] = MEMORY_LIMIT,
) -> ModelConversionReport:
    """Turns convolutions of a model into attention that computes the same, in place.

    Either all chosen layers are converted, or, after an error, none is, and nothing has changed. All other parameters
    stay the same objects. A state dict of the result carries its attention: a model of the CNN takes it by
    :func:`attncnn_plugin.follow_state_dict`, and the result takes a state dict of the CNN by converting its kernels.

    Args:
        model (nn.Module): Any model of timm, torchvision, mmpretrain or another library.
        layers (str | Iterable[str] | callable): The layers to convert: the name of a convolution, a glob such as
            ``'layer4.*.conv*'``, whose ``*`` stands for dots too, several of these, or a function that says of a name
            and a module whether to convert it. Of what globs and functions choose, convolutions alone are meant.
        num_heads, alpha, content, position, window_size, qk_dim, generator: For each layer as of
            :func:`~attncnn_plugin.convert.conv_to_mhsa`.
        inputs (Any, optional): An example batch, which the model is called with as its only argument. The model then
            runs before and after, in evaluation mode and without a trace in buffers and random numbers, and the report
            has what that costs and how far the outputs move. Defaults to None, no run.
        dry_run (bool): Whether to leave the model as it is; the report is the same. Defaults to False.
        memory_limit (int, optional): Bytes of the probabilities of one layer for ``inputs`` beyond which the attention
            is not run, and a warning says how much it needs. Defaults to 2³⁰; None is no limit.

    Returns:
        ModelConversionReport: The layers before and after; ``print`` shows a table.

    Raises:
        TypeError: ``model`` is itself a convolution; ``layers`` is of another type; or a layer cannot be converted,
            such as a transposed convolution.
        ValueError: ``layers`` chooses no convolution; a layer is used under two names, shares its weight, or has hooks
            or parametrizations; the model is wrapped for distributed training; or an argument does not go with a
            layer.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        >>> images = torch.randn(1, 3, 16, 16)
        >>> before = model.eval()(images)
        >>> report = convs_to_attention(model, '*', inputs=images)
        >>> [layer.name for layer in report.layers], report.drift < 1e-5
        (['0', '3'], True)
        >>> torch.allclose(model(images), before, atol=1e-5)
        True
    """
    chosen = find_convolutions(model, layers)
    check_replaceable(model, chosen)
    settings = {
        'num_heads': num_heads,
        'alpha': alpha,
        'content': content,
        'position': position,
        'window_size': window_size,
        'qk_dim': qk_dim,
    }
    attention: Dict[str, ImageAttention] = {}
    reports: Dict[str, ConversionReport] = {}
    runs: Dict[str, LayerRun] = {}
    drift = None
    with random_numbers_on_failure(model, generator, always=dry_run):
        for name, conv in chosen.items():
            attention[name], reports[name] = _converted(name, conv, settings, generator)
        if inputs is not None:
            runs, drift = compare_runs(model, chosen, attention, inputs, memory_limit)
    changes = tuple(
        LayerConversion(
            name,
            attention[name].window.kernel_size,
            attention[name].window.stride,
            reports[name].num_heads,
            number_of_parameters(conv),
            number_of_parameters(attention[name]),
            reports[name].relative_error,
            runs.get(name),
        )
        for name, conv in chosen.items()
    )
    before = number_of_parameters(model)
    after = before + sum(change.parameters_after - change.parameters_before for change in changes)
    if dry_run:
        return ModelConversionReport(changes, before, after, drift)
    replaced: Replaced = {}
    for name, conv in chosen.items():
        replaced.update(to_attention(name, conv, attention[name]))
    replace_layers(model, attention)
    return ModelConversionReport(changes, before, after, drift, replaced)


def _converted(
    name: str, conv: Convolution, settings: Dict[str, Any], generator: Optional[torch.Generator]
) -> Tuple[ImageAttention, ConversionReport]:
    try:
        attention, report = conv_to_mhsa(conv, **settings, generator=generator)
    except (TypeError, ValueError) as error:
        raise type(error)(f'{name} cannot be converted: {error}') from error
    if conv.bias is not None and attention.value.bias is not None:
        attention.value.bias.requires_grad_(conv.bias.requires_grad)
    Origin.of(conv, settings).attach(attention)
    return attention, report
