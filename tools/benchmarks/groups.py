"""What is measured, in groups, and the targets."""

import copy
import gc
import statistics
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from cost_curve import exponent, layer_time, measure_curve
from memory import in_new_process
from models import batch, cmhsa, draw_covariances, peer, resnet18, sa_model, with_original_attention
from settings import Settings
from steps import forward_pass, training_step
from timing import measure
from torch import nn

Row = Dict[str, Any]
Target = Optional[Tuple[str, float]]  # ('at least' or 'at most', the ratio)

# Pixels: the batch, and by how much the dense original's time is to be divided in a forward pass and a training step.
SA_TARGETS = {32: (8, 4.5, 3.0), 64: (4, 8.0, 5.0), 128: (1, 15.0, 8.0)}
GENERALIZED_TARGETS = {32: (8, 1.0), 64: (4, 1.5), 128: (1, 3.0)}
DROPOUT_BATCHES = ((32, 8), (32, 1), (64, 4), (64, 1), (128, 1))  # pixels and batch
MEMORY_TARGETS = {64: (4, 0.4), 128: (1, 0.125)}
SA_NAMES = {
    'SA quadratic': 'sa_quadratic_cifar',
    'SA generalized': 'sa_generalized_cifar',
    'SA learned': 'sa_learned_cifar',
    'SA learned + content': 'sa_learned_content_cifar',
}
SEPARABLE = ('SA quadratic', 'SA learned')
PEERS = ('deit_small_patch16_224', 'convit_tiny', 'vit_base_patch16_224')


def at_least(ratio: float) -> Target:
    return 'at least', ratio


def at_most(ratio: float) -> Target:
    return 'at most', ratio


def row(
    settings: Settings,
    name: str,
    measured: Dict[str, Any],
    numerator: Sequence[str],
    denominator: str,
    ours: Optional[str] = None,
    target: Target = None,
    **more,
) -> Row:
    """A ratio of median times, with everything that it comes from.

    Args:
        settings (Settings): Of the run.
        name (str): What is measured.
        measured (dict): See :func:`~timing.measure`.
        numerator (Sequence[str]): The sides whose times are averaged.
        denominator (str): The side that they are divided by.
        ours (str, optional): The side that is compared with the rate of matrix products. Defaults to none.
        target (tuple[str, float], optional): What the ratio is to be.
        more: Further entries.
    """
    sides = [*numerator, denominator]
    seconds, counts = ({side: measured[what][side] for side in sides} for what in ('seconds', 'multiply_adds'))
    median = {side: statistics.median(times) for side, times in seconds.items()}
    return dict(
        name=name,
        numerator=list(numerator),
        denominator=denominator,
        ours=ours,
        ratio=statistics.mean(median[side] for side in numerator) / median[denominator],
        ratio_of_multiply_adds=statistics.mean(counts[side] for side in numerator) / counts[denominator],
        target=target if settings.has_targets else None,
        seconds=seconds,
        multiply_adds=counts,
        **more,
    )


def run(
    settings: Settings,
    models: Dict[str, nn.Module],
    training: bool,
    batch_size: int,
    pixels: int,
    num_classes: int = 10,
) -> Dict[str, Any]:
    """Forward passes or training steps of several models on the same images, in turns."""
    gc.collect()  # the models before: their hooks are reference cycles
    images, labels = batch(settings, batch_size, pixels, num_classes)
    functions = {
        name: training_step(model, images, labels, settings.dtype)
        if training
        else forward_pass(model, images, settings.dtype)
        for name, model in models.items()
    }
    return measure(functions, settings.device, settings.repetitions)


def against_original(
    settings: Settings,
    kind: str,
    pixels: int,
    batch_size: int,
    training: bool,
    target: Target,
    note: str = '',
    change: Callable[[nn.Module], None] = lambda model: None,
    **kwargs,
) -> Row:
    """One of the models of C20 and its dense original, with the same weights.

    Args:
        settings (Settings): Of the run.
        kind (str): A key of ``SA_NAMES``.
        pixels, batch_size (int): The images.
        training (bool): A training step rather than a forward pass.
        target (tuple[str, float]): For the time of the original over ours.
        note (str): What else the name of the row says.
        change (Callable): Called with our model before it is copied.
        kwargs: Of the model.
    """
    pixels = pixels // 4 if settings.quick else pixels
    ours = sa_model(settings, SA_NAMES[kind], pixels, **kwargs)
    change(ours)
    models = dict(ours=ours, original=with_original_attention(ours, pixels, pixels))
    what = 'training step' if training else 'forward'
    return row(
        settings,
        f'{kind}, {what}{note}, {pixels} px, batch {batch_size}',
        run(settings, models, training, batch_size, pixels),
        ['original'],
        'ours',
        'ours',
        target,
    )


