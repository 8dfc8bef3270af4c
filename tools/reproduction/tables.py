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
    images: Optional[int] = None  # to train with, if not the table's
    start: Optional[str] = None  # the row above it whose weights it begins with, of the same images and seed


@dataclass(frozen=True)
class Table:
    """Rows that can be compared."""

    title: str  # of its page
    about: str  # the question, and the answer of the committed results
    images: int  # to train with
    epochs: int
    rows: Dict[str, Row]  # by their labels; tables share the trainings of rows with one label
    corrupted: bool = False  # whether corrupted images are classified too, and moves of attention measured

    def epochs_of(self, label: str) -> int:
        """How long a row is trained."""
        return max(round(self.rows[label].share * self.epochs), 1)

    def images_of(self, label: str) -> int:
        """How many images a row is trained with."""
        return self.rows[label].images or self.images

    def smoke(self) -> 'Table':
        """Returns a table of the same rows that takes minutes, and says that its accuracies mean nothing."""
        rows = {label: replace(row, seeds=(0,), images=None) for label, row in self.rows.items()}
        about = 'This shows that the trainings run. The accuracies say nothing about the networks.'
        return replace(self, title=f'Smoke run: {self.title}', about=about, images=200, epochs=2, rows=rows)


# The schedule of a second phase, in a training of its own.
COSINE = dict(type='CosineAnnealingLR', eta_min=0.0, begin=1, end=12, convert_to_iter_based=True)
SECOND_PHASE = {
    'optim_wrapper.optimizer.lr': 1e-3,
    'param_scheduler': [dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True), COSINE],
}
# DeiT's augmentation of single images, and nothing else of its recipe.
AUGMENTED = {
    'model.backbone.drop_path_rate': 0.0,
    'model.head.loss': dict(_delete_=True, type='CrossEntropyLoss'),
    'model.train_cfg': dict(_delete_=True),
}
TRAINED_ON = dict(seeds=(0,), share=0.35, start='generalized')
# A trained CNN becomes attention at once.
AT_ONCE = {'custom_hooks.0.epoch': 0}
FROM_CNN = dict(seeds=(0, 1), share=2.5, start='ResNet')
FINE_TUNED = dict(share=0.1, start='as it comes')
DRAWN = dict(type='TruncNormal', layer='Linear', std=0.02)
# A vision transformer of 3 heads of 64 channels.
WIDE = {
    'model.backbone.arch': dict(embed_dims=192, num_layers=6, num_heads=3, feedforward_channels=768),
    'model.head.in_channels': 192,
}


def begins_with(initializer: str, **options: Any) -> Dict[str, Any]:
    """Returns the settings of a vision transformer whose attention or embedding begins otherwise."""
    return {'model.backbone.init_cfg': [DRAWN, dict(type=initializer, **options)]}


# The rates with which pruned heads of the papers are trained on, and the heads that stay.
FINE_TUNING = {**SECOND_PHASE, 'optim_wrapper.optimizer.lr': 2e-4}
CHOSEN = {'by importance': 'HeadPruningHook', 'at random': 'RandomPruningHook'}
PRUNED = {
    f'{left} heads, {how}': Row(
        'vit', {**FINE_TUNING, 'custom_hooks': [dict(type=hook, keep=left, epochs=[0])]}, **FINE_TUNED
    )
    for left in (18, 12, 6)
    for how, hook in CHOSEN.items()
}

BY_POSITION = {
    'quadratic': Row('sa_quadratic'),
    'generalized': Row('sa_generalized', seeds=(0,)),
    'learned': Row('sa_learned', seeds=(0,)),
    'ResNet': Row('resnet'),
}
FEW_IMAGES = {**BY_POSITION, 'learned with content': Row('sa_learned_content')}

