"""Vision transformers of the size that people have: started, trained, reported, drawn, explored, and pruned."""

import pytest
import timm
import torch

pytest.importorskip('matplotlib')
from helpers.explorer_pages import page_of, unpack

from attncnn_plugin.analysis import head_report, mean_attention
from attncnn_plugin.pruning import prunable_heads, prune_heads
from attncnn_plugin.transformers import init_as_convolution
from attncnn_plugin.visualization import plot_attention_centers, plot_attention_distance, plot_heads
from attncnn_plugin.visualization.style import image_of

# One of each encoding of positions, and the bound of the total variation on random images.
BOUNDS = {
    'vit_tiny_patch16_224': 0.05,  # and DeiT-tiny
    'swin_tiny_patch4_window7_224': 1e-6,
    'eva02_tiny_patch14_224': 0.08,
}


@pytest.mark.slow
@pytest.mark.parametrize('name', BOUNDS)
def test_full_size(name):
    """As they come, at 224 x 224 pixels."""
    model, images = timm.create_model(name, img_size=224).eval(), torch.randn(1, 3, 224, 224)
    for layer in init_as_convolution(model).layers:
        assert max(head.total_variation for head in layer.heads) < BOUNDS[name]
    before = mean_attention(model, images)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(images).square().mean().backward()
    optimizer.step()
    model.eval()
    maps = mean_attention(model, images)
    assert any(not torch.equal(before[name].probs, maps[name].probs) for name in before)

    report = head_report(model, images)
    assert [own.name for own in report.layers] == list(maps)
    for figure in (plot_attention_centers(maps), plot_heads(maps), plot_attention_distance({'model': report})):
        assert image_of(figure).std() > 5
    assert [layer['name'] for layer in unpack(page_of(model, images))['layers']] == list(maps)

    last, heads = list(prunable_heads(model))[-1], len(report.layers[-1].heads)
    prune_heads(model, {last: [1]})
    assert len(head_report(model, images).layers[-1].heads) == heads - 1
    assert model(images).isfinite().all()
