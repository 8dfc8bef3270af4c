"""AttentionVisualizationHook on vision transformers of mmpretrain, whose modules stay as they are."""

import json
import uuid

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner

from attncnn_plugin.analysis import attention_maps, head_centers, head_report, read_centers
from attncnn_plugin.analysis.layer_maps import shown_layers

ARCH = dict(embed_dims=16, num_layers=2, num_heads=4, feedforward_channels=24)
BACKBONES = {
    'VisionTransformer': dict(arch=ARCH, img_size=16, patch_size=4),
    'BEiTViT': dict(arch=ARCH, img_size=16, patch_size=4),
    'SwinTransformer': dict(
        arch=dict(embed_dims=16, depths=[2], num_heads=[4]), img_size=16, patch_size=2, window_size=4, out_indices=(0,)
    ),
}
SHOW = dict(type='AttentionVisualizationHook', interval=1, num_images=3)


def train(repository, folder, kind, hooks, epochs):
    config = Config.fromfile(str(repository / 'configs/sa_quadratic_digits.py'))
    config.merge_from_dict(
        {
            'work_dir': str(folder),
            'experiment_name': f'{kind}-{uuid.uuid4().hex}',
            'train_cfg.max_epochs': epochs,
            'train_dataloader.dataset.indices': 40,
            'train_dataloader.batch_size': 20,
            'val_dataloader.dataset.indices': 20,
            'randomness.seed': 0,
            'default_hooks.checkpoint.save_best': None,
        }
    )
    config.model.backbone = dict(type=kind, in_channels=1, **BACKBONES[kind])
    config.model.head.in_channels = 16
    if kind == 'SwinTransformer':
        config.model.neck = dict(type='GlobalAveragePooling')
    config.custom_hooks = list(hooks)
    config.test_dataloader = config.test_evaluator = config.test_cfg = None
    runner = Runner.from_cfg(config)
    runner.train()
    return runner


@pytest.mark.parametrize('kind', BACKBONES)
def test_pictures_and_scalars(kind, repository, tmp_path):
    """The training is the same with it, and the last scalars are those of the mean over the hook's images."""
    runner, without = (train(repository, tmp_path / name, kind, hooks, 1) for name, hooks in (('a', [SHOW]), ('b', [])))
    states = runner.model.state_dict(), without.model.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    pictures = sorted(path.name for path in (tmp_path / 'a').glob('*/vis_data/vis_image/*'))
    assert pictures == [f'attention_{kind}_{epoch}.png' for kind in ('centers', 'probs') for epoch in (0, 1)]
    loader = runner.val_dataloader
    inputs = dict(inputs=[loader.dataset[i * len(loader.dataset) // 3]['inputs'] for i in range(3)])
    images = runner.model.data_preprocessor(inputs, False)['inputs']
    maps, recorded = attention_maps(runner.model, images), read_centers(tmp_path / 'a')
    assert list(recorded) == list(shown_layers(runner.model)) and len(recorded) == 2
    reports = {report.name: report for report in head_report(runner.model, images).layers}
    for name, own in maps.items():
        centers, _ = head_centers(own)
        if kind == 'SwinTransformer':  # a single query would show its place in its window
            centers = torch.tensor([head.center for head in reports[name].heads])
        assert np.allclose([recorded[name][head][-1, 1:] for head in range(4)], centers.numpy(), atol=1e-5)


def test_heads_keep_their_numbers(repository, tmp_path):
    """When others are pruned between two epochs."""
    prune = dict(type='HeadPruningHook', epochs=[1], num_batches=1, criteria=[dict(type='importance', keep=5)])
    runner = train(repository, tmp_path, 'VisionTransformer', [prune, SHOW], 2)
    (log,) = tmp_path.glob('*/*.log')
    removed = next(line for line in log.read_text().splitlines() if 'Removed heads' in line)
    removed = json.loads(removed[removed.index('{') : removed.index('}') + 1].replace("'", '"'))
    left = {
        name: [head for head in range(4) if head not in removed.get(name, [])] for name in shown_layers(runner.model)
    }
    assert sum(map(len, left.values())) == 5
    numbers = runner.message_hub.runtime_info['attention_heads']
    assert numbers == left and any(heads != list(range(len(heads))) for heads in left.values())
    for name, heads in read_centers(tmp_path).items():
        assert [head for head, way in heads.items() if way[-1, 0] == 2] == left[name]
