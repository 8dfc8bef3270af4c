_base_ = 'mmpretrain::_base_/default_runtime.py'

custom_imports = dict(imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading'], allow_failed_imports=False)

default_hooks = dict(
    checkpoint=dict(type='AtomicCheckpointHook', interval=1, max_keep_ckpts=3, save_best='auto'))

# As it is inherited, but without the _scope_ that mmengine adds, which mmpretrain's browse_dataset.py hands on.
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(_delete_=True, type='UniversalVisualizer', vis_backends=vis_backends)
