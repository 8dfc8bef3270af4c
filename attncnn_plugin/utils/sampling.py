"""A few elements of a long sequence."""

from typing import List


def evenly_spread(length: int, number: int) -> List[int]:
    """Indices of ``number`` elements of a sequence, or of all of them, where it has fewer.

    They are spread evenly, since the first elements of many data sets are of one class.
    """
    number = min(length, number)
    return [i * length // number for i in range(number)]
