_base_ = '../../_base_/default_runtime.py'

# An epoch takes a minute or so. A training that was stopped goes on from the last one, and ends as if it had not been.
default_hooks = dict(
    checkpoint=dict(max_keep_ckpts=1, save_best=None),
    logger=dict(interval=50),
    preemption=None,
    epoch_seed=dict(type='EpochSeedHook'))
randomness = dict(seed=0)
