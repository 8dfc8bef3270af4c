"""Self-attention networks in timm: the paper's numbers, sizes, and names and structure of state dicts."""

import re
from collections import OrderedDict

import pytest
import timm
import torch
from helpers.flops import paper_flops
from helpers.small import refused, small_timm


@pytest.mark.parametrize(
    'name, parameters, in_paper, flops',
    [
        ('sa_quadratic_cifar', 12_086_844, 12.1, 6.2),
        ('sa_generalized_cifar', 12_087_006, 12.1, 6.2),
        ('sa_learned_cifar', 12_278_682, 12.3, 6.2),
        ('sa_learned_content_cifar', 29_484_282, 29.5, 15),
    ],
)
def test_numbers_of_the_paper(name, parameters, in_paper, flops):
    with torch.device('meta'):  # counted without numbers
        model, image = timm.create_model(name), torch.empty(1, 3, 32, 32)
        assert timm.create_model('sa_quadratic16_cifar').blocks[0].attn.num_heads == 16
    assert sum(p.numel() for p in model.parameters()) == parameters and round(parameters / 1e6, 1) == in_paper
    assert round(paper_flops(model, image) / 1e9, 1 if flops < 10 else 0) == flops


def test_numbers_with_wider_patches():
    """And tables for 8x8 of them."""
    with torch.device('meta'):
        model = timm.create_model('sa_learned_cifar', reduction=4)
    assert sum(p.numel() for p in model.parameters()) == 12_278_682 + 36 * 400 - 6 * 32 * 400


def test_tokens_of_other_sizes():
    model = small_timm('sa_learned_cifar', reduction=4, img_size=(16, 24)).eval()
    assert model.forward_features(torch.randn(1, 3, 16, 24)).shape == (1, 4, 6, 16)
    assert model.feature_info[0]['reduction'] == 4
    with pytest.raises(ValueError, match='5x6 tokens is larger than the 4x6'):
        model(torch.randn(1, 3, 20, 24))
    model.load_state_dict(small_timm('sa_learned_cifar', reduction=4).state_dict())  # of 8x8 tokens: resized


def test_stem_is_invertible():
    """2x2 blocks to channels, as torch's own pixel_unshuffle has them."""
    stem = small_timm('sa_quadratic_cifar', embed_dim=12).stem
    with torch.no_grad():
        stem.proj.weight.copy_(torch.eye(12))
        stem.proj.bias.zero_()
    x = torch.randn(2, 3, 6, 8)
    assert torch.equal(stem(x).permute(0, 3, 1, 2), torch.nn.functional.pixel_unshuffle(x, 2))


@pytest.mark.slow
def test_exported_for_any_size():
    model, x = small_timm('sa_quadratic_cifar', depth=1).eval(), torch.randn(2, 3, 8, 12)
    batch, rows, columns = (torch.export.Dim(n, min=1 if n == 'batch' else 2, max=16) for n in ('batch', 'r', 'c'))
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch, 2: 2 * rows, 3: 2 * columns},))
    x = torch.randn(5, 3, 10, 6)
    assert torch.allclose(program.module()(x), model(x), atol=1e-5)


def test_dropout_rates_reach_the_layers():
    model = small_timm('sa_quadratic_cifar', drop_rate=0.3, proj_drop_rate=0.2, attn_drop_rate=0.1, drop_path_rate=0.4)
    block = model.blocks[1]
    assert (model.head.drop.p, block.proj_drop.p, block.mlp.drop2.p, block.attn.attn_drop.p) == (0.3, 0.2, 0.2, 0.1)
    assert block.mlp.drop1.p == 0 and abs(block.drop_path.drop_prob - 0.4) < 1e-6


def test_names_of_mmpretrain_keep_their_metadata():
    model, seen = small_timm('sa_quadratic_cifar'), []
    model.blocks[0].attn.register_load_state_dict_pre_hook(lambda *args: seen.append(args[3].get('settings')))
    state = model.state_dict()
    named = OrderedDict((f'backbone.{k}' if k[:4] != 'head' else k, value) for k, value in state.items())
    named._metadata = OrderedDict({'backbone.blocks.0.attn': {'settings': 6}})
    model.load_state_dict(named)
    state._metadata['blocks.0.attn']['settings'] = 5
    model.load_state_dict(state)
    assert list(dict.fromkeys(seen)) == [6, 5]


def test_an_entry_under_both_names_is_refused():
    """One of the two would win in silence."""
    model = small_timm('sa_quadratic_cifar')
    state = model.state_dict()
    state['backbone.stem.proj.weight'] = torch.zeros_like(state['stem.proj.weight'])
    with refused(model, r'both stem\.proj\.weight and backbone\.stem\.proj\.weight', RuntimeError):
        model.load_state_dict(state)


@pytest.mark.parametrize('name', ['embed_dim', 'depth', 'mlp_dim', 'in_chans', 'reduction'])
def test_sizes_of_at_least_one(name):
    with pytest.raises(ValueError, match=f'{name}=0.* must be at least 1'):
        small_timm('sa_quadratic_cifar', **{name: 0})
    assert small_timm('sa_quadratic_cifar', **{name: 1})


@pytest.mark.parametrize('img_size', [0, (0, 8), (8, 0), (8, 9), (9, 8), 18])
def test_images_that_cannot_be_cut_into_tokens(img_size):
    shown = re.escape(f'img_size={img_size}')
    with pytest.raises(ValueError, match=f'{shown} must be a multiple of reduction=4, the side of a token in pixels'):
        small_timm('sa_learned_cifar', reduction=4, img_size=img_size)
    assert small_timm('sa_learned_cifar', reduction=4, img_size=4).blocks[0].attn.encoding


@pytest.mark.parametrize('rate', [-0.1, 1.0])
def test_rates_of_blocks_that_are_left_out(rate):
    with pytest.raises(ValueError, match=f'drop_path_rate={rate} must be from 0 to below 1'):
        small_timm('sa_quadratic_cifar', drop_path_rate=rate)
