"""The arrows between the folders of the package, which pyproject.toml lists."""

import pytest

cli = pytest.importorskip('importlinter.cli', reason='pip install import-linter')


def test_imports_run_one_way(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)  # for the package of this checkout
    status = cli.lint_imports(config_filename=str(repository / 'pyproject.toml'), no_cache=True, verbose=False)
    assert status == cli.EXIT_STATUS_SUCCESS, capsys.readouterr().out
