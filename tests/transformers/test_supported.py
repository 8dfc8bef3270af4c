"""The table of supported transformers on its page: each cell is tried."""

import copy

import pytest
import torch
from helpers.vits import SETTINGS, SIZE, output_of, small_vit, vit_to_start

from attncnn_plugin import attention_maps, follow_state_dict, rollout
from attncnn_plugin.pruning import head_ablation, head_importance, prunable_heads, prune_heads
from attncnn_plugin.transformers import init_as_convolution

ROWS = {
    'timm ViT, DeiT': 'vit_tiny_patch16_224',
    'timm `vit_relpos_*`, biases by an MLP': 'vit_relpos_small_patch16_224',
    'timm `vit_relpos_*`, biases by a table': 'vit_relpos_base_patch32_plus_rpn_256',
    'timm BEiT': 'beit_base_patch16_224',
    'timm EVA02, `vit_*_rope_*`': 'eva02_tiny_patch14_224',
    'timm DINOv3': 'vit_small_patch16_dinov3',
    'timm Swin': 'swin_tiny_patch4_window7_224',
    'timm Swin v2': 'swinv2_tiny_window8_256',
    'timm Swin v2 CR': 'swinv2_cr_tiny_224',
    'timm ConViT': 'convit_tiny',
    'mmpretrain ViT, DeiT': 'VisionTransformer',
    'mmpretrain DeiT III': 'DeiT3',
    'mmpretrain BEiT': 'BEiTViT',
    'mmpretrain EVA02': 'ViTEVA02',
    'mmpretrain Swin': 'SwinTransformer',
    'mmpretrain Swin v2': 'SwinTransformerV2',
    'Hugging Face ViT': 'transformers.ViT',
    'Hugging Face DeiT': 'transformers.DeiT',
    'Hugging Face DINOv2': 'transformers.Dinov2',
    'Hugging Face DINOv2 with registers': 'transformers.Dinov2WithRegisters',
    'Hugging Face DINOv3': 'transformers.DINOv3ViT',
    'Hugging Face BEiT': 'transformers.Beit',
    'Hugging Face Swin': 'transformers.Swin',
    'torchvision ViT': 'torchvision.VisionTransformer',
    'torchvision Swin': 'torchvision.SwinTransformer',
    'torchvision Swin v2': 'torchvision.SwinTransformerV2',
}
IMAGES = torch.randn(2, 3, SIZE, SIZE)


def loss(model, images):
    return output_of(model, images).square().mean()


def prune(name):
    model, fresh = small_vit(name), small_vit(name)
    last = list(prunable_heads(model))[-1]
    prune_heads(model, {last: [0]})
    state_dict = copy.deepcopy(model.state_dict())
    assert follow_state_dict(fresh, state_dict)
    fresh.load_state_dict(state_dict)
    assert torch.equal(output_of(fresh, IMAGES), output_of(model, IMAGES))


COLUMNS = {
    'maps': lambda name: attention_maps(small_vit(name), IMAGES),
    'rollout': lambda name: rollout(small_vit(name), IMAGES),
    'for a class': lambda name: rollout(small_vit(name), IMAGES, target=1),
    'importance': lambda name: head_importance(small_vit(name), [IMAGES], loss),
    'ablation': lambda name: head_ablation(small_vit(name), [IMAGES], loss),
    'prune': prune,
    'start': lambda name: init_as_convolution(vit_to_start(name)),
}


def test_rows():
    others = 'cait_xxs24_224', 'deit_tiny_distilled_patch16_224', 'eva02_base_patch14_224', 'vit_small_patch16_rope_224'
    assert {*ROWS.values(), *others} == set(SETTINGS)


@pytest.mark.parametrize('row', ROWS)
def test_row_of_the_page(row, repository):
    cells = []
    for function in COLUMNS.values():
        try:
            function(ROWS[row])
            cells.append('yes')
        except (TypeError, ValueError):
            cells.append('–')
    lines = (repository / 'docs/tables/transformers.md').read_text().splitlines()
    table = {
        line.split('|')[1].strip(): [cell.strip() for cell in line.split('|')[2:-1]] for line in lines if '|' in line
    }
    assert table['model'] == list(COLUMNS)
    assert table.get(row) == cells, f'| {row} | {" | ".join(cells)} |'
