"""The documentation and the docstrings: their Python runs, configs build, commands and links name what exists."""

import ast
import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('docs/*.md'), *ROOT.glob('docs/gallery/*.md')])
NEEDS = {
    'attncnn_plugin.visualization': 'matplotlib',
    'torch.onnx': 'onnxscript',
    'from mmpretrain': 'mmpretrain',
    'from transformers': 'accelerate',
    'from lightning': 'lightning',
}
CONFIG = re.compile(r'(_base_|model|custom_hooks|default_hooks) = ')


def blocks(page, language):
    """The blocks of code in a language."""
    return re.findall(rf'^```{language}$\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL)


def pages_with(language, is_wanted=lambda block: True):
    pages = [page for page in PAGES if any(map(is_wanted, blocks(page, language)))]
    return pytest.mark.parametrize('page', pages, ids=[page.stem for page in pages])


def is_config(block):
    return CONFIG.match(block) is not None


def is_program(block):
    return not is_config(block)


def is_mmpretrains(block):
    """Whether it is a config that needs no other package of the family; ``test_downstream.py`` has those that do."""
    return is_config(block) and re.search("'mm(det|seg)::", block) is None


@pages_with('python', is_program)
def test_python_runs(page, monkeypatch, tmp_path, request):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in filter(is_program, blocks(page, 'python')):
        if 'torch.onnx' in block and not request.config.option.slow:
            continue
        for word, library in NEEDS.items():
            if word in block:
                pytest.importorskip(library)
        exec(compile(block, page.name, 'exec'), names)


@pages_with('python', is_mmpretrains)
def test_configs_build(page, tmp_path):
    mmpretrain = pytest.importorskip('mmpretrain', reason='mmpretrain cannot be imported')
    from mmengine.config import Config

    import attncnn_plugin  # noqa: F401

    for block in filter(is_mmpretrains, blocks(page, 'python')):
        file = tmp_path / 'config.py'
        file.write_text(block)
        config = Config.fromfile(file)
        if 'model' in config:
            mmpretrain.registry.MODELS.build(config.model)
        own = {}  # without what it inherits: other hooks want a whole run
        hooks = [line for line in ast.parse(block).body if re.match('(custom|default)_hooks =', ast.unparse(line))]
        exec(compile(ast.Module(hooks, []), page.name, 'exec'), own)
        for hook in [*own.get('custom_hooks', []), *own.get('default_hooks', {}).values()]:
            mmpretrain.registry.HOOKS.build(hook)


def commands(page):
    for block in blocks(page, 'bash'):
        for line in block.replace('\\\n', ' ').splitlines():
            for command in line.split('&&'):
                yield shlex.split(command, comments=True)


@pages_with('bash')
def test_commands_name_what_exists(page):
    for words in commands(page):
        script = next((word for word in words if re.fullmatch(r'tools/.+\.(py|sh)', word)), None)
        if script is None:
            continue
        for word in words:
            if word.startswith(('tools/', 'configs/')):
                assert (ROOT / word).is_file(), words
        if (ROOT / script).parent == ROOT / 'tools':
            continue  # mmpretrain's own
        source = (ROOT / script).read_text()
        if 'add_model_options(' in source:
            source += (ROOT / 'attncnn_plugin/model_options.py').read_text()
        for option in (word for word in words if word.startswith('--')):
            assert f"'{option}'" in source, words


def anchors(page):
    """The anchors of a page, as GitHub and mkdocs make them of headings."""
    text = re.sub(r'^```.*?^```$', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r'[^\w\- ]', '', heading.lower()) for heading in re.findall(r'^#+ (.+)$', text, re.MULTILINE))
    return {heading.strip().replace(' ', '-') for heading in headings} | set(re.findall(r'<a id="(.+?)">', text))


@pytest.mark.parametrize('page', PAGES, ids=[page.stem for page in PAGES])
def test_links_lead_somewhere(page):
    for link in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
        if '://' in link:
            continue
        path, _, anchor = link.partition('#')
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_tests_that_are_named_exist():
    named = set(re.findall(r'`(test_\w+)`', (ROOT / 'docs/faults.md').read_text()))
    sources = ''.join(path.read_text() for path in ROOT.glob('tests/**/*.py'))
    assert named
    assert [name for name in named if f'def {name}(' not in sources] == []


def test_names_on_the_page_of_the_papers_exist():
    """Files, configs, models of timm, options, classes and functions, and the arguments of calls."""
    text = re.sub(r'^```.*?^```$', '', (ROOT / 'docs/papers.md').read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r'`([^`]+)`', text)
    files = [path for folder in ('attncnn_plugin', 'configs', 'tools') for path in ROOT.glob(f'{folder}/**/*.py')]
    known = set(re.findall(r'\w+', ' '.join(path.read_text() + path.stem for path in files))) | {'nn', 'resume', 'amp'}
    assert len(spans) > 50
    for span in spans:
        code = re.sub(r"'[^']*'", '', span)  # what is called, and with which arguments
        assert (ROOT / span).is_file() if span.endswith('.py') else set(re.findall(r'\b[^\W\d]\w*', code)) <= known, (
            span
        )


@pytest.mark.slow
def test_site_builds(tmp_path):
    pytest.importorskip('mkdocstrings', reason="pip install -e '.[docs]'")
    build = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(tmp_path)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / 'api/attention/index.html').is_file()


FOLDERS = ['attncnn_plugin.convert', 'attncnn_plugin.pruning', 'attncnn_plugin.analysis', 'attncnn_plugin.transformers']


def modules_of(folder):
    package = importlib.import_module(folder)
    return [folder, *(module.name for module in pkgutil.walk_packages(package.__path__, f'{folder}.'))]


@pytest.mark.parametrize('name', [name for folder in FOLDERS for name in modules_of(folder)])
def test_examples(name):
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for examples in doctest.DocTestFinder().find(importlib.import_module(name)):
        torch.manual_seed(0)  # each docstring by itself
        runner.run(examples)
    assert runner.failures == 0


@pytest.mark.parametrize('folder', FOLDERS)
def test_public_functions_have_examples(folder):
    package = importlib.import_module(folder)
    functions = {name: getattr(package, name) for name in package.__all__}
    functions = {name: function for name, function in functions.items() if inspect.isfunction(function)}
    assert functions
    assert [name for name, function in functions.items() if '>>>' not in function.__doc__] == []
