"""What a page holds, as one compressed stream that grows by one image at a time."""

import copy
import json
import zlib
from typing import Dict, List, Sequence

import numpy as np

from ..analysis import layer_label
from .factors import Record
from .records import ImageScores, LayerRecords
from .score_codec import compressor_of_arrays

# The steps of scores that are tried, the finest first. What a coarser one shows would not be worth a look.
STEPS = [float(f'{0.002 * 1.1**i:.3g}') for i in range(49)]
ERROR_BYTES = 12  # what the error of a head takes in the header, at most


class Contents:
    """The pictures and the layers of a page, then what each image adds.

    The stream is zlib's, of the arrays one after the other. Before it stands the length of a header in JSON as 4 bytes,
    little-endian, and the header, which says where in the stream each array is; it is compressed too.

    Args:
        about (dict): What else the header says.
        layers (dict[str, LayerRecords]): As of :func:`~.records.layer_records`.
        pictures (Sequence[ndarray]): ``(h, w, 3)``, uint8.
    """

    def __init__(self, about: dict, layers: Dict[str, LayerRecords], pictures: Sequence[np.ndarray]) -> None:
        self._layers, self._arrays = layers, _Arrays()
        self._about = {**about, 'pictures': [self._arrays.put(picture) for picture in pictures]}
        self._parts = {
            name: {'position': self._arrays.put_record(layer.position)} if layer.position else {}
            for name, layer in layers.items()
        }
        self._rung = 0  # of the steps: no image takes a finer one than those before

    def add_image(self, seen: Dict[str, ImageScores], most: int) -> bool:
        """Adds an image, with the finest step with which :meth:`packed` does not get longer than ``most`` bytes.

        Returns:
            bool: Whether there is such a step. If not, nothing is added.
        """
        most -= ERROR_BYTES * 3 * sum(layer.num_heads for layer in self._layers.values())
        too_fine, fits, rung, added = self._rung - 1, len(STEPS), self._rung, None
        while fits - too_fine > 1:
            records = {name: scores.records(STEPS[rung]) for name, scores in seen.items()}
            longer = self._with_image(records)
            if len(longer.packed()) <= most:
                fits, added = rung, (longer, records)
            else:
                too_fine = rung
            rung = (too_fine + fits) // 2
        if added is None:
            return False
        self._arrays, self._parts, self._rung = added[0]._arrays, added[0]._parts, fits
        for name, records in added[1].items():
            seen[name].note_errors(records)
        return True

    def packed(self) -> bytes:
        """The header and the stream."""
        layers = [
            dict(
                label=layer_label(name),
                name=name,
                heads=layer.num_heads,
                centers=layer.centers,
                errors=layer.errors,
                parts=self._parts[name],
            )
            for name, layer in self._layers.items()
        ]
        header = json.dumps({**self._about, 'layers': layers}, separators=(',', ':'))
        header = zlib.compress(header.encode(), 9)
        return len(header).to_bytes(4, 'little') + header + self._arrays.stream()

    def _with_image(self, records: Dict[str, Dict[str, Record]]) -> 'Contents':
        """A copy with one image more."""
        longer = copy.copy(self)
        longer._arrays = self._arrays.copy()
        longer._parts = {name: dict(parts) for name, parts in self._parts.items()}
        for name, parts in records.items():
            for part, record in parts.items():
                longer._parts[name][part] = [*self._parts[name].get(part, []), longer._arrays.put_record(record)]
        return longer


class _Arrays:
    """Arrays one after the other in a zlib stream."""

    def __init__(self) -> None:
        self._offset = 0
        self._chunks: List[bytes] = []
        self._compressor = compressor_of_arrays()

    def put(self, array: np.ndarray) -> dict:
        """Adds an array and says where it is."""
        array = np.ascontiguousarray(array)
        place = dict(at=self._offset, dtype=array.dtype.name, shape=list(array.shape))
        padding = bytes(-array.nbytes % 8)  # the browser's arrays begin at multiples of 8 bytes
        self._chunks.append(self._compressor.compress(array.tobytes() + padding))
        self._offset += array.nbytes + len(padding)
        return place

    def put_record(self, record: Record) -> dict:
        """A record with its arrays replaced by where they are."""
        return {key: self.put(value) if isinstance(value, np.ndarray) else value for key, value in record.items()}

    def copy(self) -> '_Arrays':
        """Those so far; more can be put into the one without the other."""
        arrays = copy.copy(self)
        arrays._chunks, arrays._compressor = list(self._chunks), self._compressor.copy()
        return arrays

    def stream(self) -> bytes:
        """The whole stream."""
        return b''.join([*self._chunks, self._compressor.copy().flush()])