def separable(settings: Settings) -> List[Row]:
    """SA quadratic and SA learned against the dense original."""
    sizes = [32] if settings.quick else list(SA_TARGETS)
    rows = []
    for kind in SEPARABLE:
        for pixels in sizes:
            batch_size, forward, training = SA_TARGETS[pixels]
            rows.append(against_original(settings, kind, pixels, batch_size, False, at_least(forward)))
            rows.append(against_original(settings, kind, pixels, batch_size, True, at_least(training)))
        for pixels, batch_size in DROPOUT_BATCHES:
            if pixels in sizes:
                rows.append(
                    against_original(
                        settings,
                        kind,
                        pixels,
                        batch_size,
                        True,
                        at_least(1.0),
                        ', attention dropout 0.1',
                        attn_drop_rate=0.1,
                    )
                )
    return rows


def memory(settings: Settings) -> List[Row]:
    """Peak memory of a training step, over the original's."""
    rows = []
    for kind in SEPARABLE[:1] if settings.quick else SEPARABLE:
        for pixels in [64] if settings.quick else list(MEMORY_TARGETS):
            batch_size, target = MEMORY_TARGETS[pixels]
            figures = {
                side: in_new_process(settings, side, SA_NAMES[kind], pixels, batch_size)
                for side in ('ours', 'original')
            }
            added = {side: figure['peak'] - figure['before'] for side, figure in figures.items()}
            peak = {side: figure['peak'] for side, figure in figures.items()}
            for what, values in (('at most in the process', peak), ('added by the step', added)):
                rows.append(
                    dict(
                        name=f'{kind}, {pixels} px, batch {batch_size}: {what}',
                        ratio=values['ours'] / values['original'],
                        target=at_most(target) if settings.has_targets else None,
                        bytes=values,
                    )
                )
    return rows


def generalized(settings: Settings) -> List[Row]:
    """SA generalized, forward, against the dense original."""
    rows = []
    for note, change in ((', initial heads', lambda model: None), (', condition numbers to 10', draw_covariances)):
        for pixels in [32] if settings.quick else list(GENERALIZED_TARGETS):
            batch_size, target = GENERALIZED_TARGETS[pixels]
            rows.append(
                against_original(settings, 'SA generalized', pixels, batch_size, False, at_least(target), note, change)
            )
    return rows


def content(settings: Settings) -> List[Row]:
    """SA learned + content against the version by einsum."""
    return [
        against_original(settings, 'SA learned + content', 32, 8, training, at_least(target))
        for training, target in ((False, 1.5), (True, 1.3))
    ]


def cost(settings: Settings) -> List[Row]:
    """How the time of SA quadratic's attention grows: one row that holds the curve."""
    points = measure_curve(settings)
    return [
        dict(
            name='exponent in the number of tokens, attention alone',
            ratio=exponent(points, 'ours'),
            target=at_most(1.6) if settings.has_targets else None,
            dense=exponent(points, 'dense'),
            whole_layer=exponent(points, 'ours', layer_time),
            dense_whole_layer=exponent(points, 'dense', layer_time),
            points=points,
        )
    ]


def cmhsa_models(settings: Settings) -> Dict[str, nn.Module]:
    """CMHSA-5 in its first phase, in its second one, and in its second one with merged heads."""
    return {
        'convolution': cmhsa(settings, 'conv'),
        'attention': cmhsa(settings, 'attn'),
        'merged attention': cmhsa(settings, 'attn', merge_heads=True),
    }


def phases(settings: Settings) -> List[Row]:
    """Training steps of CMHSA-5, over those of ViT-base."""
    vit = PEERS[-1]
    models = {**cmhsa_models(settings), vit: peer(settings, vit)}
    measured = run(settings, models, True, *_large_images(settings), num_classes=100)
    names = {
        ('convolution',): ('convolution phase', 0.38, 0.49),
        ('attention',): ('attention phase', 1.75, 1.48),
        ('merged attention',): ('attention phase, merged heads', 1.2, None),
        ('convolution', 'merged attention'): ('both phases, half the epochs each, merged heads', 0.8, 0.98),
    }
    return [
        row(
            settings,
            f'CMHSA-5, training step, {name}',
            measured,
            sides,
            vit,
            sides[0] if len(sides) == 1 else None,
            at_most(target),
            paper=paper,
        )
        for sides, (name, target, paper) in names.items()
    ]


