"""A few lines of docs/tables/transformers.md, computed again."""

import inspect
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm

VERSION = '1.0.31'  # of timm, when the table was written
NAMES = [
    'beit: beit_base_patch16_224',
    'swin_transformer: swin_tiny_patch4_window7_224',
    'hiera: hiera_tiny_224',
    'xcit: xcit_nano_12_p16_224',
    'efficientvit_mit: efficientvit_b0',
    'CLIPModel',
    'SamModel',
    'ViTMAEForPreTraining',
    'LlamaModel',
    'models.ViTSAM',
    'models.PCPVT',
    'models.MaxVit',
]


@pytest.fixture(scope='module')
def table(request):
    monkeypatch = pytest.MonkeyPatch()
    request.addfinalizer(monkeypatch.undo)
    docs = request.config.rootpath / 'docs'
    monkeypatch.syspath_prepend(str(docs))
    return runpy.run_path(str(docs / 'transformers_table.py')), (docs / 'tables/transformers.md').read_text(
        encoding='utf-8'
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_line(name, table):
    script, page = table
    (row,) = [own for own in script['ROWS'] if own.name == name]
    pytest.importorskip(row.library.lower().replace('hugging face', 'transformers'))
    with ThreadPoolExecutor(1) as other:
        result = script['result'](row, other)
    own = script['line_of'](row, result).split('|')
    (line,) = [line.split('|') for line in page.splitlines() if f'| `{name}` |' in line]
    assert own[:4] + own[7:] == line[:4] + line[7:] and own[5] == line[5]  # all but the differences
    assert own[6] == line[6] or all(float(cell) < 1e-5 for cell in (own[6], line[6]))
    assert result.compared == result.seen == row.there
    assert result.seen == 0 or result.difference < 1e-5


@pytest.mark.skipif(timm.__version__ != VERSION, reason=f'the table has the files of timm {VERSION}')
def test_all_files_of_timm(table):
    """A file of timm whose code has a softmax of attention is in the table."""
    files = {name.partition(':')[0] for name in (own.name for own in table[0]['ROWS'] if own.library == 'timm')}
    for name in timm.list_modules():
        module = sys.modules.get(f'timm.models.{name}')
        code = inspect.getsource(module) if module else ''  # this package registers models too
        assert name in files or not any(call in code for call in ('.softmax(dim=-1)', 'scaled_dot_product_attention('))
