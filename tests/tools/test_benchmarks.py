"""The benchmarks: the dense original computes what our models compute, and the command measures and reports."""

import json
import math
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.small import small_timm

sys.path.insert(0, str(Path(__file__).parents[2] / 'tools/benchmarks'))

import benchmark  # noqa: E402
import cost_curve  # noqa: E402
import groups  # noqa: E402
import memory  # noqa: E402
import models  # noqa: E402
import report  # noqa: E402
import steps  # noqa: E402
import timing  # noqa: E402
from settings import Settings  # noqa: E402

QUICK = Settings(quick=True)


@pytest.mark.parametrize('name', list(groups.SA_NAMES.values()))
@pytest.mark.parametrize('height, width, largest', [(6, 10, (6, 10)), (14, 8, (20, 16)), (4, 12, (4, 12))])
def test_original_computes_the_same(name, height, width, largest):
    size = dict(img_size=largest) if 'learned' in name else {}
    ours = small_timm(name, **size).double()
    for parameter in ours.parameters():  # no head, bias or norm is as it began
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    original = models.with_original_attention(ours, height, width)
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
        assert gradients[key].abs().sum() > 0, key
        assert torch.allclose(gradients[key], parameter.grad, rtol=0, atol=1e-10), key


def test_original_leaves_our_model_as_it_is():
    ours = small_timm('sa_quadratic_cifar')
    layer = ours.blocks[0].attn
    original = models.with_original_attention(ours, 8, 8)
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
    layer = models.with_original_attention(ours, 8, 12).blocks[0].attn
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


def test_functions_are_timed_in_turns():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in 'ab'}
    seconds = timing.in_turns(functions, 'cpu', timing.Repetitions(3, 3))
    assert ''.join(calls) == 'ababab'
    assert [len(seconds[name]) for name in 'ab'] == [3, 3]
    assert len(timing.in_turns(functions, 'cpu', timing.Repetitions(2, 9, 0.0))['a']) == 2
    assert len(timing.in_turns(functions, 'cpu', timing.Repetitions(2, 9, 60.0))['a']) == 9


def test_multiply_adds():
    linear = torch.nn.Linear(5, 7)
    images, labels = torch.randn(3, 5), torch.tensor([0, 1, 2])
    assert timing.multiply_adds(steps.forward_pass(linear, images)) == 3 * 5 * 7
    assert timing.multiply_adds(steps.training_step(linear, images, labels)) == 2 * 3 * 5 * 7  # weights' gradient too
    assert all(parameter.grad.abs().sum() > 0 for parameter in linear.parameters())


def test_forward_pass_has_no_gradients_and_no_dropout():
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled(), torch.is_autocast_enabled('cpu')))
            return super().forward(x)

    model = Model(2, 2)
    steps.forward_pass(model, torch.randn(1, 2))()
    steps.training_step(model, torch.randn(1, 2), torch.tensor([0]), torch.bfloat16)()
    assert seen == [(False, False, False), (True, True, True)]


def test_ratio():
    measured = dict(
        seconds=dict(a=[9.0, 1.0, 2.0], b=[4.0, 4.0, 4.0], c=[1.0, 8.0, 2.0]), multiply_adds=dict(a=1, b=3, c=8)
    )
    one = groups.row(Settings(), 'one', measured, ['a'], 'b', 'a', groups.at_most(0.5))
    both = groups.row(Settings(), 'both', measured, ['a', 'b'], 'c', target=groups.at_least(1.6))
    assert one['ratio'] == 0.5 and both['ratio'] == 1.5 and both['ratio_of_multiply_adds'] == 0.25
    assert report.is_met(one) and not report.is_met(both)
    for settings in (QUICK, Settings(device='cuda'), Settings(dtype_name='bfloat16')):
        assert groups.row(settings, 'none', measured, ['a'], 'b', target=groups.at_most(1))['target'] is None


def curve(power):
    """Points whose attention takes tokens^power, and whose linear map takes tokens."""
    return [
        dict(side=side, multiply_adds={}, seconds=dict(ours=[side ** (2 * power) + side**2], linear=[side**2]))
        for side in (4, 8, 16)
    ]


def test_exponent():
    assert cost_curve.exponent(curve(1.5), 'ours') == pytest.approx(1.5)
    assert 1 < cost_curve.exponent(curve(1.5), 'ours', cost_curve.layer_time) < 1.5
    assert cost_curve.exponent(curve(1.5), 'dense') is None
    unmeasurable = [*curve(1.5), dict(side=32, seconds=dict(ours=[1.0], linear=[2.0]))]
    assert cost_curve.exponent(unmeasurable, 'ours') == pytest.approx(1.5)


@pytest.mark.slow
def test_memory_is_that_of_the_step():
    large = bytearray(15 * 10**8)  # what this process has had must not count
    figure = memory.in_new_process(QUICK, 'original', 'sa_quadratic_cifar', 64, 4)
    assert 10**8 < figure['before'] < figure['peak'] < len(large)
    # Scores, probabilities and the gradients of both, of one layer at least, (3, 32², 32²) of four bytes.
    assert figure['peak'] - figure['before'] > 4 * 3 * 32**4 * 4


def test_memory_that_cannot_be_measured(tmp_path, monkeypatch):
    (tmp_path / 'memory.py').write_text("import sys\nsys.exit(f'{sys.argv[1]} does not fit')")
    monkeypatch.setattr(memory, '__file__', str(tmp_path / 'memory.py'))
    with pytest.raises(RuntimeError, match='ours sa_learned_cifar at 64 px, batch 4, failed: ours does not fit'):
        memory.in_new_process(QUICK, 'ours', 'sa_learned_cifar', 64, 4)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    out, page = tmp_path / 'all.json', tmp_path / 'docs/benchmarks.md'
    command = [sys.executable, benchmark.__file__, '--quick', '--out', str(out), '--markdown', str(page)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads(out.read_text())
    assert results['groups'].keys() == groups.GROUPS.keys() and all(results['groups'].values())
    assert results['settings']['torch'] == torch.__version__ and results['settings']['threads'] == 1
    assert platform.node() not in out.read_text().split('"')
    text = page.read_text()
    for name, group in groups.GROUPS.items():
        for where in (result.stdout, text):
            assert f'### {group.title} (`{name}`)' in where
        for row in results['groups'][name]:
            assert name == 'cost' or f'| {row["name"]} ' in text
            for times in row.get('seconds', {}).values():
                assert times and min(times) > 0
    added = results['groups']['memory'][1]
    assert added['name'].endswith('added by the step') and 0 < added['ratio'] < 1
    assert 'Fitted exponent' in result.stdout
    assert '](images/attention_cost.svg)' in text
    assert '<svg' in (tmp_path / 'docs/images/attention_cost.svg').read_text()

    parts = [tmp_path / 'first.json', tmp_path / 'second.json']  # of one run, group by group
    for part, names in zip(parts, (['sa', 'memory'], list(results['groups'])[2:])):
        part.write_text(json.dumps(dict(results, groups={name: results['groups'][name] for name in names})))
    again = tmp_path / 'again/benchmarks.md'
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', '--from', *map(str, parts), '--markdown', str(again)])
    benchmark.main()
    assert again.read_text() == text


def test_options_that_contradict(capsys, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', '--from', 'a.json', '--only', 'sa'])
    with pytest.raises(SystemExit):
        benchmark.parse_args()
    assert 'leave --only and --out away' in capsys.readouterr().err
