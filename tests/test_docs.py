"""The documentation and the docstrings: their Python runs, configs build, commands and links name what exists."""

import ast
import doctest
import importlib
import inspect
import json
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from statistics import mean

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageChops, ImageStat

from attncnn_plugin.commands import parse_args

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(page for folder in ('', 'docs/', 'docs/gallery/', 'docs/tables/') for page in ROOT.glob(f'{folder}*.md'))
NEEDS = {
    'attncnn_plugin.visualization': 'matplotlib',
    'from sklearn': 'sklearn',
    'torch.onnx': 'onnxscript',
    'from mmpretrain': 'mmpretrain',
    'from transformers': 'accelerate',
    'from lightning': 'lightning',
}
OUTPUT = '```text title="Output"'
PROGRAM = re.compile(rf'^```python$\n(.*?)^```$(?:\n+{OUTPUT}$\n(.*?)^```$)?', re.MULTILINE | re.DOTALL)
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
def test_python_runs(page, monkeypatch, tmp_path, request, capsys):
    """And prints what ``OUTPUT`` right below a block says, up to spaces at the ends of lines; ``...`` is anything."""
    monkeypatch.chdir(tmp_path)
    names, text = {'__name__': '__main__'}, page.read_text()
    programs = [found for found in PROGRAM.findall(text) if is_program(found[0])]
    assert sum(bool(output) for _, output in programs) == text.count(OUTPUT), 'an output without its Python'
    for block, output in programs:
        if 'torch.onnx' in block and not request.config.option.slow:
            continue
        for word, library in NEEDS.items():
            if word in block:
                pytest.importorskip(library)
        capsys.readouterr()
        exec(compile(block, page.name, 'exec'), names)
        printed = '\n'.join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + '\n'
        assert not output or doctest.OutputChecker().check_output(output, printed, doctest.ELLIPSIS), printed


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
def test_commands_name_what_exists(page, tmp_path, monkeypatch):
    for words in commands(page):
        for word in words:
            if word.startswith(('tools/', 'configs/')):
                assert (ROOT / word).is_file(), words
        script = next((word for word in words if re.fullmatch(r'tools/.+/.+\.py', word)), None)
        source = '' if script is None else (ROOT / script).read_text()
        for option in (word for word in words if word.startswith('--') and source):
            assert f"'{option}'" in source, words
        if words[:1] == ['attncnn']:
            monkeypatch.chdir(tmp_path)
            parse_args(words[1:])


def test_every_tool_is_listed():
    scripts = [path for path in ROOT.glob('tools/**/*.[ps][yh]') if path.read_text().startswith('#!')]  # .py, .sh
    page = (ROOT / 'docs/commands.md').read_text()
    assert len(scripts) > 5
    assert [path.name for path in scripts if path.relative_to(ROOT).as_posix() not in page] == []


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
        if anchor and target.parent.name != 'api':  # of the API the strict build of the site knows the anchors
            assert anchor in anchors(target), link


def top1(table, label, measure='top1'):
    """The accuracies of a row of a committed table by seed, or another measure; of corrupted images the mean."""
    runs = json.loads((ROOT / f'docs/tables/{table}.json').read_text())
    found = {run['seed']: run[measure] for run in runs if run['label'] == label}
    return {seed: mean(sum(kinds.values(), [])) for seed, kinds in found.items()} if measure == 'corrupted' else found


def ahead(table, one, other, measure='top1'):
    """How much more accurate a row is than another, by seed."""
    accuracies, others = top1(table, one, measure), top1(table, other, measure)
    return [accuracies[seed] - others[seed] for seed in sorted(accuracies.keys() & others.keys())]


