"""The benchmarks: the dense original computes what our models compute, and the command measures and reports."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.small import small_timm

sys.path.insert(0, str(Path(__file__).parents[2] / 'tools/benchmarks'))

import benchmark  # noqa: E402
import measure  # noqa: E402
from original import with_dense_original  # noqa: E402

from attncnn_plugin.attention import GeneralizedQuadraticAttention  # noqa: E402
from attncnn_plugin.convert import conv_to_mhsa  # noqa: E402


@pytest.mark.parametrize('name', benchmark.C20.values())
@pytest.mark.parametrize('height, width, largest', [(6, 10, (6, 10)), (14, 8, (20, 16)), (4, 12, (4, 12))])
def test_original_computes_the_same(name, height, width, largest):
    size = dict(img_size=largest) if 'learned' in name else {}
    ours = small_timm(name, **size).double()
    for parameter in ours.parameters():  # no head, bias or norm is as it began
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    original = with_dense_original(ours, height // 2, width // 2)
    images = torch.randn(3, 3, height, width, dtype=torch.float64)
    labels = torch.tensor([0, 4, 9])
    for mode in (True, False):
        outputs = [model.train(mode)(images) for model in (ours, original)]
        assert torch.allclose(*outputs, rtol=0, atol=1e-10)
    for model in (ours, original):
        F.cross_entropy(model.train()(images), labels).backward()
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    of_original = {key.replace('.layer.', '.'): parameter.grad for key, parameter in original.named_parameters()}
    assert gradients.keys() == of_original.keys()
    for key, gradient in of_original.items():
        # Of the bias of keys, which adds the same to the scores of all of them, it is 0.
        assert gradients[key].abs().sum() > 0 or key.endswith('key.bias'), key
        assert torch.allclose(gradients[key], gradient, rtol=0, atol=1e-10), key


def test_original_has_every_probability_and_leaves_our_model_as_it_is():
    ours = small_timm('sa_quadratic_cifar')
    layer, images = ours.blocks[0].attn, torch.randn(1, 3, 8, 12)
    original = with_dense_original(ours, 4, 6)
    shapes = []
    original.blocks[0].attn.scores = lambda x, scores=original.blocks[0].attn.scores: (
        shapes.append(scores(x).shape) or scores(x)
    )
    original(images)
    assert shapes == [(4, 6, 3, 4, 6)]
    assert ours.blocks[0].attn is layer
    original.blocks[0].attn.layer.encoding.center.data.zero_()
    assert layer.encoding.center.abs().sum() > 0


def subnormals(probs):
    return ((probs > 0) & (probs < torch.finfo(torch.float32).tiny)).any().item()


@pytest.mark.parametrize(
    'probs_of',
    [
        lambda: GeneralizedQuadraticAttention(8, 3).attention_probs((20, 20)),  # the softmax
        lambda: small_timm('sa_quadratic_cifar').blocks[0].attn.attention_probs((12, 12)),  # a product of two
        lambda: conv_to_mhsa(torch.nn.Conv2d(2, 2, 3, padding=1), alpha=1.5)[0].attention_probs((12, 12)),
    ],
)
def test_before_has_the_subnormal_probabilities(probs_of):
    assert not subnormals(probs_of())
    assert benchmark.before(lambda: subnormals(probs_of()))()
    assert not subnormals(probs_of())


def test_functions_are_timed_in_turns(monkeypatch):
    monkeypatch.setattr(measure, 'SECONDS', 0)  # as many rounds as there are at least
    monkeypatch.setattr(measure, 'SECONDS_A_TURN', 0)
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in 'ab'}
    measured = measure.side_by_side(steps)
    assert (
        ''.join(calls) == 'ab' * 5
    )  # counted and warmed up, timed once to know how many calls a turn has, three rounds
    assert [len(measured.seconds[name]) for name in 'ab'] == [3, 3]
    assert len(measure.side_by_side(steps, quick=True).seconds['a']) == 1


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
    step = measure.layer_step(linear, images)
    assert measure.count_multiply_adds(step) == 3 * 3 * 5 * 7  # of the input's gradient too
    assert images.grad.abs().sum() > 0 and linear.weight.grad.abs().sum() > 0


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


def test_half_of_the_heads(monkeypatch):
    seen = []

    def compare(quick, training, models, *_):
        seen.append({name: model.blocks[0].attn.num_heads for name, model in models.items()})
        return measure.Measured(dict(pruned=[1.0], whole=[2.0]), dict(pruned=1, whole=2))

    monkeypatch.setattr(benchmark, 'compare', compare)
    assert {cell[2] for cell in benchmark.pruning(True)} == {(0.5, 0, 0.5)}
    assert seen == [dict(pruned=2, whole=3), dict(pruned=5, whole=9), dict(pruned=1, whole=2)]


def table_rows(text):
    return [line.split(' | ')[0].strip('| ') for line in text.splitlines() if line.startswith('|')][2:]


@pytest.mark.parametrize('names', [['pruning', 'cmhsa'], pytest.param(list(benchmark.GROUPS), marks=pytest.mark.slow)])
def test_the_command(names, tmp_path, monkeypatch, capsys):
    """Some groups or all of them, then one of them again."""
    names = [name for name in benchmark.GROUPS if name in names]  # in the order of the page
    path = tmp_path / 'docs/benchmarks.md'
    command = ['benchmark.py', '--quick', '--threads', '1', '--page', str(path), '--only']
    monkeypatch.setattr(sys, 'argv', [*command, *names])
    benchmark.main()
    text, printed = path.read_text(), capsys.readouterr().out
    sections = text.split('\n## ')[2:]  # after the introduction and how it is measured
    assert len(sections) == len(names)
    for name, section in zip(names, sections):
        assert section.splitlines()[0].endswith(f' (`{name}`)') and section.count('\n\n') >= 3
        assert 'no measurement' in section and section.strip() in printed
        assert table_rows(section) and ('±' in section or name == 'memory')

    monkeypatch.setattr(sys, 'argv', [*command, 'pruning'])
    monkeypatch.setattr(benchmark.os, 'getloadavg', lambda: (7.2, 0, 0))
    benchmark.main()
    again = path.read_text().split('\n## ')[2:]
    assert [a == b for a, b in zip(again, sections)] == [name != 'pruning' for name in names]
    assert 'other processes ran on the machine too (load 7)' in again[names.index('pruning')]


@pytest.mark.slow
def test_memory_is_that_of_the_step():
    large = bytearray(15 * 10**8)  # what this process has had must not count
    added = measure.added_by(benchmark.c20_step, True, 'sa_quadratic_cifar', 32, 4, True)
    # Scores, probabilities and the gradients of both, of one layer at least, (3, 32², 32²) of four bytes.
    assert 4 * 3 * 32**4 * 4 < added < len(large)
    with pytest.raises(RuntimeError, match='Unknown model'):
        measure.added_by(benchmark.c20_step, True, 'no_model', 32, 4, True)
