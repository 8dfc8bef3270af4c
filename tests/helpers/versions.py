"""What the installed versions of other libraries have."""

import importlib.metadata
import importlib.util


def new_hugging_face():
    """Says whether the attention of Hugging Face's classes has the parts that this package knows."""
    if importlib.util.find_spec('transformers') is None:
        return False
    return [*map(int, importlib.metadata.version('transformers').split('.')[:2])] >= [5, 20]
