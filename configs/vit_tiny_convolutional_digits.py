_base_ = [
    './_base_/models/model_vit_tiny_convolutional_digits.py',
    './_base_/datasets/digits_bs50.py',
    './_base_/schedules/digits_adamw_30e.py',
    './_base_/default_runtime.py',
]

optim_wrapper = dict(
    optimizer=dict(lr=1e-3), paramwise_cfg=dict(custom_keys={'.pos_embed': dict(decay_mult=0.)}))

default_hooks = dict(logger=dict(interval=10))
randomness = dict(seed=0)
# mmengine's own default names a GPU by its number; without one, two processes train on CPUs too.
model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