def deploy(settings: Settings) -> List[Row]:
    """Forward passes before ``switch_to_deploy()``, over those after it."""
    _, large = _large_images(settings)
    small = 8 if settings.quick else 32
    makers = {'CMHSA-5, attention phase': (lambda: cmhsa(settings, 'attn'), large, at_least(1.5))}
    for kind, name in SA_NAMES.items():
        makers[kind] = (lambda name=name: sa_model(settings, name, small), small, None)
    rows = []
    for name, (make, pixels, target) in makers.items():
        before = make().eval()
        after = copy.deepcopy(before)
        after.switch_to_deploy()
        for batch_size in (1, 8):
            measured = run(settings, dict(before=before, after=after), False, batch_size, pixels)
            rows.append(
                row(
                    settings,
                    f'{name}, forward, {pixels} px, batch {batch_size}',
                    measured,
                    ['before'],
                    'after',
                    'after',
                    target,
                )
            )
    return rows


def peers(settings: Settings) -> List[Row]:
    """Our models' times over those of other models of the same task."""
    batch_size, pixels = _large_images(settings)
    large = {f'CMHSA-5, {name}': model for name, model in cmhsa_models(settings).items()}
    rows = _over_peers(settings, large, {name: peer(settings, name) for name in PEERS}, batch_size, pixels, 100)
    del large
    resnet = resnet18(settings)
    if resnet is not None:
        small = {kind: sa_model(settings, name, 32) for kind, name in SA_NAMES.items()}
        rows += _over_peers(settings, small, {'ResNet18': resnet}, 8, 32, 10)
    return rows


def recipe(settings: Settings) -> List[Row]:
    """Training steps of SA quadratic as C20 trained it, batch 100 and dropout 0.1."""
    pixels, batch_size = (8, 2) if settings.quick else (32, 100)
    ours = sa_model(settings, SA_NAMES['SA quadratic'], pixels, attn_drop_rate=0.1, proj_drop_rate=0.1)
    models = dict(ours=ours, original=with_original_attention(ours, pixels, pixels))
    measured = run(settings, models, True, batch_size, pixels)
    return [
        row(
            settings,
            f'SA quadratic, training step, {pixels} px, batch {batch_size}',
            measured,
            ['original'],
            'ours',
            'ours',
            images=batch_size,
        )
    ]


def _large_images(settings: Settings) -> Tuple[int, int]:
    """Batch and pixels for the models of L21."""
    return (2, 32) if settings.quick else (8, 224)


def _over_peers(settings, ours, others, batch_size, pixels, num_classes) -> List[Row]:
    rows = []
    for training in (False, True):
        measured = run(settings, {**ours, **others}, training, batch_size, pixels, num_classes)
        what = 'training step' if training else 'forward'
        rows += [
            row(settings, f'{name} / {other}, {what}, {pixels} px, batch {batch_size}', measured, [name], other, name)
            for name in ours
            for other in others
        ]
    return rows


@dataclass(frozen=True)
class Group:
    """Rows that are measured together.

    Attributes:
        measure (Callable): Gives the rows.
        title (str): Over their table.
        ratio (str): What the ratio is.
        cuda_only (bool): Whether it is for a GPU alone. Defaults to False.
    """

    measure: Callable[[Settings], List[Row]]
    title: str
    ratio: str
    cuda_only: bool = False


GROUPS = {
    'sa': Group(separable, 'SA quadratic and SA learned, whole models', 'original / ours'),
    'memory': Group(memory, 'Peak memory of a training step', 'ours / original'),
    'generalized': Group(generalized, 'SA generalized, whole model', 'original / ours'),
    'content': Group(content, 'SA learned + content, whole model', 'original / ours'),
    'cost': Group(cost, "SA quadratic's attention against the size of the grid", ''),
    'cmhsa': Group(phases, 'CMHSA-5 against ViT-base', 'ours / ViT-base'),
    'deploy': Group(deploy, 'Inference after switch_to_deploy()', 'before / after'),
    'peers': Group(peers, 'Other models', 'ours / other'),
    'recipe': Group(recipe, 'SA quadratic with the recipe of C20', 'original / ours', cuda_only=True),
}
