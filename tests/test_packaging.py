"""The package as a wheel and as an editable install, with and without mmpretrain."""

import os
import subprocess
import sys
import textwrap
import zipfile

import pytest

USER_CONFIG = """
_base_ = 'attncnn_plugin::sa_quadratic_digits.py'
model = dict(backbone=dict(arch='base'))
"""

CHECK = textwrap.dedent("""
    import pathlib, sys
    import attncnn_plugin, mmpretrain
    from mmengine.config import Config
    from mmengine.hub import get_config, get_model

    where = pathlib.Path(attncnn_plugin.__file__)
    assert where.is_relative_to(sys.argv[1]), where
    config = get_config('attncnn_plugin::sa_quadratic_cifar10.py')
    assert config.model.backbone.type == 'SAQuadratic' and config.train_cfg.max_epochs == 300
    assert get_config('attncnn_plugin::_base_/default_runtime.py').default_scope == 'mmpretrain'
    assert get_config('mmpretrain::resnet/resnet18_8xb16_cifar10.py').model.backbone.depth == 18
    user = Config.fromfile(sys.argv[2])
    assert user.model.backbone.type == 'SAQuadratic' and user.model.backbone.arch == 'base'
    assert type(get_model('attncnn_plugin::sa_learned_digits.py').backbone).__name__ == 'SALearned'
    assert 'sa_quadratic_cifar10' in mmpretrain.list_models('sa_*')
    assert mmpretrain.get_model('sa_quadratic_digits').backbone.embed_dims == 64
    tool = where.parent / '.mim/tools/train.py'
    assert tool.is_file() and (where.parent / '.mim/tools/dist_train.sh').is_file()
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
    (site / 'parent.pth').write_text(os.path.dirname(os.path.dirname(pytest.__file__)) + '\n')
    return tmp_path / 'env'


def install(environment, *what):
    run(
        sys.executable,
        '-m',
        'pip',
        '--python',
        environment / 'bin/python',
        'install',
        '--no-deps',
        '--no-build-isolation',
        '--force-reinstall',
        *what,
    )


@pytest.mark.slow
def test_wheel_carries_configs_tools_and_index(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        'model-index.yml',
        'configs/metafile.yml',
        'configs/sa_quadratic_cifar10.py',
        'configs/_base_/models/sa_quadratic_cifar.py',
        'tools/train.py',
        'tools/dist_train.sh',
    ):
        assert f'attncnn_plugin/.mim/{name}' in names
    assert not [name for name in names if name.startswith(('tests', 'configs', 'tools'))]


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['wheel', 'editable'])
def test_installed(kind, environment, source, wheel, tmp_path):
    install(environment, *([wheel] if kind == 'wheel' else ['-e', source]))
    (tmp_path / 'user.py').write_text(USER_CONFIG)
    home = environment if kind == 'wheel' else source
    variables = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    output = run(environment / 'bin/python', '-c', CHECK, home, tmp_path / 'user.py', cwd=tmp_path, env=variables)
    assert 'all is well' in output


def python_without(modules, code, **kwargs):
    """Runs code where some modules cannot be found."""
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
    return subprocess.run(
        [sys.executable, '-c', 'import importlib.util\n' + hide + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        **kwargs,
    )


def test_timm_users_need_no_mmpretrain():
    result = python_without(
        ['mmpretrain', 'mmengine', 'mmcv'],
        """
        import warnings
        warnings.simplefilter('error')
        import timm, attncnn_plugin
        model = timm.create_model('sa_quadratic_cifar', embed_dim=8, depth=1, num_heads=2, mlp_dim=8)
        assert not [name for name in sys.modules if name.startswith(('mmengine', 'mmcv', 'mmpretrain'))]
        try:
            from attncnn_plugin.models.backbones import SAQuadratic
        except ImportError as error:
            print(error)
    """,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith('mmpretrain is not installed: pip install mmpretrain')
    assert result.stdout.count('\n') == 1


def test_tools_without_mmpretrain(repository):
    tool = repository / 'tools/train.py'
    result = python_without(
        ['mmpretrain'],
        f"""
        import runpy
        runpy.run_path({str(tool)!r}, run_name='__main__')
    """,
    )
    assert result.returncode == 1
    assert result.stderr.strip().startswith('mmpretrain is not installed: pip install') and '\n' not in (
        result.stderr.strip()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    'sabotage, reason',
    [
        ("import mmcv; mmcv.__version__ = '99.0.0'", 'MMCV==99.0.0 is used but incompatible'),
        ("import sys; sys.modules['mmpretrain.models.heads'] = None", 'mmpretrain.models.heads'),
    ],
)
def test_versions_that_mmpretrain_refuses(sabotage, reason):
    result = subprocess.run(
        [
            sys.executable,
            '-c',
            sabotage
            + textwrap.dedent("""
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            import attncnn_plugin
        print([str(w.message) for w in caught if 'mmpretrain' in str(w.message)])
        import timm
        timm.create_model('sa_quadratic_cifar', embed_dim=8, depth=1, num_heads=2, mlp_dim=8)
    """),
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    (sentence,) = eval(result.stdout)
    assert reason in sentence and 'mmcv-lite>=2.0,<2.4' in sentence
    assert '\n' not in sentence


@pytest.mark.slow
def test_setuptools_without_pkg_resources():
    result = python_without(
        ['pkg_resources'],
        """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            import attncnn_plugin
        print([str(w.message) for w in caught if 'mmengine' in str(w.message)])
        from mmpretrain.registry import MODELS
        assert 'SAQuadratic' in MODELS  # what does not need it goes on
    """,
    )
    assert result.returncode == 0, result.stderr
    (sentence,) = eval(result.stdout)
    assert 'pip install "setuptools<82"' in sentence and '\n' not in sentence
