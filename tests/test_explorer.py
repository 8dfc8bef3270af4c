"""The page that shows where heads attend to: what is in it, and what a browser makes of it."""
import base64
import io
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from processes import run
from small import SMALL, small_cmhsa, small_timm

from attncnn_plugin.visualization.attention_maps import (
    attention_layers, attention_probs_of, content_only_probs_of, position_only_probs_of, position_probs)
from attncnn_plugin.visualization.explorer import explorer_page
from attncnn_plugin.visualization.explorer.score_codec import (
    decode_probs, decode_scores, encode_content, encode_position)

SIZE = 16  # pixels
ARRAYS = {'uint8': np.uint8, 'int16': np.int16, 'float32': np.float32, 'float64': np.float64}


def pictures_of(images):
    pictures = (images - images.amin()) / (images.amax() - images.amin()) * 255
    return list(pictures.permute(0, 2, 3, 1).to(torch.uint8).numpy())


def page_of(model, images, **kwargs):
    return explorer_page(model, images, pictures_of(images), **kwargs)


def unpack(page):
    """What is in a page, with arrays in place of their descriptions."""
    packed = base64.b64decode(re.search(r'id="data">([^<]*)<', page)[1])
    end = 4 + int.from_bytes(packed[:4], 'little')
    data = zlib.decompress(packed[end:])

    def with_arrays(value):
        if isinstance(value, list):
            return [with_arrays(item) for item in value]
        if not isinstance(value, dict):
            return value
        if 'dtype' in value:
            assert value['at'] % 8 == 0
            count = int(np.prod(value['shape'], dtype=int))
            array = np.frombuffer(data, ARRAYS[value['dtype']], count, value['at'])
            return array.reshape(value['shape']).copy()
        return {key: with_arrays(item) for key, item in value.items()}

    return with_arrays(json.loads(zlib.decompress(packed[4:end])))


def probs_in(content, layer, part, image=0):
    """The probabilities of a layer in the content of a page."""
    parts = {name: records[image] if isinstance(records, list) else records
             for name, records in content['layers'][layer]['parts'].items()}
    record = parts[part]
    if record['type'] == 'product':
        return decode_probs(record, decode_scores(parts['position']) + decode_scores(parts['content']))
    return decode_probs(record)


def images_of(count=2, channels=3, size=SIZE):
    return torch.randn(count, channels, size, size)


def quadratic_model():
    """A model whose first head looks one row down and two columns to the left."""
    model = small_timm('sa_quadratic_cifar').eval()
    with torch.no_grad():
        encoding = model.blocks[0].attn.encoding
        encoding.center[0] = torch.tensor([1., -2.])
        encoding.sqrt_precision[0] = 3.
    return model


def content_model(**kwargs):
    model = small_timm('sa_learned_content_cifar', **kwargs).eval()
    with torch.no_grad():  # heads with something to see, not near uniform ones
        for layer in attention_layers(model).values():
            if layer.key is not None:
                layer.key.weight.mul_(6)
    return model


def patch_model():
    model = small_cmhsa('attn').eval()
    with torch.no_grad():
        for layer in attention_layers(model).values():
            layer.position.table.normal_()
            layer.query.weight.mul_(20)
    return model


@pytest.mark.parametrize('name, kind', [
    ('sa_quadratic_cifar', 'axes'), ('sa_learned_cifar', 'axes'), ('sa_generalized_cifar', 'shifts')])
def test_positions_are_exact(name, kind):
    model = small_timm(name).eval()
    content = unpack(page_of(model, images_of(size=20)))
    assert content['grid'] == [10, 10] and len(content['layers']) == SMALL['depth']
    for i, layer in enumerate(attention_layers(model).values()):
        assert list(content['layers'][i]['parts']) == ['position']
        assert content['layers'][i]['parts']['position']['type'] == kind
        assert content['layers'][i]['errors']['position'] <= 1e-6
        assert (probs_in(content, i, 'position') - layer.attention_probs(10, 10)).abs().max() <= 1e-6


