"""The experiments: what is trained, for how long, and what it is compared with; plain data."""

from dataclasses import dataclass, field, replace
from typing import Any, Dict, Mapping, Optional, Tuple


@dataclass(frozen=True)
class Row:
    """One network, trained in one way."""

    config: str  # the file in configs/small, without .py
    options: Mapping[str, Any] = field(default_factory=dict)  # settings of the config to change, by dotted names
    seeds: Tuple[int, ...] = (0, 1, 2)  # one training for each
    share: float = 1  # of the table's epochs
    start: Optional[str] = None  # the row above it whose weights it begins with, of the same images and seed
    begins: float = 0  # where its curve begins without such a row, as a share of the table's epochs
    images: Optional[Tuple[int, ...]] = None  # which of the table's numbers of images; None: all


@dataclass(frozen=True)
class Table:
    """Rows that can be compared."""

    title: str  # of its page
    about: str  # the question that it answers
    epochs: Dict[int, int]  # how long to train, by the number of training images
    rows: Dict[str, Row]  # by their labels; tables share the trainings of rows with one label
    curves: Mapping[str, Tuple[str, ...]] = field(default_factory=dict)  # metrics by epoch, of four rows at most

    def epochs_of(self, label: str, images: int) -> int:
        """How long a row is trained with so many images."""
        return max(round(self.rows[label].share * self.epochs[images]), 1)


# The schedule of a second phase, in a training of its own.
COSINE = dict(type='CosineAnnealingLR', eta_min=0.0, begin=1, end=12, convert_to_iter_based=True)
SECOND_PHASE = {
    'optim_wrapper.optimizer.lr': 5e-4,
    'param_scheduler': [dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True), COSINE],
}
COLD_COSINE = dict(COSINE, begin=0)
NO_WARM_UP = {**SECOND_PHASE, 'param_scheduler': [COLD_COSINE]}
# Flips and shifts alone, as the ViT has them.
NO_DEIT_RECIPE = {
    'train_dataloader.dataset.pipeline': [dict(type='PackInputs')],
    'model.backbone.drop_path_rate': 0.0,
    'model.head.loss': dict(_delete_=True, type='CrossEntropyLoss'),
    'model.train_cfg': dict(_delete_=True),
}
TRAINED_ON = dict(seeds=(0,), share=0.35, start='generalized')
LONG = dict(seeds=(0,), images=(10000,))
RANDOM_START = dict(LONG, share=0.4, begins=0.6)
# A trained CNN becomes attention at once, and trains for the epochs of a second phase.
AT_ONCE = {'custom_hooks.0.epoch': 0}
FROM_SCRATCH = {'model.backbone.phase': 'attn', 'custom_hooks': []}
FROM_CNN = dict(share=0.5, start='ResNet')
METHOD = 'model.backbone.init_cfg.1.method'  # of the start of a vision transformer

