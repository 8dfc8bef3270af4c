"""Heads that are taken out against a copy that was really pruned."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.small import small_timm, trained_like
from helpers.vits import SIZE, output_map, output_of, small_classifier, small_vit
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attncnn_plugin.pruning import head_ablation, head_costs, head_importance, prunable_heads, prune_heads
from attncnn_plugin.pruning.means import head_means
from attncnn_plugin.training import PruneHeads


def loss_and_right(model, batch):
    logits = output_of(model, batch[0])
    return F.cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).sum()


def without(model, batches, loss, head, name, kind, prune=False):
    """Loss and accuracy of a copy without the head, over all images at once: its columns are zero, or it is pruned."""
    copied = copy.deepcopy(model).eval()
    images, labels = (torch.cat(parts) for parts in zip(*batches))
    output, columns = output_map(copied, name, head)
    with torch.no_grad():
        if kind == 'mean':
            with head_means(copied) as means:
                output_of(copied, images)
            mean = means[name].mean[head].to(output.weight)
            output.bias.add_((output.weight[..., columns] @ mean).flatten())
        if prune:
            prune_heads(copied, {name: [head]}, images)
        else:
            output.weight[..., columns] = 0
        mean, right = loss(copied, (images, labels))
    return mean.item(), right.item() / len(images)


def check(ablation, model, batches, exact):
    """Compares every head with a copy without it; returns the sizes of the changes of the loss."""
    changes = []
    for kind in ('mean', 'zero'):
        of_loss, of_accuracy = getattr(ablation, f'{kind}_loss'), getattr(ablation, f'{kind}_accuracy')
        assert list(of_loss) == list(of_accuracy) == list(prunable_heads(model))
        for layer, own in prunable_heads(model).items():
            assert of_loss[layer].shape == of_accuracy[layer].shape == (own.num_heads,)
            for head in range(own.num_heads):
                mean, accuracy = without(model, batches, loss_and_right, head, layer, kind)
                torch.testing.assert_close((ablation.loss + of_loss[layer][head]).item(), mean, **exact)
                torch.testing.assert_close((ablation.accuracy + of_accuracy[layer][head]).item(), accuracy, **exact)
                changes.append(abs(of_loss[layer][head].item()))
    return changes


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize(
    'name',
    [
        'vit_tiny_patch16_224',
        'swin_tiny_patch4_window7_224',
        'transformers.ViT',
        'torchvision.VisionTransformer',
        'sa_quadratic_cifar',
        'cmhsa_attn',
        'cmhsa_narrow',
    ],
)
def test_ablation_is_that_of_a_pruned_copy(name, dtype):
    model, size = small_classifier(name)
    model = model.to(dtype).train()
    batches = [(torch.randn(number, 3, size, size, dtype=dtype), torch.randint(5, (number,))) for number in (4, 1, 2)]
    state = copy.deepcopy(model.state_dict())
    ablation = head_ablation(model, iter(batches), loss_and_right)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks or 'forward' in vars(module) for module in model.modules())
    exact = dict(rtol=1e-9, atol=1e-9) if dtype == torch.float64 else dict(rtol=1e-4, atol=1e-4)
    changes = check(ablation, model, batches, exact)
    assert max(changes) > 1e-3  # something changed
    layer = list(prunable_heads(model))[-1]
    mean, accuracy = without(model, batches, loss_and_right, 1, layer, 'mean', prune=True)
    torch.testing.assert_close((ablation.loss + ablation.mean_loss[layer][1]).item(), mean, **exact)
    importance = head_importance(model, batches, lambda *args: loss_and_right(*args)[0], normalize=False)
    for layer, values in head_importance(model, batches, loss_and_right).items():  # takes the same function
        assert torch.equal(ablation.importance[layer], importance[layer])
        torch.testing.assert_close(values, importance[layer] / importance[layer].norm())


@given(
    name=st.sampled_from(['vit_tiny_patch16_224', 'torchvision.VisionTransformer', 'sa_generalized_cifar']),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    seed=st.integers(0, 99),
)
def test_any_width_heads_and_batches(name, heads, head_dim, sizes, seed):
    """One head of a layer too, and batches of one image."""
    torch.manual_seed(seed)
    width = heads * head_dim
    if name == 'torchvision.VisionTransformer':
        model = small_vit(name, hidden_dim=width, num_heads=heads)
    else:
        build = small_timm if name.startswith('sa_') else small_vit
        model = trained_like(build(name, embed_dim=width, num_heads=heads, num_classes=5))
    model, size = model.double(), 16 if name.startswith('sa_') else SIZE
    batches = [(torch.randn(n, 3, size, size, dtype=torch.float64), torch.randint(5, (n,))) for n in sizes]
    check(head_ablation(model, batches, loss_and_right), model, batches, dict(rtol=1e-9, atol=1e-9))


class Several(nn.Module):
    """Attention with several outputs of its heads, which may be replaced."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.qkv, self.w = kind, nn.Linear(12, 36), nn.Linear(12, 6)
        self.out, self.replaced = nn.Linear(18 if kind == 'two widths' else 12, 12), {}

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        probs, w = (q @ k.mT).softmax(-1), self.w(x).unflatten(2, (3, 2)).transpose(1, 2)
        second = dict(relative=v.flip(2), sources=v)
        outputs = [
            probs @ v,
            (q @ q.mT).softmax(-1) @ v if self.kind == 'sources' else probs @ second.get(self.kind, w),
        ]
        self.outputs = [own.detach() for own in outputs]
        for own, mean in zip(outputs, self.replaced.get('means', ())):
            own[:, self.replaced['head']] = mean
        if self.kind == 'two widths':
            return self.out(torch.cat([own.transpose(1, 2).flatten(2) for own in outputs], -1))
        return self.out((outputs[0] + outputs[1]).transpose(1, 2).flatten(2))


