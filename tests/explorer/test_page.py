"""What is in a page of the explorer."""

import re

import numpy as np
import pytest
import torch
from helpers.explorer_pages import (
    HYBRID_SIZE,
    beside_in,
    content_model,
    hybrid_model,
    images_of,
    page_of,
    parts_of,
    patch_model,
    pictures_of,
    probs_in,
    quadratic_model,
    relative_errors,
    unpack,
)
from helpers.small import SMALL, small_mixed, small_timm

from attncnn_plugin import attention_maps
from attncnn_plugin.explorer import explorer_page
from attncnn_plugin.pruning import prune_heads


def assert_within_a_byte(layer, part, expected, image=0):
    """Whether the page has the probabilities of a part, within 1/255 of each query's largest, and what they lack."""
    found = probs_in(layer, part, image)
    assert (relative_errors(found, expected.double()) <= 1 / 255 + 1e-6).all()
    assert torch.allclose(found.amax(-1), expected.double().amax(-1), rtol=1e-6)
    beside = beside_in(layer, part, image)
    missing = 1 - expected.double().sum(-1, keepdim=True)
    assert torch.allclose(beside.sum(-1, keepdim=True), missing, atol=2e-5)


def check(model, images):
    """Whether a page has all parts of all layers, and each that is the same for all images once; its layers."""
    model, images = model.double(), images.double()  # kernels for an image and for all round otherwise
    content = unpack(page_of(model, images))
    expected = parts_of(model, images)
    assert [layer['name'] for layer in content['layers']] == list(expected)
    for layer, parts in zip(content['layers'], expected.values()):
        assert list(layer['parts']) == list(parts)
        for part, probs in parts.items():
            alike = all(torch.equal(probs[0], other) for other in probs)
            assert len(layer['parts'][part]) == (1 if alike else len(images))
            for image in range(len(images)):
                assert_within_a_byte(layer, part, probs[image], image)
    return content


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'sa_learned_cifar', 'sa_generalized_cifar'])
def test_positions(name):
    content = check(small_timm(name).eval(), images_of(size=20))
    assert content['grid'] == [10, 10] and len(content['layers']) == SMALL['depth']
    assert all(beside_in(layer, 'position').shape[-1] == 0 for layer in content['layers'])


def test_sums_and_centres_of_wide_heads():
    """Half of the attention on one key, half of it on all others alike, each of which has less than half of 1/255."""
    model = small_timm('sa_generalized_cifar').eval()
    probs = torch.full((3, 256, 256), 0.5 / 255)
    probs[:, :, 17] = 0.5
    model.blocks[0].attn.attention_probs = lambda size: probs
    found = probs_in(unpack(page_of(model, images_of(size=32)))['layers'][0], 'position')
    assert (found.sum(-1) - 1).abs().max() <= 0.03
    rows = torch.arange(256) // 16
    assert ((found @ rows.double()) / found.sum(-1) - probs.double() @ rows.double()).abs().max() <= 0.1


def test_one_row_down_and_two_columns_left():
    content = unpack(page_of(quadratic_model(), images_of()))
    probs = probs_in(content['layers'][0], 'position')[0].unflatten(0, (8, 8)).unflatten(2, (8, 8))  # q1, q2, k1, k2
    assert divmod(probs[3, 5].argmax().item(), 8) == (4, 3)
    assert probs[3, 5, 4, 3] > 0.9
    assert content['layers'][0]['centers'][0] == [1, -2]


@pytest.mark.parametrize('settings', [{}, dict(sharpness=20)])
def test_content(settings):
    check(content_model(**settings), images_of(3, size=12, width=20))


@pytest.mark.parametrize('heads', [dict(), dict(head_dim='exact', qk_dim=4)])  # of widths of their own
def test_patches(heads):
    for layer in check(patch_model(**heads), images_of(3))['layers']:
        assert [beside_in(layer, part).shape[-1] for part in ('position', 'content', 'both')] == [1, 0, 1]  # null key


HYBRIDS = {
    'position': dict(),
    'additive': dict(content='additive', alpha=0.5),
    'gated': dict(content='gated', alpha=0.5),
    'neighbourhoods': dict(content='gated', alpha=0.5, window_size=5),
}


