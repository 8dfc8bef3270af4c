# Both phases, with heads as wide as a token, as in Li et al. 2021.
_base_ = [
    './_base_/model_cmhsa.py',
    './_base_/data_cifar10.py',
    './_base_/deit_recipe.py',
    './_base_/two_phases.py',
    './_base_/runtime.py',
]

train_dataloader = dict(dataset=dict(pipeline={{_base_.train_pipeline}}))
