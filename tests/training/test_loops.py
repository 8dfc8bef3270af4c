"""Two phases and pruning in a plain loop: optimizer, average, resuming, two ranks, mistakes."""

import copy
import functools
import gc
import io
import os
import signal

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing
from helpers import optimizers as of
from helpers.small import numbers, small_cmhsa, small_timm
from helpers.vits import SIZE, small_vit
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from attncnn_plugin import follow_state_dict
from attncnn_plugin.attention import AttentionLayer
from attncnn_plugin.heads import found as found_heads
from attncnn_plugin.heads.found import find_entries
from attncnn_plugin.pruning import (
    head_ablation,
    head_importance,
    least_important,
    optimizers,
    prune,
    prune_heads,
)
from attncnn_plugin.training import (
    PruneHeads,
    TwoPhases,
    follow_with_optimizer,
    head_pruning,
    parts_in_phases,
)
from attncnn_plugin.training.head_pruning import loss_of_batch

EPOCHS, SWITCH, PRUNE = 6, 2, 4
IMAGES, LABELS = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8)


def batches_of(epoch):
    order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch))
    return list(zip(IMAGES[order].split(4), LABELS[order].split(4)))


def step(model, optimizer, images=IMAGES, labels=LABELS):
    """With a closure, as LBFGS asks for."""

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        return loss

    optimizer.step(closure)


def cnn():
    return timm.create_model('resnet10t', num_classes=10, layers=(1, 1, 1, 1), channels=(8, 8, 8, 16), stem_width=8)


def vit(**sizes):
    return timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=4, depth=2, num_classes=10, **sizes)


def pruning(**amount):
    return PruneHeads(epoch=PRUNE, batches=batches_of(0), **amount)


KINDS = {
    'CMHSA': (lambda: small_cmhsa('conv'), lambda: [TwoPhases(epoch=SWITCH), pruning(keep=12)]),
    'CNN': (
        cnn,
        lambda: [
            TwoPhases(epoch=SWITCH, layers='layer4.*.conv2', content='additive', alpha=6.0),
            pruning(threshold=0.3, criteria=['duplicate']),
        ],
    ),
    'ViT': (vit, lambda: [pruning(multiply_adds=0.9)]),
}
OPTIMIZERS = {
    'AdamW': lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    'backwards': lambda model: torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-3),
    'timm': lambda model: create_optimizer_v2(model, 'adamw', lr=1e-3, weight_decay=0.05),
    'Lookahead': lambda model: create_optimizer_v2(model, 'lookahead_adamw', lr=1e-3, weight_decay=0.05),
}


class Training:
    """A model, its average and its optimizer, as a loop of one's own has them."""

    def __init__(self, kind, optimizer, checkpoint=None):
        build, parts = KINDS[kind]
        torch.manual_seed(0)
        self.model, self.parts, self.epoch = build(), parts(), 0
        self.average = ModelEmaV3(self.model, decay=0.8)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        if checkpoint is not None:
            for part in self.parts:
                part.check(self.model)
            follow_with_optimizer(self.model, self.optimizer, checkpoint['model'])
            follow_state_dict(self.average.module, checkpoint['average'])
            self.model.load_state_dict(checkpoint['model'])
            self.average.module.load_state_dict(checkpoint['average'])
            self.optimizer.load_state_dict(checkpoint['optimizer'])
            self.epoch = checkpoint['epoch']

    def run(self, epochs):
        """Trains some epochs, and yields the checkpoint after each."""
        self.model.train()
        while self.epoch < epochs:
            for part in self.parts:
                part.on_epoch_begin(self.model, self.optimizer, self.epoch, [self.average.module])
            for batch in batches_of(self.epoch):
                step(self.model, self.optimizer, *batch)
                self.average.update(self.model)
            self.epoch += 1
            states = dict(model=self.model, average=self.average.module, optimizer=self.optimizer)
            yield copy.deepcopy(dict(epoch=self.epoch, **{key: own.state_dict() for key, own in states.items()}))


@pytest.fixture(
    scope='module',
    params=[(kind, own) for kind in KINDS for own in OPTIMIZERS if kind != 'CNN' or own in ('AdamW', 'timm')],
)
def whole(request):
    training = Training(*request.param)
    return request.param, training, list(training.run(EPOCHS))


