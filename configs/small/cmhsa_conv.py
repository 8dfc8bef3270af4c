# Only the first phase.
_base_ = [
    './_base_/model_cmhsa.py',
    './_base_/data_cifar10.py',
    './_base_/deit_recipe.py',
    './_base_/schedule.py',
    './_base_/runtime.py',
]

train_dataloader = dict(dataset=dict(pipeline={{_base_.train_pipeline}}))
