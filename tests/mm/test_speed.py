"""bfloat16 on CPUs, and channels last."""

import torch
from helpers.digits import run, small_config
from mmengine.hooks import Hook
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


class Formats(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        state = runner.optim_wrapper.optimizer.state
        weights = [p for p in runner.model.parameters() if p.ndim == 4]
        tensors = [t for p in weights for t in (p, state[p]['momentum_buffer'])]
        self.last = [t.is_contiguous(memory_format=torch.channels_last) for t in tensors]


def test_channels_last_in_a_training(repository, tmp_path):
    """Weights and the optimizer's state, after a resume too; the outcome is that of the other order."""
    outcomes = {}
    for name, hook in (('last', dict(type='ChannelsLastHook')), ('first', None)):
        for epochs in (1, 2):
            config = small_config(repository, tmp_path / name, 'resnet18_to_attention_digits', resume=epochs == 2)
            backbone = dict(type='ResNet_CIFAR', depth=18, in_channels=1, stem_channels=4, base_channels=4)
            config.model.backbone = backbone
            config.model.head.in_channels = 32
            config.optim_wrapper.optimizer = dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=0.0)
            config.custom_hooks = [] if hook is None else [hook]
            config.train_cfg.max_epochs = epochs
            config.param_scheduler = None
            formats = Formats()
            runner, _ = run(config, formats)
            assert all(formats.last) == (name == 'last')
        outcomes[name] = runner.model.state_dict()
    for key, value in outcomes['last'].items():  # rounding grows in batch norms of few images
        assert torch.allclose(value, outcomes['first'][key], atol=0.01, rtol=0.01), key
