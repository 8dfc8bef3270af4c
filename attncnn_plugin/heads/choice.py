"""Which attention of a model is meant, by its names."""

from fnmatch import fnmatchcase
from typing import Callable, Dict, Iterable, Union

from ..attention.window import shown

Layers = Union[str, Iterable[str], Callable[[str], bool], None]


class Chosen:
    """Says of names whether attention of that name is chosen, and remembers what it said."""

    def __init__(self, choose: Callable[[str], bool]) -> None:
        self.choose = choose
        self.answers: Dict[str, bool] = {}

    def __call__(self, name: str) -> bool:
        self.answers[name] = self.choose(name)
        return self.answers[name]

    def check(self) -> None:
        """Raises ValueError where it was asked, and chose none."""
        if self.answers and not any(self.answers.values()):
            raise ValueError(f'layers chooses none of the attention that was seen: {", ".join(self.answers)}')


def chosen_by(layers: Layers) -> Chosen:
    """Returns a function that says whether names, globs or a function choose attention of a name."""
    if layers is None or callable(layers):
        return Chosen(layers or (lambda name: True))
    globs = [layers] if isinstance(layers, str) else list(layers)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f'layers={shown(layers)} must be names, globs such as "blocks.1?.*", or a function of a name')
    return Chosen(lambda name: any(fnmatchcase(own, glob) for glob in globs for own in (name, name.partition('#')[0])))
