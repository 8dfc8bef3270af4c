"""What is in a page of the explorer."""

import re
import sys

import numpy as np
import pytest
import timm
import torch
from helpers.convolutions import content_settings, convolutions, randomize
from helpers.explorer_pages import (
    HYBRID_SIZE,
    content_model,
    gated_model,
    hard_model,
    hybrid_model,
    images_of,
    one_block_model,
    page_of,
    patch_model,
    pictures_of,
    probs_in,
    quadratic_model,
    relative_errors,
    unpack,
)
from helpers.processes import run
from helpers.small import SMALL, small_cmhsa, small_timm
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from attncnn_plugin.analysis import (
    attention_layers,
    attention_probs_of,
    content_only_probs_of,
    position_only_probs_of,
)
from attncnn_plugin.convert import conv_to_mhsa, convs_to_attention
from attncnn_plugin.explorer import explorer_page
from attncnn_plugin.pruning import prune_heads

QUADRATIC = ['quadratic', 'generalized']
EXPECTED = dict(both=attention_probs_of, content=content_only_probs_of, position=position_only_probs_of)


@pytest.mark.parametrize(
    'name, kind', [('sa_quadratic_cifar', 'axes'), ('sa_learned_cifar', 'axes'), ('sa_generalized_cifar', 'shifts')]
)
def test_positions_are_exact(name, kind):
    model = small_timm(name).eval()
    content = unpack(page_of(model, images_of(size=20)))
    assert content['grid'] == [10, 10] and len(content['layers']) == SMALL['depth']
    for i, layer in enumerate(attention_layers(model).values()):
        parts = content['layers'][i]['parts']
        assert list(parts) == ['position'] and parts['position']['terms'] == [kind]
        assert max(parts['position']['errors']) <= 1e-5
        assert (probs_in(content, i, 'position') - layer.attention_probs((10, 10))).abs().max() <= 1e-6


def test_far_away_heads_are_exact():
    """Large scores with small differences: float32 would not hold them."""
    model = small_timm('sa_generalized_cifar').eval()
    layer = model.blocks[0].attn
    with torch.no_grad():
        layer.encoding.center[0] = torch.tensor([300.0, 0.0])
        layer.encoding.sqrt_precision[0] = torch.tensor([[1.0, 0.0], [0.02, 0.3]])
    content = unpack(page_of(model, images_of()))
    assert content['layers'][0]['parts']['position']['terms'] == ['shifts']
    assert (probs_in(content, 0, 'position') - layer.attention_probs((8, 8))).abs().max() <= 1e-6


def test_one_row_down_and_two_columns_left():
    content = unpack(page_of(quadratic_model(), images_of()))
    probs = probs_in(content, 0, 'position')[0].unflatten(0, (8, 8)).unflatten(2, (8, 8))  # q1, q2, k1, k2
    assert divmod(probs[3, 5].argmax().item(), 8) == (4, 3)
    assert probs[3, 5, 4, 3] > 0.9
    assert content['layers'][0]['centers'][0] == [1, -2]


def narrow_patch_model():
    """Heads of widths of their own, on tokens that are wider than patches."""
    return patch_model(head_dim='exact', qk_dim=4)


PATCHES = (patch_model, narrow_patch_model)


@pytest.mark.parametrize(
    'make',
    [
        content_model,
        patch_model,
        narrow_patch_model,
        lambda: content_model(terms=('qk', 'uk', 'vr')),
        lambda: content_model(terms=('qr',)),
        lambda: content_model(terms=('qk', 'qr', 'vr')),
        lambda: content_model(position='absolute_learned'),
        hard_model,
        lambda: content_model(position='relative_quadratic'),
        lambda: content_model(position='relative_generalized'),
        gated_model,
    ],
    ids=[
        'qk and qr',
        'patches',
        'narrow heads of patches',
        'qk, uk and vr',
        'qr',
        'qk, qr and vr',
        'absolute',
        'hard',
        *QUADRATIC,
        'gated',
    ],
)
def test_content_within_the_error_that_is_said(make):
    torch.manual_seed(1)
    model = make()
    images = images_of(3, size=16 if make in PATCHES else 12, width=16 if make in PATCHES else 20)
    content = unpack(page_of(model, images))
    for part, probs_of in EXPECTED.items():
        expected = probs_of(model, images)
        for i, name in enumerate(attention_layers(model)):
            layer = content['layers'][i]
            assert (part in layer['parts']) == (name in expected)
            if name not in expected:
                continue
            said = torch.tensor(layer['parts'][part]['errors'])
            assert len(said) == 3 + 6 * (make in PATCHES) and said.max() <= 0.005
            errors = torch.stack(
                [relative_errors(probs_in(content, i, part, image), expected[name][image]) for image in range(3)]
            ).amax(0)
            assert (errors <= said + 1e-5).all() and (errors >= said * 0.7 - 1e-5).all()


