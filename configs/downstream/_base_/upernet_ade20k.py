# mmsegmentation's UPerNet with a ResNet-50, 160,000 iterations on ADE20K in data/ade, for the backbones of this package.
# By its path: for 'mmseg::upernet/…' mmengine looks for a package of the name mmsegmentation, which the fork's is not.
_base_ = __import__('mmseg').__path__[0] + '/.mim/configs/upernet/upernet_r50_4xb4-160k_ade20k-512x512.py'

custom_imports = dict(imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading'], allow_failed_imports=False)

model = dict(pretrained=None)  # those weights are of mmsegmentation's own ResNet; a backbone's init_cfg has others

# No weight decay on centres and widths of heads, and on tables of position biases.
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            'encoding.center': dict(decay_mult=0.),
            'encoding.sqrt_precision': dict(decay_mult=0.),
            'position.table': dict(decay_mult=0.),
        }))
