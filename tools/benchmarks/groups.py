"""What is measured: groups of ratios, each a table with a row and a column for every ratio."""

import copy
import gc
from typing import Callable, Dict, Iterator, NamedTuple, Tuple, Union

import torch
from cnns import cnns, neighbourhood_growth, neighbourhoods
from measure import Measured, Ratio, forward_pass, side_by_side, training_step
from memory import added_by
from models import (
    Settings,
    batch,
    cmhsa,
    draw_covariances,
    resnet18,
    sa_model,
    vision_transformer,
    with_dense_original,
)
from torch import Tensor, nn

from attncnn_plugin.layers import QuadraticAttention

Cells = Iterator[Tuple[str, str, Union[Ratio, str]]]  # of a row and a column

MODELS = {
    'SA quadratic': 'sa_quadratic_cifar',
    'SA generalized': 'sa_generalized_cifar',
    'SA learned': 'sa_learned_cifar',
    'SA learned + content': 'sa_learned_content_cifar',
}
POSITION_ONLY = list(MODELS)[0::2]  # whose scores are a sum of a row and a column term
# What has an attn_impl: name in timm, further arguments, and how its heads are.
KINDS = {
    'quadratic': ('sa_quadratic_cifar', {}, None),
    'quadratic, 16 heads': ('sa_quadratic16_cifar', {}, None),
    'generalized, initial heads': ('sa_generalized_cifar', {}, None),
    'generalized, trained heads': ('sa_generalized_cifar', {}, draw_covariances),
    'learned': ('sa_learned_cifar', {}, None),
    'learned + content': ('sa_learned_content_cifar', {}, None),
    "content model, terms=('vr',)": ('sa_learned_content_cifar', dict(terms=('vr',)), None),
}
BATCHES = ((16, 1), (16, 8), (32, 1), (64, 1))  # side of the grid in tokens, and images
ORIGINAL_BATCHES = ((16, 8), (32, 4), (64, 1))
SIDES = (16, 24, 32, 48, 64)
HEADS = {
    '': {},
    ', merged heads': dict(merge_heads=True),
    ', narrow heads': dict(head_dim='exact', qk_dim=64),
    ', narrow heads of at least 64': dict(head_dim='exact', min_head_dim=64, qk_dim=64),
}
TRANSFORMERS = ('deit_small_patch16_224', 'convit_tiny', 'vit_base_patch16_224')


def run(
    settings: Settings, models: Dict[str, nn.Module], training: bool, images: int, pixels: int, classes: int = 10
) -> Measured:
    """Forward passes or training steps of several models on the same images, side by side."""
    if not settings.quick:
        gc.collect()  # the models before: their hooks are reference cycles
    x, labels = batch(settings, images, pixels, classes)
    steps = {
        name: training_step(model, x, labels) if training else forward_pass(model, x) for name, model in models.items()
    }
    return side_by_side(steps, settings.quick)


def sizes(settings: Settings, batches) -> Iterator[Tuple[int, int, str]]:
    """Side of the grid, number of images, and the column."""
    for side, images in [(4, 2)] if settings.quick else batches:
        yield side, images, f'{side}x{side}, batch {images}'


def auto(settings: Settings) -> Cells:
    """``attn_impl='auto'`` against ``'dense'``."""
    for kind in KINDS:
        for training, what in ((False, 'forward'), (True, 'training')):
            for side, images, column in sizes(settings, BATCHES):
                measured = run(settings, both_ways(settings, kind, side), training, images, 2 * side)
                yield f'{kind}, {what}', column, measured.ratio('dense', 'auto')


def first_call(settings: Settings) -> Cells:
    """The first call of generalized heads on a grid against a call of the dense way."""
    for kind in KINDS:
        for side, images, column in sizes(settings, BATCHES) if 'generalized' in kind else ():
            models = both_ways(settings, kind, side)
            x, _ = batch(settings, images, 2 * side)
            steps = dict(first=call_anew(models['auto'], x), dense=forward_pass(models['dense'], x))
            yield kind, column, side_by_side(steps, settings.quick).ratio('first', 'dense')


def both_ways(settings: Settings, kind: str, side: int) -> Dict[str, nn.Module]:
    """A model with ``attn_impl='auto'`` and the same with ``'dense'``, by these names."""
    name, kwargs, change = KINDS[kind]
    model = sa_model(settings, name, side, **kwargs)
    if change is not None:
        change(model)
    dense = copy.deepcopy(model)
    for block in dense.blocks:
        block.attn.attn_impl = 'dense'
    return dict(auto=model, dense=dense)


