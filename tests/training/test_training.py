"""Heads that go, and convolutions that turn to attention, in a training of plain PyTorch, on two ranks too."""

import copy

import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing
from helpers.small import small_cmhsa, small_timm
from torch.nn.functional import cross_entropy

from attncnn_plugin import follow_state_dict
from attncnn_plugin.training import PruneHeads, parts_in_phases, to_attention

IMAGES, LABELS = torch.randn(8, 3, 32, 32), torch.arange(8)


def loss_of(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


BATCH = IMAGES, LABELS


def vit():
    torch.manual_seed(0)
    return timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, depth=2, num_classes=10)


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, (IMAGES, LABELS)).backward()
        optimizer.step()


def test_heads_go_from_the_model_its_copy_and_its_optimizer():
    model = vit()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    average = copy.deepcopy(model)
    pruner = PruneHeads(keep=4)
    judged = pruner.judge(model, [(IMAGES, LABELS)])
    assert sum(map(len, judged.heads.values())) == 2 and set(judged.reports) == {'blocks.0.attn', 'blocks.1.attn'}
    pruner.remove(model, judged, [optimizer], [average])
    for of in (model, average):
        assert sum(block.attn.num_heads for block in of.blocks) == 4
    assert {id(p) for group in optimizer.param_groups for p in group['params']} == set(map(id, model.parameters()))
    for parameter in model.parameters():
        assert (
            optimizer.state[parameter]['exp_avg'].shape == parameter.shape and optimizer.state[parameter]['step'] == 2
        )
    train(model, optimizer, 1)
    resumed = vit()
    follow_state_dict(resumed, model.state_dict())
    again = torch.optim.AdamW(resumed.parameters())
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # PyTorch shares the tensors
    for own in ((model, optimizer), (resumed, again)):
        train(*own, 1)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, resumed.state_dict()[name], atol=1e-6), name


def test_a_share_of_the_multiply_adds_of_before():
    """Nothing more goes when the heads are judged again, in a resumed training too."""
    model, pruner = vit(), PruneHeads(multiply_adds=0.9)
    batch = IMAGES, LABELS
    pruner.check(model, [batch])
    pruner.remove(model, pruner.judge(model, [batch]))
    assert not pruner.judge(model, [batch]).heads
    resumed = PruneHeads(multiply_adds=0.9)
    resumed.multiply_adds_before = pruner.multiply_adds_before
    assert not resumed.judge(model, [batch]).heads


@pytest.mark.parametrize('bias_correction', [True, False])
def test_a_duplicate_hands_on_its_values(bias_correction):
    model = small_timm('sa_generalized_cifar', depth=1).eval()
    with torch.no_grad():
        for parameter in (model.blocks[0].attn.encoding.center, model.blocks[0].attn.encoding.sqrt_precision):
            parameter[2] = parameter[0]
    expected, pruner = model(IMAGES), PruneHeads(criteria=['duplicate'], bias_correction=bias_correction)
    judged = pruner.judge(model, [(IMAGES, LABELS)])
    assert judged.heads == {'blocks.0.attn': [2]}
    pruner.remove(model, judged)
    assert model.blocks[0].attn.num_heads == 2
    assert torch.allclose(model(IMAGES), expected, atol=1e-5) == bias_correction


def judge_on_a_rank(rank, folder):
    dist.init_process_group('gloo', init_method=f'file://{folder}/meeting', rank=rank, world_size=2)
    half = slice(4 * rank, 4 * rank + 4)
    images, labels = torch.load(f'{folder}/batch.pt')
    judged = PruneHeads(criteria=['entropy'], keep=3).judge(vit(), [(images[half], labels[half])])
    found = {name: [entry.value for entry in report.found] for name, report in judged.reports.items()}
    torch.save((judged.heads, found, judged.means['blocks.0.attn'].mean), f'{folder}/{rank}.pt')
    dist.destroy_process_group()


def test_two_ranks_judge_by_the_batches_of_both(tmp_path):
    torch.save((IMAGES, LABELS), tmp_path / 'batch.pt')
    torch.multiprocessing.start_processes(judge_on_a_rank, (str(tmp_path),), nprocs=2, start_method='fork')
    one, other = (torch.load(tmp_path / f'{rank}.pt') for rank in range(2))
    judged = PruneHeads(criteria=['entropy'], keep=3).judge(vit(), [(IMAGES, LABELS)])
    assert one[0] == other[0] == judged.heads and one[1] == other[1]
    for name, report in judged.reports.items():
        assert one[1][name] == pytest.approx([entry.value for entry in report.found], rel=1e-4)
    for _, _, mean in (one, other):
        assert torch.allclose(mean, judged.means['blocks.0.attn'].mean)


def test_a_model_turns_and_keeps_training():
    model, other = (small_cmhsa('conv', attn_bias_init=40.0) for _ in range(2))
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 16, 16)
    expected = model.eval()(images)
    model(images).sum().backward()
    assert len(parts_in_phases(model, 'conv')) == 1
    (change,) = to_attention(model, seed=1)
    assert 'blocks.1.attn' in str(change) and torch.allclose(model(images), expected, atol=1e-5)
    assert not parts_in_phases(model, 'conv') and all(p.grad is None for p in model.parameters())
    to_attention(other, seed=1)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert to_attention(model) == []
