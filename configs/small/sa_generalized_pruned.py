# Degenerate heads of a trained network removed, and the rest trained on for a third of its epochs at a tenth of its rate
# (Cordonnier et al. 2020, appendix E and Figure 13). Nothing makes up for a removed head, as in the paper.
_base_ = './sa_generalized.py'

load_from = 'work_dirs/sa_generalized/epoch_20.pth'

optim_wrapper = dict(optimizer=dict(lr=2e-4))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=0.35, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., begin=0.35, end=7, convert_to_iter_based=True),
]

train_cfg = dict(max_epochs=7)

custom_hooks = [dict(type='HeadPruningHook', epochs=[0], bias_correction=False)]
