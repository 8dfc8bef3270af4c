_base_ = '../../_base_/default_runtime.py'

# A training that was stopped resumes from its last epoch, and ends as if it had not been.
default_hooks = dict(
    _delete_=True,
    checkpoint=dict(type='AtomicCheckpointHook', interval=1, max_keep_ckpts=1),
    logger=dict(type='LoggerHook', interval=50),
    epoch_seed=dict(type='EpochSeedHook'),
    resumed_validation=dict(type='ResumedValidationHook'))
randomness = dict(seed=0)
