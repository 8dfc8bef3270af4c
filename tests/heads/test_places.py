"""Which token is which patch: against numbers computed by hand, and what no grid is claimed of."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from attncnn_plugin.heads.places import SIDE, Places, axes_of, places_of_grid
from attncnn_plugin.heads.seen import watching

VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3, num_classes=5)


def model_of(name, **settings):
    if not timm.is_model(name):
        pytest.skip(f'this timm has no {name}')
    return timm.create_model(name, **settings)


def places_in(model, *args, **kwargs):
    """Returns (probabilities, places) by the name of attention."""
    found = {}
    with torch.no_grad(), watching(model.eval(), lambda name, probs, places: found.update({name: (probs, places)})):
        model(*args, **kwargs)
    return found


def as_grid(numbers):
    """Returns (image, row, column) of tokens, where steps between rows and columns do not matter; None beside it."""
    whole = (numbers - 1).long()
    image, row, column = whole // SIDE**2, whole // SIDE % SIDE, whole % SIDE
    rows, columns = (own[numbers > 0].unique().tolist() for own in (row, column))
    lines = zip(numbers.tolist(), image.tolist(), row.tolist(), column.tolist())
    return [
        [(i, rows.index(r), columns.index(c)) if number > 0 else None for number, i, r, c in zip(*line)]
        for line in lines
    ]


def row_major(images, height, width):
    return [[(image, row, column) for row in range(height) for column in range(width)] for image in range(images)]


def in_windows(images, height, width, size, shift=0):
    """Windows, row-major, of a grid that moved up and to the left, and then got padding below and to the right."""
    found = []
    for image in range(images):
        for top in range(0, height, size):
            for left in range(0, width, size):
                window = [(top + r, left + c) for r in range(size) for c in range(size)]
                move = lambda r, c: (image, (r + shift) % height, (c + shift) % width)  # noqa: B023, E731
                found.append([move(r, c) if r < height and c < width else None for r, c in window])
    return found


def strided(images, side, size):
    """The grid attention of MaxViT: windows of tokens that lie a window apart."""
    step = side // size
    return [
        [(image, r * step + top, c * step + left) for r in range(size) for c in range(size)]
        for image in range(images)
        for top in range(step)
        for left in range(step)
    ]


SWIN = dict(embed_dim=12, depths=(2,), num_heads=(3,), window_size=4, num_classes=5)


@pytest.mark.parametrize(
    ('name', 'settings', 'size', 'expected'),
    [
        ('vit_tiny_patch16_224', VIT, (32, 32), {'blocks.0.attn': ([None], row_major(2, 4, 4), [])}),
        ('vit_tiny_patch16_224', dict(VIT, img_size=(16, 40)), (16, 40), {
            'blocks.0.attn': ([None], row_major(2, 2, 5), []),
        }),
        ('vit_small_patch16_dinov3', VIT, (32, 32), {'blocks.0.attn': ([None] * 5, row_major(2, 4, 4), [])}),
        ('vit_tiny_r_s16_p8_224', dict(VIT, img_size=64, patch_size=1), (64, 64), {
            'blocks.0.attn': ([None], row_major(2, 16, 16), []),
        }),
        ('vit_base_patch16_siglip_224', VIT, (32, 32), {'blocks.0.attn': ([], row_major(2, 4, 4), [])}),
        ('pvt_v2_b0', dict(depths=(1, 1, 1, 1)), (64, 64), {'stages.3.blocks.0.attn': ([], row_major(2, 2, 2), [])}),
        ('swin_tiny_patch4_window7_224', dict(SWIN, img_size=32), (32, 32), {
            'layers.0.blocks.0.attn': ([], in_windows(2, 8, 8, 4), []),
            'layers.0.blocks.1.attn': ([], in_windows(2, 8, 8, 4, shift=2), []),
        }),
        ('swin_tiny_patch4_window7_224', dict(SWIN, img_size=(24, 40), strict_img_size=False), (24, 40), {
            'layers.0.blocks.0.attn': ([], in_windows(2, 6, 10, 4), []),
            'layers.0.blocks.1.attn': ([], in_windows(2, 6, 10, 4, shift=2), []),
        }),
        ('swinv2_cr_tiny_224', dict(SWIN, img_size=32), (32, 32), {
            'stages.0.blocks.1.attn': ([], in_windows(2, 8, 8, 4, 2), []),
        }),
        ('samvit_base_patch16', dict(VIT, window_size=3), (32, 32), {
            'blocks.0.attn': ([], in_windows(2, 4, 4, 3), []),
        }),
        ('twins_svt_small', dict(depths=(1, 1, 1, 1)), (64, 64), {
            'blocks.0.0.attn': ([], in_windows(2, 16, 16, 7), []),
        }),
        ('test_maxvit', dict(img_size=128), (128, 128), {
            'stages.0.blocks.0.attn_block.attn': ([], in_windows(2, 32, 32, 4), []),
            'stages.0.blocks.0.attn_grid.attn': ([], strided(2, 32, 4), []),
        }),
        ('mobilevit_xxs', {}, (64, 64), {'stages.2.1.transformer.0.attn': ([], [
            [(image, 2 * r + top, 2 * c + left) for r in range(4) for c in range(4)]
            for image in range(2) for top in range(2) for left in range(2)
        ], [])}),
    ],
    ids=[
        'class token', 'not square', 'registers', 'hybrid', 'pooled', 'reduced', 'Swin', 'padded', 'Swin v2 CR', 'SAM',
        'Twins', 'MaxViT', 'MobileViT',
    ],
)  # fmt: skip
def test_by_hand(name, settings, size, expected):
    model = model_of(name, **settings)
    found = places_in(model, torch.randn(2, 3, *size))
    for key, (before, places, after) in expected.items():
        probs, own = found[key]
        assert as_grid(own.queries) == [[*before, *line, *after] for line in places]
        assert probs.shape[0] == len(places) and probs.shape[2] == len(own.queries[0])
    tokens = own.queries[0][own.queries[0] < 0].tolist()
    assert len(set(tokens)) == len(tokens)  # each token beside the grid is itself


def test_hiera():
    """Tokens of a mask unit lie together; a pooling of queries keeps one of four."""
    model = timm.create_model('hiera_tiny_224', embed_dim=16, stages=(1, 1, 1, 1), img_size=(64, 64), num_classes=5)
    found = places_in(model, torch.randn(2, 3, 64, 64))
    numbers = found['blocks.0.attn'][1].queries
    units = in_windows(2, 16, 16, 8)
    assert sorted(map(sorted, as_grid(numbers))) == sorted(map(sorted, units))
    assert found['blocks.0.attn'][1].on_grid(found['blocks.0.attn'][0])[1] == (16, 16)
    probs, places = found['blocks.1.attn']
    assert places.on_grid(probs) is None and probs.shape[-2] * 4 == probs.shape[-1]


@pytest.mark.parametrize(
    'name', ['swin_tiny_patch4_window7_224', 'samvit_base_patch16', 'test_maxvit', 'hiera_tiny_224']
)
def test_on_grid(name):
    """Scattered by the numbers, entry by entry."""
    settings = {
        'swin_tiny_patch4_window7_224': dict(SWIN, img_size=(24, 40), strict_img_size=False),
        'samvit_base_patch16': dict(VIT, window_size=3),
        'test_maxvit': dict(img_size=64),
        'hiera_tiny_224': dict(embed_dim=16, stages=(1, 1, 1, 1), img_size=(64, 64)),
    }[name]
    size = settings['img_size'] if isinstance(settings['img_size'], tuple) else (settings['img_size'],) * 2
    found = places_in(model_of(name, **settings), torch.randn(2, 3, *size))
    for probs, places in list(found.values())[:2]:
        if places.on_grid(probs) is None:
            continue
        whole, (height, width) = places.on_grid(probs)
        expected = torch.zeros(2, probs.shape[1], height, width, height, width)
        for window, line in zip(probs, as_grid(places.queries)):
            for i, query in enumerate(line):
                for j, key in enumerate(line):
                    if query is not None and key is not None:
                        expected[query[0], :, query[1], query[2], key[1], key[2]] = window[:, i, j]
        assert torch.equal(whole.unflatten(3, (height, width)).unflatten(2, (height, width)), expected)
    assert list(found.values())[0][1].are_windows


class Tokens(nn.Module):
    """A ViT whose tokens a function moves."""

    def __init__(self, move):
        super().__init__()
        self.stem, self.move, self.extra = nn.Conv2d(3, 8, 4, 4), move, nn.Parameter(torch.randn(1, 2, 8))

    def forward(self, x):
        x = self.move(self.stem(x).flatten(2).mT, self.extra.expand(len(x), -1, -1))
        return F.scaled_dot_product_attention(x, x, x)


KEPT = torch.tensor([[5, 0, 3], [1, 2, 4]])
ORDER = torch.tensor([2, 0, 5, 1, 4, 3])


def written(x, extra):
    z = torch.empty_like(x)
    z[:, ORDER.argsort()] = x
    return z


def written_beside(x, extra):
    z = x.new_zeros(len(x), 7, 8)
    z[:, 0] = extra[:, 0]
    z[:, 1:] = x
    return z


def copied(x, extra):
    return torch.zeros_like(x).copy_(x.flip(1))


@pytest.mark.parametrize(
    ('move', 'expected'),
    [
        (lambda x, extra: torch.cat([x, extra], 1), [[0, 1, 2, 3, 4, 5, None, None]] * 2),  # YOLOS
        (lambda x, extra: torch.cat([extra[:, :1], x, extra[:, 1:]], 1), [[None, 0, 1, 2, 3, 4, 5, None]] * 2),
        (lambda x, extra: x.gather(1, KEPT[..., None].expand(-1, -1, 8)), KEPT.tolist()),  # MAE
        (lambda x, extra: x.flip(1).roll(1, 1), [[0, 5, 4, 3, 2, 1]] * 2),
        (lambda x, extra: F.layer_norm(x + torch.randn(6, 8), (8,)) * 2, [[0, 1, 2, 3, 4, 5]] * 2),
        (lambda x, extra: torch.einsum('bnd,de->bne', x, torch.eye(8)), [[0, 1, 2, 3, 4, 5]] * 2),
        (lambda x, extra: F.pad(x, (0, 0, 0, 2)), [[0, 1, 2, 3, 4, 5, None, None]] * 2),
        (lambda x, extra: x[:, torch.tensor([4, 1])], [[4, 1]] * 2),
        (written, [ORDER.tolist()] * 2),
        (written_beside, [[None, 0, 1, 2, 3, 4, 5]] * 2),
        (copied, [[5, 4, 3, 2, 1, 0]] * 2),
        (lambda x, extra: torch.zeros_like(x).index_copy_(1, ORDER.argsort(), x), [ORDER.tolist()] * 2),
        (
            lambda x, extra: torch.ones_like(x).scatter(1, ORDER.argsort()[None, :, None].expand(x.shape), x),
            [ORDER.tolist()] * 2,
        ),
        (
            lambda x, extra: (
                F.conv2d(x.mT.unflatten(2, (2, 3))[..., ::2], torch.randn(8, 8, 3, 3), padding=1).flatten(2).mT
            ),
            [[0, 2, 3, 5]] * 2,
        ),
    ],
    ids=[
        *('after', 'around', 'masked', 'moved', 'normalized', 'einsum', 'padded', 'indexed', 'written', 'beside'),
        *('copied', 'index_copy', 'scatter', 'convolved'),
    ],
)
def test_moves(move, expected):
    ((_, places),) = places_in(Tokens(move), torch.randn(2, 3, 8, 12)).values()
    rows = [
        [None if own is None else (image, own // 3, own % 3) for own in line] for image, line in enumerate(expected)
    ]
    if any(len(set(line)) < 6 for line in expected):  # of what is kept, rows and columns that are gone do not count
        whole = places_of_grid(2, (2, 3)).queries
        assert torch.equal(places.queries, torch.stack([whole[i][line] for i, line in enumerate(expected)]))
    else:
        assert as_grid(places.queries) == rows


@pytest.mark.parametrize(
    'move',
    [
        lambda x, extra: nn.functional.linear(x.mT, torch.eye(6)).mT,  # a mixture of tokens
        lambda x, extra: torch.randn(2, 6, 8),
        lambda x, extra: x.mT @ x,  # channels by channels
        lambda x, extra: torch.rand_like(x),
        lambda x, extra: torch.zeros_like(x).index_add(1, torch.tensor([0, 0, 1, 2, 3, 4]), x),  # sums of tokens
    ],
    ids=['mixed', 'drawn', 'channels', 'like', 'added'],
)
def test_no_grid_is_claimed(move):
    for probs, places in places_in(Tokens(move), torch.randn(2, 3, 8, 12)).values():
        assert places.on_grid(probs) is None


@pytest.mark.parametrize('channels', [1, 6])
def test_channels_are_no_places(channels):
    """As many channels as places, or one of each."""

    class OverChannels(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, channels, 4, 4)

        def forward(self, x):
            x = self.stem(x).flatten(2)
            return (x @ x.mT).softmax(-1) @ x, F.scaled_dot_product_attention(x, x, x)

    found = places_in(OverChannels(), torch.randn(2, 3, 8, 12))
    assert len(found) == 2
    for probs, places in found.values():
        assert probs.shape[-2:] == (channels, channels)
        assert places == Places() or places.queries is None and places.keys is None


def test_frames_that_attend_to_one_another_have_no_grid():
    class Video(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 4, 4)

        def forward(self, x):
            x = self.stem(x).flatten(2).permute(2, 0, 1)  # (places, frames, D)
            return F.scaled_dot_product_attention(x, x, x)

    ((probs, places),) = places_in(Video(), torch.randn(4, 3, 8, 12)).values()
    assert probs.shape == (6, 1, 4, 4) and places.queries is not None and places.on_grid(probs) is None


def test_images_by_name_and_preprocessing():
    """Images that are a keyword argument, behind what a model does to them first."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Tokens(lambda x, extra: x)

        def forward(self, mask, pixel_values):
            return self.net((pixel_values - 0.5) / 0.2)

    ((_, places),) = places_in(Outer(), mask=torch.ones(2, 7), pixel_values=torch.randn(2, 3, 8, 12)).values()
    assert as_grid(places.queries) == row_major(2, 2, 3)


def test_einsum_axes():
    ones = lambda *sizes: torch.ones(sizes)  # noqa: E731
    assert axes_of('...qk, ...kd -> ...qd', [ones(2, 3, 5, 5), ones(3, 5, 4)]) == (['YZqk', 'Zkd'], 'YZqd')
    assert axes_of('bij,bjk', [ones(2, 3, 4), ones(2, 4, 5)]) == (['bij', 'bjk'], 'ik')
    assert axes_of([0, 1], [ones(2, 3)]) == ([], '')
