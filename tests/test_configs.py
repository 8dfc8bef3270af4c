"""Every config builds, trains, validates and resumes with a small model. The recipes are those of the papers."""

import copy
import functools
import os
import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest
import torch
import yaml
from helpers.digits import run
from helpers.flops import paper_flops
from helpers.images import write_images
from helpers.schedules import rates, warm_up_and_cosine, weight_decays
from helpers.small_configs import small_config
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.hub import get_config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, DefaultScope
from mmengine.runner import Runner
from mmpretrain import get_model, list_models
from mmpretrain.apis.model import ModelHub
from mmpretrain.registry import DATASETS, TRANSFORMS
from mmpretrain.registry import MODELS as MODELS_OF_MMPRETRAIN
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import attncnn_plugin
from attncnn_plugin import config_path
from attncnn_plugin.analysis import mean_attention
from attncnn_plugin.attention import GeneralizedQuadraticAttention
from attncnn_plugin.pruning import find_degenerate_heads
from attncnn_plugin.transformers.start import random_images
from attncnn_plugin.transformers.vision_transformer import find_transformer

CONFIGS = Path(__file__).parents[1] / 'configs'
MODELS = [model['Name'] for model in yaml.safe_load((CONFIGS / 'metafile.yml').read_text())['Models']]


@functools.cache
def metainfo_of(name):
    """The entry of the index, whose config is read once."""
    return ModelHub.get(name)


def config_of(name):
    return copy.deepcopy(metainfo_of(name).config)


@pytest.fixture(autouse=True)
def scope():
    """What configs name is mmpretrain's, as in a run."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        yield


def test_every_config_is_in_the_index():
    assert sorted(MODELS) == sorted(path.stem for path in CONFIGS.glob('*.py'))


def test_configs_are_found_by_their_names():
    """By mim, which searches the whole package and refuses two files of one name, and by ``config_path``."""
    package = Path(attncnn_plugin.__file__).parent
    found = Counter(name for _, _, names in os.walk(package, followlinks=True) for name in names)
    files = [path for path in CONFIGS.rglob('*.py') if '_base_' not in path.parts]
    assert len(files) > 50 and [path.name for path in files if found[path.name] > 1] == []
    assert len({path.name for path in CONFIGS.rglob('*.py')}) == len(list(CONFIGS.rglob('*.py')))
    assert all(Path(config_path(path.name)).samefile(path) for path in files)


@pytest.fixture(scope='session')
def images(tmp_path_factory):
    """A folder of 32x32 images in ten classes, as mmpretrain's CustomDataset reads."""
    return write_images(tmp_path_factory.mktemp('images'))


SMALL = ['small/deit', 'small/cmhsa_narrow']  # which have all that others have; test_reproduce.py builds those


@pytest.mark.slow
@pytest.mark.parametrize('name', [*MODELS, *SMALL])
def test_config_trains_validates_and_resumes(name, images, tmp_path):
    """As if the run had never stopped; number by number with the augmentation and the dropped paths of small ones."""

    def trained(**settings):
        config = small_config(CONFIGS / f'{name}.py', images, tmp_path)
        config.update(settings, experiment_name=f'{tmp_path.name}-{len(settings)}')
        return run(config)

    first, _ = trained()
    whole, rates = first.model.state_dict(), first.message_hub.get_scalar('train/lr').data[0]
    assert (first.epoch, first.iter) == (2, 4)
    assert 0 <= first.message_hub.get_scalar('val/accuracy/top1').current() <= 100
    if name.endswith('cifar100'):
        assert len(list(tmp_path.glob('best_accuracy_top1_epoch_*.pth'))) == 1
        assert 0 < first.message_hub.get_scalar('val/cross_entropy/mean').current() < 50  # L21, Figure 2
        assert 0 <= first.message_hub.get_scalar('val/accuracy/top5').current() <= 100

    torch.manual_seed(123)
    second, recorder = trained(load_from=str(tmp_path / 'epoch_1.pth'), resume=True)
    assert recorder.start == 1 and (second.epoch, second.iter) == (2, 4)
    assert np.array_equal(second.message_hub.get_scalar('train/lr').data[0], rates) and len(rates) == 4
    resumed = second.model.state_dict()
    assert resumed.keys() == whole.keys() and all(torch.isfinite(value).all() for value in resumed.values())
    if name.endswith('digits'):  # no dropout, no random augmentation
        assert all(torch.allclose(resumed[key], whole[key], atol=1e-6) for key in whole)
    if name in SMALL:
        assert all(torch.equal(resumed[key], whole[key]) for key in whole)