def test_far_away_heads_are_exact():
    """Large scores with small differences: float32 would not hold them."""
    model = small_timm('sa_generalized_cifar').eval()
    layer = model.blocks[0].attn
    with torch.no_grad():
        layer.encoding.center[0] = torch.tensor([300., 0.])
        layer.encoding.sqrt_precision[0] = torch.tensor([[1., 0.], [0.02, 0.3]])
    content = unpack(page_of(model, images_of()))
    assert content['layers'][0]['parts']['position']['type'] == 'shifts'
    assert (probs_in(content, 0, 'position') - layer.attention_probs(8, 8)).abs().max() <= 1e-6


def test_positions_without_a_rule_are_quantized():
    probs = torch.randn(2, 12, 12).mul(3).softmax(-1)
    record = encode_position(probs, 3, 4)
    error = (decode_probs(record) - probs).abs() / probs.amax(-1, keepdim=True)
    assert record['type'] == 'maps' and error.max() <= 0.5 / 255 + 1e-6


def test_one_row_down_and_two_columns_left():
    content = unpack(page_of(quadratic_model(), images_of()))
    probs = probs_in(content, 0, 'position')[0].unflatten(0, (8, 8)).unflatten(2, (8, 8))  # q1, q2, k1, k2
    assert divmod(probs[3, 5].argmax().item(), 8) == (4, 3)
    assert probs[3, 5, 4, 3] > 0.9
    assert content['layers'][0]['centers'][0] == [1, -2]


EXPECTED = dict(both=attention_probs_of, content=content_only_probs_of, position=position_only_probs_of)


@pytest.mark.parametrize('make', [
    content_model, patch_model, lambda: content_model(terms=('qk', 'uk', 'vr')),
    lambda: content_model(terms=('qr', )), lambda: content_model(position='absolute_learned')],
    ids=['qk and qr', 'patches', 'qk, uk and vr', 'qr', 'absolute'])
def test_content_within_the_error_that_is_said(make):
    torch.manual_seed(1)
    model, images = make(), images_of(3)
    content = unpack(page_of(model, images))
    assert content['step'] == 0.002
    for part, probs_of in EXPECTED.items():
        expected = probs_of(model, images)
        for i, name in enumerate(attention_layers(model)):
            layer = content['layers'][i]
            assert (part in layer['parts']) == (name in expected)
            if name not in expected:
                continue
            assert layer['relative_errors'][part] <= 0.01
            error = max((probs_in(content, i, part, image) - expected[name][image]).abs().max().item()
                        for image in range(3))
            assert error <= layer['errors'][part] + 1e-7


def test_content_and_position_share_their_bytes():
    for model in (content_model(), patch_model()):
        for layer in unpack(page_of(model, images_of()))['layers']:
            assert [record['type'] for record in layer['parts']['both']] == ['product', 'product']


@pytest.mark.parametrize('step', [0.002, 0.02, 0.2])
def test_error_of_quantization(step):
    scores = torch.randn(3, 64, 8) @ torch.randn(3, 8, 64)
    probs = scores.softmax(-1)
    record = encode_content(probs, step)
    error = (decode_probs(record) - probs).abs() / probs.amax(-1, keepdim=True)
    assert record['type'] == 'factors' and error.max() <= 3 * step
    error = decode_scores(record) - probs.log()
    error = error - error.mean(-1, keepdim=True)
    assert error.square().mean().sqrt() <= step / 6 ** 0.5


def test_hard_attention_takes_maps():
    probs = torch.zeros(2, 64, 64)
    probs[0, torch.arange(64), torch.randperm(64)] = 1
    probs[1] = torch.eye(64)
    record = encode_content(probs, 0.02)
    assert record['type'] == 'maps' and torch.equal(decode_probs(record), probs)


def test_ten_megabytes():
    model = small_timm('sa_learned_content_cifar', embed_dim=32, depth=6, num_heads=9)
    images = images_of(8, size=32)
    page = page_of(model, images)
    assert len(page.encode()) <= 10_000_000
    content = unpack(page)
    assert content['grid'] == [16, 16] and content['step'] <= 0.06
    assert [len(layer['parts']['both']) for layer in content['layers']] == [8] * 6


def test_coarser_where_it_must_be():
    model, images = content_model(), images_of(2)
    fine = page_of(model, images)
    limit = len(fine.encode()) * 4 // 5
    coarse = page_of(model, images, max_bytes=limit)
    assert len(coarse.encode()) <= limit
    assert unpack(coarse)['step'] > unpack(fine)['step'] == 0.002
    with pytest.raises(ValueError, match='max_bytes=20,000 with 2 images'):
        page_of(model, images, max_bytes=20_000)
    with pytest.raises(ValueError, match='max_bytes=20,000 with 2 images'):
        page_of(quadratic_model(), images, max_bytes=20_000)


