_base_ = 'mmpretrain::_base_/default_runtime.py'

custom_imports = dict(imports=['attncnn_plugin'], allow_failed_imports=False)

default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=3, save_best='auto'))

# mmengine's own default names a GPU by its number; without one, a process trains on its own GPU or on the CPU.
model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
