# The same network as vit.py.
_base_ = ['./vit.py', './_base_/deit_recipe.py']

train_dataloader = dict(dataset=dict(pipeline={{_base_.train_pipeline}}))

model = dict(
    backbone=dict(drop_path_rate=0.1),
    head=dict(loss=dict(_delete_=True, type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')),
    train_cfg=dict(augments=[
        dict(type='Mixup', alpha=0.8),
        dict(type='CutMix', alpha=1.0),
    ]))