@pytest.mark.parametrize('name', MODELS)
def test_model_index(name):
    metainfo = metainfo_of(name)
    size = 224 if name.endswith('in1k') else metainfo.config.model.backbone.get('img_size', 32)
    with torch.device('cpu' if name.startswith('resnet') else 'meta'):  # counted without numbers, where that works
        model = get_model(config_of(name))
        image = torch.empty(1, 1 if 'digits' in name else 3, size, size)
    assert 'attncnn_plugin.mm.safe_loading' in metainfo.config.custom_imports.imports
    assert metainfo.metadata.parameters == sum(p.numel() for p in model.parameters())
    assert metainfo.metadata.flops == paper_flops(model, image)
    assert metainfo.config.auto_scale_lr.base_batch_size % metainfo.config.train_dataloader.batch_size == 0
    assert name in list_models(name, task='Image Classification')
    collections = {'to_attention': 'Transformed CNN', 'convolutional': 'Convolutional Start', 'cmhsa': 'CMHSA'}
    collections.update({'cifar100': 'CMHSA', '': 'Self-Attention CNN'})  # with baselines of each
    assert metainfo.in_collection == next(of for part, of in collections.items() if part in name)


# Of each phase: the rate at its first iteration, the largest and the last one, epochs of warm-up, and all its epochs.
OF_C20 = [(0, 0.1, 0, 15, 300)]  # Table 2
PRUNED = [(0, 0.01, 0, 5, 100)]  # appendix E
FIRST, SECOND, COLD = (1e-6, 3e-4, 1e-5, 5, 200), (1e-6, 5e-5, 1e-5, 5, 200), (0, 5e-5, 1e-5, 0, 200)
ONE_PHASE = [(1e-6, 3e-4, 1e-5, 5, 400)]  # as long as two
SCHEDULES = {
    'sa_quadratic_cifar10': OF_C20,
    'sa_quadratic16_cifar10': OF_C20,
    'sa_generalized_cifar10': OF_C20,
    'sa_learned_cifar10': OF_C20,
    'sa_learned_content_cifar10': OF_C20,
    'sa_generalized_pruned_cifar10': PRUNED,
    'sa_generalized_pruned_corrected_cifar10': PRUNED,
    # L21, appendix B: AdamW in both phases; the first and the last rate are DeiT's.
    'cmhsa3_cifar100': [FIRST, SECOND],
    'cmhsa5_cifar100': [FIRST, SECOND],
    'cmhsa5_nowarmup_cifar100': [FIRST, COLD],
    'cmhsa3_conv_cifar100': ONE_PHASE,
    'cmhsa5_conv_cifar100': ONE_PHASE,
    'cmhsa_attn_cifar100': ONE_PHASE,
    'deit_small_cifar100': ONE_PHASE,
    'deit_base_cifar100': ONE_PHASE,
    'vit_base_cifar100': [(1e-6 / 3, 1e-4, 1e-5, 5, 400)],
    'cmhsa_attn_200e_cifar100': [SECOND],  # Figure 2: from a random start
    'cmhsa_attn_200e_nowarmup_cifar100': [COLD],
    'vit_tiny_convolutional_cifar10': [(1e-6, 1e-3, 0, 15, 300)],
    'resnet18_to_attention_cifar10': [(0, 0.1, 0, 5, 150), (0, 0.01, 0, 5, 50)],
}


