"""Files that are either complete or not there."""

import os
from pathlib import Path
from typing import Union

from mmengine.fileio import LocalBackend, register_backend


@register_backend('atomic', force=True)  # again, by this plugin or by another one that has it
class AtomicBackend(LocalBackend):
    """mmengine's local files, each written beside its place and moved there when it is on the disk.

    A process that is killed while it writes, or a full disk, leaves the former file as it was.

    Examples:
        >>> default_hooks = dict(checkpoint=dict(type='CheckpointHook', backend_args=dict(backend='atomic')))
    """

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        """Writes bytes to a file.

        Args:
            obj (bytes): The content.
            filepath (str | Path): The file; its folder is made.

        Raises:
            OSError: The file could not be written.
        """
        path = Path(filepath)
        part = path.with_name(f'{path.name}.part')  # always this name: the next write replaces what was left
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, 'wb') as file:
                file.write(obj)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OSError(
                f'{path} ({len(obj):,} bytes) could not be written ({error.strerror}), and the files written '
                'before are as they were: make room, then go on from the last checkpoint'
            ) from error
