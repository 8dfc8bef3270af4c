"""The script that measures what heads of a small ViT cost: shares are reached, and nothing is trained twice."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip('mmpretrain')
sys.path.insert(0, str(Path(__file__).parents[2] / 'tools/benchmarks'))
import vit_pruning  # noqa: E402


def test_runs_and_table(images, tmp_path, monkeypatch, capsys):
    out = tmp_path / 'out'
    command = ['vit_pruning.py', str(images), str(out), '--epochs', '1', '1', '--seeds', '0', '--threads', '1']
    monkeypatch.setattr(sys, 'argv', [*command, '--shares', '0.8', '--batches', '1'])
    vit_pruning.main()
    runs = {run['kind']: run for run in (json.loads(path.read_text()) for path in out.glob('*.json'))}
    assert sorted(runs) == sorted([vit_pruning.ALL, *vit_pruning.KINDS])
    whole = runs[vit_pruning.ALL]
    assert whole['heads'] == [8] * 6
    for kind in vit_pruning.KINDS:
        assert 0.75 < runs[kind]['multiply_adds'] / whole['multiply_adds'] <= 0.8
        assert runs[kind]['parameters'] < whole['parameters']
    table = capsys.readouterr().out
    assert all(f'| {kind} | ' in table for kind in runs)

    monkeypatch.setattr(vit_pruning, 'fit', None)  # not to be called
    vit_pruning.main()
    assert capsys.readouterr().out.strip() == table.strip().split('}\n')[-1].strip()
