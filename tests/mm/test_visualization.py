"""AttentionVisualizationHook: what it shows and records, and that the training does not notice it."""

import json
import random
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from helpers.digits import run, small_config
from helpers.small import save_degenerate, small_timm
from mmengine.hooks import Hook
from mmpretrain.registry import HOOKS

from attncnn_plugin.analysis import MeanAttention, head_report, read_centers, read_scalars
from attncnn_plugin.mm import visualization as attention_visualization_hook
from attncnn_plugin.mm.visualization import AttentionVisualizationHook

LAYERS = ['backbone.blocks.0.attn', 'backbone.blocks.1.attn']


@HOOKS.register_module()
class Witness(Hook):
    """Keeps the state of the random numbers at every iteration, and modes after epochs: a block is in evaluation."""

    priority = 'LOWEST'
    seen = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        numbers = torch.get_rng_state().sum().item(), np.random.get_state()[1].sum(), random.getstate()[1]
        Witness.seen.append((*numbers, data_batch['inputs'][0].sum().item()))
        runner.model.backbone.blocks[0].eval()

    def after_train_epoch(self, runner):
        Witness.seen.append([module.training for module in runner.model.modules()])


def config_of(repository, work_dir, name='sa_quadratic_digits', hooks=(), epochs=2):
    config = small_config(repository, work_dir, name, log_level='INFO')
    config.merge_from_dict({'train_cfg.max_epochs': epochs, 'default_hooks.checkpoint.save_best': None})
    config.custom_hooks, config.param_scheduler = list(hooks), []
    return config


