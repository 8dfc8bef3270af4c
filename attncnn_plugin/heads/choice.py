"""Which attention of a model is meant, by its names."""

from fnmatch import fnmatchcase
from typing import Callable, Dict, Iterable, Union

from ..attention.window import shown

Layers = Union[str, Iterable[str], Callable[[str], bool], None]


class Chosen:
    """Decides by its name whether attention is chosen, and keeps the answers."""

    def __init__(self, choose: Callable[[str], bool]) -> None:
        self.choose = choose
        self.answers: Dict[str, bool] = {}

    def __call__(self, name: str) -> bool:
        self.answers[name] = self.choose(name)
        return self.answers[name]

    def check(self) -> None:
        """Raises ValueError if there was attention, and none of it was chosen."""
        if self.answers and not any(self.answers.values()):
            raise ValueError(f'layers chooses none of the attention that was seen: {", ".join(self.answers)}')


def chosen_by(layers: Layers) -> Chosen:
    """Returns a function that decides by names, globs or a function whether attention of a name is chosen."""
    if layers is None or callable(layers):
        return Chosen(layers or (lambda name: True))
    globs = [layers] if isinstance(layers, str) else list(layers)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f'layers={shown(layers)} must be names, globs such as "blocks.1?.*", or a function of a name')
    return Chosen(lambda name: any(fnmatchcase(own, glob) for glob in globs for own in (name, name.partition('#')[0])))
