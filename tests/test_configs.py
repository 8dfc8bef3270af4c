"""Every config parses, builds, trains, validates and resumes, with a small model and a few images."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers.flops import paper_flops
from helpers.small import SMALL_ARCH
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmpretrain import get_model, list_models
from mmpretrain.apis.model import ModelHub
from PIL import Image

CONFIGS = Path(__file__).parents[1] / 'configs'
MODELS = [model['Name'] for model in yaml.safe_load((CONFIGS / 'metafile.yml').read_text())['Models']]
SMALL_VIT = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)


def test_every_config_is_in_the_index():
    assert sorted(MODELS) == sorted(path.stem for path in CONFIGS.glob('*.py'))
    assert set(MODELS) <= set(list_models())


@pytest.fixture(scope='session')
def images(tmp_path_factory):
    """A folder of 32x32 images in ten classes, as mmpretrain's CustomDataset reads."""
    root = tmp_path_factory.mktemp('images')
    generator = np.random.default_rng(0)
    for label in range(10):
        (root / str(label)).mkdir()
        for i in range(2):
            image = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(image).save(root / str(label) / f'{i}.png')
    return root


def shrink(config: Config, images, work_dir) -> Config:
    """The config with a small model, 20 images, two epochs of two iterations."""
    backbone, head = config.model.backbone, config.model.head
    if backbone.type == 'ResNet_CIFAR':
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
    for hook in config.get('custom_hooks', []):
        if hook.type == 'PhaseTransitionHook':
            hook.epoch = 1
            for scheduler in [hook.param_scheduler] if isinstance(hook.param_scheduler, dict) else hook.param_scheduler:
                scheduler.begin = 0
    config.randomness = dict(seed=0)
    config.work_dir = str(work_dir)
    config.log_level = 'WARNING'
    return config


class Start(Hook):
    """Keeps the epoch and the iteration at which the training loop begins."""

    def before_train(self, runner):
        self.at = runner.epoch, runner.iter


@pytest.mark.parametrize('name', MODELS)
def test_config_trains_validates_and_resumes(name, images, tmp_path, repository):
    path = repository / 'configs' / f'{name}.py'

    config = shrink(Config.fromfile(path), images, tmp_path)
    config.experiment_name = f'{name}-whole'
    runner = Runner.from_cfg(config)
    runner.train()
    whole, rates = runner.model.state_dict(), runner.message_hub.get_scalar('train/lr').data[0]
    assert (runner.epoch, runner.iter) == (2, 4)
    assert 0 <= runner.message_hub.get_info('best_score') <= 100

    config = shrink(Config.fromfile(path), images, tmp_path)
    config.experiment_name = f'{name}-resumed'
    config.load_from, config.resume = str(tmp_path / 'epoch_1.pth'), True
    runner = Runner.from_cfg(config)
    start = Start()
    runner.register_hook(start)
    runner.train()
    assert start.at == (1, 2) and (runner.epoch, runner.iter) == (2, 4)
    assert all(torch.isfinite(value).all() for value in runner.model.state_dict().values())
    assert np.array_equal(runner.message_hub.get_scalar('train/lr').data[0], rates) and len(rates) == 4
    resumed = runner.model.state_dict()
    assert resumed.keys() == whole.keys()
    if name.endswith('digits'):  # no dropout, no random augmentation: as if the run had never stopped
        assert all(torch.allclose(resumed[key], whole[key], atol=1e-6) for key in whole)


@pytest.mark.parametrize('name', MODELS)
def test_model_index(name):
    metainfo = ModelHub.get(name)
    size = metainfo.config.model.backbone.get('img_size', 32)
    with torch.device('cpu' if name.startswith('resnet') else 'meta'):  # counted without numbers, where that works
        model = get_model(name)
        image = torch.empty(1, 1 if 'digits' in name else 3, size, size)
    assert metainfo.metadata.parameters == sum(p.numel() for p in model.parameters())
    assert metainfo.metadata.flops == paper_flops(model, image)
    assert name in list_models(name, task='Image Classification')
    assert metainfo.in_collection == (
        'Self-Attention CNN' if name.endswith('cifar10') or name.startswith('sa_') else 'CMHSA'
    )


def test_resnet18_has_the_numbers_of_the_paper():
    metadata = ModelHub.get('resnet18_cifar10').metadata
    assert round(metadata.parameters / 1e6, 1) == 11.2
    assert round(metadata.flops / 1e9, 1) == 1.1


