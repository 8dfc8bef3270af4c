"""Sentences on frameworks that are missing or do not fit."""

import sys

import pytest

from attncnn_plugin import installation as frameworks
from attncnn_plugin.mm import tools


def test_here_all_is_well():
    assert frameworks.import_problem() is None and tools.config_problem() is None
    frameworks.require_mmpretrain()


@pytest.mark.parametrize(
    'module, reason', [('mmpretrain.models', 'mmpretrain.models'), ('mmpretrain', 'import of mmpretrain halted')]
)
def test_mmpretrain_that_cannot_be_imported(module, reason, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(frameworks, 'has_mmpretrain', lambda: True)
    problem = frameworks.import_problem()
    assert problem.startswith('mmpretrain cannot be imported with the versions that are installed (')
    assert reason in problem and 'mmcv-lite>=2.0,<2.4' in problem and len(problem.splitlines()) == 1
    with pytest.raises(ImportError, match='mmpretrain cannot be imported with the versions'):
        frameworks.require_mmpretrain()


def test_mmpretrain_that_is_missing(monkeypatch):
    monkeypatch.setattr(frameworks, 'has_mmpretrain', lambda: False)
    assert frameworks.import_problem().startswith('mmpretrain is not installed: pip install mmpretrain')
    with pytest.raises(ImportError, match='mmpretrain is not installed'):
        frameworks.require_mmpretrain()


def test_mmengine_without_setuptools(monkeypatch):
    def no_pkg_resources(package):
        raise ModuleNotFoundError("No module named 'pkg_resources'")

    monkeypatch.setattr(tools, 'get_installed_path', no_pkg_resources)
    problem = tools.config_problem()
    assert problem.startswith("mmengine cannot find the configs of packages (No module named 'pkg_resources'")
    assert problem.endswith('pip install "setuptools<82"')