def points(difference):
    """A difference of accuracies as the docs say it: to whole points, or half of one."""
    names = ['a', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten']
    if difference < 0.75:
        return 'half a point' if difference > 0.25 else 'level'
    return f'{names[round(difference) - 1]} point{"s" if difference >= 1.5 else ""}'


def gain(*rows):
    """By how much a row is ahead of another, mean over seeds, in words."""
    return points(mean(ahead(*rows)))


def behind_a_cnn():
    """How much less accurate heads by position are, with 20,000 images and with 5,000, in order."""
    return [
        sorted(
            mean(top1('C20-1', f'ResNet{few}').values()) - mean(top1('C20-1', f'{heads}{few}').values())
            for heads in ('quadratic', 'generalized', 'learned')
        )
        for few in ('', ', 5,000 images')
    ]


def test_numbers_of_the_readme():
    """Those of trainings are of the committed tables."""
    page = (ROOT / 'README.md').read_text()
    measured = {
        '`sa_quadratic_cifar`': top1('C20-1', 'quadratic'),
        '`sa_generalized_cifar`': top1('C20-1', 'generalized'),
        '`sa_learned_cifar`': top1('C20-1', 'learned'),
        '`sa_learned_content_cifar`': top1('C20-1', 'learned with content, 5,000 images'),
        '`cmhsa3_patch16_224`': top1('two-phases', 'both phases'),
        '': top1('C20-1', 'ResNet'),
    }
    rows = re.findall(r'^\| (`\w+`)? ?\|.*\| [\d.]+ \| ([\d.]+)[^|]*\|$', page, re.MULTILINE)
    assert dict(rows) == {name: f'{mean(seeds.values()):.1f}' for name, seeds in measured.items()}
    behind = behind_a_cnn()[0]
    assert f'[{round(behind[0])} to {round(behind[-1])} points below](docs/tables/C20-1.md)' in page
    half = mean(ahead('pruning', 'all 24 heads', '12 heads, by importance'))
    assert f'[{round(half)} point less](docs/tables/pruning.md) at a fifth fewer multiply-adds' in page
    for_attention = points(min(ahead('T-CNN', 'additive attention', 'ResNet, trained on')))
    assert f'after 50 more epochs of both, [{for_attention} more](docs/tables/T-CNN.md) than the CNN' in page
    starts = 'Gaussian', 'sine-cosine embedding', 'mimetic'
    gains = [round(mean(ahead('starts', row, 'as it comes'))) for row in starts]
    claim = '[+{} points](docs/tables/starts.md) over the default start; its sine-cosine embedding alone +{}, '
    assert f'{claim}a mimetic start +{{}} |'.format(*gains) in page
    phases = ahead('two-phases', 'both phases', 'attention')
    claim = f'[{mean(phases):.0f} points above](docs/tables/two-phases.md) attention from a random start on average'
    assert f'{claim} ({min(phases):.0f} to {max(phases):.0f} by seed)' in page
    assert f"(CMHSA's\nhave {measured['`cmhsa3_patch16_224`'][0]:.1f})" in page


def test_answers_of_the_tables():
    """Each page begins with a question and an answer, whose numbers are those of its results."""

    def range_of(values, digits=0):
        return f'{min(values):.{digits}f} to {max(values):.{digits}f}'

    few, many = map(range_of, reversed(behind_a_cnn()))
    content = ahead('C20-1', 'learned, 5,000 images', 'learned with content, 5,000 images')[0]
    cnn = 'ResNet, trained on'
    robust = [mean(ahead('T-CNN', f'{kind} attention', cnn, 'corrupted')) for kind in ('additive', 'gated')]
    starts = [('starts', row, 'as it comes') for row in ('Gaussian', 'sine-cosine embedding', 'mimetic')]
    gaussian, embedding, mimetic, wide = (
        gain(*rows).split()[0] for rows in [*starts, ('starts', 'Gaussian, 192', 'as it comes, 192')]
    )
    phases = [('two-phases', 'both phases', other) for other in ('attention', 'ViT', 'convolution')]
    spreads = [
        sum(np.ptp(list(top1('pruning', f'{left} heads, {how}').values())) for left in (18, 12, 6))
        for how in ('by importance', 'at random')
    ]
    assert spreads[0] < spreads[1] and gain('starts', 'impulse, 192', 'random embedding, 192') == 'level'
    answers = {
        'C20-1': f'It ends {many} points below with 20,000 images, {few} with 5,000. '
        f'Content costs learned heads {content:.0f} points',
        'C20-E': 'Without them the trained network trains on to the same accuracy',
        'two-phases': f'yes, {range_of(ahead(*phases[0]))} points more than attention from a random start and '
        f'{gain(*phases[1]).split()[0]} more than a ViT, but hardly more than the convolution alone: '
        f'{gain(*phases[2])} on average',
        'T-CNN': f'It ends {gain("T-CNN", "gated attention", cnn)} above the CNN that trains on as long, in twice '
        f'the time, and {range_of(robust, 1)} points above it',
        'pruning': f'half of them for {gain("pruning", "all 24 heads", "12 heads, by importance")} of accuracy',
        'starts': f'{gaussian} points more, but the sine-cosine embedding that comes with them gains {embedding} '
        f'alone, and mimetic heads gain {mimetic}. With 192 channels, in three heads of 64, Gaussian heads gain {wide} '
        'points',
    }
    assert answers.keys() == {path.stem for path in ROOT.glob('docs/tables/*.json')}
    for name, answer in answers.items():
        first = (ROOT / f'docs/tables/{name}.md').read_text().splitlines()[2]
        assert '? Our answer, with CIFAR-10-J: ' in first and answer in first, (name, answer)


def test_hours_of_the_tables():
    """Those of all trainings, one after the other; docs/reproduce.md rounds them."""
    page = (ROOT / 'docs/reproduce.md').read_text()
    for path in ROOT.glob('docs/tables/*.json'):
        hours = sum(run['seconds'] for run in json.loads(path.read_text())) / 3600
        assert f' {hours:.1f} hours ' in path.with_suffix('.md').read_text()
        assert re.search(rf'^\| \[`{path.stem}`\].* \| {max(round(hours), 1)} \|$', page, re.MULTILINE), path.stem


def test_numbers_of_the_findings():
    """Differences, and what they cost, are those of the committed tables."""
    page = ' '.join((ROOT / 'docs/findings.md').read_text().split())

    behind = behind_a_cnn()
    limits = [round(gaps[i]) for gaps in behind for i in (0, -1)]
    phases = ahead('two-phases', 'both phases', 'attention')
    over_attention = f'{round(min(phases))} to {round(max(phases))} points above attention that begins at random'
    over_vit = sorted(ahead('two-phases', 'both phases', 'ViT'))
    resnet = mean(top1('C20-1', 'ResNet, 5,000 images').values())
    over_content = resnet - mean(top1('C20-1', 'learned with content, 5,000 images').values())
    over_convolution = gain('two-phases', 'both phases', 'convolution')
    contents = ('additive', 'gated')
    pairs = [('T-CNN', f'{content} attention', 'ResNet, trained on') for content in contents]
    (over_cnn,) = {points(difference) for pair in pairs for difference in ahead(*pair)}
    robust = [mean(ahead(*pair, 'corrupted')) for pair in pairs]
    for table, one, other in pairs:
        for measure, ratio in (('multiply_adds', 1.5), ('seconds', 2)):
            measured = [mean(top1(table, row, measure).values()) for row in (one, other)]
            assert measured[0] / measured[1] == pytest.approx(ratio, rel=0.15), (one, measure)
        assert round(4 * mean(top1(table, one, 'moved').values())) == 1, 'a quarter'
    sentences = [
        f'{over_cnn}, in twice the time |',
        f'[became attention](cnn_to_attention.md) ends {over_cnn} above one that stayed a ResNet, with both seeds',
        'it gains {:.1f} points with additive content and {:.1f} with gated'.format(*robust),
        f'ended {limits[0]} to {round(over_content)} points above every network made of attention',
        'no: {} to {} points behind after 60 epochs of 20,000 images, {} to {} after 20 of 5,000'.format(*limits),
        f'yes: {over_attention}',
        f'hardly: {over_convolution} on average, in twice the time',
        f'yes: {gain("two-phases", "both phases", "ViT")} on average',
        f'| {gain("two-phases", "both phases", "both phases, narrow heads")} less, with half of the multiply-adds',
        f'{gain("starts", "sine-cosine embedding", "Gaussian")} worse than its sine-cosine embedding alone',
        f'the best start, {gain("starts", "mimetic", "sine-cosine embedding")} above the embedding alone',
        f'half of them for {gain("pruning", "all 24 heads", "12 heads, by importance")}',
        f'both phases gain {over_convolution} for twice the time',
        f'a mimetic start, for {gain("starts", "mimetic", "as it comes")} on 5,000 images',
        f'a plain ViT ends {points(over_vit[0])} to {points(over_vit[-1])} below [two phases]',
        f'[Gaussian heads](vit_init.md) end {gain("starts", "Gaussian", "as it comes")} above mmpretrain',
        f'Gaussian heads end {gain("starts", "Gaussian, 192", "as it comes, 192")} above the default',
        f'no gain: {gain("starts", "impulse, 192", "random embedding, 192")} with a random embedding as large as',
    ]
    assert [sentence for sentence in sentences if sentence not in page] == []


def test_claims_of_the_papers():
    """Every claim has a place where it is shown, and a verdict whose numbers are those of tables and weights."""
    importlib.import_module('attncnn_plugin')  # registers the networks of the shipped weights

    page = (ROOT / 'docs/papers.md').read_text()
    section = page[page.index('## Claims') : page.index('## C20: experiments')]
    rows = [
        re.split(r' \| ', line.strip('| ')) for line in section.splitlines() if re.match(r'\| (?!-|C20 |L21 )', line)
    ]
    assert len(rows) == 17 and all(len(row) == 3 for row in rows)
    assert all(re.search(r'\]\(.+\)|`(tests|configs)/', shown) for _, shown, _ in rows)
    verdicts = [verdict for _, _, verdict in rows]
    allowed = re.compile(r'(holds( at small scale)?|differs)[:;, ].*\w.*|not trained')
    assert [verdict for verdict in verdicts if not allowed.fullmatch(verdict)] == []

    def both(table, one, other):
        return '{:.1f} against {:.1f}'.format(*(mean(top1(table, row).values()) for row in (one, other)))

    curves = [
        [dict(own['accuracy/top1']) for own in top1('C20-1', row, 'curves').values()] for row in ('ResNet', 'quadratic')
    ]
    behind = [round(mean(a[epoch] for a in curves[0]) - mean(b[epoch] for b in curves[1])) for epoch in (10, 60)]
    (pruned,) = {f'{mean(top1("C20-E", row).values()):.1f}' for row in ('pruned', 'trained on with all heads')}
    at_positions = []
    for name in ('sa_quadratic_small', 'sa_learned_small'):
        attention = timm.create_model(name, pretrained=True).blocks[0].attn
        probs = attention.attention_probs((16, 16)).detach().unflatten(2, (16, 16))[:, 8 * 16 + 8]
        at_positions.append((probs[:, 7:10, 7:10].amax((1, 2)) > 0.8).sum().item())
    of_convolution, of_attention = (
        float(re.search(rf'^\| {phase}, training +\|.*\| ([\d.]+) ', benchmarks, re.MULTILINE)[1])
        for benchmarks in [(ROOT / 'docs/tables/benchmarks.md').read_text()]
        for phase in ('convolution', 'attention')
    )
    both_phases = (of_convolution + of_attention) / 2
    few_images = ' with content, 5,000 images', ', 5,000 images'
    expected = [
        f'differs: {both("C20-1", "quadratic", "ResNet")} after 60 epochs',
        f'holds at small scale: {behind[0]} points behind after 10 epochs, {behind[1]} after 60',
        f'holds at small scale: {both("C20-1", "learned", "quadratic")}',
        'holds at small scale: {} (one seed)'.format(both('C20-1', *(f'learned{few}' for few in few_images))),
        f'holds at small scale: {at_positions[0]} of 9 heads, with 80% of their attention or more',
        f'holds at small scale: {at_positions[1]} of 9 heads',
        f'holds at small scale: {pruned} with and without them (one seed)',
        f'holds at small scale: {both("two-phases", "both phases", "attention")}',
        f'holds at small scale: {both("two-phases", "both phases", "ViT")}',
        f'differs: {both("two-phases", "both phases", "convolution")}, level within the seeds',
        f'differs: {of_convolution:.2f}, {of_attention:.2f} and {both_phases:.2f} on a CPU',
    ]
    assert [verdict for verdict in verdicts if 'small scale' in verdict or 'differs' in verdict] == expected
    seeds = ahead('two-phases', 'both phases', 'convolution')
    assert min(seeds) < 0 < max(seeds), 'level'
    # A rate at which the cosine of the second phase ends, and where its warm-up begins.
    schedule = {}
    exec((ROOT / 'configs/_base_/schedules/cifar100_two_phases.py').read_text(), schedule)
    warm_up, cosine = schedule['custom_hooks'][0]['param_scheduler']
    assert cosine['eta_min'] == 1e-5 and warm_up['start_factor'] * 1e-5 == pytest.approx(2e-7)


def test_sizes_of_the_papers_networks():
    """The table of docs/models.md has the parameters and FLOPs of the metafile, which counts them."""
    yaml = pytest.importorskip('yaml')
    models = {
        model['Name']: model['Metadata']
        for model in yaml.safe_load((ROOT / 'configs/metafile.yml').read_text())['Models']
    }
    page = (ROOT / 'docs/models.md').read_text()
    rows = re.findall(r'^\| `(\w+_cifar10+)`.*? \| ([\d.]+)M \| ([\d.]+)B \|', page, re.MULTILINE)
    assert len(rows) == 13
    for name, *numbers in rows:
        if name != 'sa_generalized_pruned_cifar10':  # the metafile's are those before any head is removed
            found = models[name]['Parameters'] / 1e6, models[name]['FLOPs'] / 1e9
            assert numbers == [f'{found[0]:.1f}', f'{found[1]:.2f}'], name


def test_project_files():
    """The forge reads these; a mistake in them would show there alone."""
    yaml = pytest.importorskip('yaml')
    from attncnn_plugin.version import __version__

    assert yaml.safe_load((ROOT / 'CITATION.cff').read_text())['version'] == __version__
    assert f'\n## {__version__}\n' in (ROOT / 'CHANGELOG.md').read_text()
    (job,) = yaml.safe_load((ROOT / '.github/workflows/ci.yml').read_text())['jobs'].values()
    assert job['timeout-minutes'] and [step['run'] for step in job['steps'] if 'run' in step] == ['.ci/run']
    templates = [path.read_text() for path in ROOT.glob('.github/ISSUE_TEMPLATE/*.md')]
    assert len(templates) == 2
    for template in templates:
        assert set(yaml.safe_load(template.split('---')[1])) == {'name', 'about', 'labels'}


def test_tests_that_are_named_exist():
    named = set(re.findall(r'`(test_\w+)`', (ROOT / 'docs/faults.md').read_text()))
    sources = ''.join(path.read_text() for path in ROOT.glob('tests/**/*.py'))
    assert named
    assert [name for name in named if f'def {name}(' not in sources] == []


def test_names_of_the_papers_and_in_the_tables_of_models_exist():
    """Files, configs, models of timm, options, classes and functions, and the arguments of calls."""
    papers, models = ((ROOT / f'docs/{page}.md').read_text() for page in ('papers', 'models'))
    text = re.sub(r'^```.*?^```$', '', papers, flags=re.MULTILINE | re.DOTALL)
    text += '\n'.join(line for line in models.splitlines() if line.startswith('|'))
    spans = re.findall(r'`([^`]+)`', text)
    files = [path for folder in ('attncnn_plugin', 'configs', 'tools') for path in ROOT.glob(f'{folder}/**/*.py')]
    files += ROOT.glob('configs/**/*.yml')
    known = set(re.findall(r'\w+', ' '.join(path.read_text() + path.stem for path in files))) | {'nn', 'resume', 'amp'}
    assert len(spans) > 50
    for span in spans:
        code = re.sub(r"'[^']*'", '', span)  # what is called, and with which arguments
        assert (ROOT / span).is_file() if span.endswith('.py') else set(re.findall(r'\b[^\W\d]\w*', code)) <= known, (
            span
        )


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    pytest.importorskip('mkdocstrings', reason="pip install -e '.[docs]'")
    pytest.importorskip('latex2mathml', reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp('site')
    build = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(folder)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
def test_site_builds(site):
    for file in ('api/attention/index.html', 'gallery/quadratic/explorer.html', 'changelog/index.html', 'CITATION.cff'):
        assert (site / file).is_file(), file
    index = json.loads((site / 'search/search_index.json').read_text())
    texts = ' '.join(re.sub('<.*?>', ' ', page['text']) for page in index['docs']).lower()
    assert {'install', 'slurm', 'customdataset', 'cite'} <= set(re.split(index['config']['separator'], texts))
    home = (site / 'index.html').read_text()
    assert 'docs/' not in home and 'images/photo_dark.png#only-dark' in home and 'href="contributing/"' in home
    assert 'class="arithmatex"' not in ''.join(page.read_text() for page in site.glob('*/index.html'))
    api = ''.join(page.read_text() for page in site.glob('api/*/index.html'))
    assert not re.search(':(class|func|meth|attr|mod):', api), 'a cross-reference that is no link'


@pytest.mark.slow
def test_no_page_scrolls_sideways(site, tmp_path):
    """On a desk and on a phone: wide tables and formulas scroll within the page."""
    pytest.importorskip('selenium')
    from helpers.browser import Browser, missing_programs

    if missing_programs():
        pytest.skip(f'{" and ".join(missing_programs())} not installed')
    pages = [*site.glob('index.html'), *site.glob('*/index.html'), *site.glob('*/*/index.html')]
    with Browser(tmp_path) as browser:
        for width in (1400, 390):
            size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
            browser.command('Emulation.setDeviceMetricsOverride', size)
            for page in pages:
                browser.driver.get(page.as_uri())
                found = browser.script('return document.documentElement.scrollWidth')
                assert found <= width, (page, width)
    assert len(pages) > 40


FOLDERS = ['attncnn_plugin.convert', 'attncnn_plugin.pruning', 'attncnn_plugin.analysis', 'attncnn_plugin.transformers']


WITH_EXAMPLES = sorted(path for path in ROOT.glob('attncnn_plugin/**/*.py') if '>>>' in path.read_text())


@pytest.mark.parametrize('path', WITH_EXAMPLES, ids=[f'{path.parent.name}/{path.stem}' for path in WITH_EXAMPLES])
def test_examples(path, monkeypatch, tmp_path):
    for part, library in {'mm': 'mmpretrain', 'hugging_face.py': 'accelerate'}.items():
        if part in path.parts:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    name = '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')
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


@pytest.fixture(scope='module')
def imitation():
    pytest.importorskip('matplotlib')
    return runpy.run_path(str(ROOT / 'docs/imitation.py'))


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(4))
def test_nine_heads_of_the_readme_walk_into_the_kernel(seed, imitation, tmp_path):
    """With each of the seeds; the moving picture ends with what seed 0 comes to."""
    centers, losses, heads = imitation['walk'](seed)
    assert abs(centers[0]).max() > 3 and abs(centers[-1]).max() < 1
    assert losses[0] > 0.5 and losses[-1] < 2e-4 and heads.worst < 0.02
    if seed == 0:
        imitation['save'](centers, losses, tmp_path)
        for theme in ('light', 'dark'):
            then, now = (Image.open(folder / f'imitation_{theme}.gif') for folder in (ROOT / 'docs/images', tmp_path))
            assert then.n_frames == now.n_frames and (ROOT / then.filename).stat().st_size < 1e5
            for frame in (0, 10, then.n_frames - 1):
                then.seek(frame), now.seek(frame)
                off = ImageChops.difference(then.convert('RGB'), now.convert('RGB'))
                assert sum(ImageStat.Stat(off).mean) < 3, (theme, frame)  # of 255: other processors round otherwise
