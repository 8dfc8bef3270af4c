"""Head reports of models, as text and as JSON."""

import itertools
import json
import math

import pytest
import torch
from helpers.head_reports import LAYERS, brute_force, check_schema
from helpers.small import small_cmhsa, small_timm

from attncnn_plugin.analysis import attention_maps, head_report
from attncnn_plugin.analysis.layer_maps import attention_layers
from attncnn_plugin.analysis.report import json_ready
from attncnn_plugin.pruning import prune_heads


@pytest.mark.parametrize('heads', [dict(), dict(head_dim='exact', qk_dim=4)])
def test_transition_of_cmhsa(heads):
    """Convolutions that became attention over patches are reported as hard heads on the nine patches."""
    model = small_cmhsa('conv', attn_bias_init=40.0, **heads)
    model.to_attention()
    for report in head_report(model, torch.randn(2, 3, 16, 16)).layers:
        assert report.summary == 'one convolution, 3x3, error 0' and report.grid == (8, 8)
        assert sorted(head.nearest_shift for head in report.heads) == sorted(itertools.product((-1, 0, 1), repeat=2))
        assert report.convolutions[0].padding_mode == 'zeros'
        assert {head.width_text for head in report.heads} == {'0'}
        assert {head.degenerate for head in report.heads} == {None} and 'degenerate' not in str(report)
    assert report.attention == 'images' and report.num_images == 2


@pytest.mark.parametrize('kind', ['quadratic', 'generalized', 'learned', 'patch'])
@pytest.mark.parametrize('width', [0.0, 1e-30, 1.0, 1e15])
def test_json(kind, width):
    """Widths of 0, and hardly more, give infinite covariances: null, never a word that JSON does not have."""
    layer = LAYERS[kind]()
    with torch.no_grad():
        if hasattr(layer, 'encoding') and hasattr(layer.encoding, 'sqrt_precision'):
            layer.encoding.sqrt_precision[1] *= width
        else:
            next(layer.position.parameters() if kind == 'patch' else layer.encoding.parameters())[1] *= min(
                width, 100.0
            )
    for size in [(3, 4), (1, 2), (8, 8)]:
        report = head_report(layer, size=size)
        content = report.to_dict(model='m', checkpoint=None)
        loaded = check_schema(json.dumps(content, allow_nan=False))
        assert loaded['layers'][0] == report.layers[0].to_dict() and loaded['model'] == 'm'
        assert str(report)


def test_json_of_numbers_that_are_not_finite():
    assert json_ready({'a': (math.inf, [math.nan, 1.5], 'x', None, True)}) == {
        'a': [None, [None, 1.5], 'x', None, True]
    }


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'sa_learned_cifar', 'sa_learned_content_cifar'])
def test_models(name):
    model, images = small_timm(name), torch.randn(3, 3, 12, 10)
    if name == 'sa_learned_content_cifar':
        for block in model.blocks:
            block.attn.query.weight.data.mul_(10)  # so that images differ
    prune_heads(model, {1: [0]})
    reports = head_report(model, images).layers
    assert {report.grid for report in reports} == {(6, 5)}
    parts = ['position', 'images'] if name == 'sa_learned_content_cifar' else ['position']
    assert [(report.name, report.attention, report.num_heads) for report in reports] == [
        (name, part, heads) for name, heads in zip(attention_layers(model), (3, 2)) for part in parts
    ]
    if name != 'sa_learned_content_cifar':
        assert reports[1].heads == head_report(model.blocks[1].attn, size=(6, 5)).layers[0].heads
        assert [report.attention for report in head_report(model, size=(4, 4)).layers] == ['position'] * 2
        return
    parts = {'position': 'position', 'images': 'all'}
    each = {name: [attention_maps(model, x[None], part=part) for x in images] for name, part in parts.items()}
    for report in reports:
        assert report.num_images == 3 and 'mean over 3 images' in str(report)
        probs = torch.stack([maps[report.name].probs for maps in each[report.attention]], dim=1)
        for head, maps in zip(report.heads, probs):
            expected = brute_force(maps.mean(0), 6, 5)
            entropies = torch.special.entr(maps).sum(-1).mean().item()  # of each image
            assert head.entropy == pytest.approx(entropies, abs=1e-5) and entropies < expected['entropy'] - 0.1
            assert head.degenerate is head.criterion is head.why is None
            assert head.mass_3x3 == pytest.approx(expected['mass_3x3'], abs=1e-5)


def test_content_with_positions_has_both():
    model = small_timm('sa_learned_content_cifar', terms=('qk', 'vr'))
    parts = {'position': 0, 'images': 2}  # and the number of images
    reports = head_report(model, torch.randn(2, 3, 8, 10)).layers
    assert [(report.name, report.attention, report.num_images) for report in reports] == [
        (f'blocks.{i}.attn', *part) for i in range(2) for part in parts.items()
    ]
    assert {report.grid for report in reports} == {(4, 5)}
    alone = head_report(model, size=(4, 5)).layers  # without images, what depends on position
    assert [report.heads for report in alone] == [report.heads for report in reports[::2]]
