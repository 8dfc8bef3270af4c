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


def test_ratio_is_the_median_over_the_rounds():
    seconds = dict(a=[2.0, 30.0, 6.0, 4.0, 1.0], b=[1.0, 10.0, 1.0, 4.0, 2.0])  # ratios 2, 3, 6, 1, 0.5
    ratio = measure.Measured(seconds, dict(a=3, b=2)).ratio('a', 'b')
    assert ratio == (2.0, 1.0, 1.5)
    assert str(ratio) == '2.00 ±1.00 (1.50)'


def table_rows(text):
    return [line.split(' | ')[0].strip('| ') for line in text.splitlines() if line.startswith('|')][2:]


@pytest.mark.parametrize('names', [['pruning', 'cmhsa'], pytest.param(list(benchmark.GROUPS), marks=pytest.mark.slow)])
def test_the_command(names, tmp_path, monkeypatch, capsys):
    """Some groups or all of them, then one of them again."""
    names = [name for name in benchmark.GROUPS if name in names]  # in the order of the page
    path = tmp_path / 'benchmarks.md'
    path.write_text(introduction := '# Benchmarks\n\n## How it is measured\n\nIn turns.\n\n')
    command = ['benchmark.py', '--quick', '--threads', '1', '--page', str(path), '--only']
    monkeypatch.setattr(sys, 'argv', [*command, *names])
    benchmark.main()
    text, printed = path.read_text(), capsys.readouterr().out
    sections = text.split('\n## ')[2:]  # after the introduction and how it is measured
    assert len(sections) == len(names) and text.startswith(introduction)
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
