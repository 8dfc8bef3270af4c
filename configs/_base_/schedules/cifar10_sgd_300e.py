# Cordonnier et al. 2020, Table 2: warm-up over the first 5% of the iterations, then cosine to 0, per iteration. (The
# released code sets the rate once an epoch, from the same curve: it is 0 for the whole of the first one.)
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=1e-4),
    # No weight decay on the centres and widths of the heads, as in the released code; the paper does not say.
    paramwise_cfg=dict(
        bypass_duplicate=True,  # position tables that blocks share
        custom_keys={
            'encoding.center': dict(decay_mult=0.),
            'encoding.sqrt_precision': dict(decay_mult=0.),
        }))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, begin=0, end=15, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=0., by_epoch=True, begin=15, end=300, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()

auto_scale_lr = dict(base_batch_size=100)
