# 20 epochs of AdamW, one of them of warm-up, then cosine. No weight decay for biases, norms and positions.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.,
        bias_decay_mult=0.,
        custom_keys={
            'encoding.': dict(decay_mult=0.),
            'position.table': dict(decay_mult=0.),
            '.tables.': dict(decay_mult=0.),
            '.pos_embed': dict(decay_mult=0.),
            '.gate': dict(decay_mult=0.),
        }))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., begin=1, end=20, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, max_epochs=20, val_interval=1)
val_cfg = dict()
test_cfg = dict()