@pytest.mark.parametrize(
    'make, terms',
    [
        (content_model, ['query_axes', 'products']),
        (patch_model, ['shifts', 'products']),
        (lambda: content_model(terms=('qr',)), ['query_axes']),
        (lambda: content_model(terms=('uk', 'vr')), ['axes', 'products']),
        (lambda: content_model(position='absolute_learned'), ['encoded_products']),
        (lambda: content_model(position='relative_quadratic'), ['axes', 'products']),
        (lambda: content_model(position='relative_generalized'), ['shifts', 'products']),
    ],
    ids=['qk and qr', 'patches', 'qr', 'uk and vr', 'absolute', *QUADRATIC],
)
def test_parts_share_their_arrays(make, terms):
    for layer in unpack(page_of(make(), images_of()))['layers']:
        assert layer['parts']['both']['terms'] == terms
        assert len(layer['token_arrays']) == 1


HYBRIDS = {
    'position': dict(),
    'tables': dict(num_heads=4),
    'additive': dict(content='additive', alpha=0.5),
    'gated': dict(content='gated', alpha=0.5),
    'neighbourhoods': dict(content='gated', alpha=0.5, window_size=5),
    'tables and content': dict(content='additive', num_heads=4),
}


@pytest.mark.parametrize('name', HYBRIDS)
def test_each_layer_has_its_grid(name):
    """Convolutions with strides, dilation, groups, even kernels and every padding, as attention."""
    torch.manual_seed(0)
    model, images = hybrid_model(**HYBRIDS[name]), images_of(2, **HYBRID_SIZE)
    content = unpack(page_of(model, images))
    assert content['grid'] == [12, 20]
    assert [layer['grid'] for layer in content['layers']] == [[12, 20], [6, 10], [6, 10], [7, 6]]
    assert [[len(layer['queries'][axis]) for axis in ('rows', 'columns')] for layer in content['layers']] == [
        [6, 10],
        [6, 10],
        [7, 6],
        [5, 4],
    ]
    assert [layer['label'] for layer in content['layers']] == ['0', '2', '4', '6']
    for i, (key, layer) in enumerate(attention_layers(model).items()):
        parts = content['layers'][i]['parts']
        if 'content' not in HYBRIDS[name]:
            assert list(parts) == ['position'] and max(parts['position']['errors']) <= 1e-5
            expected = layer.attention_probs(content['layers'][i]['grid'])
            assert (probs_in(content, i, 'position') - expected).abs().max() <= 1e-6
            continue
        assert list(parts) == ['position', 'content', 'both']
        for part, probs_of in EXPECTED.items():
            said = torch.tensor(parts[part]['errors'])
            expected = probs_of(model, images)[key]
            errors = torch.stack(
                [relative_errors(probs_in(content, i, part, image), expected[image]) for image in range(2)]
            ).amax(0)
            assert said.max() <= (1e-5 if part == 'position' else 0.02)
            assert (errors <= said + 1e-5).all() and (errors >= said * 0.7 - 1e-5).all()


@st.composite
def attention_for_images(draw):
    """Any convolution of images as attention, with heads anywhere, and images."""
    conv, shape = draw(convolutions((2,)))
    settings = draw(st.none() | content_settings(conv)) or {}
    heads = draw(st.none() | st.integers(1, conv.kernel_size[0] * conv.kernel_size[1]))
    if settings.get('position') != 'gaussian':
        settings['num_heads'] = heads
    attention = conv_to_mhsa(conv, **settings)[0]
    randomize(attention, draw(st.integers(0, 99)))
    return attention, torch.randn(shape, dtype=torch.float64)


