# DeiT's augmentation and regularization, which Li et al. 2021 (L21) leave as they are, after that of data_cifar10.py.
# Its learning rate and its schedule are those of the other networks.
train_pipeline = [
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(
        type='RandAugment',
        policies='timm_increasing',
        num_policies=2,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.5,
        hparams=dict(pad_val=[125, 123, 114], interpolation='bicubic')),
    dict(
        type='RandomErasing',
        erase_prob=0.25,
        mode='rand',
        min_area_ratio=0.02,
        max_area_ratio=1 / 3,
        fill_color=[125.307, 122.961, 113.8575],
        fill_std=[51.5865, 50.847, 51.255]),
    dict(type='PackInputs'),
]
