"""The script that compares CNNs with attention in them: kinds begin as the same CNN, and nothing is trained twice."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip('mmpretrain')
sys.path.insert(0, str(Path(__file__).parents[2] / 'tools/benchmarks'))
import cnn_accuracy  # noqa: E402
import cnn_heads  # noqa: E402

from attncnn_plugin.convert import conv_to_mhsa  # noqa: E402


def test_runs_and_table(images, tmp_path, monkeypatch, capsys):
    out, kinds = tmp_path / 'out', ['CNN goes on', 'additive', 'gated', 'positions alone', cnn_accuracy.FROM_SCRATCH]
    command = ['cnn_accuracy.py', str(images), str(out), '--epochs', '1', '1', '--seeds', '0', '--threads', '1']
    monkeypatch.setattr(sys, 'argv', [*command, '--kinds', *kinds])
    cnn_accuracy.main()
    runs = {run['kind']: run for run in (json.loads(path.read_text()) for path in out.glob('*.json'))}
    assert sorted(runs) == sorted(kinds)
    assert runs['CNN goes on']['parameters'] < runs['additive']['parameters'] < runs['gated']['parameters']
    for run in runs.values():
        assert list(run['before']) == list(run['after']) == list(cnn_accuracy.CORRUPTIONS)
    table = capsys.readouterr().out
    assert all(f'| {kind} | ' in table for kind in kinds)

    monkeypatch.setattr(cnn_accuracy, 'fit', None)  # not to be called
    cnn_accuracy.main()
    assert capsys.readouterr().out.strip() == table.strip().split('}\n')[-1].strip()
    monkeypatch.setattr(sys, 'argv', [*command, '--images', '5'])
    with pytest.raises(SystemExit, match='has runs with .*"images": 5000.*, not with .*"images": 5,.*: give another'):
        cnn_accuracy.main()

    figures = tmp_path / 'figures'
    command = ['cnn_heads.py', str(images), str(out), '--images', '2', '--figures', str(figures)]
    monkeypatch.setattr(sys, 'argv', [*command, '--kinds', 'additive', 'positions alone'])
    cnn_heads.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(' | ')[:2] for row in rows] == [
        [f'| {kind}', when] for kind in ('additive', 'positions alone') for when in ('before', 'after')
    ]
    assert all(row.count('%, ') == 4 for row in rows)
    assert len(list(figures.iterdir())) == 4


@pytest.mark.parametrize('stride', [1, 2])
def test_heads_at_their_positions(stride):
    """Hard heads have all of their attention there; with α = 0 they have that of a random pixel."""
    conv = nn.Conv2d(2, 2, 3, padding=1, stride=stride)
    hard, soft = conv_to_mhsa(conv)[0], conv_to_mhsa(conv)[0]
    with torch.no_grad():
        soft.encoding.sqrt_precision.zero_()
        assert cnn_heads.of_own_positions(hard, hard.attention_probs((5, 7)), (5, 7)) == (1, 0)
        share, distance = cnn_heads.of_own_positions(soft, soft.attention_probs((5, 7)), (5, 7))
    assert share == pytest.approx(1 / 35) and 2 < distance < 5


def test_corruptions():
    """Each changes the images, the same way every time, and leaves them images."""
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    for name, corrupt in cnn_accuracy.CORRUPTIONS.items():
        corrupted = corrupt(images)
        assert corrupted.dtype == torch.uint8 and corrupted.shape == images.shape
        assert torch.equal(corrupted, corrupt(images)) and torch.equal(corrupted, images) == (name == 'clean')