def call_anew(model: nn.Module, images: Tensor) -> Callable[[], None]:
    """A forward pass that finds generalized heads changed, so that nothing that it knows of them will do."""
    call = forward_pass(model, images)

    def change_and_call() -> None:
        for block in model.blocks:
            block.attn.encoding.sqrt_precision.neg_()  # Σ⁻¹ = MMᵀ stays, but M is another one
        call()

    return change_and_call


def original(settings: Settings) -> Cells:
    """The models of C20 against the dense original."""
    for kind, name in MODELS.items():
        for what, training, kwargs in (
            ('forward', False, {}),
            ('training', True, {}),
            ('training, attention dropout 0.1', True, dict(attn_drop_rate=0.1)),
        ):
            for side, images, column in sizes(settings, ORIGINAL_BATCHES):
                ours = sa_model(settings, name, side, **kwargs)
                models = dict(ours=ours, original=with_dense_original(ours, side))
                yield (
                    f'{kind}, {what}',
                    column,
                    run(settings, models, training, images, 2 * side).ratio('original', 'ours'),
                )


def memory(settings: Settings) -> Cells:
    """Memory of a training step, against the dense original."""
    for kind in POSITION_ONLY:
        for side, images, column in sizes(settings, ORIGINAL_BATCHES[1:]):
            needed = {
                dense: added_by(make_training_step, settings, MODELS[kind], dense, side, images)
                for dense in (False, True)
            }
            ours, dense = needed[False] / 1e6, needed[True] / 1e6
            yield kind, column, f'{ours / dense:.2f} ({ours:,.0f} of {dense:,.0f} MB)'


def make_training_step(settings: Settings, name: str, dense: bool, side: int, images: int) -> Callable[[], None]:
    """Of one of the models of C20, or of its dense original."""
    model = sa_model(settings, name, side)
    model = with_dense_original(model, side) if dense else model
    gc.collect()  # what it was copied from
    return training_step(model, *batch(settings, images, 2 * side))


def growth(settings: Settings) -> Cells:
    """How a layer's time grows with the grid."""
    dim, num_heads, sides = (16, 3, (4, 6)) if settings.quick else (400, 9, SIDES)
    for impl in ('auto', 'dense'):
        layer = QuadraticAttention(dim, num_heads, attn_impl=impl)
        steps = {side: forward_pass(layer, torch.randn(1, side, side, dim)) for side in sides}
        measured = side_by_side(steps, settings.quick)
        for side in sides[1:]:
            yield impl, f'{side}x{side}', measured.ratio(side, sides[0])


def deploy(settings: Settings) -> Cells:
    """Forward passes before ``switch_to_deploy()``, over those after it."""
    side, pixels = (4, 32) if settings.quick else (16, 224)
    makers = {
        kind: (lambda name=name: sa_model(settings, name, side, depth=2 if settings.quick else 6), 2 * side)
        for kind, name in MODELS.items()
    }
    makers['CMHSA-5, attention phase'] = (lambda: cmhsa(settings, 'attn'), pixels)
    for kind, (make, pixels) in makers.items():
        before = make().eval()
        after = copy.deepcopy(before)
        after.switch_to_deploy()
        for images in (1, 8):
            measured = run(settings, dict(before=before, after=after), False, images, pixels)
            yield kind, f'batch {images}', measured.ratio('before', 'after')


def cmhsa_peers(settings: Settings) -> Cells:
    """CMHSA-5 in its first phase, and in its second one with heads of each kind, against transformers."""
    ours = {
        'convolution phase': cmhsa(settings, 'conv'),
        **{f'attention phase{kind}': cmhsa(settings, 'attn', null_key=True, **HEADS[kind]) for kind in HEADS},
    }
    others = {name: vision_transformer(settings, name) for name in TRANSFORMERS}
    images, pixels = (2, 32) if settings.quick else (8, 224)
    for training, what in ((False, 'forward'), (True, 'training')):
        measured = run(settings, {**ours, **others}, training, images, pixels, 100)
        for name in ours:
            for other in others:
                yield f'{name}, {what}', other, measured.ratio(name, other)
            if training and name != 'convolution phase':
                halves = measured.joined('convolution phase', name)
                for other in others:
                    yield f'half the epochs in each, {name}', other, halves.ratio('half', other)


