# scikit-learn's digits as large as the images of CIFAR, to see that everything runs. No digit is flipped.
_base_ = './data_cifar10.py'

data_preprocessor = dict(mean=[77.9, 77.9, 77.9], std=[95.9, 95.9, 95.9])

digits = dict(_delete_=True, type='Digits', color_type='color')
resize, pack = dict(type='Resize', scale=32, interpolation='bicubic'), dict(type='PackInputs')
train_pipeline = [resize, dict(type='RandomCrop', crop_size=32, padding=2), pack]
train_dataloader = dict(dataset=dict(digits, split='train', pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(digits, split='test', pipeline=[resize, pack]))
test_dataloader = val_dataloader
