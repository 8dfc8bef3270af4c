# Images of 32x32 pixels in data/images/train/CLASS/* and data/images/test/CLASS/*, ten classes, with the mean and the
# standard deviation of CIFAR-10.
_base_ = './data_cifar10.py'

data_preprocessor = dict(to_rgb=True)

pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
train_dataloader = dict(
    dataset=dict(
        _delete_=True, type='CustomDataset', data_root='data/images', data_prefix='train', pipeline=pipeline))
val_dataloader = dict(
    dataset=dict(_delete_=True, type='CustomDataset', data_root='data/images', data_prefix='test', pipeline=pipeline))
test_dataloader = val_dataloader
