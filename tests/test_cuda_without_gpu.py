"""Models and layers on 'cuda:0' on a machine without a GPU, by PyTorch's fake tensors.

A fake tensor has a device, a shape and a dtype, and no values. Whatever was left on the CPU meets a tensor of another
device and fails; so does whatever asks for a value, for which a GPU would have to be waited for.
"""

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from helpers.layers import LAYERS, takes_images
from helpers.small import KINDS, TIMM_KINDS, small_model, small_timm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attncnn_plugin import attention as layers
from attncnn_plugin.pruning import prune_heads

CUDA = torch.device('cuda:0')

MODELS = {kind: partial(small_model, kind, depth=1) for kind in KINDS}

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, '_ensureCUDADeviceGuardSet'), reason='fake tensors of a GPU need its driver in this torch'
)


class FakeMode(FakeTensorMode):
    """The mode, of which a module that is copied with its tensors wants no copy."""

    def __deepcopy__(self, memo):
        return self


class OneDevice(TorchDispatchMode):
    """Fails at what fake tensors allow: copies to the CPU, and indices that are there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, output)) if isinstance(leaf, torch.Tensor)]
        to_gpu = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and output.is_cuda
        if any(tensor.is_cuda for tensor in tensors) and not to_gpu:
            assert all(tensor.is_cuda or tensor.ndim == 0 for tensor in tensors), function
        return output


@contextmanager
def on_fake_cuda(module):
    """Parameters and buffers of a module on ``CUDA``, and so whatever is made there in the block."""

    def fake_like(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)

    with ExitStack() as stack:
        # Autocast would turn itself off.
        stack.enter_context(mock.patch('torch.cuda.amp.common.amp_definitely_not_available', lambda: False))
        stack.enter_context(mock.patch('torch.cuda.is_bf16_supported', lambda *args, **kwargs: True))
        stack.enter_context(FakeMode())
        stack.enter_context(OneDevice())
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(fake_like(parameter), parameter.requires_grad))
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, fake_like(buffer))
        yield module


def run(model, autocast=None):
    with torch.autocast('cuda', autocast, enabled=autocast is not None):
        output = model(torch.rand(2, 3, 16, 16, device=CUDA))
    assert output.device == CUDA and output.dtype == (autocast or torch.float32)


def assert_on_cuda(*tensors):
    assert {tensor.device for tensor in tensors} == {CUDA}


@pytest.mark.parametrize(
    'training, autocast',
    [
        (True, None),
        (True, torch.float16),
        (False, torch.bfloat16),
        pytest.param(True, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(False, None, marks=pytest.mark.slow),
        pytest.param(False, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize('name', MODELS)
def test_model(name, training, autocast):
    with on_fake_cuda(MODELS[name]().train(training)) as model, torch.set_grad_enabled(training):
        run(model, autocast)


@pytest.mark.parametrize('name', TIMM_KINDS)
def test_pruned_model(name):
    with on_fake_cuda(small_timm(name)) as model:
        prune_heads(model, {0: [1], 1: [0, 2]})
        assert_on_cuda(*model.parameters(), *model.buffers())
        run(model)


@pytest.mark.parametrize('name', LAYERS)
def test_layer(name):
    """The output, in training with autocast too, and whatever the layer says of its heads."""
    with on_fake_cuda(LAYERS[name]()) as layer:
        x = torch.rand((2, 4, 6, 8) if takes_images(name) else (2, 6, 8, 4), device=CUDA)
        with torch.autocast('cuda', torch.float16):
            assert_on_cuda(layer(x))
        layer.eval().requires_grad_(False)
        assert_on_cuda(layer(x))
        if not isinstance(layer, layers.AttentionLayer):
            return
        size = (6, 8)
        heads = layer.gaussian_heads()
        said = [layer.value_matrices(), layer.position_probs(size), *(heads or ())]
        if layer.depends_on_content:
            said += [layer.attention_scores(x), layer.content_scores(x), layer.position_scores(x)]
        else:
            said.append(layer.attention_probs(size))
        assert_on_cuda(*(tensor for tensor in said if tensor is not None))


def test_every_layer_is_here():
    kinds = {type(make()) for make in LAYERS.values()}
    attention = {
        kind
        for kind in vars(layers).values()
        if isinstance(kind, type) and issubclass(kind, layers.AttentionLayer) and not kind.__subclasses__()
    }
    assert attention <= kinds
