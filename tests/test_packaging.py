"""The package as a wheel and as an editable install, with and without mmpretrain."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
import zipfile

import pytest
from helpers.images import write_images
from PIL import Image

from attncnn_plugin import commands

USER_CONFIG = """
_base_ = __import__('attncnn_plugin').config_path('sa_quadratic_digits.py')
model = dict(backbone=dict(arch='base'))
"""

CHECK = textwrap.dedent("""
    import pathlib, runpy, sys
    import mmpretrain, timm
    from mmengine.config import Config
    from mmengine.hub import get_config

    user = Config.fromfile(sys.argv[2])  # imports the plugin, whatever tool reads the config
    assert user.model.backbone.type == 'SAQuadratic' and user.model.backbone.arch == 'base'
    import attncnn_plugin
    from attncnn_plugin import commands
    where = pathlib.Path(attncnn_plugin.__file__).parent
    assert where.is_relative_to(sys.argv[1]), where
    config = mmpretrain.ModelHub.get('sa_quadratic_cifar10').config
    assert config.model.backbone.type == 'SAQuadratic' and config.train_cfg.max_epochs == 300
    runtime = attncnn_plugin.config_path('_base_/default_runtime.py')
    assert Config.fromfile(runtime).default_scope == 'mmpretrain'
    assert get_config('mmpretrain::resnet/resnet18_8xb16_cifar10.py').model.backbone.depth == 18
    assert type(mmpretrain.get_model('sa_learned_digits').backbone).__name__ == 'SALearned'
    assert 'sa_quadratic_cifar10' in mmpretrain.list_models('sa_*')
    for name in ('tools/dist_train.sh', 'tools/reproduction/tables.py', 'configs/downstream/_base_/retinanet_coco.py'):
        assert (where / '.mim' / name).is_file(), name

    image, name = str(where / 'weights/images/frog.png'), 'sa_quadratic_small'
    timm.create_model(name, pretrained=True)
    config = [str(where / '.mim/configs/pretrained/sa_quadratic_small.py'), 'attncnn://' + name]
    for out, words in (('timm', ['--timm', name, '--pretrained']), ('mm', ['--mm', *config])):
        commands.main(['explore', *words, '--images', image, '--out', out + '.html'])
        assert pathlib.Path(out + '.html').stat().st_size > 1e5
    small = ['train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=20']
    sys.argv = ['train.py', 'sa_quadratic_digits.py', '--launcher', 'none', '--cfg-options', *small]  # as mim does
    runpy.run_path(str(where / '.mim/tools/train.py'), run_name='__main__')
    assert pathlib.Path('work_dirs/sa_quadratic_digits/epoch_1.pth').is_file()
    print('all is well')
""")


def run(*command, **kwargs):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope='session')
def source(tmp_path_factory, repository):
    """A clone: what git does not know must not be needed."""
    clone = tmp_path_factory.mktemp('clone') / 'attncnn'
    files = run('git', 'ls-files', '--cached', '--others', '--exclude-standard', cwd=repository).split('\n')
    for name in filter(None, files):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (repository / name).is_symlink():
            (clone / name).symlink_to(os.readlink(repository / name))
        elif (repository / name).exists():
            (clone / name).write_bytes((repository / name).read_bytes())
    return clone


@pytest.fixture(scope='session')
def wheel(tmp_path_factory, source):
    """A wheel made of a source distribution."""
    out = tmp_path_factory.mktemp('wheel')
    code = 'import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))'
    sdist = run(sys.executable, '-c', code, out, cwd=source).strip().split('\n')[-1]
    run(sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation', '-w', out, out / sdist)
    return next(out.glob('*.whl'))


@pytest.fixture
def environment(tmp_path):
    """An empty virtual environment that sees this one's packages, but not this one's plugin."""
    run(sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'env')
    site = next((tmp_path / 'env').glob('lib/python*/site-packages'))
    distutils = 'import _distutils_hack; _distutils_hack.add_shim()'  # of setuptools, for mmengine with Python 3.12
    (site / 'parent.pth').write_text(f'{os.path.dirname(os.path.dirname(pytest.__file__))}\n{distutils}\n')
    return tmp_path / 'env'


def install(environment, *what):
    pip = [sys.executable, '-m', 'pip', '--python', environment / 'bin/python']
    run(*pip, 'install', '--no-deps', '--no-build-isolation', '--force-reinstall', *what)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['wheel', 'editable'])
def test_installed(kind, environment, source, wheel, tmp_path):
    install(environment, *([wheel] if kind == 'wheel' else ['-e', source]))
    (tmp_path / 'user.py').write_text(USER_CONFIG)
    home = environment if kind == 'wheel' else source
    variables = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    output = run(environment / 'bin/python', '-c', CHECK, home, tmp_path / 'user.py', cwd=tmp_path, env=variables)
    assert 'all is well' in output
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(('tests', 'configs', 'tools'))]


RUN = textwrap.dedent("""
    import sys, warnings
    from pathlib import Path
    from attncnn_plugin import commands

    assert Path(commands.__file__).is_relative_to(sys.argv[1])
    warnings.simplefilter('ignore')
    for line in sys.stdin.read().splitlines():
        for out in ('less.pth', 'pruned.pth', 'attention.pth', 'start.pth'):
            Path(out).unlink(missing_ok=True)
        print(line, flush=True)
        commands.main(line.split('\\t'))
