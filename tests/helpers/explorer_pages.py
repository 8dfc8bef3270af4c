"""Pages of the explorer for the tests: models, images, and what is in a page, read by the format alone."""

import base64
import json
import re
import zlib

import numpy as np
import torch

from attncnn_plugin.analysis import attention_layers
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


def gated_model(**kwargs):
    """A model whose gates stand differently."""
    model = content_model(position='relative_free_quadratic', gated=True, **kwargs)
    with torch.no_grad():
        for layer in attention_layers(model).values():
            layer.gate.copy_(torch.linspace(-2, 2, len(layer.gate)))
    return model


def hard_model():
    """A model whose second layer attends to single pixels."""
    return content_model(sharpness=20)


def one_block_model():
    """A model whose first block has become a convolution, with one head in the second."""
    model = small_timm('sa_quadratic_cifar', num_heads=1).eval()
    with torch.no_grad():
        model.blocks[0].attn.encoding.center.zero_()
        model.blocks[0].attn.encoding.sqrt_precision.fill_(7.0)
    model.switch_to_deploy(conv_tolerance=0.01)
    return model


def patch_model(**kwargs):
    """A model with a null key."""
    model = small_cmhsa('attn', null_key=True, **kwargs).eval()
    with torch.no_grad():
        for layer in attention_layers(model).values():
            layer.position.table.normal_()
            layer.query.weight.mul_(20)
    return model


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
    """The probabilities of a layer in the header of a page, ``(N_h, H*W, H*W)``, float64."""
    (height, width), images = content['grid'], len(content['names'])
    layer = content['layers'][layer]
    row, column = np.divmod(np.arange(height * width), width)
    heads, down, right = np.ix_(range(layer['heads']), range(height * width), range(height * width))
    rows, columns = row[right] - row[down], column[right] - column[down]  # δ = k − q
    arrays = {**layer['arrays']}
    if layer['token_arrays']:
        shared = len(layer['token_arrays']) == 1
        arrays.update(layer['token_arrays'][0 if shared else image])
        place = image if shared else 0

        def token(place):
            tokens = arrays['tokens'][:, place]
            return np.concatenate([np.ones_like(tokens[:1]), tokens]), tokens

    def term(name):
        if name == 'axes':
            return arrays['rows'][heads, row[down], row[right]] + arrays['columns'][heads, column[down], column[right]]
        if name == 'shifts':
            return arrays['shifts'][heads, rows + height - 1, columns + width - 1]
        if name == 'query_axes':
            query, _ = token(place)
            by_row, by_column = (
                np.einsum('iq,ihs->hqs', query, arrays[key]) for key in ('row_shifts', 'column_shifts')
            )
            return by_row[heads, down, rows + height - 1] + by_column[heads, down, columns + width - 1]
        assert name in ('products', 'encoded_products')
        query, key = token(place + (images if shared else 1) * (name == 'encoded_products'))
        return np.einsum('iq,ihj,jk->hqk', query, arrays['matrices'], key, optimize=True)

    def softmax(part):
        scores = sum(term(name) for name in part['terms'])
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        return probs / probs.sum(-1, keepdims=True)

    parts, part = layer['parts'], layer['parts'][part]
    if 'shares' in part:
        share = np.array(part['shares'])[:, None, None]
        return torch.from_numpy((1 - share) * softmax(parts['content']) + share * softmax(parts['position']))
    probs = softmax(part)
    if 'mass' in part:
        probs = probs * part['mass'][image if len(part['mass']) > 1 else 0][..., None]
    return torch.from_numpy(probs)


def relative_errors(found, probs):
    """The largest error of a probability of each head, relative to the largest one of its query, ``(N_h,)``."""
    return ((found - probs).abs().amax(-1) / found.amax(-1)).amax(-1)
