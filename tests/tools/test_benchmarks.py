"""The benchmarks: the dense original computes what our models compute, and the command measures and reports."""

import re
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers.small import small_timm
from helpers.vits import small_vit
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'tools/benchmarks'))

import benchmark  # noqa: E402
import measure  # noqa: E402
from original import with_dense_original  # noqa: E402

from attncnn_plugin import attention  # noqa: E402
from attncnn_plugin.convert import convs_to_attention  # noqa: E402
from attncnn_plugin.pruning import prune_heads  # noqa: E402


@pytest.mark.parametrize('name', benchmark.C20.values())
@pytest.mark.parametrize('height, width, largest', [(6, 10, (6, 10)), (14, 8, (20, 16)), (4, 12, (4, 12))])
def test_original_computes_the_same(name, height, width, largest):
    size = dict(img_size=largest) if 'learned' in name else {}
    ours = small_timm(name, **size).double()
    for parameter in ours.parameters():  # no head, bias or norm is as it began
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    original = with_dense_original(ours, height // 2, width // 2)
    images = torch.randn(3, 3, height, width, dtype=torch.float64)
    labels = torch.tensor([0, 4, 9])
    for mode in (True, False):
        outputs = [model.train(mode)(images) for model in (ours, original)]
        assert torch.allclose(*outputs, rtol=0, atol=1e-10)
    for model in (ours, original):
        F.cross_entropy(model.train()(images), labels).backward()
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    of_original = {key.replace('.layer.', '.'): parameter.grad for key, parameter in original.named_parameters()}
    assert gradients.keys() == of_original.keys()
    for key, gradient in of_original.items():
        # Of the bias of keys, which adds the same to the scores of all of them, it is 0.
        assert gradients[key].abs().sum() > 0 or key.endswith('key.bias'), key
        assert torch.allclose(gradients[key], gradient, rtol=0, atol=1e-10), key


def test_ratio_is_the_median_over_the_rounds():
    seconds = dict(a=[2.0, 30.0, 6.0, 4.0, 1.0], b=[1.0, 10.0, 1.0, 4.0, 2.0])  # ratios 2, 3, 6, 1, 0.5
    ratio = measure.Measured(seconds, dict(a=3, b=2)).ratio('a', 'b')
    assert ratio == (2.0, 1.0, 1.5)
    assert str(ratio) == '2.00 ±1.00 (1.50)'


class SelfAttention(nn.Module):
    """PyTorch's, by one of its fused kernels in evaluation mode."""

    def __init__(self, need_weights):
        super().__init__()
        self.attn, self.need_weights = nn.MultiheadAttention(24, 4, batch_first=True), need_weights

    def forward(self, x):
        return self.attn(x, x, x, need_weights=self.need_weights)[0]


def block(tokens, window, dim=24, hidden=24):
    """Products of a block: four maps, scores and sums over the keys of a window, and an MLP."""
    return tokens * dim * (4 * dim + 2 * window + 2 * hidden)


N, D, HEADS = 3 * 5, 8, 3  # of a grid of tokens
EMBEDDING = 16 * 24 * 3 * 8**2  # of 16 patches
CONTENT = N * N * HEADS * D * 2 + N * HEADS * D * 3 * D  # scores, sums of values, and maps to queries, keys, outputs
# A layer, the shape of an input, and the multiply-adds of one input by hand.
BY_HAND = {
    'ViT': (lambda: small_vit('vit_tiny_patch16_224'), (3, 32, 32), EMBEDDING + 2 * block(17, 17, 24, 96) + 24 * 5),
    'torchvision': (
        lambda: small_vit('torchvision.VisionTransformer', num_heads=4),  # an even number has a fused kernel
        (3, 32, 32),
        EMBEDDING + 2 * block(17, 17) + 24 * 5,
    ),
    'Swin': (
        lambda: small_vit('swin_tiny_patch4_window7_224'),
        (3, 32, 32),
        64 * 12 * 3 * 4**2 + 2 * block(64, 16, 12, 48) + 16 * 48 * 24 + 2 * block(16, 16, 24, 96) + 24 * 5,
    ),
    'MultiheadAttention': (lambda: SelfAttention(False), (7, 24), block(7, 7, hidden=0)),
    'MultiheadAttention, with maps': (lambda: SelfAttention(True), (7, 24), block(7, 7, hidden=0)),
    'encoder layer': (lambda: nn.TransformerEncoderLayer(24, 4, 96, batch_first=True), (7, 24), block(7, 7, 24, 96)),
    'convolution': (lambda: nn.Conv2d(4, 6, 3, stride=2), (4, 7, 9), 3 * 4 * 6 * 4 * 9),
    'groups': (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5), 25 * 6 * 2 * 9),
    'depthwise': (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 5, 5), 25 * 4 * 9),
    'transposed': (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5, 5), 25 * 4 * 3 * 9),
    'quadratic': (lambda: attention.QuadraticAttention(D, HEADS), (3, 5, D), N * HEADS * D * (3 + 5 + D)),
    'generalized': (lambda: attention.GeneralizedQuadraticAttention(D, HEADS), (3, 5, D), N * HEADS * D * (N + D)),
    'content': (
        lambda: attention.ContentAttention(D, HEADS, max_size=(3, 5)),
        (3, 5, D),
        CONTENT + N * (3 + 5) * HEADS * D // 2,
    ),
    'patches': (
        lambda: attention.PatchAttention(D, HEADS, attention.GridBias(HEADS, (3, 5))),
        (3, 5, D),
        CONTENT + N * HEADS * D * D,
    ),
}