@pytest.mark.parametrize('name, phases', SCHEDULES.items())
def test_schedule(name, phases):
    """The learning rate at every iteration of all phases, and that a CMHSA is in the one that it says."""
    config, per_epoch = config_of(name), 4
    found, start = rates(config, per_epoch), 0
    for first, peak, least, warm_up, epochs in phases:
        expected = warm_up_and_cosine(first, peak, least, warm_up * per_epoch, epochs * per_epoch)
        part, start = found[start : start + len(expected)], start + len(expected)
        assert np.allclose(part, expected, rtol=1e-9, atol=0 if least else 2e-6 * peak)
    assert start == len(found) and config.train_cfg.max_epochs == sum(phase[-1] for phase in phases)
    assert config.get('load_from') is None or 'pruned' in name
    if name.startswith('cmhsa'):
        kernel_size, phase = name[len('cmhsa')], 'attn' if '_attn' in name else 'conv'
        assert config.model.backbone.phase == phase and ('custom_hooks' in config) == (len(phases) == 2)
        assert phase == 'attn' or config.model.backbone.kernel_size == int(kernel_size)


@pytest.mark.parametrize('name', [name for name in MODELS if name.endswith('cifar10')])
def test_what_all_networks_on_cifar10_share(name):
    """C20, Table 2 and the released code."""
    config = config_of(name)
    peak = 0.01 if 'pruned' in name else 0.1
    optimizer = dict(type='SGD', lr=peak, momentum=0.9, weight_decay=1e-4)
    if name.startswith('vit'):
        optimizer = dict(type='AdamW', lr=1e-3, weight_decay=0.05)
    assert config.optim_wrapper.optimizer == optimizer
    if name.startswith('sa_'):
        assert (config.model.backbone.drop_rate, config.model.backbone.attn_drop_rate) == (0.1, 0.1)
        with torch.device('meta'):
            model = MODELS_OF_MMPRETRAIN.build(config.model)
        for part, decay in weight_decays(model, config.optim_wrapper).items():
            assert decay == (0 if part.endswith(('encoding.center', 'encoding.sqrt_precision')) else 1e-4), part
    loader = built_loader(config)
    assert (loader.batch_size, len(loader), type(loader.sampler).__name__) == (100, 500, 'DefaultSampler')
    indices = np.array(list(loader.sampler))
    assert np.array_equal(np.sort(indices), np.arange(50_000)) and not np.array_equal(indices, np.arange(50_000))
    crop, flip, pack = built_pipeline(config)
    assert (crop.crop_size, crop.padding, crop.pad_val, crop.padding_mode) == ((32, 32), 4, 0, 'constant')
    assert (flip.prob, flip.direction) == (0.5, 'horizontal')
    assert sample_of(config)['inputs'].shape == (3, 32, 32)


@pytest.mark.parametrize(
    'name, optimizer',
    [('sa_quadratic_cifar10', 'SGD'), ('cmhsa_attn_cifar100', 'AdamW'), ('small/sa_quadratic', 'AdamW')],
)
def test_rates_in_the_guide(name, optimizer):
    config, page = Config.fromfile(config_path(f'{name}.py')), CONFIGS.parent / 'docs/mmpretrain.md'
    rate, batch = config.optim_wrapper.optimizer.lr, config.train_dataloader.batch_size
    assert config.optim_wrapper.optimizer.type == optimizer and config.param_scheduler[0].type == 'LinearLR'
    assert f'{optimizer} at {rate:g} for batches of {batch} ' in ' '.join(page.read_text().split())


def test_a_folder_of_images_in_a_recipe_for_cifar(tmp_path):
    """As the guide says: of a red image, red is the largest channel."""
    (tmp_path / '0').mkdir()
    Image.new('RGB', (32, 32), 'red').save(tmp_path / '0/red.png')
    config = Config.fromfile(config_path('resnet18_cifar10.py'))
    pipeline = [dict(type='LoadImageFromFile'), *config.test_pipeline]
    dataset = DATASETS.build(dict(type='CustomDataset', data_root=str(tmp_path), pipeline=pipeline))
    preprocessor = MODELS_OF_MMPRETRAIN.build(dict(config.data_preprocessor, type='ClsDataPreprocessor', to_rgb=True))
    assert preprocessor(pseudo_collate([dataset[0]]))['inputs'].mean((0, 2, 3)).argmax() == 0


