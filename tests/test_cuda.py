"""Layers and models on a GPU: outputs, and gradients of inputs and parameters, as on the CPU."""

import copy

import pytest
import torch
from helpers.convolutions import relative_error
from helpers.layers import LAYERS, takes_images
from helpers.small import KINDS, small_model

if not torch.cuda.is_available():
    pytest.skip('there is no GPU', allow_module_level=True)


def check(module, x, dtype):
    """The bias of keys has no gradient but rounding: its softmax is the same whatever is added to all keys."""
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    module = module.to(dtype)
    on_gpu = copy.deepcopy(module).cuda()
    inputs = [x.clone().to(next(of.parameters())).requires_grad_() for of in (module, on_gpu)]
    outputs = [module(inputs[0]), on_gpu(inputs[1])]
    weights = torch.randn_like(outputs[0])
    for output in outputs:
        (output * weights.to(output)).sum().backward()
    pairs = [[output.detach().cpu() for output in outputs], [x.grad.cpu() for x in inputs]]
    for (name, ours), theirs in zip(module.named_parameters(), on_gpu.parameters()):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and not name.endswith('key.bias'):
            pairs.append((ours.grad, theirs.grad.cpu()))
    assert max(relative_error(theirs, ours) for ours, theirs in pairs) < tolerance


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize('images', [1, 3])
@pytest.mark.parametrize('name', LAYERS)
def test_layer(name, images, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)
    check(LAYERS[name](), torch.rand((images, 4, 6, 8) if takes_images(name) else (images, 6, 8, 4)), dtype)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('kind', KINDS)
def test_model(kind, training, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)
    check(small_model(kind, depth=1).train(training), torch.rand(2, 3, 16, 16), dtype)
