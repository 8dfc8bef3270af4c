"""What a browser makes of a page of the explorer. Needs Chromium and chromedriver."""

import re

import numpy as np
import pytest
import torch
from helpers.explorer_pages import (
    HYBRID_SIZE,
    beside_in,
    content_model,
    hard_model,
    hybrid_model,
    images_of,
    one_block_model,
    page_of,
    patch_model,
    pictures_of,
    probs_in,
    quadratic_model,
    unpack,
)
from helpers.small import small_timm
from helpers.vits import small_vit

from attncnn_plugin.analysis import (
    attention_layers,
    attention_probs_of,
    content_only_probs_of,
    grids_of,
    position_only_probs_of,
)
from attncnn_plugin.pruning import prunable_heads, prune_heads
from attncnn_plugin.transformers.attention import visit_vit_attention

pytestmark = pytest.mark.slow

EXPECTED = dict(both=attention_probs_of, content=content_only_probs_of, position=position_only_probs_of)


TALL = dict(size=12, width=20)  # 6x10 tokens
PAGES = dict(
    quadratic=(quadratic_model, TALL),
    content=(content_model, {}),
    patches=(patch_model, {}),
    generalized=(lambda: small_timm('sa_generalized_cifar').eval(), TALL),
    hard=(hard_model, TALL),
    absolute=(lambda: content_model(position='absolute_learned'), TALL),
    separable=(lambda: content_model(terms=('uk', 'vr')), TALL),
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


@pytest.mark.parametrize('name', PAGES)
def test_loads_without_errors_and_requests(name, browser, pages):
    browser.open(pages[name][2])
    browser.at('query', 2, 3)
    browser.at('map', 1, 1)
    console, addresses = browser.logs()
    assert console == []
    assert [address for address in addresses if address != 'about:blank'] == [pages[name][2].as_uri()]
    with_name = browser.script(
        "return [...document.querySelectorAll('button, canvas.view, input, svg')].every("
        "(e) => e.getAttribute('aria-label') || e.textContent.trim())"
    )
    assert with_name


def test_loads_in_a_frame(browser, pages):
    """As notebooks show a page: its document has no address."""
    browser.blank()
    browser.script(
        "const frame = document.createElement('iframe'); frame.srcdoc = arguments[0]; document.body.append(frame)",
        pages['quadratic'][2].read_text(encoding='utf-8'),
    )
    browser.wait("document.querySelector('iframe').contentDocument.getElementById('live')?.textContent")
    assert browser.logs()[0] == []


def test_policy_forbids_requests(browser, pages):
    browser.open(pages['quadratic'][2])
    refused = browser.driver.execute_async_script("fetch('http://127.0.0.1:9/').catch((e) => arguments[0](String(e)))")
    assert 'TypeError' in refused
    console, _ = browser.logs()
    assert any('Content Security Policy' in entry['message'] for entry in console)


@pytest.mark.parametrize('name', PAGES)
def test_numbers_are_the_probabilities(name, browser, pages):
    model, images, path = pages[name]
    browser.open(path)
    content = unpack(path.read_text(encoding='utf-8'))
    height, width = content['grid']
    parts = list(content['layers'][0]['parts'])
    by_image = name not in ('quadratic', 'generalized')
    position, content_parts = ['position'] * (name != 'absolute'), ['content', 'both'] * by_image
    assert parts == position + content_parts
    rng = np.random.default_rng(0)
    for i, (layer_name, layer) in enumerate(attention_layers(model).items()):
        for part in parts:
            image, head, row, column, key_row, key_column = (
                int(rng.integers(n)) for n in (2, layer.num_heads, height, width, height, width)
            )
            probs = (
                EXPECTED[part](model, images)[layer_name][image] if by_image else layer.attention_probs((height, width))
            )
            probs = probs[head, row * width + column].detach().double().unflatten(0, (height, width))
            if probs[key_row, key_column] < 1e-4:  # a key with something to see
                key_row, key_column = divmod(int(probs.argmax()), width)
            browser.state(
                f'#image={image}&layer={i}&head={head}&part={part}&query={row},{column}&key={key_row},{key_column}'
            )
            largest = float(probs.max())

            def check(place, expected, error=0.0):
                text, expected = browser.text(place), float(expected)
                assert float(text) == pytest.approx(expected, abs=1.6 * error + 1e-9, rel=5e-4)
                if error:  # a digit is left out where it says less than the error
                    digits = text.split('e')[0].replace('.', '').lstrip('0')
                    assert len(digits) <= max(2 + np.log10(expected / error), 1)

            assert browser.text('map-title') == f'Block {i}, head {head}'
            assert browser.text('query-place') == f'Row {row}, column {column}'
            assert browser.text('key-place') == f'({key_row}, {key_column})'
            of_key = float(probs[key_row, key_column])
            check('key-probability', of_key, (of_key * largest) ** 0.5 / 255)
            check('largest', largest)
            window = probs[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
            check('near', window.sum(), 3 * largest / 255)
            if name == 'patches' and part != 'content':
                assert browser.number('total') == pytest.approx(float(probs.sum()), rel=2e-4)
            else:
                assert browser.text('total') == ''
            down, right = (float(x) for x in browser.text('center').strip('()').split(','))
            rows, columns = torch.arange(height) - row, torch.arange(width) - column
            mass = probs.sum()
            assert down == pytest.approx(float(probs.sum(1) @ rows.double() / mass), abs=0.03)
            assert right == pytest.approx(float(probs.sum(0) @ columns.double() / mass), abs=0.03)


def check_decoded(browser, path):
    """Whether JavaScript computes what Python reads in a page: of all queries, heads, parts and layers."""
    browser.open(path)
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


def test_decoded(browser, pages, vits):
    for *_, path in [*pages.values(), *vits.values()]:
        check_decoded(browser, path)


@pytest.fixture(scope='module', params=[dict(), dict(content='gated', alpha=0.5, window_size=5)])
def hybrid(request, tmp_path_factory):
    """Convolutions as attention by positions, and by content too."""
    torch.manual_seed(0)
    model, images = hybrid_model(**request.param), images_of(**HYBRID_SIZE)
    path = tmp_path_factory.mktemp('hybrid') / 'page.html'
    path.write_text(page_of(model, images), encoding='utf-8')
    return model, images, path


def test_layers_of_different_grids(hybrid, browser):
    """Each of them shows its own query that is nearest to the chosen place, on its own grid."""
    model, images, path = hybrid
    browser.open(path)
    layers = attention_layers(model)
    sizes = grids_of(model, images)
    assert browser.script('return [height, width]') == [12, 20]
    for place in ((0, 0), (5, 13), (11, 19)):
        for i, (name, layer) in enumerate(layers.items()):
            browser.state(f'#image=1&layer={i}&head=3&part=both&query={place[0]},{place[1]}')
            size = sizes[name]
            # The middle of the pixel on the layer's grid, and the query nearest to it.
            middle = [(at + 0.5) * n / whole - 0.5 for at, n, whole in zip(place, size, (12, 20))]
            places = [layer.window.queries(axis, n) for axis, n in enumerate(size)]
            row, column = (int((own - at).abs().argmin()) for own, at in zip(places, middle))
            query = row * len(places[1]) + column
            if layer.depends_on_content:
                probs = attention_probs_of(model, images)[name][1, 3, query].double()
            else:
                probs = layer.attention_probs(size)[3, query].detach().double()
            largest = divmod(int(probs.argmax()), size[1])
            assert browser.text('query-place') == f'Row {places[0][row]}, column {places[1][column]}'
            assert browser.text('map-title') == f'{name}, head 3'
            assert browser.text('grid') == '{}×{} pixels, {}×{} queries.'.format(*size, *map(len, places))
            assert browser.number('largest') == pytest.approx(float(probs.max()), rel=5e-4)
            if float(probs.topk(2).values.diff().abs()) > float(probs.max()) / 100:
                assert browser.text('largest-place') == f'({largest[0]}, {largest[1]})'
            zeros = layer.window.padding_mode == 'zeros' and max(map(max, layer.window.padding)) > 0
            assert (browser.text('total') != '') == zeros
            if zeros:
                assert browser.number('total') == pytest.approx(float(probs.sum()), rel=5e-4, abs=1e-5)
    assert browser.logs()[0] == []


def test_decoded_of_convolutions(browser, hybrid):
    check_decoded(browser, hybrid[2])


def test_walk_over_different_grids(hybrid, browser):
    """Arrow keys go from query to query of the layer; a pointer finds the nearest one; other layers follow."""
    browser.open(hybrid[2], '#query=0,0&layer=0')
    browser.press('#query', 'down', 'right', 'right')
    assert browser.text('query-place') == 'Row 2, column 4'
    browser.state('#query=2,4&layer=3')  # queries at rows 1 … 5 of 7, columns 1 … 4 of 6
    assert browser.text('query-place') == 'Row 1, column 1'
    browser.press('#query', *['down'] * 9, *['right'] * 9)
    assert browser.text('query-place') == 'Row 5, column 4'
    browser.press('#query', *['up'] * 2, 'left')
    assert browser.text('query-place') == 'Row 3, column 3'
    browser.press('#map', 'up')
    assert browser.text('key-place') == '(2, 3)'
    browser.at('map', 11, 19)
    assert browser.text('key-place') == '(6, 5)'
    browser.press('#query', 'escape')
    browser.at('query', 0, 0, click=True)
    assert browser.text('query-place') == 'Row 1, column 1' and locked(browser)
    browser.at('query', 1, 1, click=True)  # the same query
    assert not locked(browser)
    images = [browser.image(f'#maps tbody tr:nth-of-type({row}) canvas') for row in (1, 2, 3, 4)]
    assert len({image.shape for image in images}) == 1  # one picture in all of them


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
        assert inside.min() >= 195  # the picture
    for selector in ('#map', '#query'):
        image = browser.image(selector)
        ring = np.argwhere(np.abs(image[..., :3].astype(int) - (0, 98, 184)).sum(-1) < 30)
        middle = (ring.min(0) + ring.max(0) + 1) / 2
        assert np.abs(middle - np.array([4.5, 3.5]) * image.shape[:2] / (6, 10)).max() <= 1.5
    assert browser.text('largest-place') == '(4, 3)'
    assert browser.text('encoded-center') == '(+1.00, -2.00)'
    assert (
        browser.script("return document.querySelector('#centers .chosen').getAttribute('transform')")
        == 'translate(-2 1)'
    )


def locked(browser):
    return browser.script("return document.getElementById('lock').getAttribute('aria-pressed')") == 'true'


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
    assert browser.text('lock') == 'Lock'
    browser.at('map', 5, 9)
    assert browser.text('key-place') == '(5, 9)'


def test_keyboard(browser, pages):
    browser.open(pages['quadratic'][2], '#query=2,3')
    first = browser.image('#map')
    browser.press('#query', 'down', 'down', 'right')
    assert browser.text('query-place') == 'Row 4, column 4' and (browser.image('#map') != first).any()
    browser.press('#query', *['up'] * 9, 'left')
    assert browser.text('query-place') == 'Row 0, column 3'
    assert 'row 0, column 3, locked' in browser.text('live')
    browser.press('#query', 'escape')
    assert not locked(browser)
    browser.press('#maps button[aria-pressed=true]', 'down', 'right', 'right', 'left')
    assert browser.text('map-title') == 'Block 1, head 1'
    assert browser.script("return document.activeElement.getAttribute('aria-pressed')") == 'true'
    browser.press('#map', 'down', 'left')
    assert browser.text('key-place') == '(1, 2)'
    assert 'probability of key (1, 2)' in browser.text('live')
    browser.press('#centers', 'left')
    assert browser.text('map-title') == 'Block 1, head 0'


def test_read_aloud_once(browser, pages):
    """What changes is told by one live region, when it has changed, and not by the name of what has the focus too."""
    browser.open(pages['quadratic'][2], '#query=2,3')
    browser.settle()
    assert browser.script(
        "return [...document.querySelectorAll('output, [role=status], [aria-live]')].map((e) => e.id)"
    ) == ['status', 'live']
    told = browser.script(
        'const waiting = new Map(), own = [setTimeout, clearTimeout]; window.clearTimeout = (id) => waiting.delete(id);'
        'window.setTimeout = (tell) => { waiting.set(waiting.size + 1, tell); return waiting.size; };'
        'for (let i = 0; i < 10; i++) { state.query = i; render(); }'
        '[window.setTimeout, window.clearTimeout] = own; for (const tell of waiting.values()) tell();'
        'return waiting.size'
    )
    assert told == 1 and 'row 0, column 9' in browser.text('live')
    label = "return document.getElementById('query').getAttribute('aria-label')"
    browser.press('#query', 'down')
    assert browser.script(label) == 'Image 0, query pixel at row 0, column 9'
    browser.script("document.getElementById('map').focus()")
    browser.settle()
    assert browser.script(label) == 'Image 0, query pixel at row 1, column 9, locked'


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
    assert browser.script("return [...document.querySelectorAll('input:checked')].map((e) => e.value)") == [
        '1',
        'content',
    ]
    browser.open(pages['content'][2], '#image=9&query=99,1&layer=-1&head=x&part=else&theme=red')
    assert browser.text('query-place') == 'Row 4, column 4' and browser.text('map-title') == 'Block 0, head 0'
    browser.state(state)
    browser.state('#query=1,1')  # an address says all: what it does not name is not chosen
    assert browser.script('return location.hash') == '#image=1&query=1,1&layer=1&head=2&part=content&theme=dark'
    assert browser.logs()[0] == []


def test_accuracy_is_said(browser, pages):
    """Last, in small print."""
    browser.open(pages['content'][2])
    said = [text for text in browser.script("return document.getElementById('main').innerText").splitlines() if text]
    assert 'A probability has 8 bits: it is within 1/255 of the largest one of its query.' in said[-2:]


def test_image_and_part_change_the_maps(browser, pages):
    browser.open(pages['content'][2], '#part=position')
    maps = [browser.image('#map')]
    for state in ('#part=content', '#part=both', '#part=both&image=1'):
        browser.state(state)
        maps.append(browser.image('#map'))
    assert all((a != b).any() for i, a in enumerate(maps) for b in maps[:i])


def test_picture_is_that_of_the_image(browser, pages):
    _, images, path = pages['quadratic']
    for i, picture in enumerate(pictures_of(images)):
        browser.open(path, f'#image={i}&query=3,3&theme=light')
        assert browser.text('image-name') == f'Image {i}'
        for selector, expected in (('#query', picture), ('#map', picture @ [0.299, 0.587, 0.114] * 0.2 + 200)):
            image = browser.image(selector)
            corner = image[image.shape[0] // 24, -image.shape[1] // 40, :3]  # the middle of a pixel
            assert np.abs(corner - expected[0, -1]).max() <= 1.5


@pytest.mark.parametrize('clicks', [True, False])
def test_phone(phone, pages, clicks):
    phone.open(pages['content'][2])
    phone.settle()
    if not clicks:  # as Chromium does at times
        phone.script("addEventListener('click', (event) => event.stopPropagation(), true)")
    assert phone.script('return [document.documentElement.scrollWidth, innerWidth]') == [360, 360]
    assert phone.script(
        "return ['query', 'map'].every((id) => byId(id).width === Math.round(byId(id).clientWidth * devicePixelRatio))"
    )
    phone.touch(phone.place('query', 1, 6))
    assert phone.text('query-place') == 'Row 1, column 6' and locked(phone)
    phone.touch(*(phone.place('query', *place) for place in ((2, 2), (4, 3), (7, 5))))
    assert phone.text('query-place') == 'Row 7, column 5' and locked(phone)
    phone.touch(phone.place('query', 7, 5))
    assert not locked(phone)
    phone.touch(phone.place('query', 7, 5))
    assert locked(phone)
    phone.touch(*(phone.place('query', *place) for place in ((7, 5), (4, 3), (7, 5))))
    assert phone.text('query-place') == 'Row 7, column 5' and locked(phone)
    phone.touch(phone.place('map', 3, 0))
    assert phone.text('key-place') == '(3, 0)'
    below = "byId('key-probability').getBoundingClientRect().top - byId('map').getBoundingClientRect().bottom"
    assert 0 <= phone.script(f'return {below}') <= 20


def test_labels_of_many_heads_stay_in_sight(phone, tmp_path):
    (tmp_path / 'page.html').write_text(
        page_of(small_timm('sa_quadratic16_cifar', num_heads=16).eval(), images_of()), encoding='utf-8'
    )
    phone.open(tmp_path / 'page.html')
    left = "document.querySelector('.scroll').scrollLeft = 1000; const place = document.querySelector('tbody th')"
    assert phone.script(
        f'{left}; return [place.getBoundingClientRect().left >= 0, place.parentNode.parentNode'
        '.parentNode.parentNode.scrollLeft > 100]'
    ) == [True, True]


def test_few_heads_of_a_tall_grid(browser, tmp_path):
    (tmp_path / 'page.html').write_text(page_of(one_block_model(), images_of(size=40, width=12)), encoding='utf-8')
    browser.open(tmp_path / 'page.html')
    assert browser.text('map-title') == 'Block 1, head 0' and browser.text('centers-title') == 'Centres of block 1'
    assert browser.script("return document.querySelector('tbody th').textContent") == 'Block 1'
    for selector, most in (('#map', 420), ('#query', 420), ('#maps canvas', 180)):
        width, height = browser.script(
            'const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.width, b.height]',
            selector,
        )
        assert height <= most and height / width == pytest.approx(20 / 6, rel=0.01)


def test_forced_colours(browser, pages):
    browser.command('Emulation.setEmulatedMedia', dict(features=[dict(name='forced-colors', value='active')]))
    try:
        browser.open(pages['content'][2])
        style = 'getComputedStyle(document.querySelector(arguments[0]))'
        for chosen, other, what in (
            ('label:has(:checked)', 'label:not(:has(:checked))', 'backgroundColor'),
            ('#maps [aria-pressed=true]', '#maps [aria-pressed=false]', 'borderTopColor'),
        ):
            colours = [browser.script(f'return {style}.{what}', selector) for selector in (chosen, other)]
            assert colours[0] != colours[1]
        assert colours[1] == 'rgba(0, 0, 0, 0)'  # no frame around the others
        assert 'gradient' in browser.script(f'return {style}.backgroundImage', '#ramp')
        assert browser.script(f'return {style}.forcedColorAdjust', '#centers') == 'none'
    finally:
        browser.command('Emulation.setEmulatedMedia', dict(features=[]))


def test_dark(browser, pages):
    colour = 'return getComputedStyle(document.body).backgroundColor'
    for scheme, expected in (('dark', 'rgb(20, 20, 20)'), ('light', 'rgb(255, 255, 255)')):
        browser.command('Emulation.setEmulatedMedia', dict(features=[dict(name='prefers-color-scheme', value=scheme)]))
        browser.open(pages['quadratic'][2])
        assert browser.script(colour) == expected
    assert browser.text('theme') == 'Dark theme'
    browser.script("document.getElementById('theme').click()")
    assert browser.script(colour) == 'rgb(20, 20, 20)' and browser.text('theme') == 'Light theme'
    browser.command('Emulation.setEmulatedMedia', dict(features=[]))


def test_pruned_heads_are_left_out(browser, tmp_path):
    model = quadratic_model()
    prune_heads(model, {0: [0, 1, 2], 1: [1]}, allow_empty=True)
    (tmp_path / 'pruned.html').write_text(page_of(model, images_of()), encoding='utf-8')
    browser.open(tmp_path / 'pruned.html')
    browser.press('#maps button[aria-pressed=true]', 'up', 'right')
    assert browser.text('map-title') == 'Block 1, head 1'
    assert browser.script("return document.querySelectorAll('#maps button').length") == 2
    prune_heads(model, {1: [0, 1]}, allow_empty=True)
    (tmp_path / 'empty.html').write_text(page_of(model, images_of()), encoding='utf-8')
    browser.open(tmp_path / 'empty.html')
    assert browser.text('query-place') == 'Row 4, column 4'
    assert browser.logs()[0] == []


VITS = dict(
    vit_small_patch16_dinov3=dict(img_size=(32, 48)),  # class token and registers, 4x6 patches
    swin_tiny_patch4_window7_224=dict(img_size=40),  # 10x10 patches in windows of 4x4: padded, shifted
)


@pytest.fixture(scope='module')
def vits(tmp_path_factory):
    """Models, the probabilities of their layers by name, and files of pages."""
    torch.manual_seed(0)
    folder, pages = tmp_path_factory.mktemp('vits'), {}
    for name, settings in VITS.items():
        model, found = small_vit(name, **settings), {}
        images = images_of(2, size=32, width=48) if 'dino' in name else images_of(2, size=40)
        visit_vit_attention(model, images, lambda name, probs, places: found.update({name: (probs, places)}))
        (folder / f'{name}.html').write_text(page_of(model, images), encoding='utf-8')
        pages[name] = model, found, folder / f'{name}.html'
    return pages


def tokens_shown(browser):
    """What the page says that the query gives to each token beside the image."""
    items = "[...document.querySelectorAll('#map-tokens li')].filter((e) => !e.hidden)"
    return browser.script(
        f"return {items}.map((e) => [e.querySelector('span').textContent, e.querySelector('strong').textContent])"
    )


def check_numbers(browser, probs, to_others, query=None):
    """Whether the page shows the probabilities of patches ``(H, W)`` and of other tokens, for a query at a place."""
    row, column = np.unravel_index(int(probs.argmax()), probs.shape)
    assert browser.number('largest') == pytest.approx(float(probs.max()), rel=5e-4)
    assert browser.text('largest-place') == f'({row}, {column})'
    assert len(tokens_shown(browser)) == len(to_others)
    for (_, shown), expected in zip(tokens_shown(browser), to_others):
        assert float(shown.replace('−', '-')) == pytest.approx(float(expected), rel=5e-3)
    if query is None:
        assert browser.text('near') == browser.text('center') == '–'
        return
    row, column = query
    near = probs[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2].sum()
    assert browser.number('near') == pytest.approx(float(near), rel=5e-4, abs=5 * float(probs.max()) / 255)
    down, right = (float(x) for x in browser.text('center').strip('()').split(','))
    rows, columns = (torch.arange(n) - at for n, at in zip(probs.shape, query))
    assert down == pytest.approx(float(probs.sum(1) @ rows.float() / probs.sum()), abs=0.03)
    assert right == pytest.approx(float(probs.sum(0) @ columns.float() / probs.sum()), abs=0.03)


OTHERS = ['cls', 'reg 1', 'reg 2', 'reg 3', 'reg 4']


def test_class_token_as_query(browser, vits):
    """Chosen by the mouse and by the keyboard, it is shown as the model computes it; so is what lies on it."""
    _, found, path = vits['vit_small_patch16_dinov3']
    browser.open(path, '#image=1&layer=1&head=2&query=2,3')
    probs = found['blocks.1.attn'][0][1, 2]  # (N, N), class token and registers first

    def of_query(query):
        return probs[query, 5:].unflatten(0, (4, 6)), probs[query, :5]

    check_numbers(browser, *of_query(5 + 2 * 6 + 3), (2, 3))
    assert [name for name, _ in tokens_shown(browser)] == OTHERS
    others = float(probs[5 + 2 * 6 + 3, :5].sum())
    assert browser.number('total') == pytest.approx(1 - others, rel=5e-4)
    beside, where = re.fullmatch(r'(\S+) lies on (.*)', browser.text('total-rest')).groups()
    assert float(beside) == pytest.approx(others, rel=5e-3) and where == 'cls … reg 4'
    drawn = browser.image('#map')

    browser.click('#query-tokens button')
    assert browser.text('query-place') == 'Token cls' and locked(browser)
    assert 'token=0' in browser.script('return location.hash') and 'Query token cls, locked' in browser.text('live')
    check_numbers(browser, *of_query(0))
    assert (browser.image('#map') != drawn).any()
    browser.state('#image=1&layer=1&head=2&query=2,3&token=0&key=3,5')
    assert browser.number('key-probability') == pytest.approx(float(of_query(0)[0][3, 5]), rel=2e-2)
    assert browser.text('centers-help') == 'The cls token has no place.'

    browser.press('#query-tokens button:nth-of-type(3)', 'enter')
    assert browser.text('query-place') == 'Token reg 2'
    check_numbers(browser, *of_query(2))
    pressed = "return [...document.querySelectorAll('#query-tokens button')].map((e) => e.getAttribute('aria-pressed'))"
    assert browser.script(pressed) == ['false', 'false', 'true', 'false', 'false']
    browser.press('#query-tokens button:nth-of-type(3)', 'tab', 'space')  # the next one
    assert browser.text('query-place') == 'Token reg 3'
    check_numbers(browser, *of_query(3))
    browser.press('#query-tokens button:nth-of-type(4)', 'space')  # back to the pixel
    assert browser.text('query-place') == 'Row 2, column 3' and not locked(browser)
    check_numbers(browser, *of_query(5 + 2 * 6 + 3), (2, 3))
    assert browser.logs()[0] == []


def test_pixel_after_a_class_token(browser, vits):
    """A pointer over the image leaves a token that is locked; a click and arrow keys choose pixels again."""
    browser.open(vits['vit_small_patch16_dinov3'][2])
    browser.click('#query-tokens button')
    browser.at('query', 1, 1)
    assert browser.text('query-place') == 'Token cls'
    browser.at('query', 1, 1, click=True)
    assert browser.text('query-place') == 'Row 1, column 1' and locked(browser)
    browser.click('#query-tokens button')
    browser.press('#query', 'down')
    assert browser.text('query-place') == 'Row 2, column 1' and locked(browser)
    browser.click('#query-tokens button')
    browser.press('#query', 'escape')
    browser.at('query', 3, 5)
    assert browser.text('query-place') == 'Row 3, column 5' and not locked(browser)
    assert 'token' not in browser.script('return location.hash')


def test_windows(browser, vits):
    """A query sees the keys of its window, which are outlined; what lies on padding lies outside."""
    _, found, path = vits['swin_tiny_patch4_window7_224']
    browser.open(path)
    assert tokens_shown(browser) == [] and browser.script('return [height, width]') == [10, 10]
    for i, (probs, places) in enumerate(found.values()):
        height, width = places.grid
        for image, head, row, column in ((0, 0, 0, 0), (1, 2, height - 1, width // 2), (1, 1, height // 2, 1)):
            # In the middle of a patch of the layer on the page's grid of 10x10.
            at = [int((place + 0.5) * 10 / n) for place, n in zip((row, column), places.grid)]
            browser.state(f'#image={image}&layer={i}&head={head}&query={at[0]},{at[1]}&theme=light')
            assert browser.text('query-place') == f'Row {row}, column {column}'
            window, slot = (places.windows == row * width + column).nonzero()[0].tolist()
            given = probs[image * len(places.windows) + window, head, slot]
            dense = torch.zeros(height * width + 1).index_add(0, places.windows[window], given)
            check_numbers(browser, dense[:-1].unflatten(0, (height, width)), [], (row, column))
            padding = places.windows == height * width  # which shifted windows hide by their masks
            outside = (probs.unflatten(0, (2, -1)) * padding[:, None, None]).sum(-1).transpose(1, 2)
            padded = bool(outside[:, :, ~padding].max() > 1e-3)
            assert (browser.text('total') != '') == padded
            if padded:
                assert browser.number('total') == pytest.approx(1 - float(dense[-1]), rel=5e-4)
                assert browser.text('total-rest') == 'the rest lies outside'
            assert f'in windows of {places.windows.shape[1]}' in browser.text('grid')
            assert browser.text('grid').startswith(f'{height}×{width} patches, {height}×{width} queries')
    assert browser.logs()[0] == []


def test_outline_of_a_window(browser, vits):
    browser.open(vits['swin_tiny_patch4_window7_224'][2], '#layer=0&query=5,6&theme=light')  # rows and columns 4 … 7
    for selector in ('#query', '#map'):
        image = browser.image(selector)
        blue = np.argwhere(np.abs(image[..., :3].astype(int) - (0, 90, 156)).sum(-1) < 12)
        unit = np.array(image.shape[:2]) / 10
        assert np.abs(blue.min(0) / unit - 4).max() < 0.1 and np.abs((blue.max(0) + 1) / unit - 8).max() < 0.1
    # Shifted by two, the window of the first row goes around the border; what it masks is not outlined.
    browser.state('#layer=1&query=0,0&theme=light')
    image = browser.image('#map')
    blue = np.argwhere(np.abs(image[..., :3].astype(int) - (0, 90, 156)).sum(-1) < 12)
    assert np.abs((blue.max(0) + 1) / (np.array(image.shape[:2]) / 10) - 2).max() < 0.1


@pytest.mark.parametrize('name', VITS)
def test_vits_on_a_phone(name, phone, vits):
    phone.open(vits[name][2])
    phone.settle()
    assert phone.script('return [document.documentElement.scrollWidth, innerWidth]') == [360, 360]


def test_vit_without_heads(browser, tmp_path):
    for name in VITS:
        model, images = small_vit(name), images_of(1, size=32)
        heads = dict.fromkeys(prunable_heads(model), [0, 1, 2])
        kept = heads.popitem()[0]
        prune_heads(model, heads, allow_empty=True)
        for pruned, count in (([0], 2), ([0, 1], 0)):
            prune_heads(model, {kept: pruned}, allow_empty=True)
            (tmp_path / 'page.html').write_text(page_of(model, images), encoding='utf-8')
            browser.open(tmp_path / 'page.html')
            browser.at('query', 0, 3)
            assert re.fullmatch('Row 0, column [13]', browser.text('query-place'))  # on a grid half as wide, or not
            assert browser.script("return document.querySelectorAll('#maps button').length") == count
            assert browser.logs()[0] == []
