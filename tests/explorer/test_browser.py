"""What a visitor sees and does on a page of the explorer, in Chromium, which chromedriver drives."""

import math
import re

import numpy as np
import pytest
import timm
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
    probs_in,
    quadratic_model,
    unpack,
)
from helpers.small import small_mixed, small_timm
from helpers.vits import small_vit

from attncnn_plugin import attention_maps

pytestmark = pytest.mark.slow

DINO, SWIN = 'vit_small_patch16_dinov3', 'swin_tiny_patch4_window7_224'
TALL = dict(size=12, width=20)  # 6x10 tokens
PAGES = dict(
    quadratic=(quadratic_model, TALL),
    content=(content_model, {}),
    patches=(patch_model, {}),
    hybrid=(lambda: hybrid_model(content='gated', alpha=0.5, window_size=5), HYBRID_SIZE),
    # A class token, registers, 4x6 patches.
    vit=(lambda: small_vit(DINO, img_size=(32, 48), global_pool='token'), dict(size=32, width=48)),
    mixed=(small_mixed, {}),
    pooled=(lambda: timm.create_model('pvt_v2_b0').eval(), dict(size=64)),  # 16x16 queries, 2x2 keys
    swin=(lambda: small_vit(SWIN, img_size=40), dict(size=40)),  # 10x10 patches in windows of 4x4: padded, shifted
)


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    """Models, images and files of pages by name."""
    torch.manual_seed(0)
    folder, pages = tmp_path_factory.mktemp('pages'), {}
    for name, (make, size) in PAGES.items():
        model, images = make(), images_of(**size)
        (folder / f'{name}.html').write_text(page_of(model, images), encoding='utf-8')
        pages[name] = model, images, folder / f'{name}.html'
    return pages


def write_page(folder, model, images):
    (folder / 'page.html').write_text(page_of(model, images), encoding='utf-8')
    return folder / 'page.html'


def locked(browser):
    return browser.script("return document.getElementById('lock').getAttribute('aria-pressed')") == 'true'


@pytest.mark.parametrize('name', PAGES)
def test_loads_without_errors_and_requests(name, browser, pages):
    """It computes what Python reads in the page: of all queries, heads, parts and layers."""
    path = pages[name][2]
    browser.open(path)
    browser.at('query', 2, 3)
    browser.at('map', 1, 1)
    console, addresses = browser.logs()
    assert console == [] and [address for address in addresses if address != 'about:blank'] == [path.as_uri()]
    assert browser.script(
        "return [...document.querySelectorAll('button, canvas.view, input, svg')].every("
        "(e) => e.getAttribute('aria-label') || e.textContent.trim())"
    )
    for i, layer in enumerate(unpack(path.read_text(encoding='utf-8'))['layers']):
        for part in layer['parts']:
            expected, beside = probs_in(layer, part, 1), beside_in(layer, part, 1)
            found = browser.script(
                'const [l, part, queries] = arguments, layer = page.layers[l]; Object.assign(state, {image: 1, part});'
                'return Array.from({length: layer.heads}, (_, h) => Array.from({length: queries}, (_, number) => {'
                '  const {probs, beside} = shownOf(layer, h, {row: 0, column: 0, number}); return [[...probs], beside];'
                '}))',
                *(i, part, expected.shape[1]),
            )
            assert len(found) == layer['heads'] > 0
            for head, queries in enumerate(found):
                probs, others = (torch.tensor(values, dtype=torch.float64) for values in zip(*queries))
                assert torch.allclose(probs, expected[head], atol=1e-9)
                assert torch.allclose(others, beside[head], atol=1e-9)


def check_number(browser, place, expected, error=0.0):
    """A number of the page, with no more digits than its error leaves."""
    text, expected = browser.text(place).replace('−', '-'), float(expected)
    assert float(text) == pytest.approx(expected, abs=1.6 * error + 1e-9, rel=5e-4)
    if error and expected:
        digits = text.split('e')[0].replace('.', '').lstrip('0')
        assert len(digits) <= max(2 + np.log10(expected / error), 1)


