"""Each kind of vision transformer: starts as a convolution, trains, is reported, drawn, explored, and pruned."""

import pytest
import torch

pytest.importorskip('matplotlib')
from helpers.explorer_pages import page_of, unpack
from helpers.vits import NO_START, OTHERS, SETTINGS, WITH_MLP, new_vit, output_of, small_vit, vit_to_start

from attncnn_plugin.analysis import head_report, mean_attention
from attncnn_plugin.pruning import prunable_heads, prune_heads
from attncnn_plugin.transformers import init_as_convolution
from attncnn_plugin.visualization import plot_attention_centers, plot_attention_distance, plot_heads
from attncnn_plugin.visualization.style import image_of

BOUNDS = dict(absolute=0.05, relative=1e-6, rotary=0.08)  # of the total variation on random images
MODELS = [name for name in SETTINGS if name not in OTHERS]
FULL_SIZE = {
    'vit_tiny_patch16_224': dict(img_size=224),  # and DeiT-tiny
    'beit_base_patch16_224': dict(img_size=224),
    'swin_tiny_patch4_window7_224': dict(img_size=224),
    'eva02_tiny_patch14_224': dict(img_size=224),
    'vit_small_patch16_dinov3': dict(img_size=224),
    WITH_MLP: dict(img_size=224, rel_pos_type='bias'),
    'VisionTransformer': dict(arch='deit-tiny'),
    'BEiTViT': dict(arch='base'),
    'SwinTransformer': dict(arch='tiny'),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_everything(name):
    changes = {'qk_norm': False} if name == 'deit_tiny_distilled_patch16_224' else {}  # which has no scale to set
    model = small_vit(name, **changes) if name in NO_START else vit_to_start(name, **changes)
    if name not in NO_START:
        init_as_convolution(model)
    if name == 'torchvision.VisionTransformer':  # whose classifier begins at 0, and has no gradients to give
        torch.nn.init.normal_(model.heads.head.weight)
    check_everything(model, torch.randn(2, 3, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize('name', FULL_SIZE)
def test_full_size(name):
    """The models that people have, as they come, at 224 x 224 pixels."""
    model = new_vit(name, **FULL_SIZE[name])
    model.eval()  # some of mmpretrain's give None
    for layer in init_as_convolution(model).layers:
        assert max(head.total_variation for head in layer.heads) < BOUNDS[layer.encoding]
    check_everything(model, torch.randn(1, 3, 224, 224))


def check_everything(model, images):
    before = mean_attention(model, images)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    output_of(model, images).square().mean().backward()
    optimizer.step()
    model.eval()
    maps = mean_attention(model, images)
    assert any(not torch.equal(before[name].probs, maps[name].probs) for name in before)

    report = head_report(model, images)
    assert [own.name for own in report.layers] == list(maps)
    for figure in (
        plot_attention_centers(maps),
        plot_heads(maps),
        plot_attention_distance({'model': report}),
    ):
        assert image_of(figure).std() > 5
    assert [layer['name'] for layer in unpack(page_of(model, images))['layers']] == list(maps)

    last = list(prunable_heads(model))[-1]
    heads = report.layers[-1].num_heads
    prune_heads(model, {last: [1]})
    assert head_report(model, images).layers[-1].num_heads == heads - 1
    assert output_of(model, images).isfinite().all()
