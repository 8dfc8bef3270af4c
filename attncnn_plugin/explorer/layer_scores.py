"""What the page holds of one layer: the terms of its scores, and how far its probabilities are from the model's."""

import math
from typing import Dict, List, Optional

import torch
from torch import Tensor

from ..analysis.attention_maps import probs_of_scores
from ..layers import AttentionLayer
from .layer_grid import LayerGrid
from .position_terms import PositionTerm, padded_position_term, position_term
from .stream import Quantized, rounded_up
from .token_terms import TokenTerms, token_scores, token_terms


class LayerScores:
    """The scores of a layer by position, by content and by both.

    Args:
        name (str): The name of the layer in the model.
        label (str): What the page calls it.
        layer (AttentionLayer): The layer.
        inputs (Tensor): Its tokens for the images, ``(B, H, W, D)``, or its images, ``(B, C, H, W)``, in the place of a
            convolution.

    Attributes:
        size (tuple[int, int]): Height H and width W of the grid in tokens.
        num_heads (int): Number of heads N_h.
        parts (dict[str, list[str]]): The terms of each part that the layer has, see :mod:`.stream`.

    Raises:
        ValueError: Scores are not finite.
    """

    @torch.no_grad()
    def __init__(self, name: str, label: str, layer: AttentionLayer, inputs: Tensor) -> None:
        self.size, self.num_heads = layer.grid_of(inputs), layer.num_heads
        self.parts: Dict[str, List[str]] = {}
        self._name, self._label, self._layer, self._inputs = name, label, layer, inputs
        self._grid = LayerGrid.of(layer, self.size)
        self._position: Optional[PositionTerm] = None
        self._tokens: List[TokenTerms] = []
        self._has_null_key = False
        self._masses: Dict[str, Tensor] = {}  # what a null key leaves to the others
        shares = layer.position_share()  # of a gate
        self._shares = None if shares is None else shares.cpu()
        if layer.num_heads == 0:
            return
        if layer.depends_on_content:
            self._check_finite(inputs)
            tokens = inputs if layer.window is None else inputs.movedim(1, -1)
            self._tokens = token_terms(layer, tokens, self._grid)
            self._check_finite(*(array for terms in self._tokens for array in terms.arrays.values()))
        arrays = self._tokens[0].arrays if self._tokens else {}
        if 'row_shifts' in arrays:
            self.parts['position'] = ['query_axes']
        elif layer.has_position_scores:
            self._add_position_term()
        if 'matrices' in arrays:
            self.parts['content'] = ['products']
        if self._tokens:
            terms = [term for part in self.parts.values() for term in part]
            self.parts['both'] = ['encoded_products'] if self._tokens[0].encodes else terms
        if self._has_null_key:
            self._masses = {part: self._sums_of_probs(part) for part in self.parts if part != 'content'}

    @torch.no_grad()
    def header(self, score_error: float, with_errors: bool) -> dict:
        """The layer in the header of :mod:`.stream`.

        Args:
            score_error (float): Error of scores that depend on an image, root mean square.
            with_errors (bool): Whether to measure the errors of the probabilities, which are 0 otherwise.
        """
        tokens = [terms.quantized(score_error) for terms in self._tokens]
        parts = {}
        for part, terms in self.parts.items():
            errors = self._errors(part, tokens) if with_errors else [0.0] * self.num_heads
            mass = {'mass': self._masses[part].numpy()} if part in self._masses else {}
            shares = {'shares': self._shares.tolist()} if part == 'both' and self._shares is not None else {}
            parts[part] = {'terms': terms, 'errors': errors, **mass, **shares}
        heads = None if self._layer.depends_on_content else self._layer.gaussian_heads()
        return {
            'label': self._label,
            'name': self._name,
            **self._grid.header(),
            'heads': self.num_heads,
            'centers': None if heads is None else heads.center.tolist(),
            'parts': parts,
            'arrays': {name: array.numpy() for name, array in self._position.arrays.items()} if self._position else {},
            'token_arrays': tokens,
        }

    def _add_position_term(self) -> None:
        self._check_finite(self._own_probs('position'))
        if self._layer.window is not None:
            self._position = padded_position_term(self._layer, self._grid)
        else:
            scores = self._own_position_scores()
            self._has_null_key = scores.shape[2] > scores.shape[1]
            self._position = position_term(scores[..., : scores.shape[1]], self.size, self._layer.gaussian_heads())
        self.parts['position'] = [self._position.name]

    def _own_position_scores(self) -> Tensor:
        """The scores by position of the layer itself, ``(N_h, N, N)``, those of a null key last."""
        layer = self._layer
        if not layer.depends_on_content:
            return layer.position_probs(self.size).log().cpu()
        return layer.position_scores(self._inputs[:1])[0].cpu()

    def _own_probs(self, part: str, image: int = 0) -> Tensor:
        """The probabilities of the layer itself, ``(N_h, Q, N)``."""
        layer, x = self._layer, self._inputs[image : image + 1]
        if not layer.depends_on_content:
            return layer.position_probs(self.size).cpu()
        scores = {'position': layer.position_scores, 'content': layer.content_scores, 'both': layer.attention_scores}
        return probs_of_scores(scores[part](x), self.size)[0].cpu()

    def _page_probs(self, part: str, image: int, head: int, arrays: List[Dict[str, Tensor]]) -> Tensor:
        """The probabilities of a head as the page computes them, but for a null key, ``(Q, N)``."""
        if part == 'both' and self._shares is not None:
            content, position = (self._page_probs(own, image, head, arrays) for own in ('content', 'position'))
            return torch.lerp(content, position.to(content.dtype), self._shares[head].to(content.dtype))
        scores = self._page_scores(part, image, head, arrays).masked_fill(self._grid.hidden, -math.inf)
        return self._grid.on_pixels(scores.softmax(-1))

    def _page_scores(self, part: str, image: int, head: int, arrays: List[Dict[str, Tensor]]) -> Tensor:
        """The scores of a head as the page computes them, ``(Q, P)``."""
        shared = len(arrays) == 1
        return sum(
            self._position.scores(head, self._grid)
            if term in ('axes', 'shifts')
            else token_scores(term, arrays[0 if shared else image], head, image if shared else 0, self._grid)
            for term in self.parts[part]
        )

    def _images(self, part: str) -> range:
        """The images of a part; the first one stands for all if they do not differ."""
        return range(1 if self.parts[part] in (['axes'], ['shifts']) else len(self._inputs))

    def _sums_of_probs(self, part: str) -> Tensor:
        """What the probabilities add up to without the null key, ``(images, N_h, N)``."""
        return torch.stack([self._own_probs(part, image).sum(-1) for image in self._images(part)])

    def _errors(self, part: str, tokens: List[Dict[str, Quantized]]) -> List[float]:
        """For each head the largest error of a probability, relative to the largest one of its query, rounded up."""
        arrays = [{name: torch.from_numpy(array.rounded) for name, array in group.items()} for group in tokens]
        errors = torch.zeros(self.num_heads)
        for image in self._images(part):
            for head, own in enumerate(self._own_probs(part, image)):
                probs = self._page_probs(part, image, head, arrays)
                if part in self._masses:
                    probs = probs * self._masses[part][image, head, :, None]
                largest = probs.amax(-1).clamp(min=1e-20)  # less where all of a head's attention is on the padding
                errors[head] = errors[head].maximum(((probs - own).abs().amax(-1) / largest).amax())
        return [rounded_up(error) for error in errors.tolist()]

    def _check_finite(self, *values: Tensor) -> None:
        if not all(tensor.isfinite().all() for tensor in values):
            raise ValueError(f'the probabilities of {self._name} are not finite: the parameters of the model must be')
