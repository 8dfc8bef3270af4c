"""The tutorials: their notebooks have the code of the pages, and all of it runs, in order, with the output below it."""

import contextlib
import doctest
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = runpy.run_path(str(ROOT / 'docs/notebooks.py'))
PAGES = NOTEBOOKS['PAGES']
BLOCK = re.compile(r'^```(python|bash)\n(.*?)^```$(?:\n+^```text.*?\n(.*?)^```$)?', re.MULTILINE | re.DOTALL)


def blocks_of(page):
    """The language, the code and the output of each block of a page."""
    return BLOCK.findall((ROOT / f'docs/{page}.md').read_text(encoding='utf-8'))


@pytest.mark.parametrize('page', PAGES)
def test_notebook_is_that_of_the_page(page):
    written = (ROOT / f'docs/notebooks/{page}.ipynb').read_text(encoding='utf-8')
    assert written == NOTEBOOKS['notebook'](page), 'run python docs/notebooks.py'
    sources = [''.join(cell['source']) for cell in json.loads(written)['cells'] if cell['cell_type'] == 'code']
    commands = [re.sub('^!', '', source, flags=re.MULTILINE) for source in sources if '%cd' not in source]
    assert commands == [code.strip('\n') for _, code, _ in blocks_of(page)]


def plain(text):
    """An output without its numbers, which processors and versions change; those of Python are in ``test_docs.py``."""
    return re.sub(r'\d[\d.,]*(e-\d+)?', '#', text)


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES)
def test_tutorial_runs(page, monkeypatch, tmp_path):
    """As a reader runs it: commands in a shell, Python in one interpreter, beside ``tools`` and ``configs``."""
    pytest.importorskip('sklearn')
    pytest.importorskip('matplotlib')
    if any(language == 'bash' for language, *_ in blocks_of(page)):
        pytest.importorskip('mmpretrain')
    for name in ('tools', 'configs'):
        (tmp_path / name).symlink_to(ROOT / name)
    command = tmp_path / 'bin/attncnn'  # of this checkout
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m attncnn_plugin "$@"\n')
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PATH', f'{command.parent}:{Path(sys.executable).parent}', prepend=':')
    names = {}
    for language, code, output in blocks_of(page):
        if language == 'python':
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                exec(compile(code, page, 'exec'), names)
            printed = stream.getvalue()
        else:
            streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            ended = subprocess.run(['bash', '-euo', 'pipefail', '-c', code], text=True, **streams)
            printed = ended.stdout
            assert ended.returncode == 0, printed
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert not output or doctest.OutputChecker().check_output(plain(output), plain(printed), flags), printed
