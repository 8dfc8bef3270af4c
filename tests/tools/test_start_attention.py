"""The script that measures how near the attention of models is to the wanted one at their start."""

import sys
from pathlib import Path

import timm

sys.path.insert(0, str(Path(__file__).parents[2] / 'tools/benchmarks'))
import start_attention  # noqa: E402


def test_table_of_attention(monkeypatch, capsys):
    """A row for each model."""
    model = timm.create_model(
        'vit_tiny_patch16_224',
        img_size=32,
        patch_size=4,
        embed_dim=32,
        num_heads=2,
        depth=1,
        class_token=False,
        global_pool='avg',
    )
    monkeypatch.setattr(sys, 'argv', ['start_attention.py', 'vit_tiny_patch16_224', '--threads', '1'])
    monkeypatch.setattr(start_attention.timm, 'create_model', lambda name, **_: model)
    start_attention.main()
    row = capsys.readouterr().out.splitlines()[2]
    name, encoding, grid, first, last, share = row.strip('| ').split(' | ')
    assert (name, encoding, grid, share) == ('`vit_tiny_patch16_224`', 'absolute', '8×8', '0')
    assert float(first) < 0.1 and float(last) < 0.1
