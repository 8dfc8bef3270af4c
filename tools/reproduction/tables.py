"""The tables: their rows, as configs of configs/small and what is changed in them."""

import dataclasses
from typing import Any, Dict, Mapping, Optional, Tuple

SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Row:
    """One network, trained in one way.

    Attributes:
        label (str): Its name, the same in all tables that share its trainings.
        config (str): The file in ``configs/small``, without ``.py``.
        seeds (tuple[int, ...]): Those of its trainings. Defaults to 0, 1 and 2.
        share (float): Its epochs in those of the table. Defaults to 1.
        start (str, optional): The row of the table with whose weights it begins, of the same images and seed.
        begins (float): Where its curve begins in figures, as a share of the epochs of the table. Defaults to 0; with
            ``start`` it begins where that ends.
        images (tuple[int, ...], optional): The numbers of images that it is trained with. Defaults to None, means all
            of the table.
        options (Mapping[str, Any]): Settings of the config to change.
    """

    label: str
    config: str
    seeds: Tuple[int, ...] = SEEDS
    share: float = 1
    start: Optional[str] = None
    begins: float = 0
    images: Optional[Tuple[int, ...]] = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that can be compared.

    Attributes:
        title (str): The heading of its page.
        about (str): What it is to show.
        epochs (dict[int, int]): Of a training, by its number of images.
        rows (tuple[Row, ...]): The rows.
        curves (tuple[str, ...]): The metrics that its figures show by epoch.
    """

    title: str
    about: str
    epochs: Dict[int, int]
    rows: Tuple[Row, ...]
    curves: Tuple[str, ...] = ('accuracy/top1',)


GENERALIZED = Row('generalized', 'sa_generalized', seeds=(0,))
RESNET = Row('ResNet', 'resnet')
TWO_PHASES = Row('two phases', 'cmhsa')
# The schedule of a second phase, in a training of its own.
COSINE = dict(type='CosineAnnealingLR', eta_min=0.0, begin=1, end=12, convert_to_iter_based=True)
SECOND_PHASE = {
    'optim_wrapper.optimizer.lr': 5e-4,
    'param_scheduler': [dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True), COSINE],
}
NO_WARM_UP = [dict(COSINE, begin=0)]
# Flips and shifts alone, as the ViT has them.
NO_DEIT_RECIPE = {
    'train_dataloader.dataset.pipeline': [dict(type='PackInputs')],
    'model.backbone.drop_path_rate': 0.0,
    'model.head.loss': dict(_delete_=True, type='CrossEntropyLoss'),
    'model.train_cfg': dict(_delete_=True),
}
# A trained CNN becomes attention at once, and trains for the epochs of a second phase.
AT_ONCE = {'custom_hooks.0.epoch': 0}
FROM_CNN = dict(config='resnet_to_attention', share=0.5, start='ResNet')
# The start of a vision transformer is drawn by the seed of the training.
HEADS = 'model.backbone.init_cfg.1'

TABLES: Dict[str, Table] = {
    'C20-1': Table(
        'Five networks in equal epochs',
        'Whether attention by positions alone learns as well as a CNN of as many multiply-adds, and whether attention '
        'by content costs accuracy (Cordonnier et al. 2020, Table 1 and Figure 2).',
        {20000: 20},
        (
            Row('quadratic', 'sa_quadratic'),
            GENERALIZED,
            Row('learned', 'sa_learned', seeds=(0,)),
            Row('learned with content', 'sa_learned_content', seeds=(0,)),
            RESNET,
        ),
    ),
    'C20-E': Table(
        'Heads removed during training',
        'Whether degenerate heads can go: removed from the trained network, which is trained on, with and without a '
        'correction of the biases (Cordonnier et al. 2020, appendix E and Figure 13).',
        {20000: 20},
        (
            GENERALIZED,
            Row(
                'trained on with all heads',
                'sa_generalized_pruned',
                seeds=(0,),
                share=0.35,
                start='generalized',
                options=dict(custom_hooks=[]),
            ),
            Row('pruned', 'sa_generalized_pruned', seeds=(0,), share=0.35, start='generalized'),
            Row(
                'pruned, biases corrected',
                'sa_generalized_pruned_corrected',
                seeds=(0,),
                share=0.35,
                start='generalized',
            ),
        ),
    ),
    'L21-1': Table(
        'Two phases and their baselines in little data',
        'Whether a vision transformer that begins as a convolutional network learns more than its baselines (Li et al. '
        '2021, Table 1), and the validation loss of attention that begins as a convolution or at random, with warm-up '
        'and without (Figure 2). All have the augmentation and the regularization of DeiT, but the ViT and the rows '
        'without it, which are not in Li et al.',
        {500: 100, 2000: 60, 10000: 30},
        (
            Row('ViT', 'vit'),
            Row('ViT, DeiT recipe', 'deit'),
            Row('convolution only', 'cmhsa_conv'),
            Row('attention only', 'cmhsa_attn'),
            TWO_PHASES,
            Row('two phases, narrow', 'cmhsa_narrow'),
            Row('two phases, narrow, no warm-up', 'cmhsa_narrow_nowarmup'),
            Row('convolution only, no DeiT recipe', 'cmhsa_conv', options=NO_DEIT_RECIPE),
            Row('attention only, no DeiT recipe', 'cmhsa_attn', options=NO_DEIT_RECIPE),
            Row('two phases, no DeiT recipe', 'cmhsa', options=NO_DEIT_RECIPE),
            Row(
                'two phases, no warm-up',
                'cmhsa',
                seeds=(0,),
                images=(10000,),
                options={'custom_hooks.0.param_scheduler': NO_WARM_UP},
            ),
            Row(
                'second phase from a random start',
                'cmhsa_attn',
                seeds=(0,),
                share=0.4,
                begins=0.6,
                images=(10000,),
                options=SECOND_PHASE,
            ),
            Row(
                'second phase from a random start, no warm-up',
                'cmhsa_attn',
                seeds=(0,),
                share=0.4,
                begins=0.6,
                images=(10000,),
                options={**SECOND_PHASE, 'param_scheduler': NO_WARM_UP},
            ),
        ),
        ('accuracy/top1', 'cross_entropy/mean'),
    ),
    'T-CNN': Table(
        'A trained CNN whose last stage becomes attention',
        'Whether attention in the place of the last convolutions of a trained CNN helps (d’Ascoli et al. 2021), '
        'against the CNN that trains on, and against attention from the beginning.',
        {10000: 20},
        (
            RESNET,
            Row(
                'ResNet goes on',
                'resnet',
                share=0.5,
                start='ResNet',
                options={**SECOND_PHASE, 'optim_wrapper.optimizer.lr': 1e-3},
            ),
            Row('additive', **FROM_CNN, options=AT_ONCE),
            Row('gated', **FROM_CNN, options={**AT_ONCE, 'model.backbone.content': 'gated'}),
            Row('positions alone', **FROM_CNN, options={**AT_ONCE, 'model.backbone.content': None}),
            Row(
                'additive, from scratch',
                'resnet_to_attention',
                share=1.5,
                options={'model.backbone.phase': 'attn', 'custom_hooks': []},
            ),
        ),
    ),
    'ViT-starts': Table(
        'Vision transformers that start as a convolution',
        'Whether a start as a convolution helps a vision transformer in little data; sines and cosines as the position '
        'embedding, which these starts set too, are the control. What a user could choose in their place is a ResNet, '
        'or a CMHSA in two phases, which has the augmentation and the regularization of DeiT.',
        {5000: 20},
        (
            Row('ViT', 'vit'),
            Row('sines and cosines', 'vit_sine_cosine'),
            Row('Gaussian heads', 'vit_convolutional'),
            Row('impulse', 'vit_convolutional', options={f'{HEADS}.method': 'impulse'}),
            Row('mimetic', 'vit_convolutional', options={f'{HEADS}.method': 'mimetic'}),
            dataclasses.replace(RESNET, seeds=(0,)),
            dataclasses.replace(TWO_PHASES, seeds=(0,)),
        ),
    ),
}


def epochs_of(row: Row, epochs: int) -> int:
    """The epochs of a row in a table of so many."""
    return max(round(row.share * epochs), 1)


def smoke(table: Table) -> Table:
    """The table in minutes: few images, two epochs, one seed."""
    sizes = {number: 200 * (i + 1) for i, number in enumerate(table.epochs)}
    rows = tuple(
        dataclasses.replace(row, seeds=(0,), images=row.images and tuple(sizes[number] for number in row.images))
        for row in table.rows
    )
    return dataclasses.replace(table, epochs=dict.fromkeys(sizes.values(), 2), rows=rows)
