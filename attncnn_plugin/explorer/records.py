"""What the page knows of each layer: records of its probabilities by position, by content and by both."""

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..analysis import attention_layers, visit_layers
from ..layers import AttentionLayer
from .factors import Factors, Record
from .score_codec import (
    centered,
    decode_probs,
    decode_scores,
    encode_content,
    encode_position,
    encode_query_axes,
    relative_errors,
    with_mass,
)


@dataclass
class LayerRecords:
    """A layer, with what is the same for all images.

    Attributes:
        name (str): The name of the layer in the model.
        num_heads (int): Number of heads N_h.
        centers (list | None): Δ of the heads, (row, column) in tokens, where their encoding has it.
        position (dict | None): The record of what depends on position alone; None where nothing does.
        errors (dict): By part, the largest error of a probability of each head, relative to the largest probability of
            the query.
    """

    name: str
    num_heads: int
    centers: Optional[List[List[float]]]
    position: Optional[Record] = None
    errors: Dict[str, List[float]] = field(default_factory=dict)

    def note_errors(self, part: str, errors: Tensor) -> None:
        """Keeps the larger ones of the errors of an image and of those before, two digits of them, rounded up."""
        before = self.errors.get(part, [0.0] * self.num_heads)
        self.errors[part] = [max(old, float(f'{1.05 * new:.1e}')) for old, new in zip(before, errors.tolist())]


class ImageScores:
    """What a layer makes of an image, before it is quantized.

    Args:
        layer (LayerRecords): The layer.
        scores (Tensor): All scores, ``(N_h, N, N)``, with those of a null key last where there is one.
        content (Tensor, optional): Those of content alone.
        axes (tuple[Tensor, Tensor], optional): The terms of rows and of columns of those of the position, where they
            depend on the image.

    Raises:
        ValueError: The scores are not finite.
    """

    def __init__(
        self, layer: LayerRecords, scores: Tensor, content: Optional[Tensor], axes: Optional[Tuple[Tensor, Tensor]]
    ) -> None:
        self.layer, self._axes, self._factors = layer, axes, {}
        check_finite(layer.name, scores)
        self.probs = {'both': scores.softmax(-1)[..., : scores.shape[1]]}
        parts = []
        if axes is not None:
            rows, columns = axes
            self.probs['position'] = (rows[..., :, None] + columns[..., None, :]).flatten(2).softmax(-1)
            rows, columns = (centered(part.softmax(-1)) for part in axes)
            parts.append((rows[..., :, None] + columns[..., None, :]).flatten(2))
        elif layer.position is not None and layer.position['type'] != 'maps':
            parts.append(decode_scores(layer.position))
        if content is not None:
            self.probs['content'] = content.softmax(-1)
            parts.append(centered(self.probs['content']))
        # Not with an absolute encoding; and what one part leaves out as small the other one can make large.
        product = with_mass({'type': 'product'}, self.probs['both'])
        self._is_sum = bool((relative_errors(decode_probs(product, sum(parts)), self.probs['both']) <= 1e-3).all())

    def records(self, step: float) -> Dict[str, Record]:
        """The records of the parts that depend on the image.

        The type ``'product'`` stands for the softmax of the sum of the scores of position and content.

        Args:
            step (float): See :func:`~.score_codec.encode_content`.
        """
        records = {}
        if self._axes is not None:
            records['position'] = encode_query_axes(*self._axes, step)
        if 'content' in self.probs:
            records['content'] = self._encoded('content', step)
        if self._is_sum and records.get('content', {}).get('type') != 'maps':
            records['both'] = with_mass({'type': 'product'}, self.probs['both'])
        else:
            records['both'] = self._encoded('both', step)
        return records

    def note_errors(self, records: Dict[str, Record]) -> None:
        """Tells the layer the errors that records make."""
        for part, record in records.items():
            scores = None
            if record['type'] == 'product':
                parts = {'position': self.layer.position, **records}
                scores = sum(decode_scores(parts[name]) for name in ('position', 'content') if parts.get(name))
            self.layer.note_errors(part, relative_errors(decode_probs(record, scores), self.probs[part]))

    def _encoded(self, part: str, step: float) -> Record:
        if part not in self._factors:
            self._factors[part] = Factors(centered(self.probs[part]))
        return encode_content(self.probs[part], self._factors[part], step)


@torch.no_grad()
def layer_records(model: nn.Module, height: int, width: int) -> Dict[str, LayerRecords]:
    """The layers of a model by name, with what depends on position alone.

    Args:
        model (nn.Module): The model.
        height, width (int): Size of the grid in tokens.

    Raises:
        ValueError: Probabilities are not finite.
    """
    layers = {}
    for name, layer in attention_layers(model).items():
        encoding = getattr(layer, 'encoding', None)
        centers = getattr(encoding, 'center', None)
        layers[name] = LayerRecords(
            name, layer.num_heads, None if centers is None else centers.detach().double().cpu().tolist()
        )
        by_query = layer.depends_on_content and 'qr' in getattr(layer, 'terms', ())
        probs = None if by_query else layer.position_probs((height, width))
        if probs is not None:
            probs = probs.float().cpu()
            check_finite(name, probs)
            scores = encoding.shift_scores((height, width)) if hasattr(encoding, 'shift_scores') else None
            layers[name].position = encode_position(probs, height, width, scores)
            layers[name].note_errors('position', relative_errors(decode_probs(layers[name].position), probs))
    return layers


def image_scores(layers: Dict[str, LayerRecords], model: nn.Module, image: Tensor) -> Dict[str, ImageScores]:
    """What the layers that depend on content make of an image, by name.

    Args:
        layers (dict[str, LayerRecords]): As of :func:`layer_records`.
        model (nn.Module): The model.
        image (Tensor): ``(1, C, H, W)``.

    Raises:
        ValueError: Scores are not finite.
    """
    seen = {}

    def keep(name: str, layer: AttentionLayer, x: Tensor) -> None:
        scores, content, axes = layer.attention_scores(x), layer.content_scores(x), layer.query_axis_scores(x)
        scores, content, rows, columns = (
            part if part is None else part[0].float().cpu() for part in (scores, content, *(axes or (None, None)))
        )
        seen[name] = ImageScores(layers[name], scores, content, None if rows is None else (rows, columns))

    names = [name for name, layer in attention_layers(model).items() if layer.depends_on_content and layer.num_heads]
    visit_layers(model, image, names, keep)
    return seen


def check_finite(name: str, values: Tensor) -> None:
    """Raises ValueError if a layer's scores or probabilities are not finite."""
    if not values.isfinite().all():
        raise ValueError(f'the probabilities of {name} are not finite: the parameters of the model must be')
