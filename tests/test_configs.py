"""Every config parses, builds, trains, validates and resumes, with a small model and a few images."""
import numpy as np
import pytest
import torch
from flops import paper_flops
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmpretrain import get_model, list_models
from mmpretrain.apis.model import ModelHub
from PIL import Image
from small import SMALL_ARCH

MODELS = sorted(list_models('sa_*') + ['resnet18_cifar10'])


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
    else:
        backbone.arch = SMALL_ARCH
        head.in_channels = SMALL_ARCH['embed_dims']
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        loader = config[name]
        loader.update(batch_size=10, num_workers=0, persistent_workers=False)
        if loader.dataset.type == 'Digits':
            loader.dataset.indices = 20
        else:
            pipeline = [dict(type='LoadImageFromFile'), *loader.dataset.pipeline]
            loader.dataset = dict(type='CustomDataset', data_root=str(images), pipeline=pipeline)
    config.train_cfg.max_epochs = 2
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
    model = get_model(name)
    assert metainfo.metadata.parameters == sum(p.numel() for p in model.parameters())
    image = torch.randn(1, 1, 16, 16) if 'digits' in name else torch.randn(1, 3, 32, 32)
    assert metainfo.metadata.flops == paper_flops(model, image)
    assert name in list_models(name, task='Image Classification')
    assert metainfo.in_collection == 'Self-Attention CNN'


def test_resnet18_has_the_numbers_of_the_paper():
    metadata = ModelHub.get('resnet18_cifar10').metadata
    assert round(metadata.parameters / 1e6, 1) == 11.2
    assert round(metadata.flops / 1e9, 1) == 1.1


@pytest.mark.parametrize('name', [name for name in MODELS if name.endswith('cifar10')])
def test_recipe_of_the_paper(name):
    """C20, Table 2: the learning rate at every iteration, batch size, epochs, augmentation."""
    config = ModelHub.get(name).config
    assert config.train_cfg.max_epochs == 300
    assert config.train_dataloader.batch_size == 100
    assert config.optim_wrapper.optimizer == dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=1e-4)
    pipeline = config.train_dataloader.dataset.pipeline
    assert [step.type for step in pipeline] == ['RandomCrop', 'RandomFlip', 'PackInputs']
    assert pipeline[0].padding == 4
    if name.startswith('sa_'):
        assert (config.model.backbone.drop_rate, config.model.backbone.attn_drop_rate) == (0.1, 0.1)

    from mmengine.registry import PARAM_SCHEDULERS
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    per_epoch, epochs = 20, 300
    schedulers = [
        PARAM_SCHEDULERS.get(cfg.type).build_iter_from_epoch(
            optimizer, **{k: v for k, v in cfg.items() if k not in ('type', 'convert_to_iter_based')},
            epoch_length=per_epoch) for cfg in config.param_scheduler
    ]
    rates = []
    for _ in range(per_epoch * epochs):
        rates.append(optimizer.param_groups[0]['lr'])
        for scheduler in schedulers:
            scheduler.step()
    total, warm_up = per_epoch * epochs, per_epoch * epochs // 20
    step = np.arange(total)
    linear = 0.1 * step[:warm_up] / (warm_up - 1)
    cosine = 0.05 * (1 + np.cos(np.pi * (step[warm_up:] - warm_up) / (total - warm_up)))
    assert np.allclose(rates, np.concatenate([linear, cosine]), atol=2e-3 * 0.1)