@given(attention_for_images())
def test_any_convolution(case):
    layer, images = case
    content = unpack(explorer_page(nn.Sequential(layer), images, [np.zeros((2, 2), np.uint8)] * len(images)))
    for part, entry in content['layers'][0]['parts'].items():
        for image in range(len(images)):
            if layer.depends_on_content:
                expected = EXPECTED[part](nn.Sequential(layer), images)['0'][image]
            else:
                expected = layer.attention_probs(images.shape[2:])
            found = probs_in(content, 0, part, image)
            assert (found - expected).abs().max() <= max(entry['errors']) + 1e-6 <= 0.05


def test_layers_of_a_cnn(tmp_path):
    """A fresh model that has loaded the state dict of one with attention; labels tell the blocks of stages apart."""
    model = timm.create_model('convnext_atto', num_classes=3, depths=(1, 1, 2, 2), dims=(4, 4, 8, 8)).eval()
    convs_to_attention(model, 'stages.3.*conv_dw')
    fresh = timm.create_model('convnext_atto', num_classes=3, depths=(1, 1, 2, 2), dims=(4, 4, 8, 8)).eval()
    fresh.load_state_dict(model.state_dict())
    images = images_of(1, size=96)
    content = unpack(page_of(fresh, images))
    assert [layer['label'] for layer in content['layers']] == ['stage 3 block 0', 'stage 3 block 1']
    for i, layer in enumerate(attention_layers(fresh).values()):
        assert content['layers'][i]['grid'] == [3, 3] and content['layers'][i]['heads'] == 49
        assert (probs_in(content, i, 'position') - layer.attention_probs((3, 3))).abs().max() <= 1e-6
    convs_to_attention(model, 'stages.2.*conv_dw')
    labels = [layer['label'] for layer in unpack(page_of(model, images))['layers']]
    assert labels == [f'stage {stage} block {block}' for stage in (2, 3) for block in (0, 1)]


def test_images_share_the_matrices():
    model = content_model(embed_dim=32)
    one, two, three = (len(page_of(model, images_of(count)).encode()) for count in (1, 2, 3))
    assert three - two <= 1.1 * (two - one) < 0.4 * one


def test_ten_megabytes():
    """With scores as large as after training."""
    model = content_model(embed_dim=32, depth=6, num_heads=9)
    with torch.no_grad():
        for layer in attention_layers(model).values():
            for table in layer.tables.parameters():
                table.mul_(6)
    images = images_of(8, size=32)
    page = page_of(model, images)
    assert len(page.encode()) <= 10_000_000
    content = unpack(page)
    assert content['grid'] == [16, 16]
    for i, (name, expected) in enumerate(attention_probs_of(model, images[7:]).items()):
        assert max(content['layers'][i]['parts']['both']['errors']) <= 0.005
        assert relative_errors(probs_in(content, i, 'both', 7), expected[0]).max() <= 0.005


def test_many_tokens():
    model = content_model(embed_dim=8, depth=1, num_heads=1, img_size=64)
    images = images_of(1, size=64)
    content = unpack(page_of(model, images))
    assert content['grid'] == [32, 32]
    for part, probs_of in EXPECTED.items():
        assert relative_errors(probs_in(content, 0, part), probs_of(model, images)['blocks.0.attn'][0]).max() <= 0.005


MEMORY = """
import resource, numpy, timm, torch
import attncnn_plugin
from attncnn_plugin.convert import conv_to_mhsa, convs_to_attention
from attncnn_plugin.explorer import explorer_page

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model, images = timm.create_model('sa_learned_content_cifar', img_size=64).eval(), torch.randn(1, 3, 64, 64)
with torch.no_grad():
    model(images)
before = peak()
page = explorer_page(model, images, [numpy.zeros((64, 64), numpy.uint8)])
print(len(page.encode()), peak() - before)
"""


@pytest.mark.slow
def test_full_size_model_with_many_tokens(tmp_path):
    """6 layers of 9 heads and 400 channels on 32x32 tokens: the page, and the memory besides that of a forward pass."""
    size, kilobytes = run(sys.executable, '-c', MEMORY, folder=tmp_path).split()[-2:]
    assert int(size) <= 10_000_000
    assert int(kilobytes) <= 500_000


