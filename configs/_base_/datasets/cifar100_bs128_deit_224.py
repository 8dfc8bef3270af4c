# CIFAR-100 at 224x224 with DeiT's augmentation, as mmpretrain's DeiT configs have it, and DeiT's repeated augmentation:
# three augmentations of an image follow each other, and an epoch has as many images as the training set, 390 full
# batches of 128. Different from DeiT: mean and standard deviation are those of CIFAR-100, not of ImageNet.
data_preprocessor = dict(
    num_classes=100,
    mean=[129.304, 124.070, 112.434],
    std=[68.170, 65.392, 70.418],
    to_rgb=False)  # the images are RGB as they are loaded

mean = data_preprocessor['mean']
std = data_preprocessor['std']

train_pipeline = [
    dict(type='RandomResizedCrop', scale=224, backend='pillow', interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='RandAugment',
        policies='timm_increasing',
        num_policies=2,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.5,
        hparams=dict(pad_val=[round(x) for x in mean], interpolation='bicubic')),
    dict(
        type='RandomErasing',
        erase_prob=0.25,
        mode='rand',
        min_area_ratio=0.02,
        max_area_ratio=1 / 3,
        fill_color=mean,
        fill_std=std),
    dict(type='PackInputs'),
]

test_pipeline = [
    dict(type='ResizeEdge', scale=256, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=128,  # of a GPU: with four of them, 32 is the batch of the paper
    num_workers=8,
    dataset=dict(type='CIFAR100', data_root='data/cifar100', split='train', pipeline=train_pipeline),
    sampler=dict(type='RepeatAugSampler', num_repeats=3, shuffle=True),
    drop_last=True)

val_dataloader = dict(
    batch_size=128,
    num_workers=8,
    dataset=dict(type='CIFAR100', data_root='data/cifar100', split='test', pipeline=test_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = [
    dict(type='Accuracy', topk=(1, 5)),
    dict(type='CrossEntropy'),  # the validation loss
]

test_dataloader = val_dataloader
test_evaluator = val_evaluator
