"""bfloat16 on CPUs."""

import torch
from mmengine.optim import build_optim_wrapper

import attncnn_plugin  # noqa: F401


def test_products_have_16_bits_and_steps_have_32():
    """The step is that of the gradient of bfloat16's product, counted here by hand, and parameters stay in float32."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 8, bias=False), torch.randn(16, 64)
    settings = dict(type='SGD', lr=1.0)
    wrapper = build_optim_wrapper(model, dict(type='mmpretrain.BFloat16OptimWrapper', optimizer=settings))
    before = model.weight.detach().clone()
    with wrapper.optim_context(model):
        output = model(x)
    assert output.dtype == torch.bfloat16
    wrapper.update_params(output.float().sum())
    assert model.weight.dtype == torch.float32
    step = before - model.weight.detach()
    assert torch.allclose(step, x.bfloat16().float().sum(0).expand(8, -1), atol=0.05)
    assert not torch.equal(step, x.sum(0).expand(8, -1))
