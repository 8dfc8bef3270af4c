"""Classes made while a program runs: the class of a module, with something of this package before it."""

import functools
import types
from typing import Any, Dict, Tuple, Type

from torch import nn


class Mixin:
    """The base of what :func:`mixed` puts before the class of a module; such modules can be copied and pickled.

    Attributes:
        class_name (str): The name of the new class, with ``{}`` for that of the module's own.
    """

    class_name: str

    def __reduce_ex__(self, protocol: Any) -> Tuple[Any, ...]:
        # pickle finds classes by their names, and this one was made for the module.
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        return _new_instance, type(self).__bases__, reduced[2]


@functools.cache
def mixed(mixin: Any, own: Any) -> Type[nn.Module]:
    """The class that inherits from a mixin, a subclass of :class:`Mixin`, and then from the class of a module.

    Examples:
        >>> class Loud(Mixin):
        ...     class_name = 'Loud{}'
        >>> mixed(Loud, nn.Linear)
        <class 'torch.nn.modules.linear.LoudLinear'>
    """

    def body(namespace: Dict[str, Any]) -> None:
        namespace.update(__module__=own.__module__, __doc__=own.__doc__)

    return types.new_class(mixin.class_name.format(own.__name__), (mixin, own), exec_body=body)


def _new_instance(mixin: Any, own: Any) -> nn.Module:
    """An instance without a state, for copies and pickles."""
    extended = mixed(mixin, own)
    return extended.__new__(extended)
