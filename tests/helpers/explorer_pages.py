"""Pages of the explorer for the tests: models, images, and what is in a page, read by the format alone."""

import base64
import json
import re
import zlib

import numpy as np
import torch

from attncnn_plugin.analysis import attention_layers
from attncnn_plugin.convert import conv_to_mhsa
from attncnn_plugin.explorer import explorer_page

from .small import small_cmhsa, small_timm


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
            if layer.key is not None:
                layer.key.weight.mul_(sharpness)
    return model


def hard_model():
    """A model whose second layer attends to single pixels."""
    return content_model(sharpness=20)


def one_block_model():
    """A model with attention in its second block alone, of one head."""
    model = small_timm('sa_quadratic_cifar', num_heads=1).eval()
    model.blocks[0].attn = torch.nn.Identity()
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
    dict(in_channels=3, out_channels=6, kernel_size=3, stride=2, padding=1),
    dict(
        in_channels=6,
        out_channels=6,
        kernel_size=3,
        padding=2,
        dilation=2,
        groups=3,
        padding_mode='reflect',
        bias=False,
    ),
    dict(in_channels=6, out_channels=8, kernel_size=(2, 4), stride=(1, 2), padding=(1, 2), padding_mode='circular'),
    dict(in_channels=8, out_channels=4, kernel_size=3),
)


def hybrid_model(num_heads=None, sharpness=1.0, **settings):
    """Convolutions of several kinds as attention: 12x20 pixels to 6x10, 7x6 and 5x4; heads as after training."""
    layers = []
    for options in HYBRID_CONVS:
        layer, _ = conv_to_mhsa(torch.nn.Conv2d(**options), num_heads, **settings)
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
    """The header of a page, with arrays in place of their descriptions."""
    return unpack_data(base64.b64decode(re.search(r'id="data">([^<]*)<', page)[1]))


def unpack_data(packed):
    """As :func:`unpack`, of the data."""
    end = 4 + int.from_bytes(packed[:4], 'little')
    data = zlib.decompress(packed[end:])

    def with_arrays(value):
        if isinstance(value, list):
            return [with_arrays(item) for item in value]
        if not isinstance(value, dict):
            return value
        if 'dtype' in value:
            assert value['at'] % 8 == 0
            dtype = np.dtype(value['dtype']).newbyteorder('<')
            return np.frombuffer(data, dtype, int(np.prod(value['shape'])), value['at']).reshape(value['shape'])
        value = {key: with_arrays(item) for key, item in value.items()}
        if 'step' not in value:
            return value
        whole = value['low'] + 256.0 * value['high'] - 128
        return np.einsum('i...,i->i...', whole, value['step'])

    return with_arrays(json.loads(zlib.decompress(packed[4:end])))


def probs_in(content, layer, part, image=0):
    """The probabilities of a layer in the header of a page, ``(N_h, queries, H*W)``, float64."""
    images, layer = len(content['names']), content['layers'][layer]
    (height, width), source = layer['grid'], layer['keys']['source'].astype(int)
    rows, columns = (np.array(layer['queries'][axis]) for axis in ('rows', 'columns'))
    i, j = np.divmod(np.arange(len(rows) * len(columns)), len(columns))
    k1, k2 = np.divmod(np.arange(source.size), source.shape[1])
    # δ = k − q, and the pixels that queries and keys are
    down, right = (
        k[None] + start - at[n][:, None]
        for k, start, at, n in zip((k1, k2), layer['keys']['start'], (rows, columns), (i, j))
    )
    at_queries = source[rows[i] - layer['keys']['start'][0], columns[j] - layer['keys']['start'][1]]
    hidden = (abs(down) > layer['keys']['reach'][0]) | (abs(right) > layer['keys']['reach'][1])
    heads = np.arange(layer['heads'])[:, None, None]
    arrays = {**layer['arrays']}
    if layer['token_arrays']:
        shared = len(layer['token_arrays']) == 1
        arrays.update(layer['token_arrays'][0 if shared else image])
        place = image if shared else 0

        def token(place):
            tokens = arrays['tokens'][:, place]
            queries = tokens[:, at_queries]
            return np.concatenate([np.ones_like(queries[:1]), queries]), tokens

    def term(name):
        if name == 'axes':
            return arrays['rows'][heads, i[:, None], k1] + arrays['columns'][heads, j[:, None], k2]
        if name == 'shifts':
            table = arrays['shifts']
            row, column = (np.where(hidden, 0, shift + n // 2) for shift, n in zip((down, right), table.shape[1:]))
            return table[heads, row, column]
        if name == 'query_axes':
            query, _ = token(place)
            by_row, by_column = (
                np.einsum('iq,ihs->hqs', query, arrays[key]) for key in ('row_shifts', 'column_shifts')
            )
            number = np.arange(len(i))[:, None]
            return by_row[heads, number, down + height - 1] + by_column[heads, number, right + width - 1]
        assert name in ('products', 'encoded_products')
        query, key = token(place + (images if shared else 1) * (name == 'encoded_products'))
        scores = np.einsum('iq,ihj,jk->hqk', query, arrays['matrices'], key, optimize=True)
        return scores[:, :, source.flatten()]

    def softmax(part):
        scores = np.where(hidden, -np.inf, sum(term(name) for name in part['terms']))
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        return np.stack([probs[..., source.flatten() == pixel].sum(-1) for pixel in range(height * width)], axis=-1)

    parts, part = layer['parts'], layer['parts'][part]
    if 'shares' in part:
        share = np.array(part['shares'])[:, None, None]
        return torch.from_numpy((1 - share) * softmax(parts['content']) + share * softmax(parts['position']))
    probs = softmax(part)
    if 'mass' in part:
        probs = probs * part['mass'][image if len(part['mass']) > 1 else 0][..., None]
    return torch.from_numpy(probs)


def stored_in(layer, image=0):
    """The probabilities of another library's layer in a page, of the patches and beside them, float64.

    Returns:
        tuple[Tensor, Tensor]: ``(N_h, N, H*W)``, N = tokens beside the patches + H*W; and ``(N_h, N, T)``, or what lies
        on padding, ``(N_h, N, 1)``.
    """
    part, patches = layer['parts']['attention'], layer['grid'][0] * layer['grid'][1]
    relative, largest, to_others = (part[name][image].astype(float) for name in ('relative', 'largest', 'to_others'))
    values = relative * largest[..., None]  # (N_h, N, M)
    if layer['windows'] is not None:
        probs = np.zeros((layer['heads'], patches, patches))
        for window in layer['windows'].astype(int):
            inside = window < patches
            for query in window[inside]:
                assert not probs[:, query].any() and (values[:, query, ~inside] == 0).all()
                probs[:, query, window[inside]] = values[:, query, inside]
        values = probs
    assert values.shape == (layer['heads'], len(layer['others']) + patches, patches)
    return torch.from_numpy(values), torch.from_numpy(to_others)


def relative_errors(found, probs):
    """The largest error of a probability of each head, relative to the largest one of its query, ``(N_h,)``."""
    return ((found - probs).abs().amax(-1) / found.amax(-1)).amax(-1)
