"""Each kind of vision transformer: starts as a convolution, trains, is reported, drawn, and pruned."""

import pytest
import torch

pytest.importorskip('matplotlib')
from helpers.vits import OF_MMPRETRAIN, OF_TIMM, output_of, small_vit

from attncnn_plugin.analysis import (
    grids_of,
    mean_attention_probs_of,
    model_reports,
    query_maps,
    reports_to_dict,
    shown_layers,
)
from attncnn_plugin.init import init_as_convolution
from attncnn_plugin.pruning import prunable_heads, prune_heads
from attncnn_plugin.visualization import (
    image_of,
    plot_attention_centers,
    plot_attention_distance,
    plot_attention_probs,
)

MODELS = [*OF_TIMM, *OF_MMPRETRAIN]


@pytest.mark.parametrize('name', MODELS)
def test_everything(name):
    changes = {'qk_norm': False} if name == 'deit_tiny_distilled_patch16_224' else {}  # which has no scale to set
    model, images = small_vit(name, **changes), torch.randn(2, 3, 32, 32)
    init_as_convolution(model, seed=0)
    before = mean_attention_probs_of(model, images)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output_of(model, images).square().mean().backward()
    optimizer.step()
    after = mean_attention_probs_of(model, images)
    assert any(not torch.equal(before[layer], after[layer]) for layer in before)

    layers, grids = shown_layers(model), grids_of(model, images)
    reports = model_reports(model, images)
    assert [report.name for report in reports] == list(layers)
    maps = {layer: query_maps(module, grids[layer], probs=after[layer]) for layer, module in layers.items()}
    for figure in (
        plot_attention_centers(model, grids, probs=after),
        plot_attention_probs(maps, zoom=3),
        plot_attention_distance({name: reports_to_dict(reports)}),
    ):
        assert image_of(figure).std() > 5

    last = list(prunable_heads(model))[-1]
    prune_heads(model, {last: [1]})
    assert [report.num_heads for report in model_reports(model, images)] == [3] * (len(layers) - 1) + [2]
    model.eval()  # some of mmpretrain's give None
    assert output_of(model, images).isfinite().all()
