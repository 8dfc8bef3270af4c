"""Importing this module makes mmengine read local checkpoint files without running anything in them.

In a config: ``custom_imports = dict(imports=['attncnn_plugin', 'attncnn_plugin.mm.safe_loading'])``. From then on, in
the whole process, mmengine's loader of local files is :func:`~attncnn_plugin.checkpoint_files.load_from_local`, which
refuses damaged files too; PyTorch's list of names that are safe to load has the classes of the logs in mmengine's
checkpoints; and onedl-mmengine's own way around that list loads only tensors and plain data.
"""

from typing import Any, Optional

import torch
from mmengine.runner import CheckpointLoader, checkpoint

from ..checkpoint_files import load_from_local, register_safe_globals


def _load_plain_data(file, map_location=None, weights_only: Optional[bool] = None) -> Any:
    """Loads only tensors and plain data, as ``torch.load`` does, whatever ``weights_only`` says."""
    register_safe_globals()
    return torch.load(file, map_location=map_location, weights_only=True)


register_safe_globals()
CheckpointLoader.register_scheme(prefixes='', loader=load_from_local, force=True)
if hasattr(checkpoint, '_safe_torch_load'):  # onedl-mmengine
    checkpoint._safe_torch_load = _load_plain_data