@pytest.mark.parametrize('images', [1, 2])
@pytest.mark.parametrize('name', BY_HAND)
def test_multiply_adds_by_hand(name, images):
    """Each product has two gradients, which are products as large."""
    make, shape, by_hand = BY_HAND[name]
    layer, x = make().eval(), torch.randn(images, *shape)
    assert measure.count_multiply_adds(measure.forward_pass(layer, x)) == images * by_hand
    layer.train().requires_grad_(True)
    step = lambda: layer(x.requires_grad_()).sum().backward()  # noqa: E731
    assert measure.count_multiply_adds(step) == 3 * images * by_hand
    assert torch.backends.mha.get_fastpath_enabled()


def cells_of_the_page(name):
    """The texts of a group's table by row and column."""
    section = re.search(rf'^## .* \(`{name}`\)$(.*?)(?=^## |\Z)', PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    (_, *columns), _, *rows = (
        [cell.strip() for cell in line.strip('|').split('|')] for line in section.splitlines() if line.startswith('|')
    )
    return {(row, column): cell for row, *cells in rows for column, cell in zip(columns, cells)}


PAGE = ROOT / 'docs/tables/benchmarks.md'
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ('cnns', 'original', 'pruning')]


@pytest.mark.parametrize('name', ['cmhsa', *SLOW])
def test_multiply_adds_of_the_page(name, monkeypatch):
    """They need no images, only their shapes; but pruning needs weights."""

    def counted(quick, training, models, images, pixels):
        with torch.device('meta'):
            steps = {
                key: benchmark.make_step(training, model.to('meta'), images, pixels) for key, model in models.items()
            }
        return measure.Measured(
            dict.fromkeys(steps, [1.0]), {key: measure.count_multiply_adds(step) for key, step in steps.items()}
        )

    monkeypatch.setattr(benchmark, 'compare', counted)
    create = timm.create_model if name == 'pruning' else on_meta
    monkeypatch.setattr(benchmark, 'create', lambda quick, *args, **kwargs: create(*args, **kwargs))
    found = {(row, column): f'({ratio.arithmetic:.2f})' for row, column, ratio in benchmark.GROUPS[name](False)}
    assert found == {key: cell.split()[-1] for key, cell in cells_of_the_page(name).items()}


def on_meta(*args, **kwargs):
    with torch.device('meta'):
        return timm.create_model(*args, **kwargs)


@pytest.mark.slow
def test_what_pruning_saves():
    """The table of docs/pruning.md."""
    rows = dict(
        re.findall(r'^\| ([^|]+) \| ([^|]+ \| [^|]+) \|$', (ROOT / 'docs/pruning.md').read_text(), re.MULTILINE)
    )
    whole = on_meta('deit_small_patch16_224')
    pruned = timm.create_model('deit_small_patch16_224')
    change = prune_heads(pruned, {block: range(3) for block in range(12)}, torch.rand(1, 3, 224, 224))
    pruned, x = pruned.to('meta'), torch.zeros(1, 3, 224, 224, device='meta')
    counts = [measure.count_multiply_adds(measure.forward_pass(model, x)) for model in (whole, pruned)]
    assert rows['parameters'] == f'{change.parameters_before / 1e6:.1f}M | {change.parameters_after / 1e6:.1f}M'
    assert rows['multiply-adds'] == f'{counts[0] / 1e9:.2f}G | {counts[1] / 1e9:.2f}G'
    time = cells_of_the_page('pruning')['deit_small_patch16_224', 'forward'].split()[0]
    assert rows['time of a batch of eight, on a CPU'] == f'1 | {time}'


def test_costs_of_large_images():
    """The table of docs/downstream.md: three convolutions of a ResNet-50, on an image of 800x1333 pixels."""
    found = []
    for options in (None, dict(window_size=7), {}):
        convs = nn.Sequential(*[nn.Conv2d(512, 512, 3, s, padding=1, bias=False) for s in (2, 1, 1)])
        if options is not None:
            convs_to_attention(convs, '*', content='additive', alpha=6, **options)
        step = measure.forward_pass(convs.to('meta'), torch.zeros(1, 512, 50, 84, device='meta'))
        found.append(measure.count_multiply_adds(step) / 1e9)
    cells = re.findall(r'^\| [^|]+ \| ([\d.]+)G \| \d+ MB \|$', (ROOT / 'docs/downstream.md').read_text(), re.MULTILINE)
    assert cells == [f'{number:.3g}' for number in found]


