_base_ = 'mmpretrain::_base_/datasets/cifar10_bs16.py'

train_dataloader = dict(batch_size=100)
val_dataloader = dict(batch_size=100)
test_dataloader = dict(batch_size=100)
