_base_ = './sa_quadratic.py'

model = dict(backbone=dict(type='SALearned'))
