"""Which attention of a model is meant, by its names."""

from fnmatch import fnmatchcase
from typing import Callable, Iterable, Optional, Union

from ..attention.window import shown

Layers = Union[str, Iterable[str], Callable[[str], bool], None]


def chosen_by(layers: Layers) -> Callable[[str], bool]:
    """Returns a function that says whether names, globs or a function choose attention of a name."""
    if layers is None or callable(layers):
        return layers or (lambda name: True)  # type: ignore[return-value]
    globs = [layers] if isinstance(layers, str) else list(layers)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f'layers={shown(layers)} must be names, globs such as "blocks.1?.*", or a function of a name')
    return lambda name: any(fnmatchcase(own, glob) for glob in globs for own in (name, name.partition('#')[0]))


def module_in(name: str, modules: Iterable[str]) -> Optional[str]:
    """Returns which of some modules attention of a name is in; None for none."""
    inside = f'{name.partition("#")[0]}.'
    return next((own for own in modules if not own or inside.startswith(f'{own}.')), None)