def cmhsa_memory(settings: Settings) -> Cells:
    """Memory of a training step of CMHSA-5, against ViT-base."""
    images, pixels = (2, 32) if settings.quick else (8, 224)
    base = added_by(make_peer_step, settings, None, {}, images, pixels)
    kinds = {'convolution phase': ('conv', {}), **{f'attention phase{kind}': ('attn', HEADS[kind]) for kind in HEADS}}
    for name, (phase, kwargs) in kinds.items():
        ours = added_by(make_peer_step, settings, phase, kwargs, images, pixels)
        yield name, 'vit_base_patch16_224', f'{ours / base:.2f} ({ours / 1e6:,.0f} of {base / 1e6:,.0f} MB)'


def make_peer_step(settings: Settings, phase, kwargs, images: int, pixels: int) -> Callable[[], None]:
    """Of CMHSA-5 in a phase, or of ViT-base."""
    model = vision_transformer(settings, 'vit_base_patch16_224') if phase is None else cmhsa(settings, phase, **kwargs)
    return training_step(model, *batch(settings, images, pixels, 100))


def sa_peers(settings: Settings) -> Cells:
    """The models of C20 against its ResNet-18."""
    ours = {kind: sa_model(settings, name, 16, depth=2 if settings.quick else 6) for kind, name in MODELS.items()}
    yield from over_peers(settings, ours, {'ResNet-18': resnet18(settings)}, 2 if settings.quick else 8, 32, 10)


def over_peers(settings, ours, others, images: int, pixels: int, classes: int) -> Cells:
    """Times of our models over those of others."""
    for training, what in ((False, 'forward'), (True, 'training')):
        measured = run(settings, {**ours, **others}, training, images, pixels, classes)
        for name in ours:
            for other in others:
                yield f'{name}, {what}', other, measured.ratio(name, other)


class Group(NamedTuple):
    """Ratios that are measured together.

    Attributes:
        measure (Callable): Gives the ratios.
        title (str): Over their table.
        ratio (str): What is divided by what, in a sentence, and what else to know.
    """

    measure: Callable[[Settings], Cells]
    title: str
    ratio: str


GROUPS = {
    'auto': Group(
        auto,
        "attn_impl='auto' against 'dense'",
        "Time of `'dense'` over that of `'auto'`: at least 1, but for noise, wherever `'auto'` chooses well. Models "
        'have two blocks: at 64x64 tokens the probabilities of a layer take 600 MB. Trained heads have covariances of '
        'condition number 1 to 10. With content in its scores a model has one way alone: its rows show the noise.',
    ),
    'first': Group(
        first_call,
        'The first call on a grid',
        'Time of the first call of generalized heads on a grid, which decomposes their tables, over that of a call of '
        "the dense way. The calls after it are those of `'auto'` above.",
    ),
    'original': Group(
        original,
        'Against the dense original',
        'Time of the dense original over ours. Models have two blocks. Every probability is needed for attention '
        'dropout, so that ours are dense too while it is active.',
    ),
    'memory': Group(
        memory,
        'Memory of a training step',
        'What ours adds to the process over what the dense original adds. Models have two blocks.',
    ),
    'growth': Group(
        growth,
        'Growth with the grid',
        'Time of one layer of SA quadratic, forward, batch 1, over its time at 16x16 tokens. The linear map of the '
        'heads is part of it.',
    ),
    'deploy': Group(deploy, 'After switch_to_deploy()', 'Time of a forward pass before it over the time after it.'),
    'cmhsa': Group(
        cmhsa_peers,
        'CMHSA-5 against vision transformers',
        'Time of ours over that of the other model, 224x224 pixels, batch 8. In training over ViT-base L21 has '
        '0.49 for convolution, 1.48 for attention and 0.98 for half the epochs in each.',
    ),
    'cmhsa_memory': Group(
        cmhsa_memory,
        'Memory of a training step of CMHSA-5',
        'What ours adds to the process over what ViT-base adds, 224x224 pixels, batch 8.',
    ),
    'sa': Group(
        sa_peers,
        'SA against ResNet-18',
        'Time of ours over that of ResNet-18, 32x32 pixels, batch 8.',
    ),
    'cnns': Group(
        cnns,
        'CNNs with a last stage of attention',
        'Time of the CNN whose last stage became attention (heads of α = 6) over that of the CNN, 224x224 pixels, '
        'batch 8.',
    ),
    'neighbourhoods': Group(
        neighbourhoods,
        'Attention over neighbourhoods',
        'A 3x3 convolution of 64 channels, and what became of it with content: over neighbourhoods of 7x7 pixels, and '
        'over the whole image. One image.',
    ),
    'neighbourhood_growth': Group(
        neighbourhood_growth,
        'Growth of attention over neighbourhoods',
        'The exponent by which the time of the layer above grows with the number of pixels: 1 is linear.',
    ),
}
