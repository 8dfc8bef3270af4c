_base_ = [
    './_base_/models/model_cmhsa3_digits.py',
    './_base_/datasets/digits_bs50.py',
    './_base_/default_runtime.py',
]

# 30 epochs of convolution, then 30 of attention.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    paramwise_cfg=dict(custom_keys={'position.table': dict(decay_mult=0.)}))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=2, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=2, end=30, convert_to_iter_based=True),
]
custom_hooks = [
    dict(
        type='PhaseTransitionHook',
        epoch=30,
        optim_wrapper=dict(optimizer=dict(lr=5e-4)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-3, begin=0, end=2, convert_to_iter_based=True),
            dict(type='CosineAnnealingLR', begin=2, convert_to_iter_based=True),
        ])
]

train_cfg = dict(by_epoch=True, max_epochs=60, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=50)

# Images of 32x32 pixels in place of 16x16.
pipeline = [dict(type='Resize', scale=32, interpolation='bicubic'), dict(type='PackInputs')]
train_dataloader = dict(dataset=dict(pipeline=pipeline))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader

default_hooks = dict(logger=dict(interval=10))
randomness = dict(seed=0)
# mmengine's own default names a GPU by its number; without one, two processes train on CPUs too.
model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
