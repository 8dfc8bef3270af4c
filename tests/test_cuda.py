"""Whatever the package does, on a GPU as on the CPU; without a GPU, where --slow rehearses it, on the CPU twice."""

import copy

import pytest
import torch
import torch.distributed as dist
from helpers import verbs
from helpers.convolutions import relative_error
from helpers.layers import LAYERS, takes_images
from helpers.small import KINDS, numbers, small_model
from timm.utils import ModelEmaV3
from torch.nn.parallel import DistributedDataParallel

from attncnn_plugin import follow_state_dict
from attncnn_plugin.pruning import prune_heads
from attncnn_plugin.training import PruneHeads, TwoPhases, follow_with_optimizer

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device('cuda:0' if ON_GPU else 'cpu')
HALF = torch.float16 if ON_GPU else torch.bfloat16

pytestmark = [] if ON_GPU else pytest.mark.slow


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)


def check(module, x, dtype):
    """Outputs and gradients. That of the bias of keys is rounding: softmax is the same whatever all keys get."""
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    module = module.to(dtype)
    theirs = copy.deepcopy(module).to(DEVICE)
    inputs = [x.clone().to(next(of.parameters())).requires_grad_() for of in (module, theirs)]
    outputs = [module(inputs[0]), theirs(inputs[1])]
    weights = torch.randn_like(outputs[0])
    for output in outputs:
        (output * weights.to(output)).sum().backward()
    pairs = [[output.detach().cpu() for output in outputs], [x.grad.cpu() for x in inputs]]
    for (name, own), other in zip(module.named_parameters(), theirs.parameters()):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None and not name.endswith('key.bias'):
            pairs.append((own.grad, other.grad.cpu()))
    assert max(relative_error(other, own) for own, other in pairs) < tolerance


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize('images', [1, 3])
@pytest.mark.parametrize('name', LAYERS)
def test_layer(name, images, dtype):
    check(LAYERS[name](), torch.rand((images, 4, 6, 8) if takes_images(name) else (images, 6, 8, 4)), dtype)


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('kind', KINDS)
def test_model(kind, training):
    check(small_model(kind, depth=1).train(training), torch.rand(2, 3, 16, 16), torch.float32)


CASES = [case for case in verbs.CASES if case[1] in (*KINDS, verbs.CNN, *verbs.VITS)]


@pytest.mark.parametrize('verb, name', CASES if ON_GPU else CASES[::10])
def test_verb(verb, name):
    """In float64; what stays on the CPU, such as reports, is as near."""
    found = []
    for device in ('cpu', DEVICE):
        model, images = verbs.model_and_images(name, new=verb in (verbs.start, verbs.MIMETIC))
        found.append(verbs.numbers(verb(model.to(device), images.to(device))))
        assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {torch.device(device)}
    assert len(found[0]) == len(found[1]) > 0
    for expected, number in zip(*found):
        assert torch.allclose(number.cpu().double(), expected.double(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('name', [*LAYERS, *KINDS])
def test_no_step_waits(name):
    if name in LAYERS:
        module, x = LAYERS[name](), torch.rand((2, 4, 6, 8) if takes_images(name) else (2, 6, 8, 4))
    else:
        module, x = small_model(name, depth=1), torch.rand(2, 3, 16, 16)
    module, x = module.to(DEVICE), x.to(DEVICE)
    optimizer = torch.optim.AdamW(module.parameters())
    say = torch.cuda.set_sync_debug_mode if ON_GPU else print
    for mode in ('default', 'error'):  # the first step fills caches
        say(mode)
        try:
            module(x).square().mean().backward()
            optimizer.step()
        finally:
            say('default')


@pytest.mark.parametrize(
    'kind', ['sa_quadratic_cifar', 'sa_generalized_cifar', 'sa_learned_content_cifar', 'cmhsa_attn']
)
def test_compiled(kind):
    model, x = small_model(kind, depth=1).to(DEVICE), torch.rand(2, 3, 16, 16, device=DEVICE)
    expected = model(x)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weights).sum(), model.parameters(), allow_unused=True)
    compiled = torch.compile(model, backend='inductor' if ON_GPU else 'aot_eager')
    output = compiled(x)
    found = torch.autograd.grad((output * weights).sum(), model.parameters(), allow_unused=True)
    assert relative_error(output, expected) < 1e-4
    largest = max(gradient.abs().max() for gradient in gradients if gradient is not None)
    for own, other in zip(gradients, found):
        assert own is other is None or (own - other).abs().max() < 1e-4 * largest


