_base_ = './sa_quadratic_digits.py'

model = dict(backbone=dict(type='SALearned'))

optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=3e-3, weight_decay=0.05))
