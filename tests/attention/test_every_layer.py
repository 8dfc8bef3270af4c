"""What every attention layer does: shapes, precisions, copies, compilation and export."""

import copy
import pickle

import pytest
import torch
from helpers.layers import LAYERS, takes_images

from attncnn_plugin.attention import AttentionLayer


def inputs_of(name, batch=2):
    return torch.randn((batch, 4, 6, 8) if takes_images(name) else (batch, 6, 8, 4))


@pytest.mark.parametrize('name', LAYERS)
def test_shapes(name):
    """Of no image and of one, on the meta device too; other channels are refused."""
    layer, axis, channels = LAYERS[name](), *((1, 6) if takes_images(name) else (3, 4))
    for batch in (0, 1):
        x = inputs_of(name, batch)
        output = layer(x)
        assert len(output) == batch and output.ndim == 4 and output.shape[axis] == channels
    with pytest.raises((ValueError, RuntimeError)):
        layer(torch.cat([x, x], dim=axis))
    assert layer.to('meta')(x.to('meta')).shape == output.shape


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', LAYERS)
def test_half_precision(name, dtype):
    layer, x = LAYERS[name](), inputs_of(name)
    expected = layer(x)
    layer = layer.to(dtype)
    output = layer(x.to(dtype))
    assert output.dtype == dtype and torch.allclose(output.float(), expected, atol=0.1)
    with torch.autocast('cpu', dtype):
        output = layer.float()(x)
    assert output.dtype == dtype and torch.allclose(output.float(), expected, atol=0.1)
    if not isinstance(layer, AttentionLayer):
        return
    said = [layer.value_matrices()] + ([layer.position_probs((6, 8))] if layer.has_position_scores else [])
    with torch.autocast('cpu', dtype):
        assert torch.equal(layer.value_matrices(), said[0])
        assert not said[1:] or torch.equal(layer.position_probs((6, 8)), said[1])
    assert not said[1:] or layer.to(dtype).position_probs((6, 8)).dtype == torch.float32


@pytest.mark.parametrize('name', LAYERS)
def test_copies(name):
    (layer, other, averaged), x = (LAYERS[name]() for _ in range(3)), inputs_of(name)
    other.load_state_dict(layer.state_dict())
    averaged.load_state_dict({key: sum([value.double() / 7] * 7) for key, value in layer.state_dict().items()})
    for copied in (other, averaged, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), layer(x))


# One of each class; networks of the others are compiled and exported in test_every_model.py.
CLASSES = 'quadratic', 'generalized', 'learned', 'hard_image', 'soft_image', 'content_image'


@pytest.mark.parametrize(
    'name', ['content_image_near', *(pytest.param(name, marks=pytest.mark.slow) for name in CLASSES)]
)
def test_compiled_and_exported(name):
    layer, x = LAYERS[name](), inputs_of(name)
    expected, compiled = layer(x), torch.compile(layer, fullgraph=True, backend='aot_eager')
    assert torch.allclose(compiled(x), expected, atol=1e-5)
    compiled(x[:1].requires_grad_()).sum().backward()
    assert torch.allclose(torch.export.export(layer, (x,)).module()(x), expected, atol=1e-5)


@pytest.mark.parametrize(
    'name',
    [
        'hard_image',
        'soft_image',
        'content_image_near',
        *(pytest.param(name, marks=pytest.mark.slow) for name in ('content_image', 'generalized')),
    ],
)
def test_exported_for_any_size(name):
    """Of an export at 6x8 pixels: no branch that depended on this size limits the graph."""
    pytest.importorskip('torch', minversion='2.7', reason='torch 2.6 traces sizes as constants of branches')
    layer = LAYERS[name]().eval()
    axes = (2, 3) if takes_images(name) else (1, 2)
    shapes = {axis: torch.export.Dim(f'side{axis}', min=2, max=64) for axis in axes}
    exported = torch.export.export(layer, (inputs_of(name),), dynamic_shapes=(shapes,)).module()
    for size in ((3, 2), (40, 30)):
        x = torch.randn((1, 4, *size) if takes_images(name) else (1, *size, 4)).expand(2, -1, -1, -1)
        assert torch.allclose(exported(x.contiguous()), layer(x), atol=1e-5)
