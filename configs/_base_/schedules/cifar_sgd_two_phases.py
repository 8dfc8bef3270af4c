# 150 epochs of a CNN, with the optimizer of cifar10_sgd_300e.py, then 50 with attention: as many as d'Ascoli et al. 2021
# ("Transformed CNNs", arXiv 2106.05795) have on ImageNet. The paper has nothing on CIFAR; rates and warm-up are ours.
_base_ = './cifar10_sgd_300e.py'

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=5, end=150, convert_to_iter_based=True),
]

custom_hooks = [
    dict(
        type='PhaseTransitionHook',
        epoch=150,
        optim_wrapper=dict(optimizer=dict(lr=0.01)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-6, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
            dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=5, end=50, convert_to_iter_based=True),
        ])
]

train_cfg = dict(max_epochs=200)