TABLES: Dict[str, Table] = {
    'C20-1': Table(
        title='Five networks in equal epochs',
        about='Whether attention by positions alone learns as well as a CNN of as many multiply-adds, and whether '
        'attention by content costs accuracy (Cordonnier et al. 2020, Table 1 and Figure 2).',
        epochs={20000: 20},
        rows={
            'quadratic': Row('sa_quadratic'),
            'generalized': Row('sa_generalized', seeds=(0,)),
            'learned': Row('sa_learned', seeds=(0,)),
            'learned with content': Row('sa_learned_content', seeds=(0,)),
            'ResNet': Row('resnet'),
        },
    ),
    'C20-E': Table(
        title='Heads removed during training',
        about='Whether degenerate heads can go: removed from the trained network, which is trained on, with and '
        'without a correction of the biases (Cordonnier et al. 2020, appendix E and Figure 13).',
        epochs={20000: 20},
        rows={
            'generalized': Row('sa_generalized', seeds=(0,)),
            'trained on with all heads': Row('sa_generalized_pruned', {'custom_hooks': []}, **TRAINED_ON),
            'pruned': Row('sa_generalized_pruned', **TRAINED_ON),
            'pruned, biases corrected': Row('sa_generalized_pruned_corrected', **TRAINED_ON),
        },
    ),
    'L21-1': Table(
        title='Two phases and their baselines in little data',
        about='Whether a vision transformer that begins as a convolutional network learns more than its baselines (Li '
        'et al. 2021, Table 1), and the validation loss of attention that begins as a convolution or at random, with '
        'warm-up and without (Figure 2). All have the augmentation and the regularization of DeiT, but the ViT and '
        'the rows without it, which are not in Li et al.',
        epochs={500: 100, 2000: 60, 10000: 30},
        rows={
            'ViT': Row('vit'),
            'ViT, DeiT recipe': Row('deit'),
            'convolution only': Row('cmhsa_conv'),
            'attention only': Row('cmhsa_attn'),
            'two phases': Row('cmhsa'),
            'two phases, narrow': Row('cmhsa_narrow'),
            'two phases, narrow, no warm-up': Row('cmhsa_narrow_nowarmup'),
            'convolution only, no DeiT recipe': Row('cmhsa_conv', NO_DEIT_RECIPE),
            'attention only, no DeiT recipe': Row('cmhsa_attn', NO_DEIT_RECIPE),
            'two phases, no DeiT recipe': Row('cmhsa', NO_DEIT_RECIPE),
            'two phases, no warm-up': Row('cmhsa', {'custom_hooks.0.param_scheduler': [COLD_COSINE]}, **LONG),
            'second phase from a random start': Row('cmhsa_attn', SECOND_PHASE, **RANDOM_START),
            'second phase from a random start, no warm-up': Row('cmhsa_attn', NO_WARM_UP, **RANDOM_START),
        },
        curves={
            'cross_entropy/mean': (
                'two phases',
                'two phases, no warm-up',
                'second phase from a random start',
                'second phase from a random start, no warm-up',
            )
        },
    ),
    'T-CNN': Table(
        title='A trained CNN whose last stage becomes attention',
        about='Whether attention in the place of the last convolutions of a trained CNN helps (d’Ascoli et al. 2021), '
        'against the CNN that trains on, and against attention from the beginning.',
        epochs={10000: 20},
        rows={
            'ResNet': Row('resnet'),
            'ResNet goes on': Row('resnet', {**SECOND_PHASE, 'optim_wrapper.optimizer.lr': 1e-3}, **FROM_CNN),
            'additive': Row('resnet_to_attention', AT_ONCE, **FROM_CNN),
            'gated': Row('resnet_to_attention', {**AT_ONCE, 'model.backbone.content': 'gated'}, **FROM_CNN),
            'positions alone': Row('resnet_to_attention', {**AT_ONCE, 'model.backbone.content': None}, **FROM_CNN),
            'additive, from scratch': Row('resnet_to_attention', FROM_SCRATCH, share=1.5),
        },
    ),
    'ViT-starts': Table(
        title='Vision transformers that start as a convolution',
        about='Whether a start as a convolution helps a vision transformer in little data; sines and cosines as the '
        'position embedding, which these starts set too, are the control. What a user could choose in their place is '
        'a ResNet, or a CMHSA in two phases, which has the augmentation and the regularization of DeiT.',
        epochs={5000: 20},
        rows={
            'ViT': Row('vit'),
            'sines and cosines': Row('vit_sine_cosine'),
            'Gaussian heads': Row('vit_convolutional'),
            'impulse': Row('vit_convolutional', {METHOD: 'impulse'}),
            'mimetic': Row('vit_convolutional', {METHOD: 'mimetic'}),
            'ResNet': Row('resnet', seeds=(0,)),
            'two phases': Row('cmhsa', seeds=(0,)),
        },
    ),
}
TABLES['C20-1-5000'] = replace(TABLES['C20-1'], title='Five networks with 5,000 images', epochs={5000: 20})
