"""Writes docs/notebooks/*.ipynb from the tutorials' Markdown; a test says where that was forgotten."""

import json
import re
from pathlib import Path
from typing import Any, Dict, List

DOCS = Path(__file__).parent
PAGES = ('tutorial_vit', 'tutorial_digits')
BLOCK = re.compile(r'^```(python|bash)\n(.*?)^```\n', re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r'^```text.*?\n.*?^```\n', re.MULTILINE | re.DOTALL)  # the notebook makes it anew
LINK = re.compile(r'\]\((?!https?:)([^)]+)\)')


def cells_of(page: str) -> List[Dict[str, Any]]:
    """Returns the cells of a page in Markdown: text, Python, and commands behind exclamation marks."""
    text, *pieces = BLOCK.split(OUTPUT.sub('', page))
    cells = [cell('markdown', text)]
    if 'bash' in pieces:
        cells.append(cell('code', '# To the root of the repository:\n%cd ../..'))
    for language, code, text in zip(pieces[::3], pieces[1::3], pieces[2::3]):
        source = code if language == 'python' else re.sub(r'^(?=\S)', '!', code, flags=re.MULTILINE)
        cells += [cell('code', source), cell('markdown', text)]
    return [{**own, 'id': f'cell-{number}'} for number, own in enumerate(cells) if own['source']]


def cell(kind: str, source: str) -> Dict[str, Any]:
    """Returns a cell that was not run; links of its text lead from the folder of the notebooks."""
    if kind == 'code':
        own = dict(execution_count=None, outputs=[])
    else:
        source, own = LINK.sub(r'](../\1)', re.sub(r'\n{3,}', '\n\n', source)), {}
    return dict(cell_type=kind, metadata={}, source=source.strip('\n').splitlines(keepends=True), **own)


def notebook(name: str) -> str:
    """Returns a tutorial as a notebook."""
    kernel = dict(display_name='Python 3', language='python', name='python3')
    cells = cells_of((DOCS / f'{name}.md').read_text(encoding='utf-8'))
    content = dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
    return json.dumps(content, indent=1, ensure_ascii=False) + '\n'


if __name__ == '__main__':
    for name in PAGES:
        (DOCS / f'notebooks/{name}.ipynb').write_text(notebook(name), encoding='utf-8')
