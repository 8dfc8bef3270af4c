"""Channels of the tokens that hold functions of the position and nothing else, in every block, at the start.

What attention gets is LayerNorm(content + position). If nothing but the position embedding writes into some directions
U of the tokens' space, all orthogonal to the ones, so that LayerNorm's mean is not in them, then Uᵀ of it is p(k)·g:
the wanted functions p of the position k times LayerNorm's factor of the token, g = 1/σ. Content changes g alone. So U
is taken out of the outputs of the patch embedding, of attention and of the MLP. They stay random maps to the other
directions, and training may use those of U again.

With the position in the tokens LayerNorm makes their content smaller, by √(1 − s) where s is the position's share of
the squares. So values and MLPs read the content alone, 1/√(1 − s) times as strongly: W(I − UUᵀ)/√(1 − s). They begin as
without the position.
"""

import math
from functools import partial
from typing import Any, List, Tuple

import torch
from torch import Tensor

from .parts import PREFIX_PARAMETERS, Attention, mlp_readers, patch_convolutions, position_embedding, writers

# Root mean square of the position functions over all channels of a token. That of the content is about 0.6 after a
# default patch embedding of images of deviation 1. The larger it is, the smaller are the weights that read it, and the
# less do steps of Adam, which are as large for all weights, change the heads.
AMPLITUDE = 2.0


class PositionChannels:
    """Directions U of the tokens' space, cleared of all that a network writes into them.

    Args:
        network: The vision transformer; its patch embedding, prefix tokens and position embedding are changed.
        attentions (list[Attention]): All attention of it; the maps that write into the tokens are changed.
        number (int): Of directions.
        generator (torch.Generator): Draws them.

    Raises:
        ValueError: A token has too few channels, or the maps that write into it are not found.
    """

    def __init__(self, network: Any, attentions: List[Attention], number: int, generator: torch.Generator) -> None:
        weight = attentions[0].weight('q')
        width = weight.shape[-1]
        if width < 2 * number:
            raise ValueError(
                f'tokens of {width} channels are too narrow: {number} of them are to hold the position, and at least '
                'as many the content'
            )
        ones = torch.ones(width, 1, dtype=torch.float64)
        drawn = torch.randn(width, number, generator=generator, dtype=torch.float64)
        self.directions = torch.linalg.qr(torch.cat([ones, drawn], 1))[0][:, 1:].to(weight.device)  # (D, number), U ⊥ 1
        self.norm = AMPLITUDE * math.sqrt(width)
        self.network = network
        for module in writers(network, attentions):
            self._clear(module.weight.data)
            if module.bias is not None:
                self._clear(module.bias.data)
        for name in PREFIX_PARAMETERS:
            token = getattr(network, name, None)
            if token is not None:
                token.data.copy_(self.cleared(token.data))

    def _clear(self, weight: Tensor) -> None:
        """W ← (I − UUᵀ)W of a weight ``(D, …)``."""
        rows = self.cleared(weight.flatten(1).T if weight.ndim > 1 else weight[None])
        weight.copy_((rows.T if weight.ndim > 1 else rows[0]).reshape(weight.shape))

    def cleared(self, tokens: Tensor) -> Tensor:
        """Tokens ``(…, D)`` without their part in U."""
        u = self.directions
        return (tokens.double() - (tokens.double() @ u) @ u.T).to(tokens)

    def read(self, tokens: Tensor) -> Tensor:
        """Uᵀ of tokens ``(…, D)``: ``(…, number)``, float64."""
        return tokens.double() @ self.directions

    def keep_content(self, attentions: List[Attention], values: bool) -> List[Any]:
        """Lets what reads the tokens read their content as strongly as without the position, when it gets them.

        Args:
            attentions (list[Attention]): All attention of the network.
            values (bool): Whether values do too, not the MLPs alone.

        Returns:
            list: Handles of hooks, to be removed after a forward pass.
        """
        read = [(module, module.weight.data) for attention in attentions for module in mlp_readers(attention)]
        if values:
            read += [(attention.module, attention.weight('v')) for attention in attentions]
        return [module.register_forward_pre_hook(partial(self._keep_content, weight)) for module, weight in read]

    def _keep_content(self, weight: Tensor, module: Any, args: Tuple[Tensor, ...]) -> None:
        share = self.read(args[0]).square().sum() / args[0].double().square().sum()  # s
        weight.copy_(self.cleared(weight) / (1 - share).sqrt())

    def hold(self, patches: Tensor, prefix: Tensor) -> None:
        """Puts functions of the position into the embedding of patches, and constants into the prefix tokens.

        Args:
            patches (Tensor): ``(patches, number)``.
            prefix (Tensor): ``(number,)``, the same for all prefix tokens.
        """
        rows = position_embedding(self.network, len(patches))
        number = len(rows) - len(patches)
        rows.copy_(self.cleared(rows))
        rows[number:] += (patches @ self.directions.T).to(rows)
        if number:
            rows[:number] += (prefix @ self.directions.T).to(rows)
            return
        for name in PREFIX_PARAMETERS:  # tokens that have no position
            token = getattr(self.network, name, None)
            if token is not None:
                token.data += (prefix @ self.directions.T).to(token)

    def hold_constant(self) -> None:
        """Puts a constant of norm ``norm`` into the first direction of every patch, by the patch embedding's bias.

        Raises:
            ValueError: The patch embedding has no bias.
        """
        projection = patch_convolutions(self.network)[-1]
        if projection.bias is None:
            raise ValueError(
                f'the patch embedding of {type(self.network).__name__} has no bias: queries and keys that are the same '
                'for all patches need it'
            )
        projection.bias.data += (self.norm * self.directions[:, 0]).to(projection.bias)
        embedding = getattr(self.network, 'pos_embed', None)
        if isinstance(embedding, torch.nn.Parameter):
            embedding.data.copy_(self.cleared(embedding.data))
