"""What tools/reproduce.py measures of networks beside their accuracy, and what its trainings import."""

import copy

import pytest
import torch
from helpers.starts import gaussian, small_vit
from torch import nn

pytest.importorskip('mmpretrain')
import reproduce  # noqa: E402, F401
from mmengine.registry import HOOKS  # noqa: E402
from reproduction import measures  # noqa: E402
from reproduction.configs import build, network_config, set_data, set_images  # noqa: E402
from reproduction.impulses import start_impulses  # noqa: E402
from reproduction.tables import TABLES  # noqa: E402

from attncnn_plugin.pruning import prunable_heads  # noqa: E402


def config_of(label, table='starts', seed=0):
    row = TABLES[table].rows[label]
    config = network_config(row.config, row.options)
    set_data(config, 'digits', None)
    set_images(config, 20, seed)
    return config


def started(label, table='starts'):
    torch.manual_seed(0)
    model = build(config_of(label, table))
    model.init_weights()
    return model


@pytest.mark.parametrize('label', ['Gaussian', 'Gaussian, random shifts', 'Gaussian, all at the centre'])
def test_the_attention_at_a_shift(label):
    """α = 2 has 0.62 of a Gaussian at its centre."""
    assert measures.share_at_shift(config_of(label)) == pytest.approx(0.62, abs=0.04)


def test_what_begins_without_shifts_has_no_attention_there():
    assert measures.share_at_shift(config_of('as it comes')) is None
    assert measures.share_at_shift(config_of('mimetic')) is None


def test_the_released_start():
    """What heads look at is that of impulses; biases are drawn, and MLPs as PyTorch draws them."""
    torch.manual_seed(0)
    module = started('impulse, 192').backbone
    for layer in module.layers:
        queries, keys, _ = layer.attn.qkv.weight.chunk(3)
        assert all(part.norm().item() == pytest.approx(7 * 3**0.5, rel=1e-4) for part in (queries, keys))
        for linear in (layer.attn.qkv, layer.attn.proj):
            assert linear.bias.std().item() == pytest.approx(192**-0.5 / 3**0.5, rel=0.15)
        assert layer.ffn.layers[1].weight.std().item() == pytest.approx(768**-0.5 / 3**0.5, rel=0.05)
    assert module.pos_embed.std().item() == pytest.approx(0.36, rel=0.05)


@pytest.mark.parametrize('size', [(6, 6), (2, 3)])  # more patches than channels of a head, or fewer
def test_impulses(size):
    """2505.19985: pre-softmax scores of the normalized embedding alone are largest at the impulses, up and here."""
    model = small_vit(size=size, embed_dim=96, num_heads=2)
    for block in model.blocks:
        block.attn.qkv.reset_parameters()  # with biases, which would shift the scores
    start_impulses(model, seed=1)
    embedding = nn.functional.layer_norm(model.pos_embed[0, 1:].detach(), (96,))
    deviations = 4 / (2 * model.pos_embed.numel()) ** 0.5  # of the standard deviation of so many numbers
    assert model.pos_embed.std().item() == pytest.approx(0.36, rel=deviations)
    inside = torch.arange(size[0] * size[1]) >= size[1]  # patches with one above them
    for block in model.blocks:
        queries, keys, values = block.attn.qkv.weight.detach().unflatten(0, (3, 2, 48))
        assert not block.attn.qkv.bias.any()
        for number, (shift, exists) in enumerate([((0, 0), inside | True), ((-1, 0), inside)]):
            for weight in (queries, keys):
                assert weight[number].norm().item() == pytest.approx(7)
            scores = embedding @ queries[number].T @ keys[number] @ embedding.T
            assert torch.equal(scores.argmax(1)[exists], gaussian(shift, 100.0, size).argmax(1)[exists])
        noise = (values.flatten(0, 1).T @ block.attn.proj.weight.detach().T) / 0.4 + torch.eye(96)
        assert noise.std().item() == pytest.approx(96**-0.5, rel=0.05)


def test_a_random_embedding():
    random, plain = started('random embedding'), started('as it comes')
    assert random.backbone.pos_embed.std().item() == pytest.approx(0.36, rel=0.05)
    others = plain.backbone.state_dict()
    changed = [name for name, x in random.backbone.state_dict().items() if not torch.equal(x, others[name])]
    assert changed == ['pos_embed']


def test_corruptions():
    """They change images more from strength to strength, and noise and contrast by what they say."""
    images = torch.rand(4, 3, 32, 32)
    for corrupt, strengths in measures.CORRUPTIONS.values():
        changes = [(corrupt(images, strength) - images).square().mean().sqrt().item() for strength in strengths]
        assert 0 < changes[0] < changes[1] < changes[2] < 0.5
    for name, expected in (('Gaussian noise', 0.08), ('contrast', 0.6 * images.std().item())):
        corrupt, strengths = measures.CORRUPTIONS[name]
        assert (corrupt(images, strengths[1]) - images).std().item() == pytest.approx(expected, rel=0.05)
    even = torch.full((1, 3, 32, 32), 0.5)
    for name in ('blur', 'contrast', 'pixelate'):
        corrupt, strengths = measures.CORRUPTIONS[name]
        assert torch.allclose(corrupt(even, strengths[2]), even)


@pytest.mark.slow
def test_corrupted_accuracies(monkeypatch):
    """A network that reads the mean of an image is right where it was; random numbers stay as they are."""
    monkeypatch.setattr(measures, 'CORRUPTED', 30)
    config = config_of('as it comes')
    model = build(config)
    generator = torch.random.get_rng_state()
    accuracies = measures.corrupted_accuracies(config, model)
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert {name: len(own) for name, own in accuracies.items()} == dict.fromkeys(measures.CORRUPTIONS, 3)
    with torch.no_grad():
        model.head.fc.weight.zero_()
        model.head.fc.bias.copy_(torch.eye(10)[3])  # it says 3 of all
    labels = [sample.gt_label.item() for sample in measures._validation_data(config, 30)['data_samples']]
    right = pytest.approx(100 * labels.count(3) / 30)
    assert all(value == right for own in measures.corrupted_accuracies(config, model).values() for value in own)


@pytest.mark.slow
def test_attention_that_moved():
    before = started('Gaussian')
    after = copy.deepcopy(before)
    config = config_of('Gaussian')
    assert measures.attention_moved(config, before, after) == 0
    with torch.no_grad():
        for layer in after.backbone.layers:
            nn.init.zeros_(layer.attn.qkv.weight[:192])
            nn.init.zeros_(layer.attn.qkv.bias[:192])
    assert 0.8 < measures.attention_moved(config, before, after) < 1  # uniform now


def test_heads_that_are_drawn():
    """So many stay, of each layer one at least, and other seeds draw others."""
    model, batch = started('as it comes'), measures._validation_data(config_of('as it comes'), 10)
    hook, found = HOOKS.build(dict(type='RandomPruningHook', keep=6, epochs=[0])), []
    hook.pruner.batches = [batch]
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(dict(hook.pruner.judge(model)))
    assert found[0] == found[1] != found[2]
    assert all(len(heads) == 3 for heads in found[0].values()) and len(found[0]) == len(prunable_heads(model)) == 6
