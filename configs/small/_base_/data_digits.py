# scikit-learn's digits as large as the images of CIFAR, to see that everything runs. No digit is flipped.
_base_ = './data_cifar10.py'

data_preprocessor = dict(flip=0., shift=2, mean=[77.9, 77.9, 77.9], std=[95.9, 95.9, 95.9])

pipeline = [dict(type='Resize', scale=32, interpolation='bicubic'), dict(type='PackInputs')]
train_dataloader = dict(
    dataset=dict(_delete_=True, type='Digits', split='train', color_type='color', pipeline=pipeline))
val_dataloader = dict(dataset=dict(_delete_=True, type='Digits', split='test', color_type='color', pipeline=pipeline))
test_dataloader = val_dataloader
