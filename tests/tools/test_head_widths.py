"""The script that compares the accuracies of heads of different widths: what is there is not trained again."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip('mmpretrain')
sys.path.insert(0, str(Path(__file__).parents[2] / 'tools/benchmarks'))
import head_widths  # noqa: E402


def test_runs_and_table(images, tmp_path, monkeypatch, capsys):
    """Every kind begins where the convolutions ended, and is a row; a second call trains nothing."""
    out, kinds = tmp_path / 'out', ['full', 'narrow', 'narrow, factors of equal norm']
    command = ['head_widths.py', str(images), str(out), '--epochs', '1', '1', '--seeds', '0', '--threads', '1']
    monkeypatch.setitem(head_widths.SMALL, 'depth', 1)
    monkeypatch.setattr(sys, 'argv', [*command, '--kinds', *kinds])
    head_widths.main()
    runs = [json.loads(path.read_text()) for path in out.glob('*-epochs-0.json')]
    assert sorted(run['kind'] for run in runs) == sorted(kinds)
    assert len({run['before'] for run in runs}) == 1  # the same function, whatever the heads are
    table = capsys.readouterr().out
    assert all(f'| {kind} | ' in table for kind in kinds)

    monkeypatch.setattr(head_widths, 'fit', None)  # not to be called
    monkeypatch.setattr(head_widths, 'step_seconds', None)
    head_widths.main()
    assert capsys.readouterr().out.strip() == table.strip().split('}\n')[-1].strip()