def test_pictures_and_names():
    model, images = quadratic_model(), images_of(2)
    pictures = [np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8) for size in ((16, 16), (16, 16, 3))]
    page = explorer_page(model, images, pictures, ['</script>', 'ä'], title='<b>{{data}} & {{style}}')
    content = unpack(page)
    assert content['names'] == ['</script>', 'ä'] and '&lt;b&gt;{{data}} &amp; {{style}}</title>' in page
    assert (content['pictures'][0] == pictures[0][..., None]).all() and (content['pictures'][1] == pictures[1]).all()


def test_heads_that_were_pruned():
    model = quadratic_model()
    model.prune_heads({0: [1], 1: [0, 1, 2]}, allow_empty=True)
    content = unpack(page_of(model, images_of()))
    assert [layer['heads'] for layer in content['layers']] == [2, 0]
    assert (probs_in(content, 0, 'position') - position_probs(model.blocks[0].attn, 8, 8)).abs().max() <= 1e-6


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


def test_tool(repository, tmp_path):
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
    output = run(sys.executable, repository / 'tools/visualization/attention_explorer.py', config,
                 tmp_path / 'model.pth', *(tmp_path / name for name in ('digit.npy', 'digit.png', 'photo.jpg')),
                 '--out', tmp_path / 'pages/explorer.html', folder=tmp_path)
    assert 'Saved ' in output and ' MB' in output
    content = unpack((tmp_path / 'pages/explorer.html').read_text(encoding='utf-8'))
    assert content['names'] == ['digit.npy', 'digit.png', 'photo.jpg'] and content['grid'] == [8, 8]
    assert [picture.shape for picture in content['pictures']] == [(16, 16, 3)] * 3
    assert (content['pictures'][0] == content['pictures'][1]).all()
    run(sys.executable, repository / 'tools/visualization/attention_explorer.py', config, tmp_path / 'model.pth',
        tmp_path / 'model.pth', folder=tmp_path, expected=1)


# ---- In a browser ----


class Browser:
    """Chromium without a window, by the WebDriver protocol."""

    def __init__(self):
        self.driver = subprocess.Popen(['chromedriver', '--port=0'], stdout=subprocess.PIPE, text=True)
        self.address = None
        for line in self.driver.stdout:
            if 'successfully on port' in line:
                self.address = f"http://127.0.0.1:{re.search(r'port ([0-9]+)', line)[1]}/session"
                break
        options = dict(args=['--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage',
                             '--window-size=1280,1400'])
        session = self.call('POST', '', dict(capabilities=dict(alwaysMatch={
            'goog:chromeOptions': options, 'goog:loggingPrefs': dict(browser='ALL', performance='ALL')})))
        self.address += f"/{session['sessionId']}"

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {'Content-Type': 'application/json'}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)['value']

    def close(self):
        self.call('DELETE', '')
        self.driver.terminate()
        self.driver.wait()

    def script(self, script, *args):
        return self.call('POST', '/execute/sync', dict(script=script, args=list(args)))

    def command(self, name, **params):
        return self.call('POST', '/goog/cdp/execute', dict(cmd=name, params=params))

    def open(self, path, state=''):
        """Opens a page anew and waits until it shows something."""
        self.call('POST', '/url', dict(url='about:blank'))
        self.logs()
        self.call('POST', '/url', dict(url=f'{path.as_uri()}{state}'))
        self.wait("!document.getElementById('main').hidden")

    def logs(self):
        """The console's entries, and the addresses that were asked for."""
        console = self.call('POST', '/se/log', dict(type='browser'))
        events = [json.loads(entry['message'])['message']
                  for entry in self.call('POST', '/se/log', dict(type='performance'))]
        return console, [event['params']['request']['url'] for event in events
                         if event['method'] == 'Network.requestWillBeSent']

    def wait(self, condition):
        end = time.time() + 20
        while not self.script(f'return {condition}'):
            assert time.time() < end, f'{condition} does not come true'
            time.sleep(0.02)

    def settle(self):
        """Waits for a frame, and for the address and what is read aloud after it."""
        self.call('POST', '/execute/async', dict(script='const done = arguments[0]; requestAnimationFrame(() => '
                                                        'setTimeout(done, 250))', args=[]))

    def state(self, state):
        self.script('location.hash = arguments[0]', state)
        self.settle()

    def text(self, name):
        return self.script('return document.getElementById(arguments[0]).textContent', name).replace('−', '-')

    def number(self, name):
        return float(self.text(name))

    def image(self, selector):
        """The pixels of a canvas, ``(h, w, 4)``."""
        url = self.script('return document.querySelector(arguments[0]).toDataURL()', selector)
        return np.array(Image.open(io.BytesIO(base64.b64decode(url.split(',')[1]))))

    def at(self, name, row, column, grid, click=False):
        """Moves the pointer to a token of a canvas."""
        left, top, width, height = self.script(
            'const b = document.getElementById(arguments[0]).getBoundingClientRect(); '
            'return [b.left, b.top, b.width, b.height]', name)
        move = dict(type='pointerMove', duration=0, origin='viewport', x=round(left + (column + 0.5) * width / grid),
                    y=round(top + (row + 0.5) * height / grid))
        press = [dict(type='pointerDown', button=0), dict(type='pointerUp', button=0)] if click else []
        self.call('POST', '/actions', dict(actions=[dict(type='pointer', id='mouse', actions=[move, *press])]))
        self.settle()

    def press(self, selector, *keys):
        """Presses keys while an element has the focus."""
        self.script('document.querySelector(arguments[0]).focus()', selector)
        codes = dict(up='\ue013', down='\ue015', left='\ue012', right='\ue014', escape='\ue00c')
        actions = [dict(type=kind, value=codes[key]) for key in keys for kind in ('keyDown', 'keyUp')]
        self.call('POST', '/actions', dict(actions=[dict(type='key', id='keys', actions=actions)]))
        self.settle()


