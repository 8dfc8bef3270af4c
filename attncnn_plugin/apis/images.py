"""Image files of a folder."""

from pathlib import Path
from typing import List, Union

from ..utils.sampling import evenly_spread

SUFFIXES = {'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'}


def image_files(folder: Union[str, Path], number: int) -> List[Path]:
    """Image files below a folder, evenly spread over all of them by name.

    Raises:
        ValueError: There are none.
    """
    files = sorted(path for path in Path(folder).rglob('*') if path.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f'{folder} holds no image files ({" ".join(sorted(SUFFIXES))})')
    return [files[i] for i in evenly_spread(len(files), number)]
