_base_ = './sa_learned.py'

model = dict(backbone=dict(content=True))
