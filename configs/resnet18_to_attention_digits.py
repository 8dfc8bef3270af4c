_base_ = [
    './_base_/models/model_resnet18_to_attention_digits.py',
    './_base_/datasets/digits_bs50.py',
    './_base_/default_runtime.py',
]

# 15 epochs of a CNN, then 15 with attention in its last stage.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    paramwise_cfg=dict(
        custom_keys={
            'encoding.center': dict(decay_mult=0.),
            'encoding.sqrt_precision': dict(decay_mult=0.),
        }))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=1, end=15, convert_to_iter_based=True),
]
custom_hooks = [
    dict(
        type='PhaseTransitionHook',
        epoch=15,
        optim_wrapper=dict(optimizer=dict(lr=5e-4)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
            dict(type='CosineAnnealingLR', begin=1, convert_to_iter_based=True),
        ])
]

train_cfg = dict(by_epoch=True, max_epochs=30, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=50)

default_hooks = dict(logger=dict(interval=10))
randomness = dict(seed=0)
# mmengine's own default names a GPU by its number; without one, two processes train on CPUs too.
model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