def test_model_average_and_optimizer(whole):
    (kind, optimizer), training, _ = whole
    groups = training.optimizer.param_groups
    order = {parameter: number for number, parameter in enumerate(training.model.parameters())}
    held = [[order[parameter] for parameter in group['params']] for group in groups]
    backwards = kind == 'ViT' and optimizer == 'backwards'  # pruning keeps the order, and the second phase does not
    assert sorted(sum(held, [])) == list(range(len(order)))
    assert all(own == sorted(own, reverse=backwards) for own in held)
    states = getattr(training.optimizer, '_base_optimizer', training.optimizer).state
    assert set(states) == set(order)
    steps = {'CMHSA': (EPOCHS - SWITCH) * 2, 'CNN': (EPOCHS - SWITCH) * 2, 'ViT': EPOCHS * 2}[kind]
    for parameter, state in states.items():
        assert state['exp_avg'].shape == parameter.shape and state['step'] == steps
        assert state.get('lookahead_slow_buff', parameter).shape == parameter.shape
    assert all('lookahead_slow_buff' in state for state in states.values()) == (optimizer == 'Lookahead')
    heads = numbers(training.model)
    assert numbers(training.average.module) == heads
    assert sum(heads) == 12 if kind == 'CMHSA' else sum(heads) < {'CNN': 9, 'ViT': 6}[kind]
    for name, value in training.average.module.state_dict().items():
        assert value.shape == training.model.state_dict()[name].shape


@pytest.mark.parametrize('epoch', [SWITCH - 1, SWITCH, SWITCH + 1, PRUNE, PRUNE + 1])
def test_resumed_run_equals_the_whole_one(epoch, whole):
    """Bit by bit, through a file, from before and after either change."""
    which, _, checkpoints = whole
    file = io.BytesIO()
    torch.save(checkpoints[epoch - 1], file)
    file.seek(0)
    *_, last = Training(*which, torch.load(file)).run(EPOCHS)
    for key in ('model', 'average'):
        assert last[key].keys() == checkpoints[-1][key].keys()
        for name, value in checkpoints[-1][key].items():
            assert torch.equal(last[key][name], value), (key, name)


@pytest.mark.parametrize('optimizer', [name for name in OPTIMIZERS if name != 'Lookahead'])
def test_the_second_phase_is_that_of_a_new_optimizer(optimizer):
    """As in L21: what was trained in place is what a new optimizer trains, and begins as the convolutions ended."""
    training = Training('CMHSA', optimizer)
    training.parts = training.parts[:1]
    *_, first = training.run(SWITCH)
    *_, last = training.run(EPOCHS)
    model = small_cmhsa('conv')
    model.load_state_dict(first['model'])
    model.to_attention(torch.Generator().manual_seed(0))
    anew = OPTIMIZERS[optimizer](model)
    for epoch in range(SWITCH, EPOCHS):
        for batch in batches_of(epoch):
            step(model, anew, *batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, last['model'][name]), name


def test_the_average_keeps_its_function():
    model = small_cmhsa('conv', attn_bias_init=40.0)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    expected = [own.eval()(IMAGES) for own in (model, average)]
    model.head.fc.bias.grad = torch.ones(10)
    (change,) = TwoPhases(epoch=0).on_epoch_begin(model, [], 0, [average])
    assert 'blocks.1.attn' in str(change) and model.head.fc.bias.grad is None
    for own, before in zip((model, average), expected):
        assert own.phase == 'attn' and torch.allclose(own(IMAGES), before, atol=1e-5)
    for name, value in model.named_parameters():  # an average of two random draws would be none
        assert torch.equal(average.get_parameter(name), value) or not name.endswith('key.weight')
    assert not parts_in_phases(model, 'conv') and TwoPhases(epoch=0).on_epoch_begin(model, [], 0) == []


def test_several_optimizers_with_names():
    model = small_cmhsa('conv')
    named = list(model.named_parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (named[:5], named[5:])]
    TwoPhases(epoch=0).on_epoch_begin(model, optimizers, 0)
    now, found = dict(model.named_parameters()), []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            assert [id(now[name]) for name in group['param_names']] == list(map(id, group['params']))
            found += group['param_names']
    assert sorted(found) == sorted(now)


