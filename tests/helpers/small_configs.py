"""Configs of this package, with a small model and few images."""

from .small import SMALL_ARCH

SMALL_VIT = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)


def shrink(config, images, work_dir):
    """The config with a small model, 20 images, two epochs of two iterations."""
    backbone, head = config.model.backbone, config.model.head
    if backbone.type == 'ConvToAttention':
        backbone.backbone.update(base_channels=4, stem_channels=4)
        head.in_channels = 32 if backbone.backbone.depth == 18 else 128
    elif backbone.type == 'ResNet_CIFAR':
        backbone.update(base_channels=4, stem_channels=4)
        head.in_channels = 32
    elif backbone.type == 'CMHSA':
        backbone.update(img_size=32, patch_size=4, num_layers=2)
        head.in_channels = 16 * backbone.get('in_channels', 3)
    elif backbone.type == 'VisionTransformer':
        backbone.update(img_size=32, patch_size=8, arch=SMALL_VIT)
        head.in_channels = 16
    else:
        backbone.arch = SMALL_ARCH
        head.in_channels = SMALL_ARCH['embed_dims']
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        loader = config[name]
        loader.update(batch_size=10, num_workers=0, persistent_workers=False)
        for step in loader.dataset.pipeline:
            step.update({key: {224: 32, 256: 36}[step[key]] for key in ('scale', 'crop_size') if step.get(key, 0) > 32})
        if loader.dataset.type == 'Digits':
            loader.dataset.indices = 20
        else:
            pipeline = [dict(type='LoadImageFromFile'), *loader.dataset.pipeline]
            loader.dataset = dict(type='CustomDataset', data_root=str(images), pipeline=pipeline)
    config.train_cfg.max_epochs = 2
    config.load_from = None
    config.auto_scale_lr = dict(base_batch_size=10)  # rates are those of the config
    config.default_hooks.logger.interval = 1
    for hook in config.get('custom_hooks') or []:
        if hook.type == 'PhaseTransitionHook':
            hook.epoch = min(1, hook.epoch)
            schedulers = hook.get('param_scheduler') or []
            for scheduler in [schedulers] if isinstance(schedulers, dict) else schedulers:
                scheduler.begin = 0
    config.randomness = dict(seed=0)
    config.work_dir = str(work_dir)
    config.log_level = 'WARNING'
    return config