TABLES: Dict[str, Table] = {
    'C20-1': Table(
        title='Heads by position and a CNN in equal epochs',
        about='Does attention by position learn as well as a CNN of as many multiply-adds (Cordonnier et al. 2020, '
        'Table 1 and Figure 2), and does content help? Our answer, with CIFAR-10-J: twice no. It ends 4 to 8 points '
        'below with 20,000 images, 14 to 19 with 5,000. Content costs learned heads 12 points (one seed).',
        images=20000,
        epochs=60,
        rows={
            **BY_POSITION,
            **{
                f'{label}, 5,000 images': replace(row, seeds=(0,), share=1 / 3, images=5000)
                for label, row in FEW_IMAGES.items()
            },
        },
    ),
    'C20-E': Table(
        title='Heads removed during training',
        about='Can degenerate heads go (Cordonnier et al. 2020, appendix E and Figure 13)? Our answer, with '
        'CIFAR-10-J: yes. Without them the trained network trains on to the same accuracy, with biases corrected or '
        'not (one seed).',
        images=20000,
        epochs=20,
        rows={
            'generalized': Row('sa_generalized', seeds=(0,)),
            'trained on with all heads': Row('sa_generalized_pruned', {'custom_hooks': []}, **TRAINED_ON),
            'pruned': Row('sa_generalized_pruned', **TRAINED_ON),
            'pruned, biases corrected': Row('sa_generalized_pruned_corrected', **TRAINED_ON),
        },
    ),
    'two-phases': Table(
        title='Two phases and their baselines in equal epochs',
        about='Does a vision transformer that begins as a convolutional network learn more than its baselines (Li et '
        'al. 2021, Table 1)? Our answer, with CIFAR-10-J: yes, 11 to 16 points more than attention from a random '
        'start and two more than a ViT, but hardly more than the convolution alone: half a point on average. All have '
        'the augmentation of DeiT and the same epochs in all. None has Mixup, CutMix, label smoothing or drop path, '
        'unlike in the paper.',
        images=2000,
        epochs=150,
        rows={
            'convolution': Row('cmhsa_conv', AUGMENTED),
            'attention': Row('cmhsa_attn', AUGMENTED),
            'both phases': Row('cmhsa_two_phases', AUGMENTED),
            'both phases, narrow heads': Row('cmhsa_narrow', AUGMENTED),
            'ViT': Row('deit', AUGMENTED),
        },
    ),
    'T-CNN': Table(
        title='A trained CNN whose last stage becomes attention',
        about='Does attention help in place of the last convolutions of a trained CNN (d’Ascoli et al. 2021)? Our '
        'answer, with CIFAR-10-J: a little. It ends half a point above the CNN that trains on as long, in twice the '
        'time, and 0.2 to 0.5 points above it on corrupted images.',
        images=10000,
        epochs=20,
        rows={
            'ResNet': Row('resnet', seeds=(0, 1)),
            'ResNet, trained on': Row('resnet', SECOND_PHASE, **FROM_CNN),
            'additive attention': Row('resnet_to_attention', AT_ONCE, **FROM_CNN),
            'gated attention': Row('resnet_to_attention', {**AT_ONCE, 'model.backbone.content': 'gated'}, **FROM_CNN),
        },
        corrupted=True,
    ),
    'pruning': Table(
        title='A vision transformer that loses heads',
        about='How many heads can a vision transformer lose, and which? Our answer, with CIFAR-10-J: half of them for '
        'a point of accuracy. To remove the least important ones (Michel et al. 2019) is no better on average than to '
        'draw heads at random, but varies less between seeds. The trained network loses heads at once, and trains for '
        'a tenth of its epochs again.',
        images=5000,
        epochs=20,
        rows={
            'as it comes': Row('vit'),
            'all 24 heads': Row('vit', FINE_TUNING, **FINE_TUNED),
            **PRUNED,
        },
    ),
    'starts': Table(
        title='Starts of vision transformers',
        about='Does a vision transformer learn more from little data if its heads begin as a convolution? Our answer, '
        'with CIFAR-10-J: three points more, but the sine-cosine embedding that comes with them gains four alone, and '
        'mimetic heads gain five. With 192 channels, in three heads of 64, Gaussian heads gain six points, and '
        'impulses nothing beyond their random embedding, whose deviation is 0.36 instead of 0.02. Heads get the '
        'positions of a kernel of 3x3 patches, the centre first, unless the row says otherwise. Impulses have the '
        'biases and the MLPs of the released code (Zheng et al. 2025).',
        images=5000,
        epochs=20,
        rows={
            'as it comes': Row('vit'),
            'random embedding': Row('vit', begins_with('RandomEmbedding')),
            'sine-cosine embedding': Row('vit_sine_cosine'),
            'Gaussian': Row('vit_convolutional'),
            'Gaussian, random shifts': Row('vit', begins_with('ConvolutionalHeads', shifts='random')),
            'Gaussian, all at the centre': Row('vit', begins_with('ConvolutionalHeads', kernel_size=1)),
            'mimetic': Row('vit', begins_with('ConvolutionalHeads', method='mimetic')),
            'as it comes, 192': Row('vit', WIDE),
            'random embedding, 192': Row('vit', {**WIDE, **begins_with('RandomEmbedding')}),
            'impulse, 192': Row('vit', {**WIDE, **begins_with('ReleasedImpulse')}),
            'Gaussian, 192': Row('vit_convolutional', WIDE),
        },
    ),
}
