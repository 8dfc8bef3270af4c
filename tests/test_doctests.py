"""The examples in docstrings: every public function has some, and they say what is true."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

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
