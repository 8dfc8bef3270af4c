# CIFAR-10 as mmpretrain downloads it. DeiT's own code too has a crop with padding, instead of one of another size, where
# images are as small as these.
data_preprocessor = dict(
    num_classes=10,
    mean=[125.307, 122.961, 113.8575],
    std=[51.5865, 50.847, 51.255],
    to_rgb=False)  # the images are RGB as they are loaded

flip_and_shift = [
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomCrop', crop_size=32, padding=4),
]

# No processes that load images: all of them are in memory, and an epoch is the same in a run that was resumed.
train_dataloader = dict(
    batch_size=50,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        type='CIFAR10', data_root='data/cifar10', split='train', pipeline=[*flip_and_shift, dict(type='PackInputs')]),
    sampler=dict(type='DefaultSampler', shuffle=True))

val_dataloader = dict(
    batch_size=250,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(type='CIFAR10', data_root='data/cifar10', split='test', pipeline=[dict(type='PackInputs')]),
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = [
    dict(type='Accuracy', topk=(1, 5)),
    dict(type='CrossEntropy'),  # the validation loss
]

test_dataloader = val_dataloader
test_evaluator = val_evaluator
