import pathlib

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile('default', deadline=None, max_examples=60, print_blob=True)
hypothesis.settings.load_profile('default')


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope='session')
def repository():
    """The root of the repository."""
    return pathlib.Path(__file__).parents[1]