def test_pruning_draws_no_random_numbers():
    """A run whose heads all stay is the run without pruning, whatever the loader draws."""
    data = DataLoader(TensorDataset(IMAGES, LABELS), 4)
    states = []
    for parts in ([], [PruneHeads(epoch=[0, 1], batches=data, threshold=0)]):
        torch.manual_seed(0)
        model = small_timm('sa_learned_content_cifar', depth=1, drop_rate=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for part in parts:
                assert part.on_epoch_begin(model, optimizer, epoch) is None
            for batch in DataLoader(TensorDataset(IMAGES, LABELS), 4, shuffle=True):
                step(model, optimizer, *batch)
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


# The rank that is killed, or the other one, which notices first.
KILLED = torch.multiprocessing.ProcessExitedException, torch.multiprocessing.ProcessRaisedException


def on_a_rank(rank, function, folder):
    dist.init_process_group('gloo', init_method=f'file://{folder}/meeting', rank=rank, world_size=2)
    torch.save(function(rank, slice(4 * rank, 4 * rank + 4), folder), folder / f'{rank}.pt')
    dist.destroy_process_group()
    gc.collect()  # ends the group's threads, held by cycles


def on_two_ranks(function, folder):
    """What a function of the rank, its half of the images and a folder returns on each of two ranks."""
    (folder / 'meeting').unlink(missing_ok=True)
    torch.multiprocessing.start_processes(on_a_rank, (function, folder), nprocs=2, start_method='spawn')
    return [torch.load(folder / f'{rank}.pt') for rank in range(2)]


def train_a_rank(rank, half, folder, killed_in=None):
    """Goes on from the checkpoint in the folder, if there is one; the second rank can be killed in an epoch."""
    torch.manual_seed(rank)  # DDP brings the ranks together
    model, start = small_cmhsa('conv').double(), len(list(folder.glob('epoch_*.pt')))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if start:
        checkpoint = torch.load(folder / f'epoch_{start}.pt')
        follow_with_optimizer(model, optimizer, checkpoint['model'])
        model.load_state_dict(checkpoint['model'])
        optimizer.load_state_dict(checkpoint['optimizer'])
    ddp = DistributedDataParallel(model)
    parts = TwoPhases(epoch=1), PruneHeads(epoch=2, batches=[(IMAGES[half], LABELS[half])], keep=12)
    for epoch in range(start, 4):
        for part in parts:
            if part.on_epoch_begin(ddp.module, optimizer, epoch):
                ddp = DistributedDataParallel(ddp.module)
        if epoch == killed_in and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(ddp, optimizer, IMAGES[half].double(), LABELS[half])
        if rank == 0:
            states = dict(model=model.state_dict(), optimizer=optimizer.state_dict())
            torch.save(states, folder / f'epoch_{epoch + 1}.pt')
    return model.state_dict()


@pytest.mark.slow
def test_two_ranks_are_one_training(tmp_path):
    """The ranks stay equal, and do what one process does with the batches of both."""
    one, other = on_two_ranks(train_a_rank, tmp_path)
    model = small_cmhsa('conv').double()  # AdamW would make steps of what kernels round otherwise
    model.load_state_dict(torch.load(tmp_path / 'epoch_1.pt')['model'])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = TwoPhases(epoch=1), PruneHeads(epoch=2, batches=[(IMAGES, LABELS)], keep=12)
    for epoch in range(1, 4):
        for part in parts:
            part.on_epoch_begin(model, optimizer, epoch)
        step(model, optimizer, IMAGES.double())
    assert sum(numbers(model)) == 12
    for name, value in model.state_dict().items():
        assert torch.equal(one[name], other[name]), name
        assert torch.allclose(one[name], value, rtol=0, atol=1e-9), name


@pytest.mark.slow
def test_two_ranks_killed_and_resumed(tmp_path):
    """In the epoch of the pruning, which is made again, and in the next one: the weights of an unbroken training."""
    folders = [tmp_path / name for name in ('whole', 'at_once', 'later')]
    for folder in folders:
        folder.mkdir()
    (whole, _), killed_in = on_two_ranks(train_a_rank, folders[0]), (2, 3)
    for folder, epoch in zip(folders[1:], killed_in):
        with pytest.raises(KILLED):
            on_two_ranks(functools.partial(train_a_rank, killed_in=epoch), folder)
        assert len(list(folder.glob('epoch_*.pt'))) == epoch
        for resumed in on_two_ranks(train_a_rank, folder):
            assert resumed.keys() == whole.keys()
            assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    'make, message',
    [
        *((lambda value=value: TwoPhases(epoch=value), f'epoch={value!r} of TwoPhases') for value in (-1, 1.5, '3')),
        *((lambda value=value: PruneHeads(value, keep=3), 'of PruneHeads must be whole') for value in (True, [2, -1])),
        (lambda: PruneHeads(1, keep=4, threshold=0.1), "'threshold': 0.1, 'keep': 4. says how many heads go: give one"),
        (lambda: PruneHeads(1, keep=2.5), 'keep=2.5 must be a number of heads'),
        (lambda: PruneHeads(1), r'criteria=\(\) of PruneHeads and nothing else say which heads go: give one of keep'),
        (lambda: TwoPhases(5, layers='*', alhpa=6), 'TwoPhases has no argument alhpa: with layers it takes those of'),
        (lambda: TwoPhases(5, alpha=6), "'alpha': 6} of TwoPhases are for the layers of a CNN: give layers"),
    ],
)
def test_settings(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(
    'build, part',
    [
        (lambda: small_cmhsa('conv'), TwoPhases(epoch=1)),
        (cnn, TwoPhases(epoch=1, layers='layer4.*.conv2', content='additive', alpha=6.0)),
        (vit, PruneHeads(epoch=1, batches=[(IMAGES, LABELS)], multiply_adds=0.95, layers='blocks.1.*')),
    ],
)
def test_a_compiled_model_is_the_model(build, part):
    """With the names of the model inside, and changed once."""
    model = build()
    other, compiled = copy.deepcopy(model), torch.compile(model, backend='eager')
    average, optimizer = copy.deepcopy(compiled), torch.optim.SGD(compiled.parameters(), lr=0.1)
    for epoch in range(2):
        part.on_epoch_begin(other, [], epoch)
        part.on_epoch_begin(compiled, optimizer, epoch, [average])
        for own in (other, compiled, average):
            cross_entropy(own(IMAGES), LABELS).backward()
    assert {*optimizer.param_groups[0]['params']} == {*model.parameters()}
    for own in (model, average._orig_mod):
        assert {name: value.shape for name, value in own.state_dict().items() if value.ndim} == {
            name: value.shape for name, value in other.state_dict().items() if value.ndim
        }
    with torch.no_grad():  # what was compiled before the change computes as the convolutions did
        for own in (model, average._orig_mod, other):
            for parameter in own.parameters():
                parameter.mul_(0.9)
    for own in (compiled, average):
        torch.testing.assert_close(own.eval()(IMAGES), other.eval()(IMAGES), rtol=1e-3, atol=1e-4)


def test_a_compiled_part_counts_once():
    model = nn.Sequential(torch.compile(small_cmhsa('conv'), backend='eager'))
    assert len(parts_in_phases(model)) == len(TwoPhases(epoch=0).on_epoch_begin(model, [], 0)) == 1
    assert parts_in_phases(model, 'attn') == [model[0]._orig_mod]


def test_a_frozen_first_block():
    """Whatever trains afterwards has an optimizer."""
    model = small_cmhsa('conv')
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    TwoPhases(epoch=0).on_epoch_begin(model, optimizer, 0)
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert (
        {*optimizer.param_groups[0]['params']}
        == trained
        == {*model.parameters()} - {*model.blocks[0].parameters(), *model.stem.proj.parameters()}
    )


def test_a_layer_of_one_head():
    """One that cannot be without any heads, as Hugging Face's BEiT, keeps it."""
    model = small_vit('transformers.Beit')
    prune_heads(model, {0: [0, 1]})
    images = torch.randn(2, 3, SIZE, SIZE)
    pruner = PruneHeads(1, [images], lambda model, images: model(images).logits.square().mean(), keep=2)
    for epoch in range(2):
        pruner.on_epoch_begin(model, [], epoch)
    assert sum(numbers(model)) == 2


def test_no_images_and_no_loss():
    """Then nothing makes up for the heads, or criteria alone judge them."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = small_timm('sa_generalized_cifar').eval()

        def forward(self, images):
            return dict(logits=self.network(images))

    model, criteria = Named(), ['uniform', 'duplicate']
    with torch.no_grad():
        model.network.blocks[0].attn.encoding.sqrt_precision[1] = 0
    batches = [dict(images=IMAGES)]
    pruner = PruneHeads(batches=batches, criteria=criteria, bias_correction=False)
    judged = pruner.judge(model)
    assert judged == {'network.blocks.0.attn': [1]}
    with pytest.raises(ValueError, match='gave None, but the mean loss is needed'):
        PruneHeads(batches=batches, criteria=criteria, keep=5).judge(model)
    expected = copy.deepcopy(model)
    prune_heads(expected, judged)
    pruner.remove(model, judged)
    assert torch.equal(model(IMAGES)['logits'], expected(IMAGES)['logits'])


def test_images_of_another_dtype():
    model = vit().bfloat16()
    found = [PruneHeads(batches=[(IMAGES.to(dtype), LABELS)], keep=4).judge(model) for dtype in (None, torch.bfloat16)]
    assert found[0] == found[1]


def test_refused_at_once():
    """At the first epoch, long before the one that it is about."""
    batches, optimizer = [(IMAGES, LABELS)], []
    for part, model, error, message in (
        (TwoPhases(5), vit(), ValueError, 'finds no module with phases, such as a CMHSA, .* in a Vi'),
        (TwoPhases(5, layers='stage*'), cnn(), ValueError, r"no convolution layers=\['stage\*'\] in a ResNet"),
        (TwoPhases(5, layers=['layer4.*.conv2', 'stage*']), cnn(), ValueError, r"layers='stage\*' matches none of the"),
        (TwoPhases(5, layers='layer4.*.conv2', alpha=0), cnn(), ValueError, 'alpha=0 must be a number from 0.1'),
        (TwoPhases(5), small_cmhsa('attn'), ValueError, 'attention at epoch 0, before epoch=5 of TwoPhases turns it'),
        (TwoPhases(5), nn.DataParallel(small_cmhsa('conv')), TypeError, 'use its .module instead, and build a new'),
        (PruneHeads(5, batches, keep=3), nn.DataParallel(vit()), TypeError, 'use its .module'),
        (PruneHeads(5, batches, keep=7), vit(), ValueError, 'keep=7 must be at most 6'),
        (PruneHeads(5, batches, multiply_adds=0.1), vit(), ValueError, 'multiply_adds=0.1 cannot be reached'),
        (PruneHeads(5, batches, criteria=['stripe']), vit(), TypeError, r"blocks.0.attn: .* layers='\*' can leave"),
        (PruneHeads(0, batches, keep=3), cnn(), ValueError, r"at epoch 0, no attention with layers='\*' in the model"),
        (PruneHeads(0, keep=3), vit(), ValueError, 'there were no images: give batches'),
        (PruneHeads(0, [(IMAGES, LABELS + 3)], keep=3), vit(), ValueError, 'label 10 is none of the classes 0 to 9'),
        (PruneHeads(0, iter(()), keep=3), vit(), ValueError, 'there were no images: give batches'),
    ):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(error, match=message):
            part.on_epoch_begin(model, optimizer, 0)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_resumed_model_that_did_not_follow():
    phases, model = TwoPhases(epoch=2), small_cmhsa('conv')
    with pytest.raises(ValueError, match='convolutions at epoch 3, but epoch=2 of .*: call follow_with_optimizer'):
        phases.on_epoch_begin(model, [], 3)
    assert phases.on_epoch_begin(small_cmhsa('attn'), [], 2) == []  # resumed in the middle of that epoch


def test_an_optimizer_of_one_state_for_all_parameters():
    """L-BFGS begins anew in the second phase, and has no entries of heads to lose."""
    model = small_cmhsa('conv')
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3)
    for epoch in range(2):
        TwoPhases(epoch=1).on_epoch_begin(model, optimizer, epoch)
        step(model, optimizer)
    with pytest.raises(ValueError, match='a LBFGS keeps one state for all parameters'):
        PruneHeads(epoch=2, batches=[(IMAGES, LABELS)], keep=12).on_epoch_begin(model, optimizer, 2)
    assert sum(numbers(model)) == 18
    step(model, optimizer)


def states(*owners):
    """All that may not change after an error: parameters, values, attributes, and what optimizers hold."""
    found = []
    for own in owners:
        modules = own.modules() if isinstance(own, nn.Module) else ()
        parts = [part for module in modules for part in (vars(module), *vars(module).values())]
        parts += of.reachable(own).values()
        for part in parts:
            if isinstance(part, torch.Tensor):
                found.append((part, part.detach().clone()))
            elif isinstance(part, (dict, list)):
                found.append((part, [id(x) for x in (part.values() if isinstance(part, dict) else part)]))
                found += [(x, x.detach().clone()) for x in found[-1][1] if isinstance(x, torch.Tensor)]
        if isinstance(own, nn.Module):
            found += [(x, x.detach().clone()) for x in (*own.parameters(), *own.buffers())]
    return found


def assert_as_before(before, *owners):
    now = states(*owners)
    assert [id(own) for own, _ in now] == [id(own) for own, _ in before]
    for (_, one), (_, other) in zip(before, now):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class Stop(BaseException):
    """As an interrupt: nothing takes it for an error that it may try to mend."""


def failing(monkeypatch, where, name, call):
    """Has a function fail after it was called so many times; never for 0."""
    whole, calls = getattr(where, name), []

    def fails(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            raise Stop
        return whole(*args, **kwargs)

    monkeypatch.setattr(where, name, fails)
    return calls


@pytest.mark.parametrize(
    'where, name',
    [
        (head_pruning, 'find_entries'),
        (head_pruning, 'fold_into_bias'),
        (head_pruning, 'prune_heads'),  # the second is that of the copy
        (head_pruning, 'replace_parameters'),  # of each optimizer and each change
        (prune, 'find_entries'),
        (AttentionLayer, 'note_kept'),
        (prune, 'set_sizes'),
        (prune, 'write_record'),
        (prune, 'compare'),
        (found_heads, 'succession'),
        (found_heads, 'set_parameter'),
        (optimizers, '_inherited'),
    ],
)
@pytest.mark.parametrize('build', [vit, lambda **sizes: small_timm('sa_learned_content_cifar', mlp_dim=8)])
def test_a_pruning_that_fails_anywhere_changes_nothing(build, where, name, monkeypatch):
    """Neither the model, nor its average, nor its optimizers: at the first call, in the middle, and at the last."""
    torch.manual_seed(0)
    model = build(embed_dim=24)
    parameters = list(model.parameters())
    own = [torch.optim.AdamW(parameters[::2]), of.Sharpness(parameters[1::2])]
    for optimizer in own:
        step(model, optimizer)
    average = copy.deepcopy(model)
    pruner = PruneHeads(batches=[(IMAGES, LABELS)], keep=3)
    judged, others = pruner.judge(model), copy.deepcopy((model, average, own))
    with monkeypatch.context() as context:
        calls = failing(context, where, name, 0)
        pruner.remove(others[0], judged, others[2], [others[1]])
        most = len(calls)
    assert most > 0 or (build is vit) == (name == 'note_kept')
    before = states(model, average, *own)
    for call in sorted({1, most // 2 + 1, most}) if most else ():
        with monkeypatch.context() as context:
            calls = failing(context, where, name, call)
            with pytest.raises(Stop):
                pruner.remove(model, judged, own, [average])
        assert len(calls) == call
        assert_as_before(before, model, average, *own)
    pruner.remove(model, judged, own, [average])
    assert sum(numbers(model)) == sum(numbers(average)) == 3
    for optimizer in own:
        step(model, optimizer)


@pytest.mark.parametrize('call', [1, 2])
@pytest.mark.parametrize(
    'build, part',
    [
        (lambda: small_cmhsa('conv'), TwoPhases(epoch=1)),
        (cnn, TwoPhases(epoch=1, layers='layer4.*.conv2', content='additive', alpha=6.0)),
    ],
)
def test_a_transition_that_fails_changes_nothing(build, part, call, monkeypatch):
    model = build()
    own, average = torch.optim.AdamW(model.parameters()), copy.deepcopy(model)
    step(model, own)
    before = states(model, average, own)
    with monkeypatch.context() as context:
        failing(context, part, '_turn', call)
        with pytest.raises(Stop):
            part.on_epoch_begin(model, own, 1, [average])
    assert_as_before(before, model, average, own)
    with pytest.raises(ValueError, match=r'ranks, beside its groups and states, where .*: build a new optimizer for'):
        part.on_epoch_begin(model, of.ranked(model.parameters()), 1, [average])
    assert_as_before(before, model, average, own)
    assert part.on_epoch_begin(model, own, 1, [average])
    step(model, own)


def test_copies_of_another_kind():
    """The wrapper of an average, whose names are others."""
    model = vit()
    average, own = ModelEmaV3(model), torch.optim.SGD(model.parameters(), lr=0.1)
    before = states(model, average, own)
    message = r'copies has a ModelEmaV3 whose attention has heads .*: give the average itself, such as the module'
    with pytest.raises(ValueError, match=message):
        PruneHeads(epoch=0, batches=[(IMAGES, LABELS)], keep=3).on_epoch_begin(model, own, 0, copies=[average])
    assert_as_before(before, model, average, own)


def judged_by(batches):
    """The heads of a transformer that attends sharply, and differently in each image: all are found."""
    torch.manual_seed(0)
    model = vit().double()  # kernels for two images and for four round otherwise, which sharp attention makes larger
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)
    return PruneHeads(batches=batches, criteria=[dict(type='entropy', threshold=0.0)]).judge(model)


def judge_on_a_rank(rank, half, folder):
    batches, drawn = [(IMAGES[half], LABELS[half])], ([4.0, 0, 1], [0.0, 0.5, 2])[rank]
    by = lambda *args: {f'blocks.{block}.attn': torch.tensor(drawn) for block in range(2)}  # noqa: E731
    assert PruneHeads(batches=batches, by=by, keep=4).judge(vit()) == {
        f'blocks.{block}.attn': [1] for block in range(2)
    }
    judged = judged_by([(images.double(), labels) for images, labels in batches])
    found = {name: [entry.value for entry in report.found] for name, report in judged.reports.items()}
    return dict(judged), found, torch.cat(judged.means['blocks.0.attn'].mean)


@pytest.mark.slow
def test_two_ranks_judge_by_the_batches_of_both(tmp_path):
    one, other = on_two_ranks(judge_on_a_rank, tmp_path)
    judged = judged_by([(IMAGES.double(), LABELS)])
    assert one[0] == other[0] == judged and one[1] == other[1]
    for name, report in judged.reports.items():
        assert len(report.found) == 3
        assert one[1][name] == pytest.approx([entry.value for entry in report.found], rel=1e-9)
    for _, _, mean in (one, other):
        assert torch.allclose(mean, torch.cat(judged.means['blocks.0.attn'].mean))


def last_first(model, batches, loss):
    """The last heads are the least important ones, most of all in the first layer."""
    return {name: block - torch.arange(3) for block, name in enumerate(('blocks.0.attn', 'blocks.1.attn'))}


@pytest.mark.parametrize(
    'by',
    [head_importance, lambda *args: head_ablation(*args).zero_loss, last_first],
    ids=['importance', 'ablation', 'own'],
)
def test_any_score_of_heads(by):
    torch.manual_seed(0)
    model, batches = vit(embed_dim=24), batches_of(0)
    judged = PruneHeads(batches=batches, by=by, keep=3).judge(model)
    assert judged == least_important(by(model.eval(), batches, loss_of_batch), keep=3)
    if by is head_importance:
        assert judged == PruneHeads(batches=batches, keep=3).judge(model)
    if by is last_first:
        assert judged == {'blocks.0.attn': [1, 2], 'blocks.1.attn': [2]}
        only = PruneHeads(batches=batches, by=by, threshold=0, layers=['blocks.1.*']).judge(model)
        assert only == {'blocks.1.attn': [2]} and only.reports['blocks.1.attn'].found[0].value == -1


@pytest.mark.parametrize(
    'score, message',
    [
        ({}, r'by\(…\) of PruneHeads gave None for blocks.0.attn, not a tensor of shape \(3,\)'),
        ({'blocks.0.attn': torch.ones(2)}, 'Tensor of shape .2,.> for blocks.0.attn'),
        ({f'blocks.{i}.attn': torch.tensor([1, torch.nan, 2]) for i in range(2)}, 'nan.* has no order'),
    ],
)
def test_scores_that_are_no_scores(score, message):
    with pytest.raises(ValueError, match=message):
        PruneHeads(batches=batches_of(0), by=lambda *args: score, keep=3).judge(vit(embed_dim=24))


def prune_with_a_mistake_on_a_rank(rank, half, folder):
    """Of no batches, of labels that are no classes, and an optimizer that keeps other state, on the second rank."""
    found = []
    for batches in ([], [(IMAGES[half], LABELS[half] + 9)]):
        good = [(IMAGES[half], LABELS[half])]
        try:
            PruneHeads(batches=batches if rank == 1 else good, keep=3).judge(vit())
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    model, good = vit(embed_dim=24), [(IMAGES[half], LABELS[half])]
    optimizer = (torch.optim.AdamW, of.Lists)[rank](model.parameters(), lr=1e-3)
    step(model, optimizer, *good[0])
    before = states(model)
    with pytest.raises((ValueError, RuntimeError)) as raised:
        PruneHeads(epoch=0, batches=good, keep=3).on_epoch_begin(model, optimizer, 0)
    assert_as_before(before, model)
    return [*found, str(raised.value)]


@pytest.mark.slow
def test_a_mistake_on_one_rank_ends_all(tmp_path):
    one, other = on_two_ranks(prune_with_a_mistake_on_a_rank, tmp_path)
    messages = 'there were no images', 'label 16 is none of the classes 0 to 9', 'Q of a Lists has several tensors'
    for own, message in zip(other, messages):
        assert own.startswith(message)
    assert one == [f'no heads are removed: rank 1 raised ValueError: {own}' for own in other]


def test_numbers_of_numpy():
    model = vit()
    pruner = PruneHeads(epoch=np.int64(1), batches=[(IMAGES, LABELS)], keep=np.int64(4))
    assert pruner.on_epoch_begin(model, [], 0) is None and pruner.on_epoch_begin(model, [], 1)
    assert sum(numbers(model)) == 4


def test_layers_are_checked_once(monkeypatch):
    """Not at every epoch before the pruning; those that are new are."""
    found, model = [], vit()
    monkeypatch.setattr(head_pruning, 'find_entries', lambda *args: found.append(args[1]) or find_entries(*args))
    pruner = PruneHeads(epoch=9, batches=[(IMAGES, LABELS)], keep=2)
    for epoch in range(3):
        pruner.on_epoch_begin(model, [], epoch)
    assert len(found) == 1
    model.blocks[1].attn = copy.deepcopy(model.blocks[1].attn)
    pruner.on_epoch_begin(model, [], 3)
    assert len(found) == 2


@pytest.mark.parametrize('bias_correction', [True, False])
def test_a_duplicate_goes_first_and_hands_on_its_values(bias_correction):
    model = small_timm('sa_generalized_cifar', depth=1).eval()
    with torch.no_grad():
        for parameter in (model.blocks[0].attn.encoding.center, model.blocks[0].attn.encoding.sqrt_precision):
            parameter[2] = parameter[0]
    expected = model(IMAGES)
    pruner = PruneHeads(batches=[(IMAGES, LABELS)], criteria=['duplicate'], bias_correction=bias_correction)
    judged = pruner.judge(model)
    assert judged == {'blocks.0.attn': [2]}
    by = lambda *args: {'blocks.0.attn': torch.tensor([0.0, 5, 9])}  # noqa: E731
    assert PruneHeads(batches=[(IMAGES, LABELS)], by=by, criteria=['duplicate'], keep=2).judge(model) == judged
    pruner.remove(model, judged)
    assert model.blocks[0].attn.num_heads == 2
    assert torch.allclose(model(IMAGES), expected, atol=1e-5) == bias_correction


def test_models_without_logits():
    """The loss of a batch by default."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.LSTM(3, 2))  # which gives a pair
    with pytest.raises(ValueError, match='the cross-entropy needs a model with logits, not a Sequential: give another'):
        loss_of_batch(model, (torch.randn(2, 3, 2, 2), torch.tensor([0, 1])))
