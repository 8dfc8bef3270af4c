"""The option ``--slow``, the profiles of Hypothesis, and what all tests share."""

import gc
import importlib.util
import os
import pathlib
import random
import re
import runpy
import sys

import hypothesis
import numpy as np
import pytest
import torch
from helpers.versions import new_hugging_face

from attncnn_plugin import commands

# Several processes run the tests, and some start others: more threads than cores would slow them all down.
os.environ.setdefault('OMP_NUM_THREADS', '1')
torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))

hypothesis.settings.register_profile('quick', deadline=None, max_examples=15, print_blob=True)
hypothesis.settings.register_profile('slow', deadline=None, max_examples=200, print_blob=True)

if importlib.util.find_spec('mmpretrain') is None:  # with timm alone
    collect_ignore = [
        'commands/test_config_model.py',
        'commands/test_of_configs.py',
        'mm',
        'models/test_backbones.py',
        'models/test_conv_to_attention.py',
        'test_configs.py',
        'test_downstream.py',
        'tools/test_mmpretrain_tools.py',
        'tools/test_tools.py',
    ]


def pytest_addoption(parser):
    parser.addoption(
        '--slow', action='store_true', help='run the tests marked slow too, and Hypothesis with more examples'
    )


def pytest_configure(config):
    hypothesis.settings.load_profile('slow' if config.option.slow else 'quick')


def pytest_itemcollected(item):
    """With --slow, tests of random examples run with more of them: `--slow -m slow` selects them too."""
    if item.config.option.slow and getattr(getattr(item, 'obj', None), 'is_hypothesis_test', False):
        item.add_marker('slow')


# Tests that let models of Hugging Face start as a convolution, or know where heads have their maps.
OF_NEW_HUGGING_FACE = re.compile(
    r'(test_started_models|test_row_of_the_page|test_starts|test_every_transformer|test_costs_are_those_that_go'
    r'|test_means_without_padding|test_rollout_of_other).*\[.*(transformers\.|Hugging F)'
)


def pytest_collection_modifyitems(config, items):
    if not new_hugging_face():
        for item in items:
            if OF_NEW_HUGGING_FACE.search(item.nodeid):
                item.add_marker(pytest.mark.skip(reason='it needs transformers 5.20 or newer'))
    if config.option.slow:
        return
    slow = [item for item in items if item.get_closest_marker('slow')]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def pytest_collection_finish():
    gc.freeze()  # mmengine collects garbage for every dataset: not among all that was imported
    if 'mmengine.config.config' in sys.modules:
        sys.modules['mmengine.config.config'].FormatCode = unformatted


def unformatted(text, **settings):
    """Python as it is: mmengine formats the config for each checkpoint, which takes longer than an epoch here."""
    compile(text, 'config', 'exec')
    return text, False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n 2`: the tests of a file stay together while they can, since they share what takes long to make."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == 'load' else None


def begin_random_numbers():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """What several tests share is drawn alike, whichever test ran before."""
    if fixturedef.scope != 'function':
        begin_random_numbers()


@pytest.fixture(autouse=True)
def fresh():
    """The same random numbers for every test, and nothing compiled: another's sizes would make this one's dynamic."""
    begin_random_numbers()
    if 'torch._dynamo' in sys.modules:
        torch._dynamo.reset()
    yield
    os.environ.pop('LOCAL_RANK', None)  # mmpretrain's tool leaves it, and accelerate would wait for other processes


@pytest.fixture(scope='session')
def repository():
    """The root of the repository."""
    return pathlib.Path(__file__).parents[1]


@pytest.fixture
def command(capsys):
    """Runs ``attncnn`` in this process, with some arguments; gives its status, its output and its errors."""

    def run_command(*words):
        capsys.readouterr()
        status = 0
        try:
            commands.main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


@pytest.fixture
def tool(repository, monkeypatch):
    """Runs a file of ``tools/`` in this process, with some arguments."""

    def run_tool(path, *arguments):
        monkeypatch.setattr(sys, 'argv', [path, *map(str, arguments)])
        return runpy.run_path(str(repository / 'tools' / path), run_name='__main__')

    return run_tool
