"""Degenerate heads: what the criteria measure, which heads they find, and what they refuse."""

import copy
import math

import pytest
import timm
import torch
from helpers.small import small_timm
from hypothesis import assume, example, given
from hypothesis import strategies as st

from attncnn_plugin import pruning
from attncnn_plugin.attention import (
    ContentAttention,
    GeneralizedQuadraticAttention,
    LearnedAttention,
    QuadraticAttention,
)
from attncnn_plugin.convert import conv_to_mhsa
from attncnn_plugin.pruning import criteria
from attncnn_plugin.pruning.criteria import (
    DegeneracyReport,
    degenerate_heads_of_maps,
    exact_maps,
    factor_of,
    relative_entropy_of_maps,
)

entries = st.floats(-4, 4, width=32) | st.floats(-(2**-10), 2**-10, width=32) | st.sampled_from([0.0, 1.0, -2.0])
matrices = st.lists(entries, min_size=4, max_size=4)


def quadratic(sqrt_precision, centers=None, dtype=torch.float32):
    layer = QuadraticAttention(2, len(sqrt_precision), dtype=dtype)
    with torch.no_grad():
        layer.encoding.sqrt_precision.copy_(torch.tensor(sqrt_precision, dtype=torch.float64))
        if centers is not None:
            layer.encoding.center.copy_(torch.tensor(centers))
    return layer


def generalized(factors, dtype=torch.float32):
    layer = GeneralizedQuadraticAttention(2, len(factors), dtype=dtype)
    with torch.no_grad():
        layer.encoding.sqrt_precision.copy_(torch.tensor(factors, dtype=torch.float64).reshape(-1, 2, 2))
    return layer


def learned(weight=None, num_heads=4):
    layer = LearnedAttention(4, num_heads if weight is None else len(weight), max_size=(6, 6))
    if weight is not None:
        with torch.no_grad():
            layer.encoding.weight.copy_(weight)
    return layer


def find_degenerate_heads(layer, *args):
    (report,) = pruning.find_degenerate_heads(layer, *args).reports.values()
    return report


def largest_eigenvalue(layer):
    return criteria.largest_eigenvalue(factor_of(layer.gaussian_heads()))


def condition_number(layer):
    return criteria.condition_number(factor_of(layer.gaussian_heads()))


def values(found):
    return [(entry.head, entry.criterion, entry.value, entry.duplicate_of) for entry in found]


def eigenvalues(layer):
    """λ₂ and λ₁ of each head, by LAPACK in float64."""
    factor = layer.encoding.sqrt_precision.detach().double()
    return torch.linalg.eigvalsh(factor @ factor.mT).unbind(-1)


def distance(layer, first, second, size):
    """Total variation of two heads, mean over queries."""
    maps = copy.deepcopy(layer).double().attention_probs(size).tolist()
    queries = list(zip(maps[first], maps[second]))
    return sum(sum(abs(p - q) for p, q in zip(*rows)) / 2 for rows in queries) / len(queries)


@given(st.lists(matrices, min_size=1, max_size=3), st.sampled_from([torch.float32, torch.float64]))
@example([[0.1, 0.2, 0.3, 0.7]], torch.float32)
def test_eigenvalues_are_those_of_lapack(factors, dtype):
    layer = generalized(factors, dtype)
    smallest, largest = eigenvalues(layer)
    torch.testing.assert_close(largest_eigenvalue(layer), largest, rtol=1e-12, atol=0)
    known = smallest > 1e-8 * largest  # LAPACK's own error is 1e-16 of the largest
    value = condition_number(layer)
    torch.testing.assert_close(value[known], (largest / smallest)[known], rtol=1e-6, atol=0)
    assert (value[~known & (largest > 0)] > 1e7).all() and (value[largest == 0] == 1).all()
    found = {head.head: (head.criterion, head.value) for head in find_degenerate_heads(layer).found}
    assert found == {
        **{h: ('stripe', value[h].item()) for h in range(len(factors)) if value[h] > 1e3},
        **{h: ('uniform', v) for h, v in enumerate(largest_eigenvalue(layer).tolist()) if v < 1e-5},
    }


@given(st.tuples(*[st.integers(-9, 9)] * 4), st.integers(-20, 20))
def test_a_singular_factor_is_a_stripe(vectors, exponent):
    a, b, c, d = vectors
    assume((a or b) and (c or d))
    layer = generalized([[math.ldexp(entry, exponent) for entry in (a * c, a * d, b * c, b * d)]])
    assert condition_number(layer).tolist() == [math.inf]
    assert values(find_degenerate_heads(layer, ['stripe']).found) == [(0, 'stripe', math.inf, None)]


