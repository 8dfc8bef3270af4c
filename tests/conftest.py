import os
import pathlib

import hypothesis
import pytest
import torch

# Two processes run the tests, and some start others: more threads than cores would slow them all down.
os.environ.setdefault('OMP_NUM_THREADS', '1')
torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))

hypothesis.settings.register_profile('default', deadline=None, max_examples=60, print_blob=True)
hypothesis.settings.load_profile('default')


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope='session')
def repository():
    """The root of the repository."""
    return pathlib.Path(__file__).parents[1]