def test_resnet18_of_the_paper():
    """Its numbers; the schedule of the released code of C20: no warm-up, no cosine."""
    metadata = metainfo_of('resnet18_cifar10').metadata
    assert (round(metadata.parameters / 1e6, 1), round(metadata.flops / 1e9, 1)) == (11.2, 1.1)
    found = rates(config_of('resnet18_cifar10'), 5).reshape(300, 5)
    expected = np.repeat([0.1, 0.01, 0.001, 0.0001], [80, 70, 100, 50])
    assert np.allclose(found, expected[:, None], rtol=1e-12)


def test_heads_are_pruned_as_in_the_released_code():
    """C20, Figure 13: κ > 1000, λ₁ < 1e-5, nothing makes up for removed heads; and with their means as biases."""
    names = ('sa_generalized_pruned_cifar10', 'sa_generalized_pruned_corrected_cifar10')
    hooks = [HOOKS.build(config_of(name).custom_hooks[0]) for name in names]
    assert [hook.pruner.bias_correction for hook in hooks] == [False, True]
    layer = GeneralizedQuadraticAttention(2, 5)
    with torch.no_grad():
        for head, (first, second) in enumerate([(1, 1), (3, 3 / 990), (3, 3 / 1010), (1.1e-5, 1e-5), (0.9e-5, 0.8e-5)]):
            layer.encoding.sqrt_precision[head] = torch.tensor([first, second]).sqrt().diag()
    for hook in hooks:
        assert hook.times == (0,)
        assert find_degenerate_heads(layer, hook.pruner.criteria, (16, 16)) == {'': [2, 4]}


@pytest.mark.parametrize('name', [name for name in MODELS if 'to_attention' in name])
def test_a_cnn_that_becomes_attention(name):
    """The last stage, with heads that learn; positions without weight decay; d'Ascoli et al. 2021: 50 epochs."""
    config = config_of(name)
    (hook,) = config.custom_hooks
    epochs = config.train_cfg.max_epochs - hook.epoch
    assert epochs == (15 if 'digits' in name else 50) and config.model.backbone.phase == 'conv'
    model = MODELS_OF_MMPRETRAIN.build(config.model)
    layers = model.backbone.conversion['layers']
    kernels = [module for part, module in model.backbone.named_modules() if part in layers]
    assert all(part.startswith('layer4') for part in layers) and {conv.kernel_size for conv in kernels} == {(3, 3)}
    model.backbone.to_attention()
    assert all(layer.depends_on_content for layer in model.backbone.modules() if hasattr(layer, 'depends_on_content'))
    for part, decay in weight_decays(model, config.optim_wrapper).items():
        if 'encoding' in part or part.endswith('gate'):
            assert decay == 0, part
        elif model.get_parameter(part).ndim > 1:
            assert decay > 0, part


@pytest.mark.parametrize('name', [name for name in MODELS if 'convolutional' in name])
def test_vits_that_start_as_a_convolution(name):
    """Each head has most of its attention where a position of a kernel of 3x3 patches looks; no decay of positions."""
    config = config_of(name)
    model = MODELS_OF_MMPRETRAIN.build(config.model)
    model.init_weights()
    expected = [(3, 3), (2, 3), (3, 4), (3, 2)]  # the centre, up, right, left, in each layer
    for maps in mean_attention(model, random_images(find_transformer(model.backbone))).values():
        middle = maps.probs.unflatten(-1, (8, 8)).unflatten(1, (8, 8))[:, 3, 3]  # (N_h, 8, 8)
        assert [divmod(int(head.argmax()), 8) for head in middle] == expected[: len(middle)]
        assert middle.amax((1, 2)).min() > 0.4
    decays = weight_decays(model, config.optim_wrapper)
    assert (decays['backbone.pos_embed'], decays['backbone.layers.0.attn.qkv.weight']) == (0, 0.05)


