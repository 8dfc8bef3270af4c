"""What the installed versions of other libraries have."""

import importlib.metadata
import sys

import pytest


def new_hugging_face():
    """Says whether the attention of Hugging Face's classes has the parts that this package knows."""
    try:
        version = importlib.metadata.version('transformers')
    except importlib.metadata.PackageNotFoundError:  # a folder of tests has the library's name
        return False
    return [*map(int, version.split('.')[:2])] >= [5, 20]


def hugging_face_library():
    """Returns ``transformers``; skips the test where only the folder of tests has this name."""
    pytest.importorskip('transformers.models')
    return sys.modules['transformers']