@pytest.fixture(scope='module')
def browser():
    if not (shutil.which('chromium') and shutil.which('chromedriver')):
        pytest.skip('chromium or chromedriver is not installed')
    browser = Browser()
    yield browser
    browser.close()


MODELS = dict(quadratic=quadratic_model, content=content_model, patches=patch_model)


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    """Models, images and files of pages by name."""
    torch.manual_seed(0)
    folder, pages = tmp_path_factory.mktemp('pages'), {}
    for name, make in MODELS.items():
        model, images = make(), images_of()
        (folder / f'{name}.html').write_text(page_of(model, images), encoding='utf-8')
        pages[name] = model, images, folder / f'{name}.html'
    return pages


@pytest.mark.parametrize('name', MODELS)
def test_loads_without_errors_and_requests(name, browser, pages):
    browser.open(pages[name][2])
    browser.at('query', 2, 3, 8)
    browser.at('map', 1, 1, 8)
    console, addresses = browser.logs()
    assert console == []
    assert [address for address in addresses if address != 'about:blank'] == [pages[name][2].as_uri()]
    with_name = browser.script(
        "return [...document.querySelectorAll('button, canvas.view, input, svg')].every("
        "(e) => e.getAttribute('aria-label') || e.textContent.trim())")
    assert with_name


def test_policy_forbids_requests(browser, pages):
    browser.open(pages['quadratic'][2])
    refused = browser.call('POST', '/execute/async', dict(
        script="fetch('http://127.0.0.1:9/').catch((e) => arguments[0](String(e)))", args=[]))
    assert 'TypeError' in refused
    console, _ = browser.logs()
    assert any('Content Security Policy' in entry['message'] for entry in console)