def test_nothing_at_all_is_uniform_and_no_stripe():
    for layer in (generalized([[0.0] * 4]), quadratic([0.0])):
        assert find_degenerate_heads(layer, ['stripe']).found == ()
        assert values(find_degenerate_heads(layer, ['stripe', 'uniform']).found) == [(0, 'uniform', 0.0, None)]


def test_thresholds_of_the_paper():
    """The text's for uniform heads, the released code's for stripes; the text's for these is an argument."""
    widths = [math.sqrt(1.01e-5), -math.sqrt(0.99e-5), 1.0, math.sqrt(0.99e-5)]
    assert find_degenerate_heads(quadratic(widths)).heads == [1, 3]
    assert largest_eigenvalue(quadratic(widths)).tolist() == pytest.approx([1.01e-5, 0.99e-5, 1, 0.99e-5], rel=1e-6)

    def turned(first, second):  # Σ⁻¹ with these eigenvalues, axes turned by 30°
        c, s = math.cos(math.pi / 6), math.sin(math.pi / 6)
        first, second = math.sqrt(first), math.sqrt(second)
        return [c * first, -s * second, s * first, c * second]

    near = (1, 1), (3, 3 / 0.99e3), (3, 3 / 1.01e3), (1.01e-5, 0.99e-5), (0.99e-5, 0.98e-5), (9e-6, 1e-12)
    layer = generalized([turned(*pair) for pair in near])
    report = find_degenerate_heads(layer)
    assert [(head.head, head.criterion) for head in report.found] == [(2, 'stripe'), (4, 'uniform'), (5, 'uniform')]
    of_the_text = generalized([turned(3, 3 / 0.99e5), turned(3, 3 / 1.01e5)])
    assert find_degenerate_heads(of_the_text, [dict(type='stripe', threshold=1e5)]).heads == [1]
    assert find_degenerate_heads(of_the_text).heads == [0, 1]
    # A head is reported once, under the first criterion that finds it.
    assert find_degenerate_heads(layer, ['stripe', 'uniform']).found[-1].criterion == 'stripe'


@pytest.mark.parametrize('name', ['uniform', 'stripe', 'entropy', 'duplicate'])
def test_a_value_at_the_threshold_is_not_beyond_it(name):
    layer = generalized([[1, 0.3, 0.2, 0.5]] * 2)
    with torch.no_grad():
        layer.encoding.center.copy_(torch.tensor([[0.3, 0.1], [0.5, 0.2]]))
    beyond = math.inf if name in ('uniform', 'duplicate') else 0

    def found(threshold):
        return find_degenerate_heads(layer, [dict(type=name, threshold=threshold)], (3, 4)).found

    assert found(beyond)
    for entry in found(beyond):
        assert entry.head not in [own.head for own in found(entry.value)]
        assert values([entry])[0] in values(found(math.nextafter(entry.value, beyond)))


@given(st.integers(1, 5), st.integers(2, 5))
def test_relative_entropy(height, width):
    layer = generalized([[4, 0.3, 0.2, 3], [0, 0, 0, 0], [60, 0, 0, 60], [0.1, 0, 0, 0.1]])
    with torch.no_grad():
        layer.encoding.center.mul_(0.1)
    value = relative_entropy_of_maps(exact_maps(layer, (height, width)))
    assert torch.equal(relative_entropy_of_maps(layer.exact_attention_probs((height, width))), value)
    for head, probs in enumerate(copy.deepcopy(layer).double().attention_probs((height, width)).tolist()):
        entropy = [-sum(p * math.log(p) for p in row if p > 0) for row in probs]
        assert value[head].item() == pytest.approx(sum(entropy) / len(entropy) / math.log(height * width), abs=1e-12)
    assert value[1] == pytest.approx(1) and value[1] <= 1 and value[2] <= 1e-6
    # Nearly uniform on a small grid only.
    assert find_degenerate_heads(layer, ['entropy'], (height, width)).heads == [1, 3]
    assert find_degenerate_heads(layer, ['entropy'], 24).heads == [1]


def test_a_duplicate_names_the_nearest_of_the_kept_heads():
    layer, size = quadratic([1.0] * 3, centers=[[0.0, 0.0], [0.0, 1.0], [0.0, 0.8]]), (4, 5)
    threshold = distance(layer, 0, 1, size)
    assert distance(layer, 0, 2, size) < threshold  # 0 would be near enough
    report = find_degenerate_heads(layer, [dict(type='duplicate', threshold=threshold - 1e-9)], size)
    assert [(head.head, head.duplicate_of) for head in report.found] == [(2, 1)]


