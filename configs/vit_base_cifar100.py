# Vision transformers were trained with other recipes before DeiT: this is mmpretrain's for ViT (AutoAugment, Mixup,
# dropout, strong weight decay, clipping). Batch, epochs and the shape of the schedule are those of the other networks;
# warm-up begins at 3.3e-7, in proportion to the rate.
_base_ = [
    'mmpretrain::_base_/models/vit-base-p16.py',
    './_base_/datasets/cifar100_bs128_deit_224.py',
    './_base_/schedules/cifar100_adamw_400e.py',
    './_base_/default_runtime.py',
]

model = dict(
    head=dict(num_classes=100, hidden_dim=3072),
    train_cfg=dict(augments=dict(type='Mixup', alpha=0.2)))

train_pipeline = [
    dict(type='RandomResizedCrop', scale=224, backend='pillow', interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='AutoAugment',
        policies='imagenet',
        hparams=dict(pad_val=[129, 124, 112], interpolation='bicubic')),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    dataset=dict(pipeline=train_pipeline), sampler=dict(_delete_=True, type='DefaultSampler', shuffle=True))

optim_wrapper = dict(
    optimizer=dict(lr=1e-4, weight_decay=0.3),  # 0.003 for a batch of 4096
    clip_grad=dict(max_norm=1.0))