@pytest.mark.parametrize('kind', ['two widths', 'relative', 'sources'])
def test_each_output_of_a_head_has_its_own_mean(kind):
    """And one bias cannot make up for several."""
    torch.manual_seed(0)
    model, x = Several(kind).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    found, whole = head_ablation(model, [x], loss), loss(model, x)
    with head_means(model) as means:
        model(x)
    with pytest.raises(ValueError, match='has no one mean output: set bias_correction=False'):
        means[''].mean  # noqa: B018
    for head in range(3):
        for changes, scale in ((found.mean_loss, 1), (found.zero_loss, 0)):
            model.replaced = dict(means=[scale * own[:, head].mean((0, 1)) for own in model.outputs], head=head)
            expected, model.replaced = (loss(model, x) - whole).item(), {}
            model(x)
            assert changes[''][head].item() == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_a_loss_without_accuracy_and_the_table():
    torch.manual_seed(0)
    model, batches = small_vit('vit_tiny_patch16_224'), [(torch.randn(3, 3, SIZE, SIZE), torch.arange(3))]
    full = head_ablation(model, batches, loss_and_right)
    alone = head_ablation(model, batches, lambda *args: loss_and_right(*args)[0])
    assert alone.accuracy is None and alone.mean_accuracy == alone.zero_accuracy == {}
    for name, values in full.zero_loss.items():
        assert torch.equal(alone.zero_loss[name], values)
    lines = str(full).splitlines()
    assert lines[0].split('  ')[0] == 'layer' and 'accuracy, at its mean' in lines[0] and 'accuracy' not in str(alone)
    assert len(lines) == 2 + 6 and lines[2].split()[:2] == ['blocks.0.attn', '0']
    assert f'{full.mean_loss["blocks.0.attn"][0]:+.4f}' in lines[2]


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'sa_generalized_cifar'])
@pytest.mark.parametrize('in_place', [False, True])
def test_a_compiled_model_is_judged_too(in_place, name):
    model, size = small_classifier(name)
    batches = [(torch.randn(2, 3, size, size), torch.arange(2))]
    pruner = PruneHeads(batches=batches, keep=3, criteria=[dict(type='entropy', threshold=0.0)])
    judge = (
        lambda model: head_ablation(model, batches, loss_and_right).mean_loss,
        lambda model: head_importance(model, batches, loss_and_right),
        lambda model: head_costs(model, lambda: model(batches[0][0]))[1],
        lambda model: {name: own.mean for name, own in pruner.judge(model).means.items()},
    )
    expected = [own(model) for own in judge]
    if in_place:
        model.compile(backend='eager')
    compiled = model if in_place else torch.compile(model, backend='eager')
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            compiled.eval()(batches[0][0])
    for own, values in zip(judge, expected):
        for found, value in zip(own(compiled).values(), values.values()):
            torch.testing.assert_close(found, value)


def test_refused_losses():
    model = small_vit('vit_tiny_patch16_224')
    images, labels = torch.randn(2, 3, SIZE, SIZE), torch.tensor([0, 1])
    batches = [(images, labels)]
    for bad, message in (
        (lambda model, batch: loss_and_right(model, batch)[0] * torch.nan, 'is nan for batch 0: a finite number'),
        (lambda model, batch: loss_and_right(model, batch)[0].item(), 'gave .* without .item()'),
        (lambda model, batch: model(batch[0]), r'gave <Tensor of shape \(2, 5\)>, but the mean loss is needed'),
        (lambda model, batch: (loss_and_right(model, batch)[0], 3), 'gives 3.0 right predictions of 2 images'),
        (lambda model, batch: torch.tensor(1.0), 'called the model 0 times'),
    ):
        with pytest.raises(ValueError, match=message):
            head_ablation(model, batches, bad)
        assert not any(module._forward_pre_hooks for module in model.modules())
    for measure in (head_ablation, head_importance):
        with pytest.raises(ValueError, match='batches are none'):
            measure(model, [], loss_and_right)
        without = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE**2, 5))
        with pytest.raises(ValueError, match='no attention of a Sequential was seen'):
            measure(without, batches, loss_and_right)