def test_sentences_of_the_page():
    """What the pages say in words of the tables: times in percent, and multiply-adds."""
    page = ' '.join(PAGE.read_text().split())
    groups = {name: cells_of_the_page(name) for name in benchmark.GROUPS}
    times, counts = (
        {
            name: {key: float(re.findall(r'[\d.]+', cell)[place]) for key, cell in cells.items()}
            for name, cells in groups.items()
            if name != 'memory'
        }
        for place in (0, 2)
    )
    training = [time for (_, way), time in times['cnns'].items() if way == 'training']
    pruned = times['pruning'].values()
    separable = [
        time
        for (row, size), time in times['original'].items()
        if size.startswith('64') and row[0] in 'ql' and '+' not in row
    ]
    dense = [(size[:5], 1 / time) for (row, size), time in times['original'].items() if row[0] == 'g' or '+' in row]
    assert f'takes {100 * min(training) - 100:.0f} to {100 * max(training) - 100:.0f}% longer to train' in page
    assert f'saves {100 - 100 * max(pruned):.0f} to {100 - 100 * min(pruned):.0f}% of a forward pass' in page
    assert f'{min(separable):.0f} to {max(separable):.0f} times as fast' in page
    longest = max(time for size, time in dense if size == '16x16')
    assert f'take up to {100 * longest - 100:.0f}% longer' in page
    assert (
        max(time for size, time in dense if size != '16x16') <= 1 and 'no more time than it on 32×32 and 64×64' in page
    )
    maps = [time for (row, column), time in times['maps'].items() if row.endswith('all maps') and column == 'time']
    assert f'[{min(maps):.1f} to {max(maps):.1f} times](docs/tables/benchmarks.md' in (ROOT / 'README.md').read_text()
    resnets = [100 * count - 100 for (row, _), count in counts['cnns'].items() if row.startswith('resnet')]
    text = f'costs {min(resnets):.0f} to {max(resnets):.0f}% more multiply-adds'
    assert text in ' '.join((ROOT / 'docs/cnn_to_attention.md').read_text().split())


def table_rows(text):
    return [line.split(' | ')[0].strip('| ') for line in text.splitlines() if line.startswith('|')][2:]


@pytest.mark.parametrize('names', [['pruning', 'cmhsa'], pytest.param(list(benchmark.GROUPS), marks=pytest.mark.slow)])
def test_the_command(names, tmp_path, monkeypatch, capsys):
    """Some groups or all of them, then one of them again."""

    def here(make_step, *args):
        make_step(*args)()
        return 10**6

    monkeypatch.setattr(benchmark, 'added_by', here)  # in processes of their own: test_memory_is_that_of_the_step
    names = [name for name in benchmark.GROUPS if name in names]  # in the order of the page
    path = tmp_path / 'benchmarks.md'
    path.write_text(introduction := '# Benchmarks\n\n## How it is measured\n\nIn turns.\n\n')
    command = ['benchmark.py', '--quick', '--threads', '1', '--page', str(path), '--only']
    monkeypatch.setattr(sys, 'argv', [*command, *names])
    benchmark.main()
    text, printed = path.read_text(), capsys.readouterr().out
    sections = text.split('\n## ')[2:]  # after the introduction and how it is measured
    assert len(sections) == len(names) and text.startswith(introduction)
    for name, section in zip(names, sections):
        assert section.splitlines()[0].endswith(f' (`{name}`)') and section.count('\n\n') >= 3
        assert 'no measurement' in section and section.strip() in printed
        assert table_rows(section) and ('±' in section or name == 'memory')

    monkeypatch.setattr(sys, 'argv', [*command, 'pruning'])
    monkeypatch.setattr(benchmark.os, 'getloadavg', lambda: (7.2, 0, 0))
    benchmark.main()
    again = path.read_text().split('\n## ')[2:]
    assert [a == b for a, b in zip(again, sections)] == [name != 'pruning' for name in names]
    assert 'other processes ran on the machine too (load 7)' in again[names.index('pruning')]


@pytest.mark.slow
def test_memory_is_that_of_the_step():
    large = bytearray(15 * 10**8)  # what this process has had must not count
    added = measure.added_by(benchmark.c20_step, True, 'sa_quadratic_cifar', 32, 4, True)
    # Scores, probabilities and the gradients of both, of one layer at least, (3, 32², 32²) of four bytes.
    assert 4 * 3 * 32**4 * 4 < added < len(large)
    with pytest.raises(RuntimeError, match='Unknown model'):
        measure.added_by(benchmark.c20_step, True, 'no_model', 32, 4, True)