@given(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.35, 0.5, 1.0, 2.0]), min_size=1, max_size=6), st.floats(0.01, 0.9))
def test_duplicates_are_near_kept_heads_and_kept_heads_are_apart(shifts, threshold):
    layer, size = quadratic([1.0] * len(shifts), centers=[[shift, -shift] for shift in shifts]), (3, 4)
    found = find_degenerate_heads(layer, [dict(type='duplicate', threshold=threshold)], size).found
    kept = [head for head in range(len(shifts)) if head not in [entry.head for entry in found]]
    assert kept[0] == 0
    for first in kept:
        for second in kept:
            assert first == second or distance(layer, first, second, size) > threshold - 1e-9
    for entry in found:
        assert entry.duplicate_of in kept and entry.duplicate_of < entry.head and entry.value < threshold
        assert entry.value == pytest.approx(distance(layer, entry.duplicate_of, entry.head, size), abs=1e-12)


@pytest.mark.parametrize('names', [['uniform', 'duplicate'], ['duplicate', 'uniform']])
def test_a_degenerate_head_is_not_the_kept_one_of_a_group(names):
    below, above = math.sqrt(0.99e-5), math.sqrt(1.01e-5)  # all but equal on this grid, on both sides of the threshold
    layer = quadratic([below, above, above, 1.0], centers=[[0.0, 0.0]] * 4)
    report = find_degenerate_heads(layer, names, (4, 4))
    assert [(head.head, head.criterion, head.duplicate_of) for head in report.found] == [
        (0, 'uniform', None),
        (2, 'duplicate', 1),
    ]


@pytest.mark.parametrize(
    'make', [lambda: quadratic([1.0, 0.5]), lambda: generalized([[1, 0, 0, 1], [0, 0, 0, 1]]), learned]
)
def test_a_search_reads_the_parameters_alone(make):
    layer = make().train()
    layer.attn_drop.p = 0.5
    layer.value.weight.data.fill_(math.nan)  # not among them
    names = ['entropy', 'duplicate'] + (['uniform', 'stripe'] if type(layer).__name__.endswith('cAttention') else [])
    before, state = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    report = find_degenerate_heads(layer, names, (4, 6))
    with torch.autocast('cpu'), torch.inference_mode():
        assert find_degenerate_heads(copy.deepcopy(layer).eval().requires_grad_(False), names, (4, 6)) == report
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num())
    assert all(p.requires_grad and p.grad is None for p in layer.parameters())


def test_given_maps():
    """The same heads as those of the layer that the maps are of."""
    layer = generalized([[1, 0, 0, 1], [0, 0, 0, 2**-9], [1, 0, 0, 2**-9], [0.01, 0, 0, 0.01], [1, 0, 0, 1]])
    with torch.no_grad():
        layer.encoding.center.zero_()
    maps, gaussian = layer.exact_attention_probs((5, 4)), layer.gaussian_heads()
    for names in (['uniform', 'stripe', 'entropy', 'duplicate'], ['duplicate', dict(type='entropy', threshold=0.5)]):
        expected = find_degenerate_heads(layer, names, (5, 4))
        assert degenerate_heads_of_maps(maps, names, gaussian) == expected and len(expected.found) >= 3
    assert degenerate_heads_of_maps(maps).heads == find_degenerate_heads(layer, ['entropy', 'duplicate'], (5, 4)).heads
    assert degenerate_heads_of_maps(maps[:0]) == DegeneracyReport(0, ())
    lines = str(degenerate_heads_of_maps(maps, ['stripe', 'entropy'], gaussian)).splitlines()
    assert lines[0] == '3 of 5 heads degenerate' and '   2  stripe     condition number 2.62e+05 > 1e+03' in lines
    with pytest.raises(TypeError, match="'uniform' is for Gaussian heads"):
        degenerate_heads_of_maps(maps, ['uniform'])
    with pytest.raises(ValueError, match='not finite'):
        degenerate_heads_of_maps(maps * math.nan)
    with pytest.raises(ValueError, match='single token'):
        degenerate_heads_of_maps(torch.ones(2, 1, 1))


@pytest.mark.parametrize('kind', [torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d])
def test_heads_made_of_a_convolution(kind):
    """Round heads over any number of axes, with α = 800."""
    layer, _ = conv_to_mhsa(kind(1, 1, 2))
    assert set(largest_eigenvalue(layer).tolist()) == {1600.0} and set(condition_number(layer).tolist()) == {1.0}
    assert find_degenerate_heads(layer).heads == []


