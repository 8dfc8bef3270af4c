"""The data of a page as bytes, and the description of their format, which ``explorer.js`` reads.

The bytes are

1. the length n of the header, 4 bytes, little-endian;
2. the header, n bytes: JSON in UTF-8, compressed by zlib;
3. the arrays one after another, each from a multiple of 8 bytes on, compressed by zlib as one stream.

**Arrays.** In the header, ``{"at", "dtype", "shape"}`` stands for an array: from byte ``at`` of the third part on,
row-major, little-endian. ``{"low", "high", "step"}`` stands for quantized numbers v·step, with an entry of ``step`` for
each index of their first axis. The whole number v is ``low + 256·high − 128``: all high bytes of small numbers are 0,
which compress to nothing.

**Header.** ``title``; ``grid``, the height and the width of the finest grid of a layer; ``names`` and ``pictures``
``(h, w, 3)`` of the images; and ``layers``, each of them with

- ``label``, ``name``, ``heads`` (N_h), and ``centers``, Δ of the heads ``(N_h, 2)`` where they are Gaussian and do not
  depend on an image;
- ``grid``, its own height H and width W in tokens, or pixels in the place of a convolution;
- ``queries``, their ``rows`` and ``columns``, Q1 and Q2 numbers: every row and column for tokens;
- ``keys``, H×W tokens, or P1×P2 pixels of an image that is padded: ``start``, the row and the column of the first one;
  ``source``, the number of the token that each of them is or repeats, ``(P1, P2)``, H·W for a zero; ``reach``, the
  largest number of rows and of columns from a query to a key that it sees;
- ``others``, ``windows`` and ``masked`` of attention of other libraries, whose one part is ``attention``, see below;
- ``parts``: by ``position``, ``content`` and ``both``, as far as the layer has them,
    - ``terms``: the names of the terms whose sum are the scores, up to a constant for each query. The probabilities are
      their softmax over the keys; keys that repeat a token are added to it, those of zeros are lost;
    - ``mass``: what a null key leaves to the others, ``(N_h, Q)``, for ``both`` ``(images, N_h, Q)``: the probabilities
      are the softmax times it;
    - ``shares``: of ``both``, where a gate mixes probabilities, for each head the share s of those by position. They
      are s times those by ``position`` and 1 − s times those by ``content``, not a softmax of all terms;
    - ``errors``: for each head the largest error of a probability of all queries, keys and images, relative to the
      largest probability of the query;
- ``arrays`` of the terms that do not depend on an image;
- ``token_arrays``: a list of those of the terms that do, one for all images, or one for each image.

**Terms.** The score of head h for the query at row q1 and column q2 and the key at row k1 and column k2, by ``arrays``
…

- ``axes``: ``rows[h, q1, k1] + columns[h, q2, k2]``, where q1, q2, k1 and k2 count the queries and keys of an axis;
- ``shifts``: ``shifts[h, k1 − q1 + S1, k2 − q2 + S2]`` with a table of ``2·S1 + 1`` rows and ``2·S2 + 1`` columns, S1 =
  H − 1 for tokens;

… and by ``token_arrays``. There ``tokens[i, s, n]`` is coordinate i of the token n of an image, in the principal axes
of the layer's tokens, the zero after the last one where zeros are keys; s counts the images that share the arrays. With
c_q the coordinates of the query's token after a first one that is 1, and c_k those of the key's, it is

- ``products``: ``Σ_ij c_q[i] · matrices[i, h, j] · c_k[j]``;
- ``encoded_products``: the same with the tokens to which the position encoding is added. They come after the others, at
  s + the number of images;
- ``query_axes``: ``Σ_i c_q[i] · (row_shifts[i, h, k1 − q1 + H − 1] + column_shifts[i, h, k2 − q2 + W − 1])``.

**Attention of other libraries.** The probabilities themselves are there, not terms of scores. The queries are T tokens
beside the patches, such as class tokens and registers, whose names are ``others``, then the H·W patches, row-major: N =
T + H·W. Where attention is in windows of M tokens, T = 0, and ``windows`` has the numbers of the patches in each of
them, ``(windows, M)``, H·W for padding: the keys of a patch are those of the one window that it lies in. Otherwise
``windows`` and ``masked`` are null, and all patches are keys, M = H·W. ``masked``, ``(H·W, M)``, is 1 for keys of its
window to which a patch gives nothing with any head on any image: padding, and what the mask of a shifted window hides.
The part ``attention`` has the ``terms`` ``probabilities``, ``errors`` as above, and

- ``largest``: the largest probability that a query gives to a patch, ``(images, N_h, N)``;
- ``relative``: the probabilities of the patches as parts of it, ``(images, N_h, N, M)``, 0 for padding;
- ``to_others``: the probabilities of the tokens beside the patches, ``(images, N_h, N, T)``; with windows that are
  padded the sum of those of the padding, ``(images, N_h, N, 1)``. What a query gives to patches and to these adds up to
  1.
"""

import json
import zlib
from typing import Any, NamedTuple

import numpy as np


class Quantized(NamedTuple):
    """Numbers that are stored as whole multiples of a step.

    Attributes:
        values (ndarray): The numbers, float32.
        step (ndarray): float32, an entry for each index of the first axis of ``values``.
    """

    values: np.ndarray
    step: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        """The multiples, int32, to be from −2²³ to 2²³ − 129."""
        return np.rint(self.values / self._steps).astype(np.int32)

    @property
    def rounded(self) -> np.ndarray:
        """The numbers as they are stored, float32."""
        return self.whole.astype(np.float32) * self._steps

    @property
    def _steps(self) -> np.ndarray:
        return self.step.reshape(-1, *[1] * (self.values.ndim - 1))


def rounded_up(error: float) -> float:
    """A measured error with two digits, no smaller than it is."""
    return float(f'{1.05 * error:.1e}')


def pack(header: dict) -> bytes:
    """The bytes of a header with arrays.

    Args:
        header (dict): See above, with ``np.ndarray`` and :class:`Quantized` where it has arrays.
    """
    arrays = _Arrays()
    text = zlib.compress(json.dumps(arrays.placed(header), separators=(',', ':')).encode(), 9)
    return len(text).to_bytes(4, 'little') + text + arrays.packed()


class _Arrays:
    """The third part: arrays one after another."""

    def __init__(self) -> None:
        self._size = 0
        self._chunks = []
        # Noise with runs of zeros: a search for longer repetitions takes ten times as long and finds no more.
        self._compressor = zlib.compressobj(9, strategy=zlib.Z_RLE)

    def placed(self, value: Any) -> Any:
        """A part of the header with descriptions in place of its arrays, which are added."""
        if isinstance(value, np.ndarray):
            return self._add(value)
        if isinstance(value, Quantized):
            shifted = value.whole + 128
            halves = {'low': (shifted & 255).astype(np.uint8), 'high': (shifted >> 8).astype(np.int16)}
            return self.placed({**halves, 'step': value.step})
        if isinstance(value, dict):
            return {key: self.placed(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.placed(item) for item in value]
        return value

    def packed(self) -> bytes:
        return b''.join([*self._chunks, self._compressor.flush()])

    def _add(self, array: np.ndarray) -> dict:
        place = {'at': self._size, 'dtype': array.dtype.name, 'shape': list(array.shape)}
        data = array.astype(array.dtype.newbyteorder('<')).tobytes() + bytes(-array.nbytes % 8)
        self._chunks.append(self._compressor.compress(data))
        self._size += len(data)
        return place
