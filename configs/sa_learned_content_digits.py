_base_ = './sa_learned_digits.py'

model = dict(backbone=dict(content=True))
