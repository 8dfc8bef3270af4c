"""Images, or another tensor, where something else is expected: the message has their shape, not their numbers."""

import pytest
import timm
import torch
from torch import nn

from attncnn_plugin import analysis, convert, pruning, transformers
from attncnn_plugin.attention.positions import RelativeTables

IMAGES = torch.rand(2, 3, 32, 32)
CONV = nn.Conv2d(4, 4, 3, padding=1)
MAPS = torch.full((1, 4, 4), 0.25)


def model():
    return timm.create_model('sa_quadratic_small')


def vit():
    return timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1)


@pytest.mark.parametrize(
    'call',
    [
        lambda x: analysis.head_report(model(), size=x),
        lambda x: analysis.mean_attention(model().blocks[0].attn, size=x),
        lambda x: convert.conv_to_mhsa(CONV, content='gated', qk_dim=x),
        lambda x: convert.expressible_shifts(model().blocks[0].attn, 3, size=x),
        lambda x: transformers.init_as_convolution(vit(), kernel_size=x),
        lambda x: RelativeTables(8, max_size=x),
        lambda x: pruning.criteria.degenerate_heads_of_maps(MAPS, criteria=x),
        lambda x: pruning.least_important({'a': torch.rand(3)}, keep=x),
    ],
)
def test_no_numbers_of_a_tensor(call):
    for argument in (IMAGES, IMAGES.numpy()):
        with pytest.raises((TypeError, ValueError), match=r'<(Tensor|ndarray) of shape \((2, )?3, 32, 32\)>') as error:
            call(argument)
        assert '\n' not in str(error.value) and len(str(error.value)) < 260


@pytest.mark.parametrize(
    'call',
    [
        lambda x: convert.conv_to_mhsa(CONV, content=x),
        lambda x: convert.expressible_shifts(model().blocks[0].attn, 3, size=(8, 8), queries=x),
    ],
)
def test_no_numbers_in_place_of_a_name(call):
    with pytest.raises(ValueError, match=r'=<Tensor of shape \(2, 3, 32, 32\)> .*(one of|choose)') as error:
        call(IMAGES)
    assert '\n' not in str(error.value)