def check_numbers(browser, probs, query=None):
    """What the page says of the probabilities ``(H, W)`` of a query at a place."""
    probs, largest = probs.double(), float(probs.max())
    check_number(browser, 'largest', largest)
    if probs.flatten().topk(2).values.diff().abs() > largest / 100:
        assert browser.text('largest-place') == '({}, {})'.format(*divmod(int(probs.argmax()), probs.shape[1]))
    if query is None:
        assert browser.text('near') == browser.text('center') == '–'
        return
    near = [(torch.arange(n) - at).abs() <= 1 for n, at in zip(probs.shape, query)]
    check_number(browser, 'near', probs[near[0]][:, near[1]].sum(), 3 * largest / 255)
    center = [float(x) for x in browser.text('center').replace('−', '-').strip('()').split(',')]
    rows, columns = (torch.arange(n).double() - at for n, at in zip(probs.shape, query))
    expected = [float(probs.sum(1) @ rows / probs.sum()), float(probs.sum(0) @ columns / probs.sum())]
    assert center == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize('name', ['quadratic', 'patches', 'hybrid'])
def test_numbers_are_the_probabilities(name, browser, pages):
    """Of the query of each layer that is nearest to the chosen place, on the layer's own grid."""
    model, images, path = pages[name]
    browser.open(path)
    content, rng = unpack(path.read_text(encoding='utf-8')), np.random.default_rng(0)
    for i, (layer_name, parts) in enumerate(parts_of(model, images).items()):
        layer = content['layers'][i]
        for part, probs in parts.items():
            image, head, *place = (int(rng.integers(n)) for n in (2, layer['heads'], *content['grid']))
            # The middle of the pixel on the layer's grid, and the query nearest to it.
            axes = [layer['rows'], layer['columns']]
            sizes = zip(place, layer['grid'], content['grid'])
            middle = [(at + 0.5) * n / whole - 0.5 for at, n, whole in sizes]
            numbers = [int(np.abs(np.array(axis) - at).argmin()) for axis, at in zip(axes, middle)]
            row, column = (axis[number] for axis, number in zip(axes, numbers))
            of_query = probs[image, head, numbers[0] * len(axes[1]) + numbers[1]].unflatten(0, tuple(layer['grid']))
            browser.state(f'#image={image}&layer={i}&head={head}&part={part}&query={place[0]},{place[1]}')
            assert browser.text('query-place') == f'Row {row}, column {column}'
            assert browser.text('map-title') == f'{layer["label"].replace("block", "Block")}, head {head}'
            check_numbers(browser, of_query, (row, column))
            outside = beside_in(layer, part).shape[-1] > 0
            assert outside == bool((1 - probs.sum(-1) > 1e-4).any())  # a null key, or the zeros of a padding
            assert (browser.text('total') != '') == outside
            if outside:
                assert browser.number('total') == pytest.approx(float(of_query.sum()), rel=5e-4, abs=1e-5)
            if layer['grid'] != content['grid'] or 'hybrid' in name:
                counts = [*layer['grid'], len(axes[0]), len(axes[1])]
                assert browser.text('grid') == '{}×{} tokens, {}×{} queries.'.format(*counts)
            else:  # a key with something to see
                at = divmod(int(of_query.argmax()), layer['grid'][1])
                browser.at('map', *at)
                assert browser.text('key-place') == f'({at[0]}, {at[1]})'
                check_number(browser, 'key-probability', of_query.max(), float(of_query.max()) / 255)
    assert browser.logs()[0] == []


