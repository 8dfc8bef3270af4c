_base_ = './sa_quadratic_digits.py'

model = dict(backbone=dict(type='SALearned'))