@pytest.mark.parametrize('name', MODELS)
def test_numbers_are_the_probabilities(name, browser, pages):
    model, images, path = pages[name]
    browser.open(path)
    content = unpack(path.read_text(encoding='utf-8'))
    parts = list(content['layers'][0]['parts'])
    assert parts == (['position'] if name == 'quadratic' else ['position', 'content', 'both'])
    rng = np.random.default_rng(0)
    for i, (layer_name, layer) in enumerate(attention_layers(model).items()):
        for part in parts:
            image, head, row, column, key_row, key_column = (
                int(rng.integers(n)) for n in (2, layer.num_heads, 8, 8, 8, 8))
            if name == 'quadratic':
                probs = layer.attention_probs(8, 8)
            else:
                probs = EXPECTED[part](model, images)[layer_name][image]
            probs = probs[head, row * 8 + column].detach().double().unflatten(0, (8, 8))
            browser.state(f'#image={image}&layer={i}&head={head}&part={part}&query={row},{column}'
                          f'&key={key_row},{key_column}')
            error = content['layers'][i]['errors'][part]

            def near(expected, keys=1):
                return pytest.approx(float(expected), abs=keys * error + 1e-9, rel=5e-3 if expected < 1e-3 else 2e-4)

            assert browser.text('map-title') == f'Layer {i}, head {head}'
            assert browser.text('query-place') == f'Row {row}, column {column}'
            assert browser.text('key-place') == f'({key_row}, {key_column})'
            assert browser.number('key-probability') == near(probs[key_row, key_column])
            assert browser.number('largest') == near(probs.max())
            window = probs[max(row - 1, 0):row + 2, max(column - 1, 0):column + 2]
            assert browser.number('near') == near(window.sum(), window.numel())
            if name == 'patches' and part != 'content':
                assert browser.number('total') == near(probs.sum())
            else:
                assert browser.text('total') == ''
            down, right = (float(x) for x in browser.text('center').strip('()').split(','))
            steps = torch.arange(8.)
            mass = probs.sum()
            assert down == pytest.approx(float(probs.sum(1) @ (steps - row).double() / mass), abs=0.006 + 300 * error)
            assert right == pytest.approx(float(probs.sum(0) @ (steps - column).double() / mass),
                                          abs=0.006 + 300 * error)
            shown = browser.text('error')
            assert shown == 'exact' if error <= 1e-6 else float(shown.split()[-1]) == pytest.approx(error, rel=5e-3)