def test_imagenet_recipe():
    """From the weights of mmpretrain's ResNet-50, right after they are loaded, with the schedule of the run."""
    config = config_of('resnet50_to_attention_in1k')
    weights = ModelHub.get('resnet50_8xb32_in1k').weights  # the fork has them on another host
    assert urlparse(config.load_from).path == urlparse(weights).path
    assert config.custom_hooks == [dict(type='PhaseTransitionHook', epoch=0)]
    settings = config.model.backbone
    assert settings.content == 'gated' and 'num_heads' not in settings  # one for each position of the kernel


OF_DEIT = [
    name for name in MODELS if name.startswith(('cmhsa', 'deit')) and name.endswith('cifar100')
]  # with its hyper-parameters: L21, section 5


@pytest.mark.parametrize('name', OF_DEIT)
def test_optimizer_and_regularization_of_deit(name):
    """main.py of facebookresearch/deit: AdamW, which parameters decay, no clipping, no average that is validated.

    Drop path 0.1, no dropout, label smoothing 0.1, Mixup or CutMix.
    """
    config = config_of(name)
    assert not any(hook.type == 'EMAHook' for hook in config.get('custom_hooks', []))
    with torch.device('meta'):
        model = MODELS_OF_MMPRETRAIN.build(config.model)
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    assert type(wrapper.optimizer) is torch.optim.AdamW and not wrapper.clip_grad_kwargs
    (settings,) = {(group['eps'], group['betas'], group['lr']) for group in wrapper.optimizer.param_groups}
    assert settings == (1e-8, (0.9, 0.999), 5e-5 if '200e' in name else 3e-4)
    for part, decay in weight_decays(model, config.optim_wrapper).items():
        left_off = model.get_parameter(part).ndim == 1 or part.endswith(('pos_embed', 'cls_token', 'position.table'))
        assert decay == (0 if left_off else 0.05), part
    drops = [m.drop_prob for m in model.backbone.modules() if type(m).__name__ == 'DropPath']
    assert max(drops) == pytest.approx(0.1) and drops == sorted(drops) and min(drops) <= 0.02
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert (model.head.loss_module.label_smooth_val, model.head.loss_module.mode) == (0.1, 'original')
    preprocessor = MODELS_OF_MMPRETRAIN.build(
        dict(type='ClsDataPreprocessor', num_classes=100, batch_augments=config.model.train_cfg)
    )
    mixes = preprocessor.batch_augments
    assert [(type(mix).__name__, mix.alpha) for mix in mixes.augments] == [('Mixup', 0.8), ('CutMix', 1.0)]
    assert mixes.probs is None  # one of them for each batch, both as often


def test_images_of_deit():
    """Repeated augmentation, and the transforms as built: rand-m9-mstd0.5-inc1, erasing 0.25, bicubic."""
    config, *others = map(config_of, OF_DEIT)
    for name in ('train_dataloader', 'test_dataloader'):
        assert all(other[name] == config[name] for other in others)
    loader = built_loader(config)
    assert (loader.batch_size, len(loader), loader.drop_last) == (128, 390, True)  # DeiT: 50,000 // 256 * 256 images
    indices = np.array(list(loader.sampler))
    assert np.array_equal(indices[:49_998], np.repeat(indices[:49_998:3], 3)) and len(np.unique(indices)) == 16_667
    loader.sampler.set_epoch(1)
    assert not np.array_equal(list(loader.sampler), indices)
    crop, flip, augment, erase, pack = built_pipeline(config)
    assert (crop.scale, crop.crop_ratio_range, crop.interpolation) == ((224, 224), (0.08, 1.0), 'bicubic')
    assert (flip.prob, flip.direction) == (0.5, 'horizontal')
    magnitude = (augment.magnitude_level, augment.magnitude_std, augment.total_level)
    assert (augment.num_policies, *magnitude, len(augment.policies)) == (2, 9, 0.5, 10, 15)  # timm's, which increase
    assert (erase.erase_prob, erase.mode, erase.min_area_ratio, erase.max_area_ratio) == (0.25, 'rand', 0.02, 1 / 3)
    assert sample_of(config)['inputs'].shape == (3, 224, 224)
    edge, center, pack = built_pipeline(config, 'test_dataloader')
    assert (edge.scale, edge.edge, edge.interpolation, center.crop_size) == (256, 'short', 'bicubic', (224, 224))


