"""The benchmarks of a GPU and the script for an hour with one, on the CPU with small models."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'tools/benchmarks'))

import benchmark  # noqa: E402
import gpu  # noqa: E402

from attncnn_plugin.attention import QuadraticAttention  # noqa: E402


@pytest.mark.skipif(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 7), reason='its score_mod reads no tables')
def test_flex_attention_is_the_quadratic_layer():
    layer, flex = QuadraticAttention(6, 3), gpu.Flex(6, 3, side=4, quick=True, part=4)
    flex.center.data, flex.alpha.data = layer.encoding.center.data, layer.encoding.sqrt_precision.data.square() / 2
    flex.value = layer.value
    x = torch.randn(2, 4, 4, 6)
    with torch.no_grad():
        assert torch.allclose(flex(x), layer(x), atol=1e-5)


@pytest.mark.parametrize('names', [['layers'], pytest.param(['layers', 'networks'], marks=pytest.mark.slow)])
def test_the_command(names, tmp_path, monkeypatch, capsys):
    """A page that begins with how it is measured, with every layer; a failure of one is a cell, no end."""
    precisions = ['bfloat16'] if len(names) == 1 else ['float32', 'bfloat16, compiled']
    monkeypatch.setattr(gpu, 'PRECISIONS', {name: gpu.PRECISIONS[name] for name in precisions})
    page = tmp_path / 'benchmarks_gpu.md'
    command = ['benchmark.py', '--device', 'cpu', '--quick', '--threads', '1', '--page', str(page), '--only', *names]
    monkeypatch.setattr(sys, 'argv', command)
    benchmark.main()
    text = page.read_text()
    assert text.startswith('# Benchmarks on a GPU') and 'no measurement' in text
    assert [f'(`{name}`)' in text for name in gpu.GROUPS] == [name in names for name in gpu.GROUPS]
    cells = [line.split('|')[2] for line in text.splitlines() if line.startswith('| ')][2:]
    assert len(cells) >= 14 and sum('Error' in cell for cell in cells) <= len(gpu.PRECISIONS)  # flex attention's


@pytest.mark.slow
def test_all_in_one_go(tmp_path, monkeypatch, capsys):
    """From images in folders; then nothing is left to do, and a training that was stopped goes on."""
    import on_a_gpu
    from PIL import Image

    for part in ('train', 'test'):
        for label in range(10):
            folder = tmp_path / f'images/{part}/{label}'
            folder.mkdir(parents=True)
            for number in range(8):
                Image.effect_noise((32, 32), 10 * label + 5).convert('RGB').save(folder / f'{number}.png')

    def run(*options):
        command = ['on_a_gpu.py', '--smoke', '--data', tmp_path / 'images', '--out', tmp_path / 'out', *options]
        monkeypatch.setattr(sys, 'argv', list(map(str, command)))
        on_a_gpu.main()
        return capsys.readouterr().out

    parts = ['c20', 'c20_more', 'starts']
    said = run('--only', *parts)
    results = {part: json.loads((tmp_path / f'out/{part}.json').read_text()) for part in parts}
    assert {name: len(own['networks']) for name, own in results.items()} == dict(c20=2, c20_more=2, starts=5)
    for result in results.values():
        assert (
            'one seed' in result['differs'] or result is results['c20_more'] and 'no measurement' in result['machine']
        )
        assert all(len(own['curve']) == own['epochs'] == 2 for own in result['networks'].values())
    assert said.strip() in (tmp_path / 'out/log.txt').read_text()
    assert run('--only', *parts).count('done before') == 3
    (tmp_path / 'out/c20.json').unlink()
    (tmp_path / 'out/c20_epochs.json').write_text('3')
    said = run('--only', 'c20')
    assert 'quadratic: epoch 3 of 3' in said and 'epoch 2' not in said and 'c20: done' in said


def test_images_are_flipped_and_shifted(monkeypatch):
    import on_a_gpu

    images = torch.arange(3 * 32 * 32).view(1, 3, 32, 32).expand(50, -1, -1, -1)
    for image in on_a_gpu.augmented(images).permute(0, 3, 1, 2):
        inside = image[:, 4:28, 4:28]
        rows, columns = inside[0] // 32, inside[0] % 32
        assert torch.equal(inside[1], inside[0] + 1024) and (rows[1:] - rows[:-1] == 1).all()
        assert (columns[:, 1:] - columns[:, :-1]).unique().tolist() in ([1], [-1])
