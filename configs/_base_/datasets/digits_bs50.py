data_preprocessor = dict(num_classes=10, mean=[77.9], std=[95.9])  # of the training images

train_pipeline = [
    dict(type='Resize', scale=16, interpolation='bicubic'),
    dict(type='PackInputs'),
]

test_pipeline = [
    dict(type='Resize', scale=16, interpolation='bicubic'),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=50,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(type='Digits', split='train', pipeline=train_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True))

val_dataloader = dict(
    batch_size=182,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(type='Digits', split='test', pipeline=test_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='Accuracy', topk=(1, ))

test_dataloader = val_dataloader
test_evaluator = val_evaluator
