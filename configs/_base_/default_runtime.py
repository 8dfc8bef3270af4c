_base_ = 'mmpretrain::_base_/default_runtime.py'

custom_imports = dict(imports=['attncnn_plugin'], allow_failed_imports=False)

default_hooks = dict(
    checkpoint=dict(type='AtomicCheckpointHook', interval=1, max_keep_ckpts=3, save_best='auto'),
    invalid_loss=dict(type='InvalidLossHook'),
    preemption=dict(type='PreemptionHook'))
