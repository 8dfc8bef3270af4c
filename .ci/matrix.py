#!/usr/bin/env python3
"""Runs the tests with the oldest and the newest versions that the package is for, and prints a table of the results.

    python3 .ci/matrix.py                           # all rows
    python3 .ci/matrix.py lowest newest --slow      # some of them, with the slow tests
    python3 .ci/matrix.py --folder ~/matrix         # keeps the environments and the logs, and takes them up again

A row is a virtual environment of its own, of 6 GB or so, with the checkout that this file lies in. It takes Python 3.11
or newer, and the Pythons of the rows as python3.9 … in the PATH or from pyenv.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ['torch', 'torchvision', 'timm', 'numpy', 'mmengine', 'mmcv', 'mmpretrain']


@dataclass(frozen=True)
class Row:
    """An environment."""

    python: str  # version
    extras: str = '[mm,vis,test]'  # of the package
    packages: tuple[str, ...] = ()  # what is installed besides it
    versions: tuple[str, ...] = ()  # what the versions of packages are held at


def lowest_versions() -> tuple[str, ...]:
    """Returns the bounds of pyproject.toml, ``'torch>=2.6'``, as versions, ``'torch==2.6'``."""
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    requirements = [*project['dependencies'], *sum(project['optional-dependencies'].values(), [])]
    bounds = (re.match(r'([\w-]+)>=([\w.]+)', requirement) for requirement in requirements)
    return tuple(f'{bound[1]}=={bound[2]}' for bound in bounds if bound)


ROWS = {
    'lowest': Row('3.9', versions=lowest_versions()),
    'torch 2.14': Row('3.11', versions=('torch==2.14.1',)),
    'newest': Row('3.13'),  # mmengine needs pkgutil.find_loader, which 3.14 does not have
    'timm only': Row('3.12', '', ('pytest', 'pytest-xdist', 'hypothesis', 'selenium')),
    'onedl': Row(
        '3.11',
        '[onedl,vis,test]',
        versions=('torch==2.14.1',),
    ),
}


def main() -> None:
    """Runs the rows; exits with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('rows', nargs='*', metavar='row', help=f'of {", ".join(ROWS)}; default all')
    parser.add_argument('--slow', action='store_true', help='run the slow tests too')
    parser.add_argument('--processes', default='1', help='number of processes that run tests; default 1')
    parser.add_argument('--tests', nargs='+', default=[], help='files of tests; default all')
    parser.add_argument('--folder', type=Path, help='for environments and logs; default a temporary one')
    args = parser.parse_args()
    if unknown := set(args.rows) - ROWS.keys():
        parser.error(f'no rows: {", ".join(sorted(unknown))}; choose of {", ".join(ROWS)}')
    folder = args.folder or Path(tempfile.mkdtemp(prefix='matrix-'))
    folder.mkdir(parents=True, exist_ok=True)
    options = ['--numprocesses', args.processes] + ['--slow'] * args.slow + args.tests
    table, failed = [], False
    for name in args.rows or ROWS:
        venv = folder / name.replace(' ', '-')
        with open(f'{venv}.log', 'w') as log:
            print(f'{name}: {log.name}', flush=True)
            cells, failures = run(ROWS[name], venv.resolve(), options, log)
        table.append([name, *cells])
        for failure in failures:
            print(f'  {failure}', flush=True)
        failed |= bool(failures)
        if args.folder is None:
            shutil.rmtree(venv)  # there may be no room for all of them
    print_table(['environment', 'Python', *PACKAGES, 'tests'], table)
    sys.exit(failed)


def run(row: Row, venv: Path, options: list[str], log) -> tuple[list, list[str]]:
    """Makes an environment and runs the tests in it; returns the cells of the table, and the names of what failed."""

    def call(*command, **kwargs) -> int:
        print('+', *command, file=log, flush=True)
        return subprocess.run(command, env=environment, stdout=log, stderr=log, **kwargs).returncode

    versions = Path(f'{venv}.txt')
    versions.write_text('\n'.join(row.versions))
    environment = {
        **os.environ,
        'PATH': f'{venv / "bin"}:{os.environ["PATH"]}',
        'PIP_CONSTRAINT': str(versions),  # and none of the machine's
        'TORCHINDUCTOR_CACHE_DIR': f'{venv}/inductor',  # what one release of PyTorch compiled another cannot read
        'OMP_NUM_THREADS': '1',
        'CI': 'true',
    }
    environment.pop('PYTHONPATH', None)
    install = ['python', '-m', 'pip', 'install']
    if (
        call(find_python(row.python), '-m', 'venv', venv)
        or call(*install, '--upgrade', 'pip')  # that of Python 3.9 tries versions for an hour
        or call(*install, '--editable', f'{ROOT}{row.extras}', *row.packages)
    ):
        return [row.python, *[''] * len(PACKAGES), ''], ['installation']
    pytest = ['python', '-m', 'pytest', '-p', 'no:cacheprovider', '-q', '-rfE', *options]
    ended = subprocess.run(pytest, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    log.write(ended.stdout)
    lines = ended.stdout.splitlines() or ['']
    failures = [line for line in lines if line.startswith(('FAILED', 'ERROR'))]
    if ended.returncode and not failures:
        failures = ['pytest itself']
    return [*installed(venv), lines[-1]], failures


def find_python(version: str) -> str:
    """Returns the interpreter of a version, such as ``'3.9'``."""
    pyenv = Path(os.environ.get('PYENV_ROOT', Path.home() / '.pyenv'))
    candidates = [f'python{version}', *sorted(map(str, pyenv.glob(f'versions/{version}.*/bin/python')))]
    for python in candidates:
        # pyenv puts commands in the PATH that only say that there is no such version.
        if shutil.which(python) and subprocess.run([python, '--version'], capture_output=True).returncode == 0:
            return python
    sys.exit(f'no Python {version} is in the PATH or of pyenv')


def installed(venv: Path) -> list[str]:
    """Returns the versions of Python and of :data:`PACKAGES` in an environment."""
    python = venv / 'bin/python'
    version = subprocess.run([python, '--version'], capture_output=True, text=True).stdout.split()[1]
    command = [python, '-m', 'pip', 'list', '--format=json', '--disable-pip-version-check']
    packages = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    short = {package['name'].removeprefix('onedl-').removesuffix('-lite'): package['version'] for package in packages}
    return [version, *(short.get(name, '') for name in PACKAGES)]


def print_table(header: list[str], rows: list[list]) -> None:
    """Prints a table in Markdown."""
    for row in [header, ['---'] * len(header), *rows]:
        print('|', ' | '.join(map(str, row)), '|')


if __name__ == '__main__':
    main()
