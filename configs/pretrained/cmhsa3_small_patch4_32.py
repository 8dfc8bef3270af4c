# small/cmhsa_attn.py for images of files, as users of its weights have them. Weights of narrow heads make the heads
# narrow.
_base_ = [
    '../small/_base_/model_cmhsa.py',
    '../small/_base_/data_folder.py',
    '../small/_base_/schedule.py',
    '../small/_base_/runtime.py',
]

model = dict(backbone=dict(phase='attn'))
optim_wrapper = dict(optimizer=dict(lr=1e-3))
