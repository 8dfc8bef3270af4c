# Li et al. 2021, appendix B, for one phase of 400 epochs, as long as their two phases together: 5 epochs of warm-up,
# then cosine, batch 128; their learning rates are from 1e-4 to 5e-4.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=3e-4, weight_decay=0.05, eps=1e-8, betas=(0.9, 0.999)),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={
            '.cls_token': dict(decay_mult=0.0),
            '.pos_embed': dict(decay_mult=0.0),
            'position.table': dict(decay_mult=0.0),
        }),
    clip_grad=dict(max_norm=5.0))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=5, end=400, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, max_epochs=400, val_interval=1)
val_cfg = dict()
test_cfg = dict()

auto_scale_lr = dict(base_batch_size=128)