class Training:
    """Mixed precision, accumulated gradients, an average, a transition at epoch 1 and a pruning at epoch 2."""

    def __init__(self, checkpoint=None):
        torch.manual_seed(0)
        self.model = small_model('cmhsa_conv', depth=1).to(DEVICE)
        self.average = ModelEmaV3(self.model, decay=0.8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, enabled=ON_GPU)
        generator = torch.Generator().manual_seed(0)
        images, labels = torch.randn(8, 3, 16, 16, generator=generator), torch.arange(8)
        self.batches = [(x.to(DEVICE), y.to(DEVICE)) for x, y in zip(images.split(2), labels.split(2))]
        self.parts, self.epoch = [TwoPhases(epoch=1), PruneHeads(epoch=2, keep=7, batches=self.batches)], 0
        if checkpoint is not None:
            follow_with_optimizer(self.model, self.optimizer, checkpoint['model'])
            follow_state_dict(self.average.module, checkpoint['average'])
            self.epoch = checkpoint['epoch']
            for name, own in self.states().items():
                own.load_state_dict(checkpoint[name])

    def states(self):
        return dict(model=self.model, average=self.average.module, optimizer=self.optimizer, scaler=self.scaler)

    def run(self):
        """Yields the checkpoint of each epoch."""
        while self.epoch < 4:
            for part in self.parts:
                part.on_epoch_begin(self.model, self.optimizer, self.epoch, [self.average.module])
            self.model.train()
            for number, (x, y) in enumerate(self.batches, 1):
                with torch.autocast(DEVICE.type, HALF):
                    loss = torch.nn.functional.cross_entropy(self.model(x), y) / 2
                self.scaler.scale(loss).backward()
                if number % 2 == 0:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.optimizer.zero_grad()
                    self.average.update(self.model)
            self.epoch += 1
            yield copy.deepcopy(
                dict(epoch=self.epoch, **{name: own.state_dict() for name, own in self.states().items()})
            )


def test_training_resumes():
    training = Training()
    checkpoints = list(training.run())
    assert training.model.phase == 'attn' and numbers(training.model) == numbers(training.average.module) == [7]
    assert all(parameter.device == DEVICE and parameter.isfinite().all() for parameter in training.model.parameters())
    for checkpoint in checkpoints[:3]:
        last = list(Training(checkpoint).run())[-1]
        for name in ('model', 'average'):
            for key, value in checkpoints[-1][name].items():
                assert torch.allclose(last[name][key], value, rtol=1e-3, atol=1e-4), (checkpoint['epoch'], name, key)


def test_run_of_mmengine(repository, tmp_path):
    """Both hooks, AMP, an average and accumulated gradients in mmengine's runner, resumed after each of them."""
    pytest.importorskip('mmpretrain')
    from helpers.digits import CHANGE, average_of, run, small_config

    def config(folder, **changes):
        wrapper = dict(type='AmpOptimWrapper' if ON_GPU else 'BFloat16OptimWrapper', accumulative_counts=2)
        config = small_config(repository, folder, **{'optim_wrapper': wrapper, **changes})
        config.train_dataloader.batch_size, config.model.backbone.num_layers = 6, 1
        pruning = dict(type='HeadPruningHook', epochs=[CHANGE + 1], num_batches=1, keep=8)
        config.custom_hooks = [*config.custom_hooks, pruning, dict(type='EMAHook', momentum=0.2)]
        return config

    runner, _ = run(config(tmp_path))
    whole = [copy.deepcopy(own.state_dict()) for own in (runner.model, average_of(runner).module)]
    assert numbers(runner.model) == [8] and next(runner.model.parameters()).device == DEVICE
    for epoch in (CHANGE, CHANGE + 1):
        changes = dict(resume=True, load_from=str(tmp_path / f'epoch_{epoch}.pth'))
        resumed, _ = run(config(tmp_path / str(epoch), **changes))
        for own, expected in zip((resumed.model, average_of(resumed).module), whole):
            for name, value in own.state_dict().items():
                assert torch.allclose(value, expected[name], rtol=1e-3, atol=1e-4), (epoch, name)


def test_one_rank(tmp_path):
    """In a wrapper for distributed training, which is built anew after a transition and a pruning."""
    dist.init_process_group(
        'nccl' if ON_GPU else 'gloo', init_method=f'file://{tmp_path}/meeting', rank=0, world_size=1
    )
    try:
        found = []
        for wrap in (lambda model: model, lambda model: DistributedDataParallel(model)):
            model, images = verbs.model_and_images('cmhsa_conv')
            model, images = model.to(DEVICE), images.to(DEVICE)
            optimizer = verbs.sgd(model)
            own = verbs.numbers(verbs.steps(wrap(model), images, optimizer))
            TwoPhases(epoch=1).on_epoch_begin(model, optimizer, 1)
            own += verbs.numbers(verbs.steps(wrap(model), images, optimizer))
            pruning = PruneHeads(epoch=2, keep=16, batches=[verbs.batch_of(images)])
            assert pruning.on_epoch_begin(model, optimizer, 2)
            found.append(own + verbs.numbers(verbs.steps(wrap(model), images, optimizer)))
        assert all(map(torch.allclose, *found))
    finally:
        dist.destroy_process_group()


def test_pruned_under_autocast():
    model, images = verbs.model_and_images('vit_tiny_patch16_224')
    model, images = model.float().to(DEVICE), images.float().to(DEVICE)
    prune_heads(model, {0: [0, 2]})
    expected = model(images)
    with torch.autocast(DEVICE.type, HALF):
        output = model(images)
    assert output.dtype == HALF and relative_error(output.float(), expected) < 0.1
