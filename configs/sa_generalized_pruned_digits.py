# Degenerate heads of a trained network removed, and the rest trained on (Cordonnier et al. 2020, appendix E).
_base_ = './sa_generalized_digits.py'

load_from = 'work_dirs/sa_generalized_digits/epoch_30.pth'

optim_wrapper = dict(optimizer=dict(lr=3e-4))

param_scheduler = dict(
    _delete_=True, type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=0, end=10, convert_to_iter_based=True)

train_cfg = dict(max_epochs=10)

custom_hooks = [dict(type='HeadPruningHook', epochs=[0], criteria=['uniform', 'stripe', 'entropy'])]
