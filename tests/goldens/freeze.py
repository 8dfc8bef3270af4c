"""Freezes what the package computed at one commit: the net under its rewrite.

This folder is here while the package is being rewritten, and goes at its end. ``python tests/goldens/freeze.py`` checks
out :data:`COMMIT` into a temporary folder, runs all :data:`CASES` there and writes :data:`DATA`; ``test_goldens.py``
runs the same cases with the package as it is now and compares.

Cases call the package by :class:`Package` alone. All is float64 on the CPU, but for what the package computes in
float32. Parameters are not stored: :func:`drawn` makes them from their names and shapes, images too.
"""

import copy
import gzip
import io
import itertools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import zlib

import timm
import torch
from torch import nn

COMMIT = '70a0211'
DATA = pathlib.Path(__file__).with_name('goldens.pt.gz')


def drawn(name, shape):
    """Numbers for a parameter or an image, by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    last = name.rpartition('.')[2]
    if last == 'running_var':
        return 1 + 0.2 * values.abs()
    if len(shape) == 1 and last in ('weight', 'sqrt_precision'):  # of a norm, of round Gaussian heads
        return 1 + 0.2 * values
    return values if last in ('center', 'sqrt_precision', 'images', 'loss', 'directions') else 0.4 * values


def numbers(value):
    """Numbers in tuples, None among them, as float64."""
    if isinstance(value, (list, tuple)):
        return torch.stack([numbers(entry) for entry in value]) if value else torch.zeros(0, dtype=torch.float64)
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else value.double()
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64)


def products(values, count=3):
    """With random directions; NaN and ∞ count as numbers of their own."""
    values = values.flatten().nan_to_num(3.0, 7.0, -7.0)
    return (drawn('directions', (count, len(values))) @ values.double()).to(values.dtype)


def tuple_of(output):
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


FIELDS = {  # what is kept of a report
    'conv_to_mhsa': 'num_heads relative_error bound guarantee alpha deviation output_bound',
    'conv_to_patch_mhsa': 'shifts head_dims relative_error parameters_after',
    'mhsa_to_conv': 'shifts coefficients residual bound interior_bound',
    'fit_values': 'coefficients residual error interior_error rank condition amplification',
    'expressible_shifts': 'residual query_residual rank query_rank',
    'to_attention': 'head_dims relative_error parameters_after',
    'layer': 'num_heads parameters_after error',
    'head': 'center alpha covariance entropy relative_entropy distance mass_3x3 mass_5x5 nearest_shift share shares '
    'degenerate prefix_mass',
    'convolution': 'error interior_error',
    'degenerate': 'head value threshold duplicate_of',
}


class Package:
    """The calls of the package, as they are at :data:`COMMIT`. ``Now`` overrides what is called otherwise."""

    def __init__(self):
        import attncnn_plugin

        self.a = attncnn_plugin

    def __getattr__(self, name):
        places = self.a.convert, self.a.init, self.a.pruning, self.a.analysis
        return next(getattr(place, name) for place in places if hasattr(place, name))

    def field(self, report, name):
        return getattr(report, name)

    def parameters(self, module):
        """By its name at :data:`COMMIT`, each parameter or running statistic: values to write into, and gradient."""
        running = {name: (b, None) for name, b in module.named_buffers() if '.running_' in f'.{name}'}
        return {**{name: (p.data, p.grad) for name, p in module.named_parameters()}, **running}

    def model(self, name, **settings):
        if timm.is_model(name):
            return timm.create_model(name, **settings).double()
        from mmpretrain.registry import MODELS

        return MODELS.build(dict(settings, type=name)).double()

    def layer(self, kind, dim, heads, **settings):
        """Attention over a grid, of at most 8×9 tokens."""
        name, more = {
            'quadratic': ('QuadraticAttention', {}),
            'generalized': ('GeneralizedQuadraticAttention', {}),
            'learned': ('LearnedAttention', dict(max_size=(8, 9))),
            'vr': ('ContentAttention', dict(max_size=(8, 9), terms=('vr',))),
            'quadratic and content': ('ContentAttention', dict(terms=('qk', 'vr'), position='relative_quadratic')),
        }[kind]
        return getattr(self.a.layers, name)(dim, heads, **more, **settings).double()

    def to_attention(self, model):
        return model.to_attention(generator=torch.Generator().manual_seed(0))


class Run:
    """One case: what it computed, by name; tensors and texts."""

    def __init__(self, package):
        self.package, self.found = package, {}

    def add(self, tag, results):
        """Keeps results, of many numbers their products with directions."""
        for name, value in dict(results).items():
            if isinstance(value, torch.Tensor):
                value = products(value.detach(), 16) if value.numel() > 48 else value.detach().clone()
            self.found[f'{tag}: {name}'] = value

    def add_fields(self, tag, kind, *reports):
        """Keeps the :data:`FIELDS` of reports."""
        empty = {'center': (None,) * 2, 'covariance': ((None,) * 2,) * 2}
        for name in FIELDS[kind].split():
            values = [self.package.field(report, name) for report in reports]
            values = numbers([empty.get(name) if value is None else value for value in values])
            self.add(tag, {name: values})

    def draw(self, module):
        """Sets all parameters by their names, and returns the module."""
        for name, (values, _) in self.package.parameters(module).items():
            values.copy_(drawn(name, values.shape))
        return module

    def function(self, tag, module, shape, parameters=True):
        """Outputs for images, without and with gradients, and products of all gradients with directions."""
        images = drawn('images', shape).requires_grad_()
        module.eval()
        module.zero_grad()
        with torch.no_grad():
            self.add(tag, {f'output {number}': output for number, output in enumerate(tuple_of(module(images)))})
        outputs = tuple_of(module(images))
        self.add(tag, {'outputs with gradients': torch.stack([products(output.detach()) for output in outputs])})
        sum((output * drawn('loss', output.shape)).sum() for output in outputs).backward()
        gradients = {'images': images.grad}
        if parameters:
            found = self.package.parameters(module)
            gradients.update((name, gradient) for name, (_, gradient) in found.items() if gradient is not None)
        names = sorted(gradients)
        self.found[f'{tag}: names'] = '\n'.join(f'{name} {tuple(gradients[name].shape)}' for name in names)
        self.found[f'{tag}: gradients'] = torch.stack([products(gradients[name]) for name in names])

    def network(self, name, settings, *sizes):
        model = self.package.model(name, **settings)
        model = model if 'pretrained' in settings else self.draw(model)
        for size in sizes:
            self.function(f'{size}', model, (2, settings.get('in_chans', settings.get('in_channels', 3)), *size))

    backbone = network

    def transition(self, kernel, bias, settings):
        """CMHSA as convolutions, as the attention that they become, and trained on."""
        settings = dict(PATCH, phase='conv', kernel_size=kernel, attn_bias_init=bias, **settings)
        model = self.draw(self.package.model('cmhsa3_patch16_224', **settings))
        self.function('convolutions', model, (1, 1, 12, 12))
        self.add_fields('report', 'to_attention', self.package.to_attention(model))
        for size in ((12, 12), (16, 8)):
            self.function(f'as it begins {size}', model, (1, 1, *size), parameters=False)
        self.function('trained', self.draw(model), (1, 1, 12, 12))

    def convolution(self, ndim, channels, kernel, settings):
        return self.draw([nn.Conv1d, nn.Conv2d, nn.Conv3d][ndim - 1](*channels, kernel, **settings).double())

    def converted(self, tag, way, *arguments, **settings):
        """A layer by a function of ``convert``, whose report is kept."""
        layer, report = getattr(self.package, way)(*arguments, **settings)
        self.add_fields(tag, way, report)
        if way in ('mhsa_to_conv', 'fit_values'):
            self.add(tag, {'weight': (layer if way == 'mhsa_to_conv' else layer.value).weight})
        return layer

    def conversion(self, ndim, channels, kernel, settings):
        conv = self.convolution(ndim, channels, kernel, settings)
        size = {1: (9,), 2: (8, 7), 3: (4, 4, 3)}[ndim]
        window = [2 * (k if settings.get('dilation', 1) == 1 else 2 * k) - 1 for k in conv.kernel_size]
        ways = {'hard': {}, 'soft': dict(alpha=6), 'table': dict(position='table')}
        for content, position in (('additive', 'gaussian'), ('gated', 'table')):
            ways[content] = dict(content=content, alpha=6, qk_dim=3)
            ways[f'{content} window'] = dict(ways[content], position=position, window_size=window)
        for way, arguments in ways.items():
            attention = self.converted(way, 'conv_to_mhsa', conv, **arguments)
            self.function(way, attention, (1, channels[0], *size), parameters=False)
            if 'content' not in arguments:
                self.converted(f'{way} and back', 'mhsa_to_conv', attention, kernel, size)
            self.function(f'{way}, trained', self.draw(attention), (1, channels[0], *size))
        if math.prod(conv.kernel_size) > 1:
            attention = self.converted('fewer', 'conv_to_mhsa', conv, math.prod(conv.kernel_size) // 2)
            self.function('fewer', attention, (1, channels[0], *size), parameters=False)

    def patch_conversion(self, channels, kernel, settings, patch):
        conv, shape = self.convolution(2, channels, kernel, settings), (1, channels[0], 12, 8)
        for way in ({}, dict(head_dim='exact', qk_dim=3)):
            attention = self.converted(f'{way}', 'conv_to_patch_mhsa', conv, patch, **way)
            self.function(f'{way}', attention, shape, parameters=False)
            self.function(f'{way}, trained', self.draw(attention), shape)

    def report(self, tag, report):
        """A head report; means over images are computed in float32."""
        run = Run(self.package)
        run.add_fields(tag, 'head', *report.heads)
        run.add_fields(f'{tag}: errors', 'convolution', *report.convolutions)
        run.add(f'{tag}: residuals', {f'{x.kernel_size}': numbers(x.residual) for x in report.expressible})
        self.found.update((k, value.float() if report.num_images else value) for k, value in run.found.items())
        self.add(tag, {'kinds': ' '.join([report.kind.kind, *(head.kind for head in report.heads)])})

    def layer(self, kind, *arguments):
        """A layer by itself, or what a convolution becomes: its function, its report, and the kernels of its heads."""
        channels, by_content = (3 if kind in LAYERS else 1), 'gated' in arguments or kind == LAYERS[-1]
        if kind in LAYERS:
            layer = self.draw(self.package.layer(kind, 3, 10, out_dim=2))
            self.function('layer', layer, (2, 6, 7, 3))
        else:
            layer = self.converted('layer', kind, self.convolution(2, (1, 2), 3, SAME), *arguments)
        self.report('report', self.package.head_report(layer, (6, 7)))
        if by_content or kind == 'conv_to_patch_mhsa':
            return
        self.add('centres', zip(('center', 'width'), self.package.head_centers(layer, (6, 7))))
        self.converted('convolution', 'mhsa_to_conv', layer, 3, (6, 7))
        for queries in ('all', 'interior'):
            found = self.package.expressible_shifts(layer, 3, (6, 7), queries)
            self.add_fields(f'shifts {queries}', 'expressible_shifts', found)
            conv = self.convolution(2, (channels, 2), 3, SAME)
            self.converted(f'fit {queries}', 'fit_values', layer, conv, (6, 7), queries)

    def cnn(self, name):
        shape = 2, 3, 12, 14
        for alpha in (None, 6):
            model = self.draw(copy.deepcopy(CNNS[name]).double())
            report = self.package.convs_to_attention(model, '*', alpha=alpha, inputs=drawn('images', shape))
            self.add_fields(f'alpha {alpha}', 'layer', *report.layers)
            self.add(f'alpha {alpha}', {'drift': numbers(report.drift)})
            self.function(f'alpha {alpha}', model, shape, parameters=False)
            report = self.package.attention_to_convs(model, math.inf)
            self.add_fields(f'alpha {alpha} and back', 'layer', *report.layers)
            self.function(f'alpha {alpha} and back', model, shape)
        self.package.convs_to_attention(model, '*', alpha=6, content='gated', qk_dim=3)
        self.function('trained', self.draw(model), shape)

    def refused(self, tag, call, *arguments, **settings):
        """The result of a call, None where the package refuses it."""
        try:
            return call(*arguments, **settings)
        except (TypeError, ValueError) as error:
            self.add(tag, {'refused': type(error).__name__})

    def new_vit(self, name):
        size = VITS[name]['img_size']
        return self.draw(self.package.model(name, **VITS[name])), (2, 3, size, size)

    def start(self, name, settings):
        model, shape = self.new_vit(name)
        report = self.refused(f'{settings}', self.package.init_as_convolution, model, seed=0, **settings)
        if report is not None:
            heads = [(*(head.shift or (None,) * 2), head.total_variation) for x in report.layers for head in x.heads]
            self.add(
                f'{settings}', {'heads': numbers(heads), 'prefix': numbers([x.prefix_share for x in report.layers])}
            )
            self.function(f'{settings}', model, shape, parameters=False)

    def heads(self, model, shape, pruned):
        """Importance of heads, reports, and the model without some of them."""

        def loss(model, batch):
            output = tuple_of(model(batch))[-1]
            return (output * drawn('loss', output.shape)).flatten(1).sum(1).mean()

        images = drawn('images', shape)
        self.add('importance', self.package.head_importance(model, [images, images[:1]], loss))
        for report in self.package.model_reports(model, images):
            self.report(f'{report.name} {report.attention}', report)
        if self.refused('pruning', self.package.prune_heads, model, pruned) is not None:
            self.function('pruned', model, shape)

    def vit(self, name):
        model, shape = self.new_vit(name)
        for part, found in zip(('probs', 'prefix'), self.package.vit_attention(model, drawn('images', shape))):
            self.add(part, found)
        self.heads(model, shape, {list(self.package.prunable_heads(model))[-1]: [1]})

    def own_heads(self, name, settings):
        model, shape = self.draw(self.package.model(name, **settings)), (2, settings.get('in_chans', 3), *SIZES[0])
        for part in ('attention', 'content_only', 'position_only', 'mean_attention'):
            self.add(part, getattr(self.package, f'{part}_probs_of')(model, drawn('images', shape)))
        self.heads(model, shape, {'blocks.0.attn': [1, 2], 1: [0]})

    def degenerate(self, kind):
        layer = self.draw(self.package.layer(kind, 3, 5))
        center, width = (self.package.parameters(layer)[f'encoding.{name}'][0] for name in ('center', 'sqrt_precision'))
        width[0], width[1] = 1e-4 * width[0], 1e-1 * width[1]
        if kind == 'generalized':
            width[2, 0] = width[2, 1] * (1 + 1e-5)
        center[4], width[4] = center[3] * (1 + 1e-3), width[3] * (1 + 1e-3)
        for criteria in (['uniform', 'stripe'], ['entropy', dict(type='duplicate', threshold=0.05)]):
            found = self.package.find_degenerate_heads(layer, criteria, size=(6, 7)).found
            self.add_fields(f'{criteria}', 'degenerate', *found)
            self.add(f'{criteria}', {'by': ' '.join(x.criterion for x in found)})


SIZES = (12, 16), (8, 4)
SA = dict(embed_dim=12, depth=2, num_heads=4, mlp_dim=16, num_classes=3)
TABLE = dict(SA, img_size=SIZES[0], num_heads=3, embed_dim=8)
SMALL = dict(depth=1, embed_dim=6, num_heads=3)
PATCH = dict(img_size=12, patch_size=4, in_chans=1, mlp_dim=16, depth=2, num_classes=3)
REDUCTIONS = dict(reduction=1), dict(reduction=4)
KINDS = 'quadratic', 'generalized', 'learned', 'learned_content'
SHIPPED = [*(f'sa_{kind}_small' for kind in KINDS), 'cmhsa3_small_patch4_32']
OF_TABLES = dict(position='relative_sinusoidal'), dict(share_position=True)
QUADRATIC = dict(terms=('qk', 'vr'), position='relative_quadratic')
EXACT = dict(head_dim='exact', qk_dim=6)
OF_CONTENT = dict(qk_dim=4, qk_bias=False, head_dim=3), dict(terms=('vr',))
ABSOLUTE = dict(position='absolute_learned'), dict(position='absolute_sinusoidal')
OWN_HEADS = [
    ('sa_generalized_cifar', SA),
    ('sa_learned_cifar', TABLE),
    *(('sa_learned_content_cifar', {**TABLE, **more}) for more in ({}, QUADRATIC)),
    ('cmhsa3_patch16_224', PATCH),
]
NETWORKS = [
    *OWN_HEADS,
    *(('sa_quadratic_cifar', {**SA, **more}) for more in ({}, dict(head_dim=5), *REDUCTIONS)),
    ('sa_quadratic16_cifar', {**SA, 'num_heads': 16}),
    *(('sa_generalized_cifar', {**SA, **more}) for more in (dict(head_dim=5), *REDUCTIONS)),
    *(('sa_learned_cifar', {**TABLE, **more}) for more in (dict(head_dim=5, position_dim=6), *OF_TABLES, *REDUCTIONS)),
    *(('sa_learned_content_cifar', {**TABLE, **more}) for more in (*OF_TABLES, *REDUCTIONS, *OF_CONTENT, *ABSOLUTE)),
    *((name, SMALL) for name in SHIPPED[:4]),
    *(('cmhsa3_patch16_224', {**PATCH, **more}) for more in (EXACT, dict(null_key=True))),
    *(('cmhsa5_patch16_224', {**PATCH, **more}) for more in ({}, {**EXACT, 'null_key': True})),
    (SHIPPED[4], dict(depth=1, mlp_dim=8, in_chans=1)),
]
OF_CONVOLUTIONS = ('conv_to_mhsa',), ('conv_to_mhsa', None, 6), ('conv_to_mhsa', None, 6, 'gated')
LAYERS = 'quadratic', 'generalized', 'learned', 'vr', 'quadratic and content'
ARCH = dict(embed_dims=12, num_layers=2, num_heads=4, feedforward_channels=16)
GRID = dict(arch=ARCH, img_size=SIZES[0], out_indices=(0, -1))
PATCHES = dict(img_size=12, patch_size=4, in_channels=1, num_layers=2, feedforward_channels=16)
STAGES = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1), stem_channels=4, base_channels=4)
CNN = dict(backbone=dict(type='mmpretrain.ResNet', depth=18, **STAGES), layers='layer2.0.*conv2')
BACKBONES = [
    ('SAQuadratic', GRID),
    ('SAGeneralized', dict(GRID, out_type='avg_featmap', head_dim=5)),
    ('SALearned', dict(GRID, share_position=True)),
    ('SALearned', dict(GRID, content=True, qk_dim=4, out_indices=[1, 0])),
    ('SALearned', dict(GRID, content=True, **QUADRATIC)),
    ('CMHSA', dict(PATCHES, phase='conv', out_indices=(0, 1))),
    ('CMHSA', dict(PATCHES, **EXACT, out_type='avg_featmap')),
    ('ConvToAttention', CNN),
    ('ConvToAttention', dict(CNN, phase='attn', content='gated', alpha=6, qk_dim=3)),
]
TRANSITIONS = [
    (kernel, bias, more)
    for kernel, bias in itertools.product((3, 5), (12, 40))
    for more in ({}, dict(null_key=False), EXACT, dict(EXACT, min_head_dim=3, null_key=False))
]
SAME, SAME_SIZE = dict(padding=1), dict(padding='same')
MODES = 'zeros', 'replicate', 'reflect', 'circular'
CONVOLUTIONS = [  # axes, channels, kernel, other arguments
    *((1, (2, 3), kernel, SAME_SIZE) for kernel in (1, 2, 3, 4)),
    *((1, (3, 2), 3, more) for more in ({}, dict(stride=3), dict(padding=2, padding_mode='reflect'))),
    (1, (4, 4), 5, dict(groups=4, padding=4, dilation=2, padding_mode='circular')),
    *((2, (2, 3), kernel, {}) for kernel in (1, 2, 3)),
    *((2, (2, 3), 3, dict(SAME, padding_mode=mode)) for mode in MODES),
    *((2, (2, 2), 3, more) for more in (dict(SAME, bias=False), dict(padding=3), dict(SAME_SIZE, dilation=2))),
    *((2, (2, 2), 3, dict(SAME, stride=stride)) for stride in (2, (1, 3))),
    *((2, (1, 2), kernel, SAME_SIZE) for kernel in (4, 5, (3, 1))),
    (2, (2, 2), 4, dict(stride=4)),
    (2, (2, 2), (2, 3), dict(stride=(2, 1), padding=(0, 1))),
    *((2, (2, 2), kernel, dict(SAME_SIZE, padding_mode='circular')) for kernel in (2, (1, 5))),
    (2, (4, 4), 3, dict(SAME, groups=4)),
    (2, (4, 4), 3, dict(groups=2, padding=2, dilation=(2, 1), padding_mode='reflect')),
    (2, (3, 6), 3, dict(SAME, groups=3, stride=2, bias=False)),
    *((3, (1, 2), kernel, SAME_SIZE) for kernel in (2, 3, (1, 2, 3))),
    (3, (1, 2), 3, dict(SAME, padding_mode='circular')),
    (3, (2, 4), 2, dict(stride=2, groups=2)),
]
OVER_PATCHES = [  # channels, kernel, other arguments, patch
    *(((1, 2), kernel, SAME_SIZE, (2, 2)) for kernel in (3, 4)),
    ((1, 2), 3, SAME, (4, 4)),
    ((2, 1), 5, dict(padding=2, bias=False), (3, 2)),
    ((4, 4), 3, dict(SAME, groups=4), (1, 2)),
    ((2, 2), 3, dict(padding=2, dilation=2, groups=2), (3, 2)),
    ((2, 4), 2, dict(stride=2), (4, 2)),
    ((1, 2), 3, dict(SAME, stride=2), (4, 4)),
    ((1, 2), (1, 3), dict(padding=(0, 1)), (2, 4)),
]
RESNET = dict(layers=(1,) * 4, channels=(2, 4, 4, 4), stem_type='deep', stem_width=2, num_classes=3)
STEM = nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.Hardswish()
BLOCK = nn.Conv2d(4, 4, 5, 2, 2, groups=4, bias=False), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 6, 1)
HEAD = nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
FIRST = nn.Conv2d(3, 4, 3, padding=1, padding_mode='reflect'), nn.BatchNorm2d(4), nn.ReLU()
SECOND = nn.Conv2d(4, 4, 2, 2, groups=2), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 2, (3, 2))
CNNS = {
    'resnet': timm.create_model('resnet18', **RESNET),
    'mobilenet': nn.Sequential(*STEM, *BLOCK, *HEAD),
    'plain': nn.Sequential(*FIRST, *SECOND),
}
VIT = dict(img_size=24, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=3)
SWIN = dict(img_size=32, embed_dim=12, depths=(1, 2), num_heads=(2, 2), window_size=4, num_classes=3)
MM_ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=24)
MM_VIT = dict(img_size=24, patch_size=8, arch=MM_ARCH)
MM_SWIN = dict(img_size=32, patch_size=4, window_size=4, arch=dict(embed_dims=12, depths=[1, 2], num_heads=[2, 2]))
VITS = {
    **dict.fromkeys(['vit_tiny_patch16_224', 'deit_tiny_distilled_patch16_224', 'beit_base_patch16_224'], VIT),
    **dict.fromkeys(['eva02_tiny_patch14_224', 'eva02_base_patch14_224', 'vit_small_patch16_dinov3'], VIT),
    'vit_relpos_base_patch32_plus_rpn_256': dict(VIT, rel_pos_type='bias'),
    **dict.fromkeys(['swin_tiny_patch4_window7_224', 'swinv2_tiny_window8_256'], SWIN),
    **{f'mmpretrain.{name}': MM_VIT for name in ('VisionTransformer', 'DeiT3', 'BEiTViT')},
    'mmpretrain.SwinTransformer': dict(MM_SWIN, out_indices=(1,)),
}
STARTS = {}, dict(method='mimetic'), dict(method='impulse'), dict(shifts='in turn', alpha=1)  # some are refused
CASES = {
    f'{method} {number} {row[0]}': (method, *row)
    for method, rows in {
        'network': [*((*row, *SIZES) for row in NETWORKS), *((x, dict(pretrained=True), (32, 32)) for x in SHIPPED)],
        'backbone': [(*row, SIZES[0]) for row in BACKBONES],
        'transition': TRANSITIONS,
        'conversion': CONVOLUTIONS,
        'patch_conversion': OVER_PATCHES,
        'layer': [*((kind,) for kind in LAYERS), *OF_CONVOLUTIONS, ('conv_to_patch_mhsa', (2, 1))],
        'cnn': [(name,) for name in CNNS],
        'start': [(name, settings) for name in VITS for settings in STARTS],
        'vit': [(name,) for name in VITS],
        'own_heads': OWN_HEADS,
        'degenerate': [(kind,) for kind in LAYERS[:2]],
    }.items()
    for number, row in enumerate(rows)
}


def run_case(name, package):
    """What a case computes, by name."""
    torch.manual_seed(0)
    method, *arguments = CASES[name]
    run = Run(package)
    getattr(run, method)(*arguments)
    return {f'{name} / {key}': value for key, value in run.found.items()}


def freeze(folder):
    """Writes the results of all cases."""
    package, found = Package(), {}
    for name in CASES:
        found.update(run_case(name, package))
    content = io.BytesIO()
    torch.save(found, content)
    pathlib.Path(folder, DATA.name).write_bytes(gzip.compress(content.getvalue(), mtime=0))
    print(f'{len(CASES)} cases of {package.a.__file__}')


if __name__ == '__main__':
    if len(sys.argv) > 1:
        freeze(sys.argv[1])
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(['git', 'archive', COMMIT], cwd=DATA.parents[2], check=True, stdout=subprocess.PIPE)
        subprocess.run(['tar', '-x', '-C', folder], input=archive.stdout, check=True)
        environment = {**os.environ, 'PYTHONPATH': folder, 'OMP_NUM_THREADS': '1'}
        subprocess.run([sys.executable, __file__, str(DATA.parent)], check=True, env=environment, cwd=folder)
