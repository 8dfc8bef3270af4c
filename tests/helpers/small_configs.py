"""Configs of this package, with a small model and few images."""

import copy

import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS

from .small import SMALL_ARCH

SMALL_VIT = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)


def small_config(path, images, work_dir):
    """The config of a file with a small model, 20 images, two epochs of two iterations."""
    config = Config.fromfile(path)
    backbone = config.model.backbone
    if backbone.type == 'CMHSA':
        backbone.update(img_size=32, patch_size=4, num_layers=2)
    elif backbone.type == 'VisionTransformer':
        backbone.update(img_size=32, patch_size=8, arch=SMALL_VIT)
    elif 'ResNet' in backbone.type or 'backbone' in backbone:
        backbone.get('backbone', backbone).update(base_channels=4, stem_channels=4)
    else:
        backbone.arch = SMALL_ARCH
    size = backbone.get('img_size', 32)
    image = torch.zeros(2, backbone.get('backbone', backbone).get('in_channels', 3), size, size)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        config.model.head.in_channels = MODELS.build(copy.deepcopy(backbone))(image)[-1].shape[1]
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
    for hook in config.get('custom_hooks') or []:
        if hook.type == 'PhaseTransitionHook':
            hook.epoch = min(1, hook.epoch)
            schedulers = hook.get('param_scheduler') or []
            for scheduler in [schedulers] if isinstance(schedulers, dict) else schedulers:
                scheduler.begin = 0
    for scheduler in config.param_scheduler if isinstance(config.param_scheduler, list) else []:
        scheduler.update({key: 1 for key in ('begin', 'end') if 0 < scheduler.get(key, 0) < 1})
    config.train_cfg.update(max_epochs=2, val_interval=1)
    config.default_hooks.checkpoint.max_keep_ckpts = -1
    config.default_hooks.logger.interval = 1
    config.auto_scale_lr = dict(base_batch_size=10)  # rates are those of the config
    config.update(load_from=None, randomness=dict(seed=0), work_dir=str(work_dir), log_level='WARNING')
    return config
