"""The script that compares the starts of vision transformers: nothing is trained twice, and runs that stop go on."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip('mmpretrain')
sys.path.insert(0, str(Path(__file__).parents[2] / 'tools/benchmarks'))
import small_images  # noqa: E402
import vit_starts  # noqa: E402


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    for name, value in dict(WIDTH=32, HEADS=2, DEPTH=1, CMHSA_DEPTH=1, RESNET_CHANNELS=4).items():
        monkeypatch.setattr(vit_starts, name, value)


def test_runs_table_and_curves(images, tmp_path, monkeypatch, capsys):
    pytest.importorskip('matplotlib')
    out = tmp_path / 'out'
    command = ['vit_starts.py', str(images), str(out), '--epochs', '3', '--seeds', '0', '1', '--threads', '1']
    monkeypatch.setattr(sys, 'argv', command)
    vit_starts.main()
    runs = [json.loads(path.read_text()) for path in out.glob('*.json')]
    assert sorted({run['kind'] for run in runs}) == sorted(vit_starts.MAIN_KINDS) and len(runs) == 14
    assert all(len(run['curve']) == 3 and run['curve'][-1] == run['top1'] for run in runs)
    assert not list(out.glob('*.pth'))
    table = capsys.readouterr().out
    assert all(f'| {kind} | 5,000 | 3 |' in table for kind in vit_starts.MAIN_KINDS)

    monkeypatch.setattr(vit_starts, 'fit', None)  # not to be called
    monkeypatch.setattr(sys, 'argv', [*command, '--curves', str(tmp_path / 'curves.svg')])
    vit_starts.main()
    assert capsys.readouterr().out.strip() == table.strip().split('}\n')[-1].strip()
    figure = (tmp_path / 'curves.svg').read_text()
    assert figure.startswith('<?xml')


@pytest.mark.parametrize('kind', ['Gaussian', vit_starts.CMHSA])
@pytest.mark.parametrize('stop', [2, 4])
def test_a_stopped_run_goes_on(kind, stop, images, tmp_path, monkeypatch):
    """As if it had never stopped, in either phase."""
    curves = {}
    for name in ('whole', 'stopped'):
        out = tmp_path / name
        command = ['vit_starts.py', str(images), str(out), '--epochs', '5', '--seeds', '0', '--kinds', kind]
        monkeypatch.setattr(sys, 'argv', [*command, '--threads', '1'])
        if name == 'stopped':
            calls = []

            def accuracy(model, test):
                calls.append(model)
                if len(calls) == stop:
                    raise KeyboardInterrupt
                return measured(model, test)

            measured = small_images.accuracy
            monkeypatch.setattr(small_images, 'accuracy', accuracy)
            with pytest.raises(KeyboardInterrupt):
                vit_starts.main()
            monkeypatch.setattr(small_images, 'accuracy', measured)
            assert not list(out.glob('*.json')) and list(out.glob('*.pth'))
            torch.manual_seed(5)
        vit_starts.main()
        (path,) = out.glob('*.json')
        curves[name] = json.loads(path.read_text())['curve']
    assert curves['whole'] == curves['stopped'] and len(curves['whole']) == 5


@pytest.mark.parametrize('kind', vit_starts.STARTS)
def test_starts(kind):
    """All are the same network but for what a start sets."""
    default, model = vit_starts.new_network('default', 0), vit_starts.new_network(kind, 0)
    pairs = zip(default.named_parameters(), model.parameters())
    changed = {name for (name, before), after in pairs if not torch.equal(before, after)}
    heads = {'blocks.0.attn.qkv.weight', 'pos_embed'}
    if kind == 'default':
        assert changed == set()
    elif kind == 'sine-cosine embedding':
        assert changed == {'pos_embed'}
    else:
        assert heads <= changed and not any(name.startswith(('head', 'blocks.0.norm')) for name in changed)


def test_table_of_attention(monkeypatch, capsys):
    """A row for each model."""
    import start_attention

    monkeypatch.setattr(sys, 'argv', ['start_attention.py', 'vit_tiny_patch16_224', '--threads', '1'])
    model = vit_starts.new_network('default', 0)
    monkeypatch.setattr(start_attention.timm, 'create_model', lambda name, **_: model)
    start_attention.main()
    row = capsys.readouterr().out.splitlines()[2]
    name, encoding, grid, first, last, share = row.strip('| ').split(' | ')
    assert (name, encoding, grid, share) == ('`vit_tiny_patch16_224`', 'absolute', '8×8', '0')
    assert float(first) < 0.1 and float(last) < 0.1