HOOK = dict(type='AttentionVisualizationHook', interval=2)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['sa_quadratic_digits', 'sa_learned_content_digits'])
def test_the_training_does_not_notice_it(repository, tmp_path, name):
    weights, seen = [], []
    for hooks in ([], [dict(HOOK, interval=1)]):
        Witness.seen = []
        config = config_of(repository, tmp_path / str(len(hooks)), name, [*hooks, dict(type='Witness')])
        # Augmentation that draws from numpy, dropout that draws from torch.
        config.train_pipeline.insert(1, dict(type='RandomFlip', prob=0.5))
        config.train_dataloader.dataset.pipeline = config.val_dataloader.dataset.pipeline = config.train_pipeline
        config.model.backbone.update(drop_rate=0.1)
        runner, _ = run(config)
        weights.append(runner.model.state_dict())
        seen.append(Witness.seen)
    assert len(seen[0]) == 8 and seen[0] == seen[1]
    assert False in seen[0][-1] and True in seen[0][-1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.slow
def test_pictures_and_scalars(repository, tmp_path):
    stop = dict(type='EarlyStoppingHook', monitor='accuracy/top1', patience=4, min_delta=1000, rule='greater')
    runner, _ = run(config_of(repository, tmp_path, hooks=[HOOK, stop], epochs=9))  # stops after 5
    pictures = sorted(path.name for path in tmp_path.glob('*/vis_data/vis_image/*'))
    assert pictures == [f'attention_{kind}_{epoch}.png' for kind in ('centers', 'probs') for epoch in (0, 2, 4, 5)]
    for path in tmp_path.glob('*/vis_data/vis_image/*'):
        assert cv2.imread(str(path)).std() > 10
    scalars = read_scalars(tmp_path)
    for i, layer in enumerate(LAYERS):
        encoding = runner.model.backbone.blocks[i].attn.encoding
        for head in range(3):
            row, column, width = (
                scalars[f'attention/{layer}/head{head}/{key}'] for key in ('center_row', 'center_column', 'width')
            )
            assert row[:, 0].tolist() == column[:, 0].tolist() == width[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
            assert [row[-1, 1], column[-1, 1]] == pytest.approx(encoding.center[head].tolist())
            assert width[-1, 1] == pytest.approx(1 / abs(encoding.sqrt_precision[head].item()))
            assert len(set(row[:, 1])) > 3  # it moves
    assert list(read_centers(tmp_path)) == LAYERS
    assert len(scalars['accuracy/top1']) == 5

    def refuse(constant):
        raise ValueError(constant)

    (path,) = tmp_path.glob('*/vis_data/attention.json')
    lines = path.read_text().splitlines()
    assert all(json.loads(line, parse_constant=refuse) for line in lines)
    assert sum('attention/' in line for line in lines) == 6


def test_heads_keep_their_numbers_when_others_are_pruned(repository, tmp_path):
    pruning = dict(type='HeadPruningHook', epochs=[1], num_batches=1)
    config = config_of(repository, tmp_path, 'sa_generalized_digits', [pruning, HOOK], epochs=3)
    config.load_from = save_degenerate(tmp_path / 'start.pth')
    runner, _ = run(config)
    layer = runner.model.backbone.blocks[0].attn
    assert layer.num_heads == 2
    centers = read_centers(tmp_path)[LAYERS[0]]
    assert [centers[head][:, 0].tolist() for head in range(3)] == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    assert centers[0][-1, 1:] == pytest.approx(layer.encoding.center[0].tolist())
    assert centers[2][-1, 1:] == pytest.approx(layer.encoding.center[1].tolist())


@pytest.mark.slow
def test_cmhsa_is_shown_from_its_transition_on(repository, tmp_path):
    config = config_of(repository, tmp_path, 'cmhsa3_digits', epochs=3)
    config.custom_hooks = [dict(type='PhaseTransitionHook', epoch=1), dict(HOOK, interval=1)]
    run(config)
    pictures = sorted(path.stem for path in tmp_path.glob('*/vis_data/vis_image/*centers*'))
    assert pictures == ['attention_centers_2', 'attention_centers_3']
    centers = read_centers(tmp_path)
    assert centers and all(head[:, 0].tolist() == [2, 3] for layer in centers.values() for head in layer.values())


def test_model_without_attention_layers(repository, tmp_path):
    """An error at once: of a model that has patches and blocks."""
    config = config_of(repository, tmp_path, hooks=[HOOK], epochs=1)
    arch = dict(embed_dims=16, num_layers=1, tokens_mlp_dims=8, channels_mlp_dims=16)
    config.model.backbone = dict(type='MlpMixer', arch=arch, img_size=16, patch_size=4, patch_cfg=dict(in_channels=1))
    config.model.neck = dict(type='GlobalAveragePooling', dim=1)
    with pytest.raises(ValueError, match='no attention of a ImageClassifier was seen'):
        run(config)


def test_self_supervised_learning_with_several_views(repository, tmp_path):
    config = config_of(repository, tmp_path, hooks=[HOOK], epochs=1)
    backbone = dict(config.model.backbone, out_type='avg_featmap')
    neck = dict(type='NonLinearNeck', in_channels=16, hid_channels=16, out_channels=8, with_avg_pool=False)
    head = dict(type='ContrastiveHead', loss=dict(type='CrossEntropyLoss'), temperature=0.1)
    config.model = dict(type='SimCLR', backbone=backbone, neck=neck, head=head)
    config.data_preprocessor = dict(type='SelfSupDataPreprocessor', mean=[77.9], std=[95.9])
    config.train_dataloader.collate_fn = dict(type='default_collate')
    config.train_dataloader.dataset.pipeline = [
        dict(type='MultiView', num_views=2, transforms=[[dict(type='RandomFlip', prob=0.5)]]),
        dict(type='PackInputs'),
    ]
    config.val_dataloader = config.val_cfg = config.val_evaluator = None
    run(config)
    assert list(read_centers(tmp_path)) == LAYERS


def test_heads_that_give_nothing_to_the_grid(monkeypatch):
    """They have no centre to record."""
    model, recorded = small_timm('sa_learned_content_cifar'), {}

    def maps_of(model, images):
        probs = torch.full((3, 16, 16), 1 / 16)
        probs[1] = 0
        return {f'blocks.{i}.attn': MeanAttention(probs, (4, 4)) for i in range(2)}

    monkeypatch.setattr(attention_visualization_hook, 'mean_attention', maps_of)
    hook = AttentionVisualizationHook()
    hook._images = torch.randn(1, 3, 8, 8)
    backend = SimpleNamespace(add_scalars=lambda scalars, step: recorded.update(scalars))  # such as TensorBoard
    visualizer = SimpleNamespace(_vis_backends={'other': backend})
    hub = SimpleNamespace(runtime_info={}, update_info=lambda name, value: None)
    hook._show(SimpleNamespace(model=model, visualizer=visualizer, message_hub=hub), 0, draw=False)
    heads = {name.split('/')[2] for name in recorded}
    assert heads == {'head0', 'head2'} and len(recorded) == 2 * 2 * 3


@pytest.mark.slow
def test_attention_by_content_is_a_mean_over_images(repository, tmp_path):
    config = config_of(repository, tmp_path, hooks=[dict(HOOK, interval=1)], epochs=1)
    arch = dict(embed_dims=16, depths=[2], num_heads=[4])
    sizes = dict(img_size=16, patch_size=2, window_size=4, in_channels=1)
    config.model.backbone = dict(type='SwinTransformer', arch=arch, out_indices=(0,), **sizes)
    config.model.neck = dict(type='GlobalAveragePooling')
    runner, _ = run(config)
    pictures = sorted(path.name for path in tmp_path.glob('*/vis_data/vis_image/*'))
    assert pictures == [f'attention_{kind}_{epoch}.png' for kind in ('centers', 'probs') for epoch in (0, 1)]
    loader = runner.val_dataloader
    inputs = dict(inputs=[loader.dataset[i * len(loader.dataset) // 8]['inputs'] for i in range(8)])
    images = runner.model.data_preprocessor(inputs, False)['inputs']
    recorded, report = read_centers(tmp_path), head_report(runner.model, images)
    assert list(recorded) == [layer.name for layer in report.layers] and len(recorded) == 2
    for layer in report.layers:
        for number, head in enumerate(layer.heads):
            assert np.allclose(recorded[layer.name][number][-1, 1:], head.center, atol=1e-5)