def coloured(image):
    """How strongly each token of a drawing of 8x8 tokens is coloured, at its middle."""
    height, width = image.shape[:2]
    rows, columns = ((np.arange(8) + 0.5) * size // 8 for size in (height, width))
    pixels = image[rows.astype(int)][:, columns.astype(int)].astype(int)
    return pixels[..., 0] - pixels[..., 2]  # red without blue


def test_drawn_one_row_down_and_two_columns_left(browser, pages):
    browser.open(pages['quadratic'][2], '#query=3,5&layer=0&head=0')
    for selector in ('#map', '#maps tbody tr:first-of-type td:nth-of-type(1) canvas'):
        colour = coloured(browser.image(selector))
        assert np.unravel_index(colour.argmax(), colour.shape) == (4, 3)
    assert browser.text('largest-place') == '(4, 3)'
    assert browser.text('encoded-center') == '(+1.00, -2.00)'
    assert browser.script("return document.querySelector('#centers .chosen').getAttribute('transform')"
                          ) == 'translate(-2 1)'


def test_pointer_moves_and_locks(browser, pages):
    browser.open(pages['quadratic'][2])
    cell = '#maps tbody tr:last-of-type td:last-of-type canvas'
    browser.at('query', 1, 6, 8)
    first = browser.image(cell)
    assert browser.text('query-place') == 'Row 1, column 6'
    browser.at('query', 6, 2, 8)
    assert browser.text('query-place') == 'Row 6, column 2'
    assert (browser.image(cell) != first).any() and 'query=6,2' in browser.script('return location.hash')
    browser.at('query', 5, 3, 8, click=True)
    browser.at('query', 0, 0, 8)
    assert browser.text('query-place') == 'Row 5, column 3' and browser.text('lock') == 'Locked'
    browser.at('query', 5, 3, 8, click=True)
    browser.at('query', 0, 0, 8)
    assert browser.text('query-place') == 'Row 0, column 0' and browser.text('lock') == 'Lock'
    browser.at('map', 7, 4, 8)
    assert browser.text('key-place') == '(7, 4)'


def test_keyboard(browser, pages):
    browser.open(pages['quadratic'][2], '#query=3,3')
    first = browser.image('#map')
    browser.press('#query', 'down', 'down', 'right')
    assert browser.text('query-place') == 'Row 5, column 4' and (browser.image('#map') != first).any()
    browser.press('#query', *['up'] * 9, 'left')
    assert browser.text('query-place') == 'Row 0, column 3'
    assert 'row 0, column 3, locked' in browser.text('live')
    browser.press('#query', 'escape')
    assert browser.text('lock') == 'Lock'
    browser.press('#maps button[aria-pressed=true]', 'down', 'right', 'right', 'left')
    assert browser.text('map-title') == 'Layer 1, head 1'
    assert browser.script("return document.activeElement.getAttribute('aria-pressed')") == 'true'
    browser.press('#map', 'down', 'left')
    assert browser.text('key-place') == '(1, 2)'
    assert 'probability of key (1, 2)' in browser.text('live')


def test_state_is_in_the_address(browser, pages):
    browser.open(pages['content'][2])
    state = '#image=1&query=2,7&layer=1&head=2&part=content&locked=1&key=4,0&theme=dark'
    browser.script("document.querySelectorAll('input[name=image]')[1].click();"
                   "document.querySelector('input[value=content]').click();"
                   "document.getElementById('theme').click();"
                   "document.querySelectorAll('#maps button')[5].click();")
    browser.at('query', 2, 7, 8, click=True)
    browser.at('map', 4, 0, 8)
    assert browser.script('return location.hash') == state
    drawn, shown = browser.image('#map'), browser.text('key-probability')
    browser.open(pages['content'][2], state)
    browser.settle()
    assert browser.script('return location.hash') == state
    assert (browser.image('#map') == drawn).all() and browser.text('key-probability') == shown
    assert browser.script("return [...document.querySelectorAll('input:checked')].map((e) => e.value)"
                          ) == ['1', 'content']
    browser.open(pages['content'][2], '#image=9&query=99,1&layer=-1&head=x&part=else&theme=red')
    assert browser.text('query-place') == 'Row 4, column 4' and browser.text('map-title') == 'Layer 0, head 0'
    assert browser.logs()[0] == []


def test_image_and_part_change_the_maps(browser, pages):
    browser.open(pages['content'][2], '#part=position')
    maps = [browser.image('#map')]
    for state in ('#part=content', '#part=both', '#part=both&image=1'):
        browser.state(state)
        maps.append(browser.image('#map'))
    assert all((a != b).any() for i, a in enumerate(maps) for b in maps[:i])


def test_phone(browser, pages):
    browser.command('Emulation.setDeviceMetricsOverride', width=360, height=740, deviceScaleFactor=2, mobile=True)
    browser.command('Emulation.setTouchEmulationEnabled', enabled=True)
    try:
        browser.open(pages['content'][2])
        assert browser.script('return [document.documentElement.scrollWidth, innerWidth]') == [360, 360]
        left, top = browser.script("const b = document.getElementById('query').getBoundingClientRect(); "
                                   'return [b.left + b.width * 6.5 / 8, b.top + b.height * 1.5 / 8]')
        for kind, points in (('touchStart', [dict(x=left, y=top)]), ('touchEnd', [])):
            browser.command('Input.dispatchTouchEvent', type=kind, touchPoints=points)
        browser.wait("document.getElementById('lock').textContent === 'Locked'")
        assert browser.text('query-place') == 'Row 1, column 6'
    finally:
        browser.command('Emulation.clearDeviceMetricsOverride')
        browser.command('Emulation.setTouchEmulationEnabled', enabled=False)


def test_dark(browser, pages):
    colour = 'return getComputedStyle(document.body).backgroundColor'
    for scheme, expected in (('dark', 'rgb(20, 20, 20)'), ('light', 'rgb(255, 255, 255)')):
        browser.command('Emulation.setEmulatedMedia', features=[dict(name='prefers-color-scheme', value=scheme)])
        browser.open(pages['quadratic'][2])
        assert browser.script(colour) == expected
    browser.script("document.getElementById('theme').click()")
    assert browser.script(colour) == 'rgb(20, 20, 20)'
    browser.command('Emulation.setEmulatedMedia', features=[])


def test_pruned_heads_are_left_out(browser, tmp_path):
    model = quadratic_model()
    model.prune_heads({0: [0, 1, 2], 1: [1]}, allow_empty=True)
    (tmp_path / 'pruned.html').write_text(page_of(model, images_of()), encoding='utf-8')
    browser.open(tmp_path / 'pruned.html')
    browser.press('#maps button[aria-pressed=true]', 'up', 'right')
    assert browser.text('map-title') == 'Layer 1, head 1'
    assert browser.script("return document.querySelectorAll('#maps button').length") == 2
    assert browser.logs()[0] == []