def coloured(image, grid=(6, 10)):
    """How strongly each token of a drawing is coloured, at its middle."""
    rows, columns = ((np.arange(count) + 0.5) * size // count for size, count in zip(image.shape, grid))
    pixels = image[rows.astype(int)][:, columns.astype(int)].astype(int)
    return pixels[..., 0] - pixels[..., 2]  # red without blue


def test_drawn_one_row_down_and_two_columns_left(browser, pages):
    browser.open(pages['quadratic'][2], '#query=3,5&layer=0&head=0&theme=light')
    for selector in ('#map', '#maps tbody tr:first-of-type td:nth-of-type(1) canvas'):
        image = browser.image(selector)
        assert np.unravel_index(coloured(image).argmax(), (6, 10)) == (4, 3)
        # The outline of the query lies inside of it, the ring around the middle of the head.
        black = np.argwhere(image[..., :3].max(-1) < 30)
        start, end = np.array([[3, 5], [4, 6]]) * image.shape[:2] / (6, 10)
        assert np.abs(black.min(0) - start).max() <= 1 and np.abs(black.max(0) + 1 - end).max() <= 1
        inside = image[int(3.5 * image.shape[0] / 6), int(5.5 * image.shape[1] / 10), :3]
        assert inside.min() >= 140  # the picture, with less than uniform attention
    for selector in ('#map', '#query'):
        image = browser.image(selector)
        ring = np.argwhere(np.abs(image[..., :3].astype(int) - (0, 98, 184)).sum(-1) < 30)
        middle = (ring.min(0) + ring.max(0) + 1) / 2
        assert np.abs(middle - np.array([4.5, 3.5]) * image.shape[:2] / (6, 10)).max() <= 1.5
    assert browser.text('encoded-center') == '(+1.00, -2.00)'
    chosen = "return document.querySelector('#centers .chosen').getAttribute('transform')"
    assert browser.script(chosen) == 'translate(-2 1)'


def shares_of(layer, part):
    """By head the mean probability of each shift that half of the queries see, and its range, from a page's data."""
    rows, columns = ([math.floor(place + 0.5) for place in layer[axis]] for axis in ('rows', 'columns'))
    queries = [(row, column) for row in rows for column in columns]
    keys = [divmod(key, layer['grid'][1]) for key in range(math.prod(layer['grid']))]
    seen = [{*own, len(keys)} - {len(keys)} for own in layer['keys'].tolist()] if layer['keys'] is not None else None
    images, beside = len(layer['parts'][part]), len(layer['others'])
    probs = np.stack([probs_in(layer, part, image).numpy()[:, beside:] for image in range(images)])
    found = {}
    for number, (row, column) in enumerate(queries):
        for key, (down, right) in enumerate(keys):
            if seen is None or key in seen[beside + number]:
                found.setdefault((down - row, right - column), []).append(probs[:, :, number, key])
    enough = min(len(queries) / 2, max(map(len, found.values())))
    return {shift: np.concatenate(own) for shift, own in found.items() if len(own) >= enough}, probs


@pytest.mark.parametrize('name', PAGES)
def test_opens_on_the_most_local_head(name, browser, pages):
    """Of all layers, that with the largest mean probability of a shift; a sentence says how much that is."""
    browser.open(pages[name][2])
    content, best = unpack(pages[name][2].read_text(encoding='utf-8')), {}
    for number, layer in enumerate(content['layers']):
        shares, probs = shares_of(layer, list(layer['parts'])[-1])
        for head in range(layer['heads']):
            shift, given = max(((shift, own[:, head]) for shift, own in shares.items()), key=lambda own: own[1].mean())
            whole = probs[:, head] / probs[:, head].sum(-1, keepdims=True)
            spread = np.exp(-np.where(whole > 0, whole * np.log(np.maximum(whole, 1e-300)), 0).sum(-1).mean())
            best[number, head] = given.mean(), shift, given.min(), given.max(), spread
    (layer, head), (share, shift, low, high, spread) = max(best.items(), key=lambda own: own[1][0])
    found = browser.script('return {...state, ...summaryOf(state.layer, state.head)}')
    assert (found['layer'], found['head'], tuple(found['shift'])) == (layer, head, shift)
    assert [found[name] for name in ('share', 'low', 'high', 'spread')] == pytest.approx([share, low, high, spread])
    says = browser.text('says')
    assert says.startswith(f'Head {head} of {content["layers"][layer]["label"]} ')
    keys = content['layers'][layer]['keys']
    count = math.prod(content['layers'][layer]['grid']) if keys is None else keys.shape[1]
    assert ('nearly uniform' in says) == (spread > 0.9 * count) == ('%' not in says)
    assert browser.script("return document.getElementById('says').getAttribute('aria-live')") == 'polite'


def test_sentences(browser, tmp_path):
    """Gaussians by place and width; the same in all images, or not; tokens beside the image."""
    model = quadratic_model()
    with torch.no_grad():
        encoding = model.blocks[0].attn.encoding
        encoding.center[1], encoding.sqrt_precision[1] = torch.tensor([0.2, -1.1]), 1 / 0.3
        encoding.center[2], encoding.sqrt_precision[2] = torch.tensor([0.0, 0.0]), 0
    browser.open(write_page(tmp_path, model, images_of(**TALL)), '#layer=0&head=1')
    says = browser.text('says')
    assert says.startswith(
        'Head 1 of block 0 is a Gaussian, 0.3 tokens wide, around the token to the left. It gives that'
    )
    assert says.endswith('by query).') and ', whatever the image (' in says
    browser.state('#layer=0&head=0')
    start = (
        'Head 0 of block 0 is a Gaussian, 0.33 tokens wide, around the token 1 below and 2 to the left. It gives that'
    )
    assert browser.text('says').startswith(start)
    browser.state('#layer=0&head=2')
    start = (
        'Head 2 of block 0 is a Gaussian, wider than the image, around the query itself. It is nearly '
        'uniform: it spreads over about 60 of 60 tokens.'
    )
    assert browser.text('says').startswith(start)
    browser.open(write_page(tmp_path, content_model(), images_of()), '#layer=1&head=1&part=both')
    assert 'It depends on the image and the query: 0% to ' in browser.text('says')
    texts = 'return [0.9996, 1, 0.123, 0.0031, 0.00001, 0.0094].map(percent)'
    assert browser.script(texts) == ['99.9%', '100%', '12%', '0.3%', '0%', '0.9%']
    widths = 'return [[[2, 0], [0, 0.5]], [[1, 1], [0, 1]], [[0, 0], [3, 0]]].map((factor) => widthsOf(factor))'
    by_torch = [
        (1 / torch.linalg.svdvals(torch.tensor(factor)).flip(0)).tolist()
        for factor in ([[2, 0], [0, 0.5]], [[1.0, 1], [0, 1]])
    ]
    *found, stripe = browser.script(widths)
    assert found == [pytest.approx(own) for own in by_torch] and stripe == [None, pytest.approx(1 / 3)]  # ∞ is null


def test_every_number_is_explained(browser, pages):
    """On the page itself, where no pointer is needed."""
    browser.open(pages['quadratic'][2])
    texts = browser.script(
        "return [...document.querySelectorAll('.numbers dl > div')].filter((e) => e.checkVisibility())"
        ".map((e) => [e.querySelector('dt').textContent, e.querySelector('.help').textContent])"
    )
    assert [name for name, _ in texts] == ['Largest probability', 'Within 3×3', 'Mean shift', 'Learned centre Δ']
    assert all(len(text) > 20 for _, text in texts)


def test_pointer_moves_and_locks(browser, pages):
    browser.open(pages['quadratic'][2])
    cell = '#maps tbody tr:last-of-type td:last-of-type canvas'
    browser.at('query', 1, 8)
    first = browser.image(cell)
    assert browser.text('query-place') == 'Row 1, column 8'
    browser.at('query', 5, 2)
    assert browser.text('query-place') == 'Row 5, column 2'
    assert (browser.image(cell) != first).any() and 'query=5,2' in browser.script('return location.hash')
    browser.at('query', 4, 3, click=True)
    browser.at('query', 0, 0)
    assert browser.text('query-place') == 'Row 4, column 3' and locked(browser)
    browser.at('query', 4, 3, click=True)
    browser.at('query', 0, 0)
    assert browser.text('query-place') == 'Row 0, column 0' and not locked(browser)
    browser.at('map', 5, 9)
    assert browser.text('key-place') == '(5, 9)'


def test_keyboard(browser, pages):
    """What changes is told by one live region, and not by the name of what has the focus too."""
    label = "return document.getElementById('query').getAttribute('aria-label')"
    browser.open(pages['quadratic'][2], '#query=2,3')
    first, before = browser.image('#map'), browser.script(label)
    browser.press('#query', 'down', 'down', 'right')
    assert browser.text('query-place') == 'Row 4, column 4' and (browser.image('#map') != first).any()
    browser.press('#query', *['up'] * 9, 'left')
    assert browser.text('query-place') == 'Row 0, column 3'
    assert 'row 0, column 3, locked' in browser.text('live') and browser.script(label) == before
    browser.press('#query', 'escape')
    assert not locked(browser)
    assert browser.text('map-title') == 'Block 0, head 0'
    browser.press('#maps button[aria-pressed=true]', 'down', 'right', 'right', 'left')
    assert browser.text('map-title') == 'Block 1, head 1'
    assert browser.script("return document.activeElement.getAttribute('aria-pressed')") == 'true'
    assert browser.script(label) == 'Image 0, query at row 0, column 3'
    browser.press('#map', 'down', 'left')
    assert browser.text('key-place') == '(1, 2)' and 'probability of key (1, 2)' in browser.text('live')
    browser.press('#centers', 'left')
    assert browser.text('map-title') == 'Block 1, head 0'


def test_state_is_in_the_address(browser, pages):
    browser.open(pages['content'][2])
    state = '#image=1&query=2,7&layer=1&head=2&part=content&locked=1&key=4,0&theme=dark'
    browser.script(
        "document.querySelectorAll('input[name=image]')[1].click();"
        "document.querySelector('input[value=content]').click();"
        "document.getElementById('theme').click();"
        "document.querySelectorAll('#maps button')[5].click();"
    )
    browser.at('query', 2, 7, click=True)
    browser.at('map', 4, 0)
    assert browser.script('return location.hash') == state
    drawn, shown = browser.image('#map'), browser.text('key-probability')
    browser.open(pages['content'][2], state)
    browser.settle()
    assert browser.script('return location.hash') == state
    assert (browser.image('#map') == drawn).all() and browser.text('key-probability') == shown
    checked = "return [...document.querySelectorAll('input:checked')].map((e) => e.value)"
    assert browser.script(checked) == ['1', 'content', 'same']
    browser.open(pages['content'][2])
    first = browser.text('map-title')
    browser.open(pages['content'][2], '#image=9&query=99,1&layer=-1&head=x&part=else&theme=red')
    assert browser.text('query-place') == 'Row 4, column 4' and browser.text('map-title') == first
    browser.state(state)
    browser.state('#query=1,1')  # an address says all: what it does not name is not chosen
    assert browser.script('return location.hash') == '#image=1&query=1,1&layer=1&head=2&part=content&theme=dark'
    assert browser.logs()[0] == []


def test_phone(phone, pages):
    phone.open(pages['content'][2])
    phone.settle()
    sizes = "[...document.querySelectorAll('button, label')].map((e) => e.getBoundingClientRect())"
    assert phone.script(f'return {sizes}.every(({{width, height}}) => width >= 44 && height >= 44)')
    shown = (
        "[...document.querySelectorAll('.mouse, .touch')].filter((e) => e.checkVisibility()).map((e) => e.className)"
    )
    assert set(phone.script(f'return {shown}')) == {'touch'}
    phone.touch(phone.place('query', 1, 6))
    assert phone.text('query-place') == 'Row 1, column 6' and locked(phone)
    phone.touch(*(phone.place('query', *place) for place in ((2, 2), (4, 3), (7, 5))))
    assert phone.text('query-place') == 'Row 7, column 5' and locked(phone)
    phone.touch(phone.place('query', 7, 5))
    assert not locked(phone)
    phone.touch(phone.place('query', 7, 5))
    phone.touch(*(phone.place('query', *place) for place in ((7, 5), (4, 3), (7, 5))))
    assert phone.text('query-place') == 'Row 7, column 5' and locked(phone)
    phone.touch(phone.place('map', 3, 0))
    assert phone.text('key-place') == '(3, 0)'
    below = "byId('key-probability').getBoundingClientRect().top - byId('map').getBoundingClientRect().bottom"
    assert 0 <= phone.script(f'return {below}') <= 20


def test_layout_on_a_phone(phone, tmp_path):
    """Nothing is wider than the screen but the table of heads, which scrolls beside its labels."""
    many = small_timm('sa_quadratic16_cifar', num_heads=16).eval()
    phone.open(write_page(tmp_path, many, images_of()))
    phone.settle()
    assert phone.script('return [document.documentElement.scrollWidth, innerWidth]') == [360, 360]
    assert phone.script(
        "return ['query', 'map'].every((id) => byId(id).width === Math.round(byId(id).clientWidth * devicePixelRatio))"
    )
    scroll = "const table = document.querySelector('.scroll'); table.scrollLeft = 1000; return table.scrollLeft"
    assert phone.script(scroll) > 100
    assert phone.script("return document.querySelector('tbody th').getBoundingClientRect().left") >= 0


def test_one_scale_or_one_for_each_head(browser, tmp_path):
    """On the same scale a head that attends to all keys alike has no colour; the choice is in the address."""
    model = quadratic_model()
    with torch.no_grad():
        model.blocks[0].attn.encoding.sqrt_precision[1] = 0  # uniform attention
    path, state = write_page(tmp_path, model, images_of(**TALL)), '#layer=0&theme=light&scale='
    uniform, local = (f'#maps tbody tr:first-of-type td:nth-of-type({n}) canvas' for n in (2, 1))
    browser.open(path, state + 'same')
    browser.settle()
    assert np.abs(coloured(browser.image(uniform))).max() < 10 and coloured(browser.image(local)).max() > 60
    assert coloured(browser.image(local)).min() < -25  # less than uniform attention
    assert [browser.text(name) for name in ('ramp-start', 'ramp-end')] == ['1/10×', '100×']
    assert 'scale' not in browser.script('return location.hash')
    browser.script("document.querySelector('input[value=own]').click()")
    browser.settle()
    assert coloured(browser.image(uniform)).min() > 60 and 'scale=own' in browser.script('return location.hash')
    assert browser.text('ramp-start') == '0'


def test_play_moves_the_query_until_it_is_stopped(browser, pages):
    browser.open(pages['quadratic'][2], '#query=5,9')
    browser.click('#play')
    browser.wait("document.getElementById('query-place').textContent !== 'Row 5, column 9'")
    browser.click('#play')
    assert browser.script('return playing') is None
    browser.open(pages['quadratic'][2], '#query=5,9')
    browser.script('window.setInterval = (next) => (window.next = next, 1)')  # as slow as the test
    browser.click('#play')
    for place in ('Row 0, column 0', 'Row 0, column 1'):  # after the last the first
        browser.script('next()')
        browser.settle()
        assert browser.text('query-place') == place
    assert browser.text('play') == 'Stop' and browser.text('lock') == 'Locked'
    browser.press('#query', 'escape')
    assert browser.text('play') == 'Play' and browser.text('lock') == 'Lock' and browser.text('query-place') == place
    assert browser.script('return playing') is None


def test_colours_of_the_figures(browser, pages):
    """On their scale; the map is drawn in them, over a picture that leaves white as it is."""
    style = pytest.importorskip('attncnn_plugin.visualization.style')
    browser.open(pages['quadratic'][2], '#theme=light&layer=0&head=0&query=3,5')
    light = style.ATTENTION_COLORS(np.linspace(0, 1, 256))[:, :3]
    dark = light + 1 - light.max(-1, keepdims=True) - light.min(-1, keepdims=True)  # as of dark pictures
    ramp = np.reshape(list(browser.script('return [...colours()]')), (256, 4))[:, :3]
    assert np.abs(ramp - 255 * light).max() < 4
    browser.script("change({theme: 'dark'})")
    ramp = np.reshape(list(browser.script('return [...colours()]')), (256, 4))[:, :3]
    stops = np.array([0, 85, 127, 170, 255])  # between them other hues are mixed
    assert np.abs(ramp - 255 * dark)[stops].max() < 6
    browser.script("change({theme: 'light'})")
    assert browser.script("return color('--heads').split(' ')") == list(style.COLORS)
    low, high = style.ATTENTION_RANGE
    assert (browser.text('ramp-start'), browser.text('ramp-end')) == (f'1/{1 / low:.0f}×', f'{high:.0f}×')
    scale = np.log([low, 0.5, 1, 7, high, 1000])
    expected = np.clip((scale - math.log(low)) / math.log(high / low), 0, 1)
    found = browser.script(
        'const ramp = Uint8Array.from({length: 1024}, (_, i) => i / 4);'
        'return [0.1, 0.5, 1, 7, 100, 1000].map((times) => colourOf(times / 60, {seen: 60}, ramp)[0])'
    )
    assert np.abs(np.array(found) - 255 * expected).max() <= 1
    assert browser.script('return colourOf(0, {seen: 60}, Uint8Array.from({length: 1024}, (_, i) => i / 4))[0]') == 0


def test_colours(browser, pages):
    """Of a dark system, and of the other theme."""
    colour = 'return getComputedStyle(document.body).backgroundColor'
    for scheme, expected in (('dark', 'rgb(20, 20, 20)'), ('light', 'rgb(255, 255, 255)')):
        browser.command('Emulation.setEmulatedMedia', dict(features=[dict(name='prefers-color-scheme', value=scheme)]))
        browser.open(pages['quadratic'][2])
        assert browser.script(colour) == expected
    browser.click('#theme')
    assert browser.script(colour) == 'rgb(20, 20, 20)' and browser.text('theme') == 'Light theme'
    browser.command('Emulation.setEmulatedMedia', dict(features=[]))


def tokens_shown(browser):
    """What the page says that the query gives to each token beside the image."""
    items = "[...document.querySelectorAll('#map-tokens li')].filter((e) => !e.hidden)"
    names, numbers = ("e.querySelector('span').textContent", "e.querySelector('strong').textContent")
    return dict(browser.script(f'return {items}.map((e) => [{names}, {numbers}])'))


def test_class_token_as_query(browser, pages):
    """Chosen by the mouse and by the keyboard, it is shown as the model computes it; so is what lies on it."""
    model, images, path = pages['vit']
    browser.open(path, '#image=1&layer=1&head=2&query=2,3')
    probs = attention_maps(model, images)['blocks.1.attn'][1, 2]  # (N, N), class token and registers first

    def check(query, place=None):
        check_numbers(browser, probs[query, 5:].unflatten(0, (4, 6)), place)
        shown = tokens_shown(browser)
        assert list(shown) == ['cls', *(f'extra {i}' for i in range(2, 6))]
        numbers = [float(text.replace('−', '-')) for text in shown.values()]
        assert numbers == pytest.approx(probs[query, :5].tolist(), rel=5e-3)

    of_pixel = 5 + 2 * 6 + 3
    check(of_pixel, (2, 3))
    others = float(probs[of_pixel, :5].sum())
    assert browser.number('total') == pytest.approx(1 - others, rel=5e-4)
    rest = re.fullmatch(r'The rest, (\S+), lies on (.*), beside the image.', browser.text('total-rest'))
    beside, where = rest.groups()
    assert float(beside) == pytest.approx(others, rel=5e-3) and where == 'cls … extra 5'
    browser.click('#query-tokens button')
    assert browser.text('query-place') == 'Token cls' and locked(browser)
    assert 'token=0' in browser.script('return location.hash') and 'Query token cls, locked' in browser.text('live')
    check(0)
    assert browser.text('centers-help') == 'The cls token has no place.'
    browser.press('#query-tokens button:nth-of-type(3)', 'tab', 'space')  # the next one
    assert browser.text('query-place') == 'Token extra 4'
    check(4 - 1)
    browser.press('#query-tokens button:nth-of-type(4)', 'space')  # back to the pixel
    assert browser.text('query-place') == 'Row 2, column 3' and not locked(browser)
    browser.click('#query-tokens button')
    browser.at('query', 1, 1)  # a pointer over the image leaves a token that is locked
    assert browser.text('query-place') == 'Token cls'
    browser.at('query', 1, 1, click=True)
    assert browser.text('query-place') == 'Row 1, column 1' and locked(browser)
    browser.click('#query-tokens button')
    browser.press('#query', 'down')
    assert browser.text('query-place') == 'Row 2, column 1' and 'token' not in browser.script('return location.hash')


def test_pooled_keys(browser, pages):
    """Each query of the finer grid has its own number, and its place between the keys."""
    browser.open(pages['pooled'][2], '#layer=0&head=0&query=3,14')
    assert browser.text('query-place') == 'Row 3, column 14' and browser.text('grid') == '2×2 tokens, 16×16 queries.'
    layer = unpack(pages['pooled'][2].read_text(encoding='utf-8'))['layers'][0]
    check_numbers(browser, probs_in(layer, 'attention')[0, 3 * 16 + 14].unflatten(0, (2, 2)), (-0.0625, 1.3125))
    browser.press('#query', 'right', 'right', 'down')
    assert browser.text('query-place') == 'Row 4, column 15'


def test_windows(browser, pages):
    """A query sees the keys of its window, which are outlined; what lies on padding lies outside."""
    model, images, path = pages['swin']
    browser.open(path)
    assert tokens_shown(browser) == {} and browser.script('return [height, width]') == [10, 10]
    for i, probs in enumerate(attention_maps(model, images).values()):
        height = width = math.isqrt(probs.shape[-1])
        for image, head, row, column in ((0, 0, 0, 0), (1, 2, height - 1, width // 2)):
            # In the middle of a patch of the layer on the page's grid of 10x10.
            at = [int((place + 0.5) * 10 / height) for place in (row, column)]
            browser.state(f'#image={image}&layer={i}&head={head}&query={at[0]},{at[1]}&theme=light')
            given = probs[image, head, row * width + column]
            check_numbers(browser, given.unflatten(0, (height, width)), (row, column))
            if browser.text('total'):
                assert browser.number('total') == pytest.approx(float(given.sum()), rel=5e-4)
                assert browser.text('total-rest') == 'The rest lies outside.'
            else:
                assert given.sum() > 1 - 1e-3
            assert f'{height}×{width} queries, in windows of 16' in browser.text('grid')
    assert browser.logs()[0] == []
