_base_ = 'mmpretrain::_base_/datasets/cifar100_bs16.py'

train_dataloader = dict(batch_size=100)
val_dataloader = dict(batch_size=100)
test_dataloader = dict(batch_size=100)

val_evaluator = [
    dict(type='Accuracy', topk=(1, 5)),
    dict(type='CrossEntropy'),  # the validation loss
]
test_evaluator = val_evaluator