@pytest.mark.parametrize('name', HYBRIDS)
def test_each_layer_has_its_grid(name):
    """Convolutions with strides, dilation, groups, even kernels and every padding, as attention."""
    content = check(hybrid_model(**HYBRIDS[name]), images_of(2, **HYBRID_SIZE))
    assert content['grid'] == [12, 20]
    assert [layer['grid'] for layer in content['layers']] == [[12, 20], [6, 10], [6, 10], [7, 6]]
    queries = [(len(layer['rows']), len(layer['columns'])) for layer in content['layers']]
    assert queries == [(6, 10), (6, 10), (7, 6), (5, 4)]
    assert [layer['label'] for layer in content['layers']] == ['0', '2', '4', '6']


def test_mixed_models():
    """Attention of this package, and of another library's layers after it."""
    model, images = small_mixed(), images_of(2)
    content, maps = unpack(page_of(model, images)), attention_maps(model, images)
    assert [layer['name'] for layer in content['layers']] == list(maps)
    assert [list(layer['parts'])[-1] for layer in content['layers']] == ['both', 'both', 'attention', 'attention']
    for layer, expected in zip(content['layers'], maps.values()):
        for image in range(2):
            found = probs_in(layer, list(layer['parts'])[-1], image)
            assert relative_errors(found, expected[image]).max() < 1 / 255


def test_pages_that_are_too_large():
    model, images = content_model(), images_of(2)
    size = len(page_of(model, images).encode())
    assert len(page_of(model, images, max_bytes=size).encode()) == size
    with pytest.raises(ValueError, match=f'takes {size:,} bytes, more than max_bytes={size - 1:,} .*: give fewer'):
        page_of(model, images, max_bytes=size - 1)


@pytest.mark.parametrize('make', [content_model, quadratic_model])
def test_one_pass_of_each_image(make):
    model, passes = make().train(), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.stem.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    page_of(model, images_of(3))
    assert passes == [1] * 3
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_pictures_and_names():
    model, images = quadratic_model(), images_of(2)
    pictures = [np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8) for size in ((16, 16), (16, 16, 3))]
    page = explorer_page(model, images, pictures, ['</script>', 'ä'], title='<b>{{data}} & {{style}}', about='<i>')
    content = unpack(page)
    assert content['names'] == ['</script>', 'ä']
    assert '&lt;b&gt;{{data}} &amp; {{style}}</title>' in page and '&lt;i&gt;</p>' in page
    assert (content['pictures'][0] == pictures[0][..., None]).all() and (content['pictures'][1] == pictures[1]).all()


def test_heads_that_were_pruned():
    model = quadratic_model()
    prune_heads(model, {0: [1], 1: [0, 2]})
    content = unpack(page_of(model, images_of()))
    assert [layer['heads'] for layer in content['layers']] == [2, 1]
    assert_within_a_byte(content['layers'][0], 'position', model.blocks[0].attn.position_probs((8, 8)))
    assert_within_a_byte(content['layers'][1], 'position', model.blocks[1].attn.position_probs((8, 8)))


def test_errors():
    model, images = quadratic_model(), images_of()
    with pytest.raises(ValueError, match='are 2, 1 and 2'):
        explorer_page(model, images, pictures_of(images)[:1])
    with pytest.raises(ValueError, match='at least one'):
        explorer_page(model, images[:0], [])
    with pytest.raises(ValueError, match='pictures are of float64'):
        explorer_page(model, images, [np.zeros((16, 16))] * 2)
    with pytest.raises(ValueError, match='blocks.0.attn has 40x40 tokens with 1600 keys each, more than the 1,048,576'):
        page_of(model, images_of(size=80))
    with pytest.raises(ValueError, match='blocks.0.attn are not finite'):
        page_of(content_model(), images * float('inf'))


def test_page_asks_for_nothing():
    page = page_of(quadratic_model(), images_of())
    assert set(re.findall(r'https?://[^"\'\s]*', page)) == {'http://www.w3.org/2000/svg'}  # a name, not an address
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and 'unsafe' not in policy
    assert not re.search(r'\b(src|href)=', page)


def test_way_back():
    page = page_of(quadratic_model(), images_of(), back='../"a"/')
    assert re.findall(r'<a [^>]*>[^<]*</a>', page) == ['<a href="../&quot;a&quot;/">← Back</a>']
