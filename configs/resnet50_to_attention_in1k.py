# d'Ascoli et al. 2021, "Transformed CNNs: recasting pre-trained convolutional layers with self-attention" (arXiv
# 2106.05795): a trained CNN whose last stage becomes gated attention of a head for each position of the kernel, and 50
# epochs of fine-tuning on ImageNet-1k, which give a ResNet50-RS 2.2% more top-1.
#
# No code of the paper was found, and its hyper-parameters are not known to us. So these are ours, and not the paper's:
# - the CNN: mmpretrain's ResNet-50 (76.55% top-1), for it has no ResNet50-RS;
# - the width of the heads (alpha), their query and key channels, and how far the gate is open at first;
# - optimizer, rates, batch, warm-up, weight decay, augmentation and label smoothing.
_base_ = [
    'mmpretrain::_base_/models/resnet50.py',
    'mmpretrain::_base_/datasets/imagenet_bs64.py',
    './_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        _delete_=True,
        type='ConvToAttention',
        backbone=dict(type='ResNet', depth=50, num_stages=4, out_indices=(3, ), style='pytorch'),
        layers='layer4.*.conv2',
        phase='conv',
        content='gated',
        alpha=6.0),
    head=dict(
        loss=dict(_delete_=True, type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'), topk=(1, 5)))

load_from = 'https://download.openmmlab.com/mmclassification/v0/resnet/resnet50_8xb32_in1k_20210831-ea4938fc.pth'

optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.,
        bias_decay_mult=0.,
        custom_keys={
            'encoding.center': dict(decay_mult=0.),
            'encoding.sqrt_precision': dict(decay_mult=0.),
            '.gate': dict(decay_mult=0.),
        }))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-6, by_epoch=True, begin=5, end=50, convert_to_iter_based=True),
]
# Right after the weights are loaded, with the optimizer and the schedule above.
custom_hooks = [dict(type='PhaseTransitionHook', epoch=0)]

train_cfg = dict(by_epoch=True, max_epochs=50, val_interval=1)
val_cfg = dict()
test_cfg = dict()

auto_scale_lr = dict(base_batch_size=512, enable=True)
