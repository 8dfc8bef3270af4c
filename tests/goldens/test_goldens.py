"""The package computes what it computed at one commit, to 1e-12 in float64: see ``freeze.py``, which goes with this."""

import gzip
import io
from fnmatch import fnmatchcase
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from goldens.freeze import CASES, DATA, Package, run_case

from attncnn_plugin.analysis.layer_maps import position_maps
from attncnn_plugin.change import LayerChange
from attncnn_plugin.convert import ConvFit

RENAMED = {}  # parts of parameters' names, {old: new}
FIELDS_RENAMED = {}  # of reports, {old: new}
CHANGED = (
    '* / fewer: *',  # fewer heads than positions: another construction with the same guarantee
    *('*: guarantee', '*: query_residual', '*: query_rank'),  # fields of reports that are no more
)
GONE = {  # cases that the package has no more, {glob: reason}
    **{f'start {n} *': 'impulses: shifts in the released order, where they were random' for n in (2, 6, 38, 42)},
    **{f'start {n} *': "shifts='in turn' is no option" for n in range(3, 52, 4)},
    **{f'network {n} *': 'values of D_h < D channels, which C20 advises against' for n in (6, 10, 13, 22)},
    'backbone 1 *': 'values of D_h < D channels, which C20 advises against',
    'backbone 3 *': 'queries and keys of D_k < D channels, which C20 does not have',
    **{f'{case} *': 'v·r_δ alone is LearnedAttention' for case in ('network 23', 'layer 3')},
    **{f'network {n} *': 'absolute encodings, of which C20 has no result' for n in (24, 25)},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
LOOSE = {'* / fewer: *': 1e-6, 'start *impulse*': 1e-4, 'start *': 1e-11}  # ill-conditioned: other rounding shows more


class Now(Package):
    """The calls of the package as they are now, where they differ from those at the commit."""

    def __init__(self):
        super().__init__()
        self.a = SimpleNamespace(**vars(self.a), layers=self.a.attention, init=self.a.transformers)

    def field(self, report, name):
        if name == 'relative_error' and not hasattr(report, name):
            return 0.0  # heads over patches are always exact
        if isinstance(report, LayerChange) and name in ('num_heads', 'error'):
            report = report.report  # of a conversion, or of the way back
            if name == 'error':
                return report.bound if isinstance(report, ConvFit) else report.relative_error
            return len(report.coefficients) if isinstance(report, ConvFit) else report.num_heads
        if name in ('guarantee', 'query_residual', 'query_rank'):
            return 0.0
        return super().field(report, FIELDS_RENAMED.get(name, name))

    def parameters(self, module):
        found = super().parameters(module)
        for old, new in RENAMED.items():
            found = {name.replace(new, old): value for name, value in found.items()}
        return found

    def prune_heads(self, model, heads):
        if type(model).__name__ == 'SwinTransformerV2':
            raise TypeError('Swin v2 was refused, and can be pruned now')
        return self.a.pruning.prune_heads(model, heads)

    def model(self, name, **settings):
        settings = dict(settings)
        if settings.get('position') == 'relative_quadratic':
            assert settings.pop('terms') == ('qk', 'vr')  # its scores have no others
        share_position = settings.pop('share_position', False)
        model = super().model(name, **settings)
        if share_position:
            first, *others = ((block.attn if 'content' in name else block.attn.encoding) for block in model.blocks)
            for other in others:
                other.tables = first.tables
        return model

    def layer(self, kind, dim, heads, out_dim=None):
        layers = self.a.attention
        layer = {
            'quadratic': layers.QuadraticAttention,
            'generalized': layers.GeneralizedQuadraticAttention,
            'learned': partial(layers.LearnedAttention, max_size=(8, 9)),
            'quadratic and content': partial(layers.ContentAttention, position='relative_quadratic'),
        }[kind](dim, heads)
        layer.value = torch.nn.Linear(heads * dim, out_dim or dim)
        return layer.double()

    def head_report(self, layer, size):
        return self.a.analysis.head_report(layer, size=size).layers[0]

    def model_reports(self, model, images):
        return self.a.analysis.head_report(model, images).layers

    def head_centers(self, layer, size):
        return self.a.analysis.head_centers(position_maps(layer, size))  # mean_attention keeps float32

    def maps(self, model, images, part='all'):
        """By layer that depends on content, the maps of each image."""
        maps = [self.a.analysis.mean_attention(model, image[None], part=part) for image in images]
        by_content = [n for n in maps[0] if getattr(model.get_submodule(n), 'depends_on_content', True)]
        return {name: [own[name] for own in maps] for name in by_content}

    def probs_of(self, model, images, part):
        return {name: torch.stack([own.probs for own in maps]) for name, maps in self.maps(model, images, part).items()}

    def attention_probs_of(self, model, images):
        return self.probs_of(model, images, 'all')

    def content_only_probs_of(self, model, images):
        return self.probs_of(model, images, 'content')

    def position_only_probs_of(self, model, images):
        return self.probs_of(model, images, 'position')

    def mean_attention_probs_of(self, model, images):
        maps = self.a.analysis.mean_attention(model, images)
        return {name: maps[name].probs for name in self.maps(model, images)}

    def vit_attention(self, model, images):
        maps = self.maps(model, images)
        prefix = {name: torch.stack([own.prefix_mass for own in each]) for name, each in maps.items()}
        return self.attention_probs_of(model, images), prefix

    def to_attention(self, model):
        change = super().to_attention(model)  # which does not name the widths of heads
        return SimpleNamespace(head_dims=model.blocks[0].attn.head_dims, parameters_after=change.parameters_after)

    def init_as_convolution(self, model, **settings):
        return self.a.transformers.init_as_convolution(model, overwrite=True, **settings)  # the parameters are drawn


PACKAGE, GOLDENS = Now(), torch.load(io.BytesIO(gzip.decompress(DATA.read_bytes())))


@pytest.fixture(scope='module')
def compared(request):
    found = []
    yield found
    count, largest = sum(count for count, _, _ in found), max(found, key=lambda entry: entry[1], default=(0, 0.0, ''))
    with request.config.pluginmanager.get_plugin('capturemanager').global_and_fixture_disabled():
        print(f'\n{count:,} numbers compared, largest difference {largest[1]:.2g} of what is allowed: {largest[2]}')


def difference(value, golden, rows):
    """Relative to the largest number, or to that of each row, if that is no rounding error itself."""
    assert value.shape == golden.shape
    value, golden = (x.double().nan_to_num(3.0, 7.0, -7.0) for x in (value, golden))
    size = golden.abs().amax(1, keepdim=True) if rows else golden.abs().max()
    return ((value - golden).abs() / size.clamp(min=1e-2 * max(1, size.max()))).max().item()


@pytest.mark.parametrize('case', CASES)
def test_same(case, compared):
    for reason in (reason for glob, reason in GONE.items() if fnmatchcase(case, glob)):
        pytest.skip(reason)
    if 'backbone' in case or 'mmpretrain' in case:
        pytest.importorskip('mmpretrain')
    found = run_case(case, PACKAGE)
    goldens = {key: value for key, value in GOLDENS.items() if key.startswith(f'{case} / ')}
    assert found.keys() == goldens.keys()
    wrong = {}
    for key, golden in goldens.items():
        if any(fnmatchcase(key, glob) for glob in CHANGED):
            continue
        if isinstance(golden, str):
            assert found[key] == golden, key
        elif golden.numel():
            allowed = next((x for glob, x in LOOSE.items() if fnmatchcase(key, glob)), TOLERANCE[golden.dtype])
            off = difference(found[key], golden, rows=key.endswith(': gradients'))  # a row for each parameter
            compared.append((golden.numel(), off / allowed, key))
            if not off <= allowed:
                wrong[key] = off
    assert not wrong