def test_coarser_where_it_must_be():
    model, images = content_model(embed_dim=64), images_of(2)
    fine = page_of(model, images)
    limit = len(fine.encode()) * 4 // 5
    coarse = page_of(model, images, max_bytes=limit)
    assert limit * 0.9 < len(coarse.encode()) <= limit
    finest, coarsest = (unpack(page)['layers'][0]['parts']['both']['errors'] for page in (fine, coarse))
    assert max(finest) <= 0.005 < min(coarsest)
    shell = len(page_of(quadratic_model(), images).encode())
    for other, most in ((model, shell), (quadratic_model(), 20_000)):
        with pytest.raises(ValueError, match=f'max_bytes={most:,} with 2 images of 16x16 pixels'):
            page_of(other, images, max_bytes=most)


def test_one_pass_of_each_image():
    model, images, passes = content_model(), images_of(3), []
    model.stem.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    page_of(model, images)
    assert passes == [1] * 3
    passes.clear()
    model = quadratic_model()
    model.stem.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    page_of(model, images)
    assert passes == [1]  # images do not matter


def test_positions_without_a_rule_err_as_is_said(monkeypatch):
    model = quadratic_model()
    probs = torch.randn(3, 64, 64).softmax(-1)
    monkeypatch.setattr(model.blocks[0].attn, 'position_probs', lambda size: probs)
    monkeypatch.setattr(model.blocks[0].attn, 'gaussian_heads', lambda: None)
    content = unpack(page_of(model, images_of()))
    errors = relative_errors(probs_in(content, 0, 'position'), probs)
    said = torch.tensor(content['layers'][0]['parts']['position']['errors'])
    assert said.min() > 0.01 and (errors <= said + 1e-5).all() and (errors >= said * 0.7).all()
    assert max(content['layers'][1]['parts']['position']['errors']) <= 1e-5


def test_blocks_are_called_as_in_figures():
    content = unpack(page_of(one_block_model(), images_of()))
    assert [(layer['label'], layer['name']) for layer in content['layers']] == [('block 1', 'blocks.1.attn')]


def test_pictures_and_names():
    model, images = quadratic_model(), images_of(2)
    pictures = [np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8) for size in ((16, 16), (16, 16, 3))]
    page = explorer_page(model, images, pictures, ['</script>', 'ä'], title='<b>{{data}} & {{style}}')
    content = unpack(page)
    assert content['names'] == ['</script>', 'ä'] and '&lt;b&gt;{{data}} &amp; {{style}}</title>' in page
    assert (content['pictures'][0] == pictures[0][..., None]).all() and (content['pictures'][1] == pictures[1]).all()


def test_heads_that_were_pruned():
    model = quadratic_model()
    prune_heads(model, {0: [1], 1: [0, 1, 2]}, allow_empty=True)
    content = unpack(page_of(model, images_of()))
    assert [layer['heads'] for layer in content['layers']] == [2, 0]
    assert (probs_in(content, 0, 'position') - model.blocks[0].attn.position_probs((8, 8))).abs().max() <= 1e-6


def test_errors():
    model, images = quadratic_model(), images_of()
    with pytest.raises(ValueError, match='convolution phase'):
        page_of(small_cmhsa('conv'), images)
    with pytest.raises(ValueError, match='are 2, 1 and 2'):
        explorer_page(model, images, pictures_of(images)[:1])
    with pytest.raises(ValueError, match='at least one'):
        explorer_page(model, images[:0], [])
    with pytest.raises(ValueError, match='float64 and shape'):
        explorer_page(model, images, [np.zeros((16, 16))] * 2)
    with pytest.raises(ValueError, match='40x40 tokens, more than the 1024'):
        page_of(model, images_of(size=80))
    with pytest.raises(ValueError, match='33x33 tokens, more than the 1024'):
        page_of(content_model(img_size=66), images_of(size=66))
    with pytest.raises(ValueError, match='for 2, 34x34 tokens, more than the 1024'):
        page_of(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), conv_to_mhsa(nn.Conv2d(4, 4, 3))[0]), images_of(size=34))
    along = nn.Sequential(nn.Flatten(2), conv_to_mhsa(nn.Conv1d(3, 4, 3))[0])
    with pytest.raises(ValueError, match='1 is attention along 1 axes'):
        page_of(along, images)
    model.other = conv_to_mhsa(nn.Conv2d(4, 4, 3))[0]
    with pytest.raises(ValueError, match='other is attention that the model does not run'):
        page_of(model, images)
    del model.other
    with pytest.raises(ValueError, match='blocks.0.attn are not finite'):
        page_of(content_model(), images * float('inf'))
    with torch.no_grad():
        model.blocks[1].attn.encoding.center.fill_(float('nan'))
    with pytest.raises(ValueError, match='blocks.1.attn are not finite'):
        page_of(model, images)


