"""Head importance against differences of the loss, the number of heads that go, and attention that was observed."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.small import small_timm
from helpers.versions import hugging_face_library
from helpers.vits import OF_HUGGING_FACE, SIZE, output_map, output_of, small_classifier, small_vit
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attncnn_plugin.convert import convs_to_attention
from attncnn_plugin.heads.found import Heads
from attncnn_plugin.pruning import (
    count_multiply_adds,
    head_costs,
    head_importance,
    least_important,
    prunable_heads,
    prune_heads,
)
from attncnn_plugin.pruning.degenerate import ObservedAttention, observed_attention, report_of
from attncnn_plugin.training import PruneHeads


def loss_of(model, batch):
    return F.cross_entropy(output_of(model, batch[0]), batch[1])


def by_differences(model, images, labels, step=1e-4):
    """E_x |∂L(x)/∂ξ_h| by central differences, image by image, head by head."""
    found = {}
    for name, layer in prunable_heads(model).items():
        found[name] = torch.zeros(layer.num_heads, dtype=torch.float64)
        for head in range(layer.num_heads):
            output, of_head = output_map(model, name, head)
            for image, label in zip(images, labels):
                losses = []
                for gate in (1 + step, 1 - step):
                    whole = output.weight.clone()
                    output.weight[:, of_head] *= gate
                    losses.append(loss_of(model, (image[None], label[None])).item())
                    output.weight.copy_(whole)
                found[name][head] += abs(losses[0] - losses[1]) / (2 * step) / len(images)
    return found


def small_bert():
    transformers = hugging_face_library()
    sizes = dict(hidden_size=16, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, vocab_size=50)
    return transformers.BertModel(transformers.BertConfig(**sizes))


@pytest.mark.parametrize(
    'name',
    [
        'vit_tiny_patch16_224',
        'swin_tiny_patch4_window7_224',
        'transformers.ViT',
        'transformers.Beit',
        'torchvision.VisionTransformer',
        'torchvision.SwinTransformer',
        'sa_generalized_cifar',
        'cmhsa_attn',
        'cmhsa_narrow',
    ],
)
def test_importance_is_the_derivative_of_the_loss(name):
    """Windows of an image count together, and images apart."""
    model, size = small_classifier(name)
    model = model.double().eval()
    images, labels = torch.randn(4, 3, size, size, dtype=torch.float64), torch.tensor([0, 2, 1, 4])
    with torch.no_grad():
        expected = by_differences(model, images, labels)
    model.train()
    batches = [(images[:3], labels[:3]), (images[3:], labels[3:])]
    importance = head_importance(model, batches, loss_of, normalize=False)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert list(importance) == list(expected)
    for layer, values in expected.items():
        torch.testing.assert_close(importance[layer], values, rtol=1e-5, atol=1e-9)
    normalized = head_importance(model, batches, loss_of)
    for layer, values in normalized.items():
        torch.testing.assert_close(values, importance[layer] / importance[layer].norm())
    unused, *used = expected
    with torch.no_grad():
        output_map(model, unused, 0)[0].weight.zero_()
    normalized = head_importance(model, batches, loss_of)
    assert not normalized[unused].any()
    assert all(abs(normalized[name].norm() - 1) < 1e-6 for name in used)


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'sa_generalized_cifar'])
def test_importance_with_checkpointing(name):
    """Blocks that are computed again for the gradients have no gates of their own."""
    model, size = small_classifier(name)
    batch = torch.randn(3, 3, size, size), torch.tensor([0, 2, 1])
    expected = head_importance(model, [batch], loss_of)
    model.set_grad_checkpointing()
    importance = head_importance(model, [batch, batch], loss_of)
    for layer, values in importance.items():
        torch.testing.assert_close(values, expected[layer])


def test_importance_of_a_layer_that_is_used_twice():
    """What it does for an image counts together, whichever call it is of."""
    torch.manual_seed(0)
    model = small_vit('vit_tiny_patch16_224').double()
    model.blocks[1].attn = model.blocks[0].attn
    images, labels = torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64), torch.tensor([0, 2, 1])
    with torch.no_grad():
        expected = by_differences(model, images, labels)
    importance = head_importance(model, [(images, labels)], loss_of, normalize=False)
    torch.testing.assert_close(importance['blocks.0.attn'], expected['blocks.0.attn'], rtol=1e-5, atol=1e-9)


class FramesFirst(nn.Module):
    """Attention in each frame of videos ``(B, 3, frames, H, W)``, the first frames of all of them before the others."""

    def __init__(self):
        super().__init__()
        self.stem, self.qkv = nn.Conv3d(3, 8, (1, 4, 4), (1, 4, 4)), nn.Linear(8, 24)
        self.proj = nn.Linear(8, 4)
        self.gates = torch.ones(1, 2, dtype=torch.float64)

    def forward(self, x):
        x = self.stem(x).flatten(3).permute(2, 0, 3, 1)  # (frames, B, N, C)
        q, k, v = self.qkv(x).flatten(0, 1).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        gates = self.gates.expand(x.shape[1], 2).repeat(x.shape[0], 1)
        y = (q @ k.mT).softmax(-1) @ v * gates[:, :, None, None]
        return self.proj(y.transpose(1, 2).flatten(2)).unflatten(0, x.shape[:2]).mean((0, 2))


def test_importance_of_frames_before_images():
    torch.manual_seed(0)
    model, videos = FramesFirst().double(), torch.randn(3, 3, 4, 8, 8, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1])
    found = head_importance(model, [(videos, labels)], loss_of, normalize=False)['']
    model.gates = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(3 * loss_of(model, (videos, labels)), model.gates)
    torch.testing.assert_close(found, expected.abs().mean(0), rtol=1e-12, atol=1e-14)


def test_refused_losses():
    model = small_vit('vit_tiny_patch16_224')
    batch = torch.randn(2, 3, SIZE, SIZE), torch.tensor([0, 1])
    with pytest.raises(ValueError, match='called the model 2 times'):
        head_importance(model, [batch], lambda model, batch: loss_of(model, batch) + loss_of(model, batch))
    for wrong in ((batch[0] * torch.nan, batch[1]), (batch[0][:0], batch[1][:0])):
        with pytest.raises(ValueError, match='is nan for batch 1: a finite number is needed'):
            head_importance(model, [batch, wrong], loss_of)


def test_importance_wherever_it_is_called():
    """Inside of inference mode, and with a last batch that is empty."""
    model = small_vit('vit_tiny_patch16_224')
    images = torch.randn(2, 3, SIZE, SIZE)

    def loss(model, batch):
        return model(batch).square().sum() / max(1, len(batch))

    expected = head_importance(model, [images], loss)
    with torch.inference_mode():
        importance = head_importance(model, [images, images[:0]], loss)
    for layer, values in importance.items():
        torch.testing.assert_close(values, expected[layer], rtol=0, atol=0)


def test_importance_of_a_model_that_takes_a_dict():
    class OfDict(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = small_vit('vit_tiny_patch16_224')

        def forward(self, batch):
            return self.vit(batch['images'][0])

    torch.manual_seed(0)
    model, images = OfDict(), torch.randn(3, 3, SIZE, SIZE)
    (own, expected) = (
        head_importance(given, [images], lambda model, x, call=call: model(call(x)).square().mean())
        for given, call in ((model, lambda x: dict(kind='rgb', images=[x])), (model.vit, lambda x: x))
    )
    for name, values in expected.items():
        torch.testing.assert_close(own[f'vit.{name}'], values, rtol=0, atol=0)


@pytest.mark.parametrize('frozen', [False, True])
def test_costs_with_tables_that_are_parameters(frozen):
    """Slices of them have gradients without a history where none is kept."""
    model, images = small_timm('sa_learned_cifar').eval(), torch.randn(1, 3, 16, 16)
    with FlopCounterMode(display=False) as counter:
        model(images)
    model.blocks[0].requires_grad_(not frozen)
    total, costs = head_costs(model, lambda: model(images))
    assert total == counter.get_total_flops() // 2 > sum(own.sum() for own in costs.values()) > 0
    assert [p.requires_grad for p in model.blocks[0].parameters()].count(frozen) == 0
    assert all(parameter.requires_grad for parameter in model.blocks[1].parameters())


@pytest.mark.parametrize(
    'name',
    [
        'vit_tiny_patch16_224',
        'beit_base_patch16_224',
        'swin_tiny_patch4_window7_224',
        'torchvision.VisionTransformer',
        'torchvision.SwinTransformer',
        *OF_HUGGING_FACE,
        'BertModel',
    ],
)
def test_costs_are_those_that_go(name):
    """As PyTorch counts them with gradients, where it computes attention by products; so is what is left."""
    even = dict(num_heads=4) if name == 'torchvision.VisionTransformer' else {}  # which PyTorch has a fused kernel for
    if name == 'BertModel':  # whose map of outputs is beside its attention
        model, images = small_bert().eval(), torch.randint(50, (1, 7))
    else:
        model, images = small_vit(name, **even), torch.randn(1, 3, SIZE, SIZE)

    def check():
        total, costs = head_costs(model, lambda: model(images))
        kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with FlopCounterMode(display=False) as counter, kernel:
            model(images)
        assert total == counter.get_total_flops() // 2 == count_multiply_adds(model, lambda: model(images))[0]
        return total, costs

    for layer in prunable_heads(model, images):
        before, costs = check()
        change = prune_heads(model, {layer: [1]}, images)
        assert change.parameters_after == sum(own.numel() for own in model.parameters()) < change.parameters_before
        assert before - check()[0] == costs[layer][1]


def test_costs_of_a_part_and_inside_of_another_module():
    """The model need not be what is called."""
    model, images = small_vit('vit_tiny_patch16_224'), torch.randn(1, 3, SIZE, SIZE)
    _, expected = head_costs(model, lambda: model(images))
    wrapper = torch.nn.Sequential(model)
    for run in (lambda: model.forward_features(images), lambda: wrapper(images)):
        _, costs = head_costs(model, run)
        for name, own in costs.items():
            assert torch.equal(own, expected[name]) and (own > 0).all()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize('multiply_adds', [0.8, 0.9])
def test_a_share_of_the_multiply_adds_is_of_an_image(multiply_adds):
    """It was counted on a batch of another size."""
    model = small_vit('vit_tiny_patch16_224')
    found = []
    for counted in (4, 2, 5):
        counts = [(torch.randn(counted, 3, SIZE, SIZE), torch.zeros(counted, dtype=torch.long))]
        pruner = PruneHeads(batches=counts, loss=loss_of, multiply_adds=multiply_adds)
        pruner.check(model)
        batch = torch.ones(2, 3, SIZE, SIZE), torch.tensor([0, 1])
        pruner.batches = [batch]
        found.append(pruner.judge(model))
        assert (
            pruner._costs(model, batch, prunable_heads(model))[0] == head_costs(model, lambda: model(batch[0][:1]))[0]
        )
    assert found[0] and found[0] == found[1] == found[2]


def test_no_order_without_finite_numbers():
    model = small_vit('vit_tiny_patch16_224')
    images, labels = torch.randn(2, 3, SIZE, SIZE), torch.tensor([0, 1])
    images[0, 0, 0, 0] = torch.nan
    pruner = PruneHeads(batches=[(images, labels)], loss=loss_of, keep=5)
    with pytest.raises(ValueError, match='is nan for batch 0: a finite number is needed'):
        pruner.judge(model)
    for check in (PruneHeads.judge, PruneHeads.check):
        with pytest.raises(ValueError, match='there were no images'):
            check(PruneHeads(keep=3), model)
    with pytest.raises(ValueError, match='keep=7 must be at most 6, the number of heads'):
        PruneHeads(batches=[(images.nan_to_num(), labels)], loss=loss_of, keep=7).check(model)


def test_number_of_heads():
    importance = {'a': torch.tensor([0.5, 0.1, 0.4]), 'b': torch.tensor([0.2, 0.3])}
    costs = 100, {'a': torch.tensor([10.0, 10, 10]), 'b': torch.tensor([5.0, 5])}
    for settings, expected in (
        (dict(threshold=0.1), {}),
        (dict(threshold=0.35), {'a': [1], 'b': [0]}),  # the last one of a layer stays
        (dict(keep=5), {}),
        (dict(keep=3), {'a': [1], 'b': [0]}),
        (dict(keep=2), {'a': [1, 2], 'b': [0]}),
        (dict(keep=0.5), {'a': [1, 2], 'b': [0]}),  # 2.5 heads
        (dict(keep=0.7), {'a': [1]}),
        (dict(multiply_adds=1.0, costs=costs), {}),
        (dict(multiply_adds=0.9, costs=costs), {'a': [1]}),
        (dict(multiply_adds=0.89, costs=costs), {'a': [1], 'b': [0]}),
    ):
        assert least_important(importance, **settings) == expected, settings
    for settings, message in (
        ({}, 'nothing says how many heads go'),
        (dict(keep=1, threshold=0.1), 'says how many heads go: give one of'),
        (dict(keep=1), 'keep=1 cannot be reached: without the 3 heads that may go, 2 of 5 heads are left'),
        (dict(keep=6), 'keep=6 must be at most 5'),
        (dict(threshold=float('nan')), 'threshold=nan must be'),
        *((dict(keep=own), f'keep={own} must be a number of heads, or a share') for own in (1.5, 1.0, 0.0, -1, True)),
        (dict(keep=0.1), 'keep=0.1 cannot be reached'),
        (dict(threshold=-1), 'threshold=-1 must be'),
        (dict(multiply_adds=0), 'multiply_adds=0 must be a share above 0'),
        (dict(multiply_adds=0.5), 'needs costs'),
        (dict(multiply_adds=0.5, costs=costs), 'cannot be reached: without the 3 heads that may go, 75 of 100'),
    ):
        with pytest.raises(ValueError, match=message):
            least_important(importance, **settings)


def test_observed_attention_is_that_of_the_model():
    """Against probabilities computed anew, one image at a time."""
    torch.manual_seed(0)
    model = small_vit('vit_tiny_patch16_224').double()
    images = torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64)
    tokens = []
    layers = prunable_heads(model)
    model.blocks[0].attn.register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    with torch.no_grad(), observed_attention(model, layers) as observed:
        model(images[:2])
        model(images[2:])
    query, key, _ = model.blocks[0].attn.qkv(torch.cat(tokens)).view(3, -1, 3, 3, 8).permute(2, 0, 3, 1, 4)
    probs = (query @ key.mT / 8**0.5).softmax(-1)  # (images, heads, queries, keys)
    own, keys = observed['blocks.0.attn'], probs.shape[-1]
    entropy = -(probs * probs.log()).sum(-1).mean((0, 2)) / math.log(keys)
    torch.testing.assert_close(own.mean('entropy'), entropy.detach(), rtol=1e-12, atol=1e-12)
    uniform = (probs - 1 / keys).abs().sum(-1).mean((0, 2)) / 2
    torch.testing.assert_close(own.mean('from_uniform'), uniform.detach(), rtol=1e-12, atol=1e-12)
    between = (probs[:, :, None] - probs[:, None]).abs().sum(-1).mean((0, 3)) / 2
    torch.testing.assert_close(own.mean('distances'), between.detach(), rtol=1e-12, atol=1e-12)


def test_heads_that_look_at_other_things_in_each_image_are_no_duplicates():
    """Though their mean maps are the same, and uniform."""
    observed, layer = ObservedAttention(3), Heads('', nn.Identity(), 3)
    for shift in range(4):
        maps = [torch.eye(4).roll(shift * sign, 1) for sign in (1, -1)]
        observed.add(torch.stack([*maps, torch.full((4, 4), 0.25)])[None])
    report = report_of(layer, ['uniform', 'entropy', 'duplicate'], observed)
    assert report.heads == [2] and report.found[0].reason == 'distance 0 < 0.01 from uniform attention'
    assert report_of(layer, [dict(type='duplicate', threshold=0.6)], observed).heads == [1]
    with pytest.raises(TypeError, match="'stripe' is for Gaussian heads"):
        report_of(layer, ['stripe'], observed)
    with pytest.raises(ValueError, match='on images, but none were observed'):
        report_of(layer, ['entropy'], ObservedAttention(3))


def test_importance_of_convolutions_in_groups():
    """Whose heads the linear map after them takes apart; a loss that no head has a part in is refused."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(6, 5)).double()
    convs_to_attention(model, '0')
    images, labels = torch.randn(3, 4, 7, 7, dtype=torch.float64), torch.tensor([0, 2, 1])
    with torch.no_grad():
        expected = by_differences(model, images, labels)
    importance = head_importance(model, [(images, labels)], loss_of, normalize=False)
    torch.testing.assert_close(importance['0'], expected['0'], rtol=1e-5, atol=1e-9)
    with pytest.raises(ValueError, match='the loss does not depend on the heads of 0: they have no importance'):
        head_importance(model, [images], lambda model, batch: (model(batch), model[4].bias.sum())[1])
