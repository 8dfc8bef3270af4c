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


@dataclass(frozen=True)
class Table:
    """Rows that can be compared."""

    title: str  # of its page
    about: str  # the question that it answers
    images: int  # to train with
    epochs: int
    rows: Dict[str, Row]  # by their labels; tables share the trainings of rows with one label
    corrupted: bool = False  # whether corrupted images are classified too, and moves of attention measured
    gate: Optional[float] = None  # the attention that heads which begin with a shift have there, at least; else void

    def epochs_of(self, label: str) -> int:
        """How long a row is trained."""
        return max(round(self.rows[label].share * self.epochs), 1)


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

TABLES: Dict[str, Table] = {
    'C20-1': Table(
        title='Four networks in equal epochs',
        about='Whether attention by position only learns as well as a CNN of as many multiply-adds (Cordonnier et al. '
        '2020, Table 1 and Figure 2).',
        images=20000,
        epochs=60,
        rows={
            'quadratic': Row('sa_quadratic'),
            'generalized': Row('sa_generalized', seeds=(0,)),
            'learned': Row('sa_learned', seeds=(0,)),
            'ResNet': Row('resnet'),
        },
    ),
    'C20-E': Table(
        title='Heads removed during training',
        about='Whether degenerate heads can go: removed from the trained network, which is trained on, with and '
        'without a correction of the biases (Cordonnier et al. 2020, appendix E and Figure 13).',
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
        about='Whether a vision transformer that begins as a convolutional network learns more than its baselines (Li '
        'et al. 2021, Table 1). All have the augmentation of DeiT and the same epochs in all. None has Mixup, CutMix, '
        'label smoothing or drop path, so they differ from Li et al. in that.',
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
        about='Whether attention instead of the last convolutions of a trained CNN helps (d’Ascoli et al. 2021), on '
        'clean and on corrupted images, against the CNN that keeps training, and how far its heads move.',
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
        about='How the accuracy falls with the heads that go: the least important ones (Michel et al. 2019), or heads '
        'that are drawn. The trained network loses them at once, and trains for a tenth of its epochs again.',
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
        about='Whether heads that begin as a convolution help a vision transformer in little data, beyond what the '
        'sine-cosine position embedding does that comes with them. The random embedding has a deviation of 0.36 '
        'instead of 0.02. Heads get the positions of a kernel of 3x3 patches, the centre first, unless the row says '
        'otherwise.',
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
        },
        gate=0.5,
    ),
    'starts-192': Table(
        title='Starts of vision transformers with 192 channels',
        about='Whether impulses, and Gaussian heads, help a vision transformer of 3 heads of 64 channels in little '
        'data, beyond the random position embedding of impulses, with a deviation of 0.36 instead of 0.02. Heads get '
        'the positions of a kernel of 3x3 patches, the centre first. Impulses have the biases and the MLPs of the '
        'released code (Zheng et al. 2025).',
        images=5000,
        epochs=20,
        rows={
            'as it comes, 192': Row('vit', WIDE),
            'random embedding, 192': Row('vit', {**WIDE, **begins_with('RandomEmbedding')}),
            'impulse, 192': Row('vit', {**WIDE, **begins_with('ReleasedImpulse', method='impulse')}),
            'Gaussian, 192': Row('vit_convolutional', WIDE),
        },
        gate=0.5,
    ),
}
TABLES['C20-1-5000'] = replace(
    TABLES['C20-1'],
    title='Five networks with 5,000 images',
    about='Whether attention by content costs accuracy (Cordonnier et al. 2020, Table 1), one seed of each network.',
    images=5000,
    epochs=20,
    rows={
        label: replace(row, seeds=(0,))
        for label, row in {**TABLES['C20-1'].rows, 'learned with content': Row('sa_learned_content')}.items()
    },
)
