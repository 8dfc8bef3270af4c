"""What the page knows of each layer: records of its probabilities by position, by content and by both."""
from dataclasses import dataclass, field
from typing import Dict, List, Optional

import torch
from torch import Tensor, nn

from ..attention_maps import (
    attention_layers, attention_probs_of, content_only_probs_of, depends_on_content, position_only_probs_of,
    position_probs)
from .score_codec import (
    EXACT, Record, decode_probs, decode_scores, encode_content, encode_position, max_error, with_mass)


@dataclass
class LayerRecords:
    """The records of a layer.

    Attributes:
        name (str): The name of the layer in the model.
        num_heads (int): Number of heads N_h.
        centers (list | None): Δ of the heads, (row, column) in tokens, where their encoding has it.
        position, content, both (dict | list[dict] | None): The record for all images, or one for each image, or None
            where the layer's scores have no such part. The type ``'product'`` stands for the softmax of the sum of
            the scores of position and content.
        errors (dict): The largest error of a probability by part.
        relative_errors (dict): The largest error relative to the largest probability of the query by part.
    """

    name: str
    num_heads: int
    centers: Optional[List[List[float]]]
    position: Optional[object] = None
    content: Optional[object] = None
    both: Optional[object] = None
    errors: Dict[str, float] = field(default_factory=dict)
    relative_errors: Dict[str, float] = field(default_factory=dict)

    def put(self, part: str, record: Record, probs: Tensor, image: Optional[int] = None,
            scores: Optional[Tensor] = None) -> None:
        """Keeps the record of a part, for an image or for all, and the error that it makes of ``probs``.

        Raises:
            ValueError: The probabilities are not finite.
        """
        if not probs.isfinite().all():
            raise ValueError(f'the probabilities of {self.name} are not finite: the parameters of the model must be')
        absolute, relative = max_error(decode_probs(record, scores), probs)
        self.errors[part] = max(self.errors.get(part, 0.), absolute)
        self.relative_errors[part] = max(self.relative_errors.get(part, 0.), relative)
        if image is None:
            setattr(self, part, record)
        else:
            setattr(self, part, [*(getattr(self, part) or []), record])


def position_records(model: nn.Module, height: int, width: int) -> Dict[str, LayerRecords]:
    """The layers of a model by name, with what depends on position alone.

    Args:
        model (nn.Module): The model.
        height, width (int): Size of the grid in tokens.
    """
    layers = {}
    for name, layer in attention_layers(model).items():
        encoding = getattr(layer, 'encoding', None)
        centers = getattr(encoding, 'center', None)
        layers[name] = LayerRecords(
            name, layer.num_heads, None if centers is None else centers.detach().double().cpu().tolist())
        probs = None if _position_by_query(layer) else position_probs(layer, height, width)
        if probs is not None:
            with torch.no_grad():
                scores = encoding.shift_scores(height, width) if hasattr(encoding, 'shift_scores') else None
            layers[name].put('position', encode_position(probs.cpu(), height, width, scores), probs.cpu())
    return layers


def add_image(layers: Dict[str, LayerRecords], model: nn.Module, image: Tensor, index: int, step: float) -> None:
    """Adds to the layers what depends on an image.

    Args:
        layers (dict[str, LayerRecords]): As of :func:`position_records`.
        model (nn.Module): The model.
        image (Tensor): ``(1, C, H, W)``.
        index (int): The number of the image.
        step (float): See :func:`~.score_codec.encode_content`.
    """
    modules = attention_layers(model)
    everything, content = attention_probs_of(model, image), content_only_probs_of(model, image)
    position = {name: probs for name, probs in position_only_probs_of(model, image).items()
                if _position_by_query(modules[name])}
    for name, probs in everything.items():
        layer, probs = layers[name], probs[0].cpu()
        parts = {}
        for part, of_part in (('position', position), ('content', content)):
            if name in of_part:
                parts[part] = of_part[name][0].cpu()
                layer.put(part, encode_content(parts[part], step), parts[part], index)
            elif part == 'position' and layer.position is not None:
                parts[part] = decode_probs(layer.position)
        _put_both(layer, parts, probs, index, step)


def _put_both(layer: LayerRecords, parts: Dict[str, Tensor], probs: Tensor, index: int, step: float) -> None:
    """Content and position together: the sum of their scores where it is just that, or a record of its own."""
    product = with_mass({'type': 'product'}, probs)
    if len(parts) == 2:
        scores = sum(part.log() for part in parts.values())
        if max_error(decode_probs(product, scores), probs)[0] <= 10 * EXACT:
            scores = sum(decode_scores(_of_image(getattr(layer, part), index)) for part in parts)
            # What one part leaves out as small the other one can make large.
            if max_error(decode_probs(product, scores), probs)[1] <= 0.004 + 4 * step:
                layer.put('both', product, probs, index, scores)
                return
    layer.put('both', encode_content(probs, step), probs, index)


def _position_by_query(layer: nn.Module) -> bool:
    """Whether the scores of the position depend on the content of the query, as q·r_δ does (C20, eq. 8)."""
    return depends_on_content(layer) and 'qr' in getattr(layer, 'terms', ())


def _of_image(records: object, index: int) -> Record:
    return records[index] if isinstance(records, list) else records
