"""Pages of the explorer for the tests: models, images, and what is in a page, read by the format alone."""

import base64
import gzip
import json
import re

import numpy as np
import torch

from attncnn_plugin.analysis.recorder import attention_layers
from attncnn_plugin.convert import conv_to_mhsa
from attncnn_plugin.explorer import explorer_page

from .small import small_cmhsa, small_timm


def parts_of(model, images):
    """By layer and part, what attention by position, by content and by both gives each image, ``(B, N_h, Q, H*W)``."""
    found, handles = {}, []

    def keep(name, layer, args):
        height, width = layer.grid_of(args[0])
        parts = dict(position=layer.position_scores, content=layer.content_scores, both=layer.attention_scores)
        if not layer.depends_on_content:
            found[name] = {'position': layer.attention_probs((height, width)).expand(len(images), -1, -1, -1)}
            return
        scores = {part: of(args[0]) for part, of in parts.items()}
        scores = {part: values for part, values in scores.items() if values is not None}
        found[name] = {part: values.softmax(-1)[..., : height * width] for part, values in scores.items()}

    layers = attention_layers(model)
    for name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(lambda layer, args, name=name: keep(name, layer, args)))
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return {name: found[name] for name in layers}


def images_of(count=2, channels=3, size=16, width=None):
    return torch.randn(count, channels, size, width or size)


def pictures_of(images):
    pictures = (images - images.amin()) / (images.amax() - images.amin()) * 255
    return list(pictures.permute(0, 2, 3, 1).to(torch.uint8).numpy())


def page_of(model, images, **kwargs):
    return explorer_page(model, images, pictures_of(images), **kwargs)


def quadratic_model():
    """A model whose first head looks one row down and two columns to the left."""
    model = small_timm('sa_quadratic_cifar').eval()
    with torch.no_grad():
        encoding = model.blocks[0].attn.encoding
        encoding.center[0] = torch.tensor([1.0, -2.0])
        encoding.sqrt_precision[0] = 3.0
    return model


def content_model(sharpness=6, **kwargs):
    """A model whose heads attend to something, rather than to all pixels alike."""
    model = small_timm('sa_learned_content_cifar', **kwargs).eval()
    with torch.no_grad():
        for layer in attention_layers(model).values():
            layer.key.weight.mul_(sharpness)
    return model


def patch_model(**kwargs):
    """A model with a null key."""
    model = small_cmhsa('attn', null_key=True, **kwargs).eval()
    with torch.no_grad():
        for layer in attention_layers(model).values():
            layer.position.table.normal_()
            layer.query.weight.mul_(20)
    return model


HYBRID_SIZE = dict(size=12, width=20)
HYBRID_CONVS = (
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=3, padding=2, dilation=2, groups=3, padding_mode='reflect', bias=False),
    dict(kernel_size=(2, 4), stride=(1, 2), padding=(1, 2), padding_mode='circular'),
    dict(kernel_size=3),
)


def hybrid_model(sharpness=1.0, **settings):
    """Convolutions of several kinds as attention: 12x20 pixels to 6x10, 7x6 and 5x4; heads as after training."""
    layers = []
    for inputs, outputs, options in zip((3, 6, 6, 8), (6, 6, 8, 4), HYBRID_CONVS):
        layer, _ = conv_to_mhsa(torch.nn.Conv2d(inputs, outputs, **options), **settings)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if name.startswith(('query', 'key')):
                    parameter.normal_(std=sharpness)
                elif name in ('encoding.center', 'encoding.weight'):
                    parameter.add_(torch.randn_like(parameter))
                elif name == 'gate':
                    parameter.copy_(torch.linspace(-2, 2, len(parameter)))
        layers += [layer, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).eval()


def unpack(page):
    """The data of a page, with arrays instead of what they are packed as."""

    def with_arrays(value):
        if isinstance(value, list):
            return [with_arrays(item) for item in value]
        if not isinstance(value, dict):
            return value
        if 'dtype' not in value:
            return {key: with_arrays(item) for key, item in value.items()}
        data = gzip.decompress(base64.b64decode(value['data']))
        return np.frombuffer(data, np.dtype(value['dtype']).newbyteorder('<')).reshape(value['shape'])

    return with_arrays(json.loads(re.search(r'id="data">([^<]*)<', page)[1]))


def probs_in(layer, part, image=0):
    """The probabilities of a part of a layer in a page's data, of all queries for all keys, ``(N_h, N, H*W)``, float64.

    In windows each query's are where its keys are, and those that it does not see have 0.
    """
    images = layer['parts'][part]
    found = images[0 if len(images) == 1 else image]
    probs = torch.from_numpy((found['bytes'] / 255.0) ** 2 * found['largest'][..., None].astype(float))
    if layer['keys'] is None:
        return probs
    count = layer['grid'][0] * layer['grid'][1]
    keys = torch.from_numpy(layer['keys'].astype(int)).expand(probs.shape)
    return probs.new_zeros(*probs.shape[:2], count + 1).scatter_(2, keys, probs)[..., :-1]


def beside_in(layer, part, image=0):
    """What lies on the tokens beside the grid, or outside of the image, ``(N_h, N, T)``, float64."""
    images = layer['parts'][part]
    return torch.from_numpy(images[0 if len(images) == 1 else image]['beside'].astype(float))


def relative_errors(found, probs):
    """The largest error of a probability of each query, relative to the query's largest one, ``(N_h, N)``."""
    return (found - probs).abs().amax(-1) / probs.amax(-1).clamp(min=1e-30)
