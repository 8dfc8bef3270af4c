# mmdetection's RetinaNet with a ResNet-50, 12 epochs on COCO in data/coco, for the backbones of this package.
_base_ = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'

custom_imports = dict(imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading'], allow_failed_imports=False)

# No weight decay on centres and widths of heads, and on tables of position biases.
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            'encoding.center': dict(decay_mult=0.),
            'encoding.sqrt_precision': dict(decay_mult=0.),
            'position.table': dict(decay_mult=0.),
        }))