def test_repeated_augmentation_on_four_gpus(monkeypatch):
    """The batch of all GPUs is that of one: 128 images, of which three in a row are the same, in 390 iterations.

    The rate goes with it.
    """
    config = config_of('cmhsa5_cifar100')
    assert config.auto_scale_lr == dict(base_batch_size=128, enable=True)
    alone = list(built_loader(config).sampler)
    parts = []
    for rank in range(4):
        monkeypatch.setattr('mmpretrain.datasets.samplers.repeat_aug.get_dist_info', lambda: (rank, 4))
        loader = built_loader(config, batch_size=32)
        assert len(loader) == 390
        parts.append(list(loader.sampler)[:32])
    assert [index for four in zip(*parts) for index in four] == alone[:128]


def test_vit_has_the_recipe_of_mmpretrains_vit():
    ours = config_of('vit_base_cifar100')
    vit = get_config('mmpretrain::vision_transformer/vit-base-p16_64xb64_in1k.py')
    assert ours.model.train_cfg == vit.model.train_cfg and ours.model.head.loss == vit.model.head.loss
    assert ours.optim_wrapper.clip_grad == vit.optim_wrapper.clip_grad
    assert ours.optim_wrapper.optimizer.weight_decay == vit.optim_wrapper.optimizer.weight_decay
    loader = built_loader(ours)
    assert len(loader) == 390 and np.array_equal(np.sort(list(loader.sampler)), np.arange(50_000))
    crop, flip, augment, pack = built_pipeline(ours)
    assert type(augment).__name__ == 'AutoAugment' and sample_of(ours)['inputs'].shape == (3, 224, 224)


def built_loader(config, **settings):
    """The loader of a training set of 50,000 numbers."""
    loader = {**config.train_dataloader, 'dataset': list(range(50_000)), 'num_workers': 0, 'persistent_workers': False}
    return Runner.build_dataloader({**loader, **settings}, seed=0)


def built_pipeline(config, loader='train_dataloader'):
    return [TRANSFORMS.build(step) for step in config[loader].dataset.pipeline]


def sample_of(config):
    """A random image of 32x32 pixels as the network gets it in training."""
    sample = dict(img=np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8), gt_label=3)
    for step in built_pipeline(config):
        sample = step(sample)
    return sample


@pytest.mark.slow
def test_gpu_hours_of_the_papers_networks():
    """Multiply-adds in training, of both phases, as docs/papers.md counts them, in docs/models.md."""
    page = (CONFIGS.parent / 'docs/models.md').read_text()
    rows = re.findall(r'^\| `(\w+_cifar10+)`.*\| ([\d.]+) \|$', page, re.MULTILINE)
    assert len(rows) == 18
    for name, hours in rows:
        config = config_of(name)
        model, epochs = MODELS_OF_MMPRETRAIN.build(config.model), config.train_cfg.max_epochs
        size = 224 if name.endswith('cifar100') else 32
        products = 0
        for hook in [hook for hook in config.get('custom_hooks', []) if hook.type == 'PhaseTransitionHook']:
            products += hook.epoch * multiply_adds(model, size)
            epochs -= hook.epoch
            model.backbone.to_attention()
        products += epochs * multiply_adds(model, size)
        assert products * 6 * 50_000 / 0.3 / 312e12 / 3600 == pytest.approx(float(hours), abs=0.06), name


def multiply_adds(model, size):
    """Of an image in training, where dropout makes attention dense."""
    backbone = copy.deepcopy(model.backbone).to('meta')
    backbone.train()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        backbone(torch.zeros(2, 3, size, size, device='meta'))
    return counter.get_total_flops() / 4
