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
    if len(names) == 1:
        monkeypatch.setattr(gpu, 'PRECISIONS', {'bfloat16': (True, True, False)})
    page = tmp_path / 'benchmarks_gpu.md'
    command = ['benchmark.py', '--device', 'cpu', '--quick', '--threads', '1', '--page', str(page), '--only', *names]
    monkeypatch.setattr(sys, 'argv', command)
    benchmark.main()
    text = page.read_text()
    assert text.startswith('# Benchmarks on a GPU') and 'no measurement' in text
    assert [f'(`{name}`)' in text for name in gpu.GROUPS] == [name in names for name in gpu.GROUPS]
    cells = [line.split('|')[2] for line in text.splitlines() if line.startswith('| ')][2:]
    assert len(cells) >= 14 and sum('Error' in cell for cell in cells) <= len(gpu.PRECISIONS)  # flex attention's