@pytest.mark.parametrize('name', [name for name in MODELS if name.endswith('cifar10')])
def test_recipe_of_the_paper(name):
    """C20, Table 2: the learning rate at every iteration, batch size, epochs, augmentation."""
    config = ModelHub.get(name).config
    pruned = 'pruned' in name  # C20, appendix E
    epochs, peak = (100, 0.01) if pruned else (300, 0.1)
    assert config.train_cfg.max_epochs == epochs and ('load_from' in config and config.load_from is not None) == pruned
    assert config.train_dataloader.batch_size == 100
    assert config.optim_wrapper.optimizer == dict(type='SGD', lr=peak, momentum=0.9, weight_decay=1e-4)
    pipeline = config.train_dataloader.dataset.pipeline
    assert [step.type for step in pipeline] == ['RandomCrop', 'RandomFlip', 'PackInputs']
    assert pipeline[0].padding == 4
    if name.startswith('sa_'):
        assert (config.model.backbone.drop_rate, config.model.backbone.attn_drop_rate) == (0.1, 0.1)

    from mmengine.registry import PARAM_SCHEDULERS

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    per_epoch = 20
    schedulers = [
        PARAM_SCHEDULERS.get(cfg.type).build_iter_from_epoch(
            optimizer,
            **{k: v for k, v in cfg.items() if k not in ('type', 'convert_to_iter_based')},
            epoch_length=per_epoch,
        )
        for cfg in config.param_scheduler
    ]
    rates = []
    for _ in range(per_epoch * epochs):
        rates.append(optimizer.param_groups[0]['lr'])
        for scheduler in schedulers:
            scheduler.step()
    total, warm_up = per_epoch * epochs, per_epoch * epochs // 20
    step = np.arange(total)
    linear = peak * step[:warm_up] / (warm_up - 1)
    cosine = peak / 2 * (1 + np.cos(np.pi * (step[warm_up:] - warm_up) / (total - warm_up)))
    assert np.allclose(rates, np.concatenate([linear, cosine]), atol=2e-3 * peak)


def rates(config, per_epoch):
    """The learning rate at every iteration of both phases, by mmengine's own schedulers."""
    from mmengine.registry import PARAM_SCHEDULERS

    (hook,) = config.get('custom_hooks') or [dict(epoch=config.train_cfg.max_epochs)]
    phases = [(config.optim_wrapper.optimizer.lr, config.param_scheduler, hook['epoch'])]
    if hook['epoch'] < config.train_cfg.max_epochs:
        schedulers = hook.param_scheduler if isinstance(hook.param_scheduler, list) else [hook.param_scheduler]
        phases.append((hook.optim_wrapper.optimizer.lr, schedulers, config.train_cfg.max_epochs - hook['epoch']))
    for lr, param_scheduler, epochs in phases:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        schedulers = [
            PARAM_SCHEDULERS.build(dict(cfg), default_args=dict(optimizer=optimizer, epoch_length=per_epoch))
            for cfg in param_scheduler
        ]
        for _ in range(epochs * per_epoch):
            yield optimizer.param_groups[0]['lr']
            for scheduler in schedulers:
                scheduler.step()


@pytest.mark.parametrize('name', ['cmhsa3_cifar100', 'cmhsa5_cifar100', 'cmhsa5_nowarmup_cifar100'])
def test_two_phases_of_the_paper(name):
    """L21, appendix B: 200 epochs a phase, 5 of warm-up, then cosine; batch 128; AdamW; the ranges of the rates."""
    config = ModelHub.get(name).config
    assert config.train_cfg.max_epochs == 400 and config.train_dataloader.batch_size == 128
    optimizer = config.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.eps, optimizer.betas) == ('AdamW', 1e-8, (0.9, 0.999))
    assert config.model.backbone.kernel_size == int(name[len('cmhsa')])
    per_epoch = 4
    first, second = np.split(np.array(list(rates(config, per_epoch))), 2)
    assert 1e-4 <= first.max() <= 5e-4 and 1e-5 <= second.max() <= 7e-5
    warm_up, total = 5 * per_epoch, 200 * per_epoch
    cosine = (1 + np.cos(np.pi * np.arange(total - warm_up) / (total - warm_up))) / 2
    for phase in (first, second) if 'nowarmup' not in name else (first,):
        assert phase[0] < 2e-3 * phase.max() and np.all(np.diff(phase[:warm_up]) > 0)
        assert np.allclose(phase[warm_up:], phase.max() * cosine, atol=1e-6)
    if 'nowarmup' in name:
        assert np.allclose(second, second.max() * (1 + np.cos(np.pi * np.arange(total) / total)) / 2)


@pytest.mark.parametrize(
    'name, phase', [('cmhsa3_conv_cifar100', 'conv'), ('cmhsa5_conv_cifar100', 'conv'), ('cmhsa_attn_cifar100', 'attn')]
)
def test_one_phase_as_long_as_two(name, phase):
    config = ModelHub.get(name).config
    assert config.train_cfg.max_epochs == 400 and config.model.backbone.phase == phase
    assert len(list(rates(config, 1))) == 400 and 'custom_hooks' not in config


@pytest.mark.parametrize(
    'name', ['cmhsa3_cifar100', 'cmhsa_attn_cifar100', 'deit_small_cifar100', 'deit_base_cifar100']
)
def test_augmentation_of_deit(name):
    """As mmpretrain's own DeiT configs have it."""
    from mmengine.hub import get_config

    ours, deit = ModelHub.get(name).config, get_config('mmpretrain::deit/deit-base_16xb64_in1k.py')
    assert ours.model.train_cfg == deit.model.train_cfg and ours.model.head.loss == deit.model.head.loss
    pipeline, expected = ours.train_dataloader.dataset.pipeline, deit.train_dataloader.dataset.pipeline[1:]
    colours = ('hparams', 'fill_color', 'fill_std')  # of another data set

    def settings(steps):
        return [{key: value for key, value in step.items() if key not in colours} for step in steps]

    assert settings(pipeline) == settings(expected)
    assert ours.test_dataloader.dataset.pipeline == deit.test_dataloader.dataset.pipeline[1:]
    assert ours.optim_wrapper.clip_grad == deit.optim_wrapper.clip_grad
    assert ours.optim_wrapper.optimizer.weight_decay == deit.optim_wrapper.optimizer.weight_decay
