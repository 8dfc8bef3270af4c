"""Networks that nobody has trained, packed as trained ones are."""

import json
import shutil
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'tools'))
from model_converters.model_cards import write_metafile, write_table  # noqa: E402
from model_converters.pack_weights import pack  # noqa: E402
from reproduction.configs import network_config, set_data, set_images  # noqa: E402
from reproduction.results import build, cost, machine, versions  # noqa: E402

from .small import trained_like  # noqa: E402


def untrained_run(folder, config_name, data='cifar10'):
    """A folder as tools/reproduce.py leaves it, of a network with any weights, in its second phase if it has two."""
    torch.manual_seed(0)
    config = network_config(config_name, {})
    set_data(config, data, None, test_images=4000)
    set_images(config, 20000, 0)
    model = build(config)
    if getattr(model.backbone, 'phase', None) == 'conv':
        model.backbone.to_attention()
    trained_like(model)
    parameters, multiply_adds = cost(model)
    folder.mkdir(parents=True)
    torch.save(dict(state_dict=model.state_dict()), folder / 'epoch_20.pth')
    result = dict(
        label='quadratic',
        images=20000,
        epochs=20,
        seed=0,
        top1=12.345,
        seconds=90.0,
        parameters=parameters,
        multiply_adds=multiply_adds,
        curves={'accuracy/top1': [[1, 10.0], [20, 12.345]], 'accuracy/top5': [[1, 50.0], [20, 51.5]]},
        versions=versions(),
        machine=dict(machine(), threads=1),
        config=config.to_dict(),
    )
    (folder / 'result.json').write_text(json.dumps(result, default=str))
    return folder


def checkout(root):
    """A folder with what the packing tool reads and writes in a checkout, without weights."""
    for name in ('configs/metafile.yml', 'configs/pretrained/metafile.yml', 'docs/weights.md', 'model-index.yml'):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / 'attncnn_plugin/weights/images', root / 'attncnn_plugin/weights/images')
    return root


def pack_untrained(root, runs, networks):
    """Packs networks into a checkout: ``networks`` are configs of configs/small by the names in timm."""
    for name, config in networks.items():
        pack(untrained_run(runs / name, config), name, 'no data', root / 'attncnn_plugin/weights')
    write_table(root / 'docs/weights.md', root / 'attncnn_plugin/weights')
    write_metafile(root / 'configs/pretrained/metafile.yml', root / 'attncnn_plugin/weights')
