"""The benchmarks: the dense original computes what our models compute, and the command measures and reports."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.small import small_timm

sys.path.insert(0, str(Path(__file__).parents[2] / 'tools/benchmarks'))

import benchmark  # noqa: E402
import groups  # noqa: E402
import measure  # noqa: E402
import memory  # noqa: E402
import models  # noqa: E402
import page  # noqa: E402

from attncnn_plugin.layers import grid_attention  # noqa: E402

QUICK = models.Settings(quick=True)


@pytest.mark.parametrize('name', list(groups.MODELS.values()))
@pytest.mark.parametrize('height, width, largest', [(6, 10, (6, 10)), (14, 8, (20, 16)), (4, 12, (4, 12))])
def test_original_computes_the_same(name, height, width, largest):
    size = dict(img_size=largest) if 'learned' in name else {}
    ours = small_timm(name, **size).double()
    for parameter in ours.parameters():  # no head, bias or norm is as it began
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    original = models.with_dense_original(ours, (height // 2, width // 2))
    images = torch.randn(3, 3, height, width, dtype=torch.float64)
    labels = torch.tensor([0, 4, 9])
    for mode in (True, False):
        outputs = [model.train(mode)(images) for model in (ours, original)]
        assert torch.allclose(*outputs, rtol=0, atol=1e-10)
    for model in (ours, original):
        F.cross_entropy(model.train()(images), labels).backward()
    gradients = {models.original_name(key): parameter.grad for key, parameter in ours.named_parameters()}
    assert gradients.keys() == dict(original.named_parameters()).keys()
    for key, parameter in original.named_parameters():
        # Of the bias of keys, which adds the same to the scores of all of them, it is 0.
        assert gradients[key].abs().sum() > 0 or key.endswith('key.bias'), key
        assert torch.allclose(gradients[key], parameter.grad, rtol=0, atol=1e-10), key


def test_original_leaves_our_model_as_it_is():
    ours = small_timm('sa_quadratic_cifar')
    layer = ours.blocks[0].attn
    original = models.with_dense_original(ours, 4)
    assert ours.blocks[0].attn is layer
    original.blocks[0].attn.center.data.zero_()
    assert layer.encoding.center.abs().sum() > 0


@pytest.mark.parametrize(
    'name, masks',
    [('sa_quadratic_cifar', 1), ('sa_generalized_cifar', 1), ('sa_learned_cifar', 2), ('sa_learned_content_cifar', 2)],
)
def test_dropout_of_the_original(name, masks):
    """One mask for the batch, or one an image."""
    ours = small_timm(name, attn_drop_rate=0.5)
    layer = models.with_dense_original(ours, (4, 6)).blocks[0].attn
    x = torch.randn(1, 4, 6, 16).expand(2, -1, -1, -1)
    assert torch.equal(*layer.eval()(x))
    assert torch.allclose(*layer.train()(x)) == (masks == 1)
    assert not torch.allclose(layer(x), layer.eval()(x))


def test_random_covariances():
    model = small_timm('sa_generalized_cifar', num_heads=50)
    models.draw_covariances(model)
    inverse = model.blocks[1].attn.encoding.inverse_covariance.detach()
    condition = torch.linalg.cond(inverse)
    assert 5 < condition.max() < 10.01 and condition.min() < 1.5
    assert math.sqrt(0.1) - 1e-3 < torch.linalg.eigvalsh(inverse).min() < 0.4
    assert inverse[:, 0, 1].max() > 0.1 and inverse[:, 0, 1].min() < -0.1  # all orientations


def test_functions_are_timed_in_turns(monkeypatch):
    monkeypatch.setattr(measure, 'SECONDS', 0)  # as many rounds as there are at least
    monkeypatch.setattr(measure, 'SECONDS_A_TURN', 0)
    calls = []
    functions = {name: lambda name=name: calls.append((name, torch.get_num_threads())) for name in 'ab'}
    measured = measure.side_by_side(functions)
    turns = ''.join(name for name, _ in calls[2:])  # after one call each
    assert [turns[i - 1 : i + 1] for i in range(1, len(turns)) if turns[i - 1] != turns[i]] == [
        'ab',
        'ba',
        'ab',
        'ba',
        'ab',
    ]
    assert {threads for _, threads in calls[2:]} == {measure.NUM_THREADS}
    assert [len(measured.seconds[name]) for name in 'ab'] == [3, 3]
    assert len(measure.side_by_side(functions, quick=True).seconds['a']) == 1


def test_ratio_is_the_median_over_the_rounds():
    seconds = dict(a=[2.0, 30.0, 6.0, 4.0, 1.0], b=[1.0, 10.0, 1.0, 4.0, 2.0])  # ratios 2, 3, 6, 1, 0.5
    ratio = measure.Measured(seconds, dict(a=3, b=2)).ratio('a', 'b')
    assert ratio == (2.0, 1.0, 1.5)
    assert str(ratio) == '2.00 ±1.00 (1.50)'


def test_multiply_adds():
    linear = torch.nn.Linear(5, 7)
    images, labels = torch.randn(3, 5), torch.tensor([0, 1, 2])
    assert measure.count_multiply_adds(measure.forward_pass(linear, images)) == 3 * 5 * 7
    step = measure.training_step(linear, images, labels)
    assert measure.count_multiply_adds(step) == 2 * 3 * 5 * 7  # of the weights' gradient too
    assert all(gradient.abs().sum() > 0 for gradient in step())


def test_forward_pass_has_no_gradients_and_no_dropout():
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    model = Model(2, 2)
    measure.forward_pass(model, torch.randn(1, 2))()
    measure.training_step(model, torch.randn(1, 2), torch.tensor([0]))()
    assert seen == [(False, False), (True, True)]


@pytest.mark.parametrize('kind', groups.KINDS)
def test_both_ways(kind):
    pair = groups.both_ways(QUICK, kind, 4)
    for name, model in pair.items():
        assert {block.attn.attn_impl for block in model.blocks} == {name}
    assert all(map(torch.equal, *(model.parameters() for model in pair.values())))
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(*(model.eval()(images) for model in pair.values()), atol=1e-5)


def test_heads_are_decomposed_in_every_call_anew(monkeypatch):
    model, calls = groups.both_ways(QUICK, 'generalized, trained heads', 4)['auto'], []
    cheapest_heads = grid_attention.cheapest_heads
    monkeypatch.setattr(grid_attention, 'cheapest_heads', lambda *args: calls.append(1) or cheapest_heads(*args))
    call = groups.call_anew(model, torch.randn(2, 3, 8, 8))
    for _ in range(3):
        call()
    assert len(calls) == 3 * len(model.blocks)


def table_rows(text):
    return [line.split(' | ')[0].strip('| ') for line in text.splitlines() if line.startswith('|')][2:]


@pytest.mark.parametrize('names', [['first', 'growth'], pytest.param(list(groups.GROUPS), marks=pytest.mark.slow)])
def test_the_command(names, tmp_path, monkeypatch, capsys):
    """Some groups or all of them, then one of them again."""
    path = tmp_path / 'docs/benchmarks.md'
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', '--quick', '--page', str(path), '--only', *names])
    benchmark.main()
    text, printed = path.read_text(), capsys.readouterr().out
    sections = text.split('\n## ')[2:]  # after the introduction and how it is measured
    assert len(sections) == len(names)
    for name, section in zip(names, sections):
        assert f'{groups.GROUPS[name].title} (`{name}`)' in section
        assert 'no measurement' in section and section.strip() in printed
        assert table_rows(section) and ('±' in section or 'memory' in name)

    monkeypatch.setattr(sys, 'argv', ['benchmark.py', '--quick', '--page', str(path), '--only', 'growth'])
    monkeypatch.setattr(page.os, 'getloadavg', lambda: (7.2, 0, 0))
    benchmark.main()
    again = path.read_text().split('\n## ')[2:]
    assert [a == b for a, b in zip(again, sections)] == [name != 'growth' for name in names]
    assert 'other processes ran on the machine too (load 7)' in again[names.index('growth')]


@pytest.mark.slow
def test_memory_is_that_of_the_step():
    large = bytearray(15 * 10**8)  # what this process has had must not count
    added = memory.added_by(groups.make_training_step, QUICK, 'sa_quadratic_cifar', True, 32, 4)
    # Scores, probabilities and the gradients of both, of one layer at least, (3, 32², 32²) of four bytes.
    assert 4 * 3 * 32**4 * 4 < added < len(large)
    with pytest.raises(RuntimeError, match='Unknown model'):
        memory.added_by(groups.make_training_step, QUICK, 'no_model', True, 32, 4)