def test_criteria_that_are_refused():
    layer = quadratic([1.0, 1.0])
    for wrong in ('Uniform', dict(type='uniform', limit=1), dict(threshold=1), dict(type=3), 5):
        with pytest.raises(ValueError, match='unknown: choose one of'):
            find_degenerate_heads(layer, [wrong])
    for wrong in (-1, math.nan, '1e-5', None, True):
        with pytest.raises(ValueError, match=r"threshold=.* of criterion 'uniform' must be a number"):
            find_degenerate_heads(layer, [dict(type='uniform', threshold=wrong)])
    for wrong in ('uniform', [], ()):
        with pytest.raises(ValueError, match='must be a list'):
            find_degenerate_heads(layer, wrong)
    for name in ('entropy', 'duplicate'):
        with pytest.raises(ValueError, match='size=None, but attention maps are those of a grid'):
            find_degenerate_heads(layer, [name])
    for wrong in ((3, 0), (3, 4, 5), 'ab'):
        with pytest.raises(ValueError, match='size='):
            find_degenerate_heads(layer, ['entropy'], wrong)
    with pytest.raises(ValueError, match='single token'):
        find_degenerate_heads(layer, ['entropy'], 1)
    for name in ('uniform', 'stripe'):
        with pytest.raises(TypeError, match="LearnedAttention.* for Gaussian heads.*'entropy', 'duplicate'"):
            find_degenerate_heads(learned(), [name])
    with pytest.raises(ValueError, match='judged by what it does on images, but none were observed'):
        find_degenerate_heads(ContentAttention(4, 2))
    with pytest.raises(ValueError, match='a Linear has no attention of this package, .* give inputs'):
        find_degenerate_heads(torch.nn.Linear(2, 2))
    layer.encoding.sqrt_precision.data[1] = math.nan
    for name in ('uniform', 'stripe', 'entropy', 'duplicate'):
        with pytest.raises(ValueError, match='not finite'):
            find_degenerate_heads(layer, [name], 3)


def test_uniform_attention_is_no_more_than_uniform():
    """Whatever rounding makes of the entropy of so many keys."""
    assert all(relative_entropy_of_maps(torch.full((n, n), 1 / n)) <= 1 for n in range(2, 50))


@pytest.mark.parametrize('some', [True, False], ids=['some heads', 'all heads'])
def test_the_heads_of_a_model(some):
    """Of all layers, by what is known of each, as ``prune_heads`` takes them; one head of a layer stays."""
    torch.manual_seed(0)
    images = torch.randn(3, 3, 24, 24)
    network = small_timm('sa_generalized_cifar', depth=2)
    with torch.no_grad():
        network.blocks[1].attn.encoding.sqrt_precision[1 if some else slice(None)] *= 1e-6
    vit = timm.create_model('vit_tiny_patch16_224', img_size=24, patch_size=8, embed_dim=24, depth=2).train()
    with torch.no_grad():
        for block in vit.blocks:
            block.attn.qkv.weight.mul_(60)
        vit.blocks[0].attn.qkv.weight[slice(8, 16) if some else slice(24)] = 0
    for model, name, settings, criterion in (
        (network, 'blocks.1.attn', {}, 'uniform'),
        (network, 'blocks.1.attn', dict(criteria=['entropy'], inputs=images), 'entropy'),
        (network, 'blocks.1.attn', dict(criteria=['entropy'], size=6), 'entropy'),
        (vit, 'blocks.0.attn', dict(inputs=images), 'entropy'),
        (vit, 'blocks.0.attn', dict(criteria=['uniform'], inputs=images, call=lambda own, x: own(x)), 'uniform'),
    ):
        found, number = pruning.find_degenerate_heads(model, **settings), pruning.prunable_heads(model)[name].num_heads
        expected = [1] if some else list(range(number))
        assert found.reports[name].heads == expected and set(found) == {name}
        assert {entry.criterion for entry in found.reports[name].found} == {criterion}
        assert found[name] == expected if some else len(found[name]) == number - 1
        assert str(found).startswith(f'{name}: {len(expected)} of {number} heads degenerate')
        assert sum(line.startswith('blocks') for line in str(found).splitlines()) == 1
        change = pruning.prune_heads(copy.deepcopy(model), found)
        assert [layer.name for layer in change.layers] == [name]
    stripes = pruning.find_degenerate_heads(network, ['stripe'])
    assert vit.training and not stripes and str(stripes) == 'none'
    with pytest.raises(TypeError, match="blocks.0.attn: the criterion 'stripe' is for Gaussian heads"):
        pruning.find_degenerate_heads(vit, ['stripe'], inputs=images)
