# One phase of 400 epochs, as long as the two phases of Li et al. 2021 (L21) together. L21, appendix B: AdamW, batch 128,
# 5 epochs of warm-up, then cosine, rates of 1e-4 to 5e-4. L21 trains on four GPUs and has one number for the batch: here
# it is the batch of all GPUs together. With another one the rate is scaled by it, as the log says.
#
# All else is DeiT's (main.py of facebookresearch/deit), whose hyper-parameters L21 leaves as they are: weight decay 0.05,
# none for biases, norms and position embeddings; gradients are not clipped; warm-up from 1e-6, cosine down to 1e-5.
# Different from DeiT, besides L21's own settings:
# - the rate is that of the iteration; in DeiT it changes once an epoch;
# - the rate for a batch of 128 is the one that stands here; DeiT's own is for a batch of 512;
# - it trains in float32; DeiT trains with autocast, which is `tools/train.py CONFIG --amp`;
# - no average of the weights (EMA) is kept: DeiT keeps one, but validates without it;
# - CMHSA's tables of relative position biases have no weight decay either: DeiT has none of these.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=3e-4, weight_decay=0.05, eps=1e-8, betas=(0.9, 0.999)),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={
            '.cls_token': dict(decay_mult=0.0),
            '.pos_embed': dict(decay_mult=0.0),
            'position.table': dict(decay_mult=0.0),
        }))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6 / 3e-4, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=5, end=400, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, max_epochs=400, val_interval=1)
val_cfg = dict()
test_cfg = dict()

auto_scale_lr = dict(base_batch_size=128, enable=True)