""")


@pytest.mark.slow
def test_commands_of_the_documentation(environment, wheel, tmp_path, repository):
    """All that need no clone and no training, in an empty folder; weights that would be downloaded are random."""
    install(environment, wheel)
    write_images(tmp_path / 'data/train')
    for name in ('data/test', 'photos'):
        (tmp_path / name).symlink_to(tmp_path / 'data/train/3')
    Image.open(tmp_path / 'photos/0.png').save(tmp_path / 'photo.jpg')
    lines = []
    for page in [*repository.glob('*.md'), *repository.glob('docs/**/*.md')]:
        for block in re.findall(r'^```bash$\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL):
            for line in re.findall('^attncnn (.*)$', block.replace('\\\n', ' '), re.MULTILINE):
                if not re.search('configs/|runs |work_dirs|CONFIG|attncnn_plugin/', line):
                    offline = line if '_small ' in line else re.sub('--pretrained|--checkpoint vit.pth', '', line)
                    lines.append(shlex.split(offline))
    if importlib.util.find_spec('transformers') is None:
        lines = [words for words in lines if '--hf' not in words]
    else:
        from transformers import ViTConfig, ViTForImageClassification

        size = dict(hidden_size=24, num_attention_heads=3, intermediate_size=24, image_size=32, patch_size=8)
        ViTForImageClassification(ViTConfig(**size, num_labels=10)).save_pretrained(tmp_path / 'vit_folder')
    assert {words[0] for words in lines} == set(commands.VERBS)
    variables = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    folder = dict(cwd=tmp_path, env=variables)
    said = run(environment / 'bin/python', '-c', RUN, environment, input='\n'.join(map('\t'.join, lines)), **folder)
    assert said.count('Next: ') == len(lines) > 10
    assert run(environment / 'bin/attncnn', '--help', **folder).startswith('usage: attncnn')


def python_without(modules, code):
    """The lines that code prints where some modules cannot be found."""
    hide = textwrap.dedent(f"""
        import importlib.abc, importlib.machinery, sys

        class Hidden(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split('.')[0] in {set(modules)!r}:
                    raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)

        sys.meta_path.insert(0, Hidden())
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *args: None if name in {set(modules)!r} else find_spec(name, *args)
    """)
    return run(sys.executable, '-c', 'import importlib.util\n' + hide + textwrap.dedent(code)).splitlines()


@pytest.mark.slow
def test_timm_users_need_no_mmpretrain(repository):
    """Nor matplotlib; whatever needs them says so in one line."""
    *of_mmpretrain, of_figures, of_nonsense = python_without(
        ['mmpretrain', 'mmengine', 'mmcv', 'matplotlib'],
        f"""
        import runpy, warnings
        from argparse import Namespace
        warnings.simplefilter('error')
        import timm, attncnn_plugin
        model = timm.create_model('sa_quadratic_cifar', embed_dim=8, depth=1, num_heads=2, mlp_dim=8)
        assert attncnn_plugin.pruning.replace_parameters and attncnn_plugin.convert.conv_to_mhsa
        assert attncnn_plugin.attention.QuadraticAttention and attncnn_plugin.analysis
        import attncnn_plugin.commands.model, attncnn_plugin.training
        assert not [name for name in sys.modules if name.startswith(('mmengine', 'mmcv', 'mmpretrain', 'matplotlib'))]
        for statement in (
            'import attncnn_plugin.mm.backbones',
            'import attncnn_plugin.mm.safe_loading',
            'attncnn_plugin.commands.model.load(Namespace(timm=None, hf=None, mm=["a.py", "a.pth"]))',
            'runpy.run_path("{repository}/tools/train.py", run_name="__main__")',
            'attncnn_plugin.visualization',
            'attncnn_plugin.nonsense',
        ):
            try:
                exec(statement)
            except (AttributeError, ImportError, SystemExit) as error:
                print(error)
    """,
    )
    assert len(of_mmpretrain) == 4 and len(set(of_mmpretrain)) == 1, of_mmpretrain
    assert of_mmpretrain[0].startswith('mmpretrain is not installed: pip install mmpretrain')
    assert of_figures.endswith("need matplotlib: pip install 'attncnn_plugin[vis]'")
    assert of_nonsense == "module 'attncnn_plugin' has no attribute 'nonsense'"


IMPORT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    import attncnn_plugin
for warning in caught:
    if warning.category is UserWarning and str(warning.message).startswith(('mmpretrain', 'mmengine')):
        print(warning.message)
"""


@pytest.mark.slow
def test_versions_that_mmpretrain_refuses():
    """Modules that cannot be imported: test_errors.py."""
    pytest.importorskip('mmpretrain')
    sabotage = "import mmcv; mmcv.__version__ = '99.0.0'"
    works = "import timm; timm.create_model('sa_quadratic_cifar', embed_dim=8, depth=1, num_heads=2, mlp_dim=8)"
    (sentence,) = run(sys.executable, '-c', sabotage + IMPORT + works).splitlines()
    assert sentence.startswith('mmpretrain does not work with the versions that are installed')
    assert 'MMCV==99.0.0 is used but incompatible' in sentence and 'mmcv-lite>=2.0,<2.4' in sentence