def test_nothing_is_changed():
    model, images = content_model().train(), images_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    page_of(model, images)
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_page_asks_for_nothing():
    page = page_of(quadratic_model(), images_of())
    assert set(re.findall(r'https?://[^"\'\s]*', page)) == {'http://www.w3.org/2000/svg'}  # a name, not an address
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and 'unsafe' not in policy
    assert not re.search(r'\b(src|href)=', page)


def test_tool_on_a_cnn(repository, tmp_path):
    """The config of a training in two phases, and a checkpoint of its second phase."""
    pytest.importorskip('mmpretrain')
    from mmengine.config import Config
    from mmengine.registry import init_default_scope
    from mmpretrain.registry import MODELS

    narrow = {
        'model.backbone.backbone.stem_channels': 4,
        'model.backbone.backbone.base_channels': 4,
        'model.head.in_channels': 32,
    }
    config = Config.fromfile(repository / 'configs/resnet18_to_attention_digits.py')
    config.merge_from_dict({**narrow, 'model.backbone.phase': 'attn'})
    init_default_scope('mmpretrain')
    model = MODELS.build(config.model).eval()
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'model.pth')
    options = [f'{name}={value}' for name, value in narrow.items()]
    run(
        'python',
        repository / 'tools/visualization/attention_explorer.py',
        repository / 'configs/resnet18_to_attention_digits.py',
        tmp_path / 'model.pth',
        *('5', '--out', tmp_path / 'explorer.html', '--cfg-options', *options),
        folder=tmp_path,
    )
    content = unpack((tmp_path / 'explorer.html').read_text(encoding='utf-8'))
    layers = attention_layers(model)
    assert [layer['name'] for layer in content['layers']] == list(layers)
    for i, (name, layer) in enumerate(layers.items()):
        assert tuple(content['layers'][i]['parts']) == ('position', 'content', 'both')
        expected = layer.position_probs(content['layers'][i]['grid'])
        assert (probs_in(content, i, 'position') - expected).abs().max() <= 1e-6


def test_tool(repository, tmp_path):
    pytest.importorskip('mmpretrain')
    from mmengine.config import Config
    from mmengine.registry import init_default_scope
    from mmpretrain.registry import MODELS

    rng = np.random.default_rng(0)
    digit = rng.integers(0, 256, (8, 8), dtype=np.uint8)
    np.save(tmp_path / 'digit.npy', digit)
    Image.fromarray(digit).save(tmp_path / 'digit.png')
    Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(tmp_path / 'photo.jpg')
    config = repository / 'configs/sa_quadratic_digits.py'
    init_default_scope('mmpretrain')
    torch.save(dict(state_dict=MODELS.build(Config.fromfile(config).model).state_dict()), tmp_path / 'model.pth')
    output = run(
        'python',
        repository / 'tools/visualization/attention_explorer.py',
        config,
        tmp_path / 'model.pth',
        *(tmp_path / name for name in ('digit.npy', 'digit.png', 'photo.jpg')),
        '5',
        '--out',
        tmp_path / 'pages/explorer.html',
        folder=tmp_path,
    )
    assert 'Saved ' in output and ' MB' in output
    content = unpack((tmp_path / 'pages/explorer.html').read_text(encoding='utf-8'))
    assert content['names'] == ['digit.npy', 'digit.png', 'photo.jpg', 'test image 5'] and content['grid'] == [8, 8]
    assert [picture.shape for picture in content['pictures']] == [(16, 16, 3)] * 4
    assert (content['pictures'][0] == content['pictures'][1]).all()
    run(
        'python',
        repository / 'tools/visualization/attention_explorer.py',
        config,
        tmp_path / 'model.pth',
        tmp_path / 'model.pth',
        folder=tmp_path,
        expected=1,
    )
