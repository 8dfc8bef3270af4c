"""The convolutions of a model whose attention still is one, any model's: back from attention."""

from typing import Dict, Tuple

from torch import nn

from ..layers.image_attention import ImageAttention
from .kernels import Convolution
from .model_layers import check_replaceable, number_of_parameters, replace_layers
from .model_report import LayerConversion, ModelConversionReport
from .origins import Origin
from .succession import Replaced, to_convolution
from .to_conv import mhsa_to_conv


def attention_to_convs(model: nn.Module, tolerance: float = 1e-6) -> ModelConversionReport:
    """Turns all attention of :func:`~attncnn_plugin.convert.convs_to_attention` back into convolutions, in place.

    Either all such layers of a model are convolutions, up to the tolerance, and are converted; or, after an error, none
    is, and nothing has changed. Attention that was not trained since gives back the same kernels.

    Args:
        model (nn.Module): A model with such layers.
        tolerance (float): The largest error of an output of a layer, for inputs of norm 1, see
            :class:`~attncnn_plugin.convert.ConvFit`. Defaults to 1e-6.

    Returns:
        ModelConversionReport: The layers before and after.

    Raises:
        TypeError: ``model`` is itself such attention.
        ValueError: ``tolerance`` is negative; there is no such layer; one is no convolution, or is used under two
            names, shares a parameter, or has hooks or parametrizations.
        RuntimeError: A linear map of a layer is more than its weight and bias, for instance an adapter.

    Examples:
        >>> from attncnn_plugin.convert import convs_to_attention
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> kernel = model[0].weight
        >>> report = convs_to_attention(model, '0')
        >>> report = attention_to_convs(model)
        >>> bool((model[0].weight == kernel).all())
        True
    """
    if not tolerance >= 0:
        raise ValueError(f'tolerance={tolerance} must be at least 0')
    if isinstance(model, ImageAttention):
        raise TypeError(
            f'model is itself attention, {type(model).__name__}, which nothing holds: mhsa_to_conv(model, kernel_size) '
            'returns its convolution'
        )
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, ImageAttention)
    }
    if not layers:
        raise ValueError(
            f'model is a {type(model).__name__} without attention in the place of convolutions: there is nothing to '
            'convert'
        )
    check_replaceable(model, layers)
    convs: Dict[str, Convolution] = {}
    errors: Dict[str, float] = {}
    for name, layer in layers.items():
        convs[name], errors[name] = _converted(name, layer)
    too_far = {name: error for name, error in errors.items() if not error <= tolerance}
    if too_far:
        worst = max(too_far, key=lambda name: too_far[name])
        raise ValueError(
            f'{len(too_far)} of {len(layers)} layers are no convolution any more for tolerance={tolerance:g}: '
            f'{", ".join(too_far)}; the bound of {worst} is {too_far[worst]:.3g}'
        )
    changes = tuple(
        LayerConversion(
            name,
            layer.window.kernel_size,
            layer.window.stride,
            layer.num_heads,
            number_of_parameters(layer),
            number_of_parameters(convs[name]),
            errors[name],
        )
        for name, layer in layers.items()
    )
    before = number_of_parameters(model)
    after = before + sum(change.parameters_after - change.parameters_before for change in changes)
    replaced: Replaced = {}
    for name, layer in layers.items():
        replaced.update(to_convolution(name, layer, convs[name]))
    replace_layers(model, convs)
    return ModelConversionReport(changes, before, after, replaced=replaced)


def _converted(name: str, layer: ImageAttention) -> Tuple[Convolution, float]:
    try:
        conv, fit = mhsa_to_conv(layer, layer.window.kernel_size)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f'{name} cannot be converted: {error}') from error
    if isinstance(layer.from_conv, Origin):
        conv = layer.from_conv.as_it_was(conv)
    for key, parameter in conv.named_parameters():
        parameter.requires_grad_(layer.get_parameter(f'value.{key}').requires_grad)
    return conv, fit.bound
