"""timm's train.py, as it is, on a folder of digits: both phases in two runs, a start as a convolution, a pruning."""

import csv
import os
import re
from pathlib import Path

import pytest
import timm
import torch
from helpers.plain_digits import digits
from helpers.processes import run
from PIL import Image

from attncnn_plugin.pruning import prune_heads

SCRIPT = os.environ.get('TIMM_TRAIN', '')  # timm's distributions have no scripts
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(SCRIPT).is_file(), reason="TIMM_TRAIN must be the train.py of a checkout of timm's"),
]
NETWORK = ['img_size=16', 'patch_size=4', 'depth=2']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('digits')
    for number, (image, label) in enumerate(digits()):
        path = folder / ('train' if number < 1437 else 'validation') / str(int(label)) / f'{number}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(((image[0] + 1) * 127.5).byte().numpy()).save(path)
    return folder


def train(folder, out, model, kwargs, *options, rate=1e-2, epochs=1, batch=64, modules=()):
    """Runs the script, and returns the accuracy of each epoch and the folder of checkpoints."""
    settings = (
        f'--device cpu --num-classes 10 --in-chans 1 --input-size 1 16 16 --mean 0.5 --std 0.5 --no-aug -b {batch} \
        --smoothing 0 --workers 1 --no-prefetcher --opt adamw --weight-decay 0 --sched step \
        --decay-epochs 100 --warmup-epochs 0 --lr {rate} \
        --epochs {epochs} --output {out.parent} --experiment {out.name}'
    )
    plugin = ['--device-modules', 'attncnn_plugin', *modules, '--model', model, '--model-kwargs', *kwargs]
    run('python', SCRIPT, folder, *plugin, *settings.split(), *options, folder=out.parent, PYTHONWARNINGS='ignore')
    rows = csv.DictReader((out / 'summary.csv').open())
    return [float(row['eval_top1']) for row in rows], out


def weights(file):
    return torch.load(file, map_location='cpu', weights_only=False)['state_dict']


def test_both_phases(folder, tmp_path):
    name = 'cmhsa3_patch16_224'
    first, conv = train(folder, tmp_path / 'conv', name, [*NETWORK, 'phase=conv'], epochs=3)
    start = ['--initial-checkpoint', conv / 'last.pth.tar']
    (frozen,), _ = train(folder, tmp_path / 'frozen', name, [*NETWORK, 'attn_bias_init=40.0'], *start, rate=1e-30)
    second, attn = train(folder, tmp_path / 'attn', name, [*NETWORK, 'phase=attn'], *start, epochs=3)
    resume = ['--resume', attn / 'checkpoint-1.pth.tar']
    resumed, again = train(folder, tmp_path / 'again', name, [*NETWORK, 'phase=attn'], *resume, epochs=3)
    print(f'train.py: {first}, attention {frozen} before it trains, {second}, resumed {resumed}')
    assert frozen == first[-1] and second[-1] > first[-1] and len(resumed) == 1
    assert 'blocks.0.attn.conv.weight' in weights(conv / 'last.pth.tar')
    assert 'blocks.0.attn.query.weight' in weights(again / 'last.pth.tar')


def test_a_start_as_a_convolution(folder, tmp_path):
    name, kwargs, start = 'vit_tiny_patch16_224', [*NETWORK, 'num_classes=10', 'in_chans=1'], tmp_path / 'new/start.pth'
    words = 'start', '--timm', name, '--out', start, '--model-kwargs', *kwargs
    said = run('python', '-m', 'attncnn_plugin', *words, folder=tmp_path)
    assert 'blocks.1.attn' in said and f'Saved {start}' in said
    _, frozen = train(folder, tmp_path / 'frozen', name, NETWORK, '--initial-checkpoint', start, rate=1e-30)
    for key, value in weights(frozen / 'last.pth.tar').items():
        assert torch.allclose(value, weights(start)[key], rtol=0, atol=1e-20), key


def test_pruned_in_the_middle(folder, tmp_path, repository):
    """Resumed, it is the run that was not stopped: in batches of all images, whose order timm does not resume."""
    page = (repository / 'docs/any_trainer.md').read_text()
    (module,) = re.findall(r'^```python$\n(import attncnn_plugin, timm\n.*?)^```$', page, re.MULTILINE | re.DOTALL)
    (tmp_path / 'pruned_vit.py').write_text(module.replace("'pruned.pth'", f"'{tmp_path}/pruned.pth'"))
    name, sizes = 'vit_tiny_patch16_224', dict(img_size=16, patch_size=4, depth=2, num_classes=10, in_chans=1)
    first, whole = train(folder, tmp_path / 'whole', name, NETWORK, rate=1e-3, epochs=2)
    model = timm.create_model(name, **sizes, checkpoint_path=str(whole / 'last.pth.tar'))
    prune_heads(model, {0: [1], 1: [0, 2]})
    torch.save(model.state_dict(), tmp_path / 'pruned.pth')
    settings = dict(modules=['pruned_vit'], rate=1e-3, epochs=4, batch=1437)
    start = ['--initial-checkpoint', tmp_path / 'pruned.pth']
    after, pruned = train(folder, tmp_path / 'pruned', 'pruned_vit', NETWORK, *start, **settings)
    _, resumed = train(
        folder, tmp_path / 'again', 'pruned_vit', NETWORK, '--resume', pruned / 'checkpoint-1.pth.tar', **settings
    )
    print(f'train.py: {first}, pruned {after}')
    assert after[-1] > after[0]
    images, (between, expected, found) = (
        torch.stack([image for image, _ in digits()]),
        [
            weights(file)
            for file in (pruned / 'checkpoint-1.pth.tar', pruned / 'last.pth.tar', resumed / 'last.pth.tar')
        ],
    )
    assert expected['blocks.1.attn.qkv.weight'].shape == (192, 192)
    outputs = []
    for state_dict in (between, expected, found):
        model.load_state_dict(state_dict)
        outputs.append(model.eval()(images).detach())
    torch.testing.assert_close(outputs[2], outputs[1], rtol=0, atol=1e-4)
    assert (outputs[0] - outputs[1]).abs().max() > 0.1
