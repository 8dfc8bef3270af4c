# Images of 32x32 pixels in data/images/train/CLASS/* and data/images/test/CLASS/*, ten classes, with the mean and the
# standard deviation of CIFAR-10.
_base_ = './data_cifar10.py'

data_preprocessor = dict(to_rgb=True)

load, folder = dict(type='LoadImageFromFile'), dict(_delete_=True, type='CustomDataset', data_root='data/images')
train_pipeline = [load, *_base_.flip_and_shift, dict(type='PackInputs')]
train_dataloader = dict(dataset=dict(folder, data_prefix='train', pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(folder, data_prefix='test', pipeline=[load, dict(type='PackInputs')]))
test_dataloader = val_dataloader
