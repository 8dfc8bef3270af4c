_base_ = './deit_small_cifar100.py'

model = dict(backbone=dict(arch='deit-base', drop_path_rate=0.1), head=dict(in_channels=768))

custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL')]
