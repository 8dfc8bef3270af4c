"""Positions in tokens: sines and cosines, and directions of a token that hold nothing but its position."""

import math
from contextlib import ExitStack
from functools import partial
from typing import Any, Callable, List, Tuple

import torch
from torch import Tensor, nn

from ..attention.window import CONVOLUTIONS, shown
from .vision_transformer import Attention, Transformer, find_transformer

# Root mean square of the position functions over all channels of a token. That of the content is about 0.6 after a
# default patch embedding of images of deviation 1. The larger it is, the smaller are the weights that read it, and the
# less do steps of Adam, which are as large for all weights, change the heads.
AMPLITUDE = 2.0


def sine_cosine_embedding(size: Tuple[int, int], channels: int) -> Tensor:
    """Computes sines and cosines of rows and columns (Vaswani et al. 2017, 3.5, on two axes).

    They have a quarter of the channels each; channels beyond are 0.

    Returns:
        Tensor: ``(height*width, channels)``, float64.
    """
    quarter = channels // 4
    # 10000^(−i/n), i = 0 … n − 1
    frequencies = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64, device='cpu') / quarter)
    angles = patch_positions(size)[:, :, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], -1).flatten(1)
    return nn.functional.pad(waves, (0, channels - waves.shape[1]))


@torch.no_grad()
def set_sine_cosine_embedding(model: nn.Module, overwrite: bool = False) -> None:
    """Sets the learned embedding of a vision transformer's patches to sines and cosines of their rows and columns.

    Rows and columns have a quarter of the channels each for sines, and for cosines, of the frequencies 10000^(−i/n),
    i = 0 … n − 1, where n is that quarter (Vaswani et al. 2017, 3.5, on two axes).

    Args:
        model (nn.Module): A vision transformer with ``pos_embed``, or a model with one, just built.
        overwrite (bool): Whether the embedding of a trained model may be overwritten, see
            :func:`~attncnn_plugin.transformers.init_as_convolution`. Defaults to False.

    Raises:
        ValueError: It has no such embedding, or is trained.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', depth=1)
        >>> set_sine_cosine_embedding(model)
        >>> round(model.pos_embed[0, 1:].square().mean().item(), 3)
        0.5
    """
    network = find_transformer(model)
    if not overwrite:
        check_new(network)
    size = network.grid
    rows = position_embedding(network, size[0] * size[1])
    rows[-size[0] * size[1] :] = sine_cosine_embedding(size, rows.shape[1]).to(rows)


def check_new(network: Transformer) -> None:
    """Refuses a network that looks trained by its norms and biases, which are constant in a new one.

    Some libraries draw the biases of linear maps, see :func:`_drawn`.
    """
    kind, norms, trained = network.kind, 0, None
    for name, module in network.module.named_modules():
        is_norm = 'norm' in type(module).__name__.lower()
        for own, values in module.named_parameters('', False):
            norms += is_norm
            if values.ndim > 1 and not is_norm or isinstance(module, CONVOLUTIONS):  # a start sets that of patches
                continue
            if (values != values.flatten()[0]).any() and not _drawn(module, values):
                trained = trained or f'{name}.{own}'
    if trained or not norms:
        reason = f'{trained} of {kind} holds different numbers' if trained else f'no norm of {kind} has parameters'
        raise ValueError(
            f'{reason}, so that model may be trained, which a start would undo: give a new one, or overwrite=True'
        )


def _drawn(module: Any, bias: Tensor) -> bool:
    """Returns whether a linear map's bias looks as drawn from N(0, 1e-6²) or, as PyTorch's, from U(−1/√n, 1/√n).

    n is the number of inputs. The mean square says so, to 4.5 standard deviations. Of the second the weights must not
    have gone beyond ±1/√n, up to the rounding of bfloat16, where their mean square is as drawn.
    """
    if not isinstance(module, nn.Linear):
        return False
    limit, bias = module.in_features**-0.5, bias[bias != 0].double()  # a start sets those of queries to 0
    if 0.5e-6 < bias.square().mean().sqrt() < 2e-6:
        return True
    weight, bias = module.weight.double() / limit, bias / limit
    moved = abs(weight.square().mean() * 3 - 1) < 0.01 and weight.abs().max() > 1.004
    near = abs(bias.square().mean() * 3 - 1) < 4.5 * (0.8 / len(bias)) ** 0.5 and bias.abs().max() < 1.5
    return bool(near and not moved)


def position_embedding(network: Transformer, patches: int) -> Tensor:
    """Returns a view of the absolute position embedding, ``(N, D)``: of patches, with or without prefix tokens."""
    embedding, prefix = network.position, network.num_prefix_tokens
    shape = tuple(getattr(embedding, 'shape', ()))
    if len(shape) != 3 or shape[0] != 1 or not patches <= shape[1] <= patches + prefix:
        raise ValueError(
            f'{network.layout.position}={shown(embedding)} of a {network.kind} must be a parameter of shape '
            f'(1, N, D), for {patches} patches and up to {prefix} other tokens'
        )
    return embedding.data[0]


def patch_positions(size: Tuple[int, int]) -> Tensor:
    """Returns the row and column of each patch of a grid, ``(patches, 2)``, float64."""
    return torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64, device='cpu') for n in size))


class PositionChannels:
    """Directions U of the tokens' space that hold functions of the position and nothing else, in every block.

    What attention gets is LayerNorm(content + position). If nothing but the position embedding writes into U, and U is
    orthogonal to the ones, so that LayerNorm's mean is not in it, then Uᵀ of it is p(k)·g: the wanted functions p of
    the position k times LayerNorm's factor of the token, g = 1/σ. Content changes only g. So U is taken out of the
    outputs of the patch embedding, of attention and of the MLPs. They stay random maps to the other directions, and
    training may use those of U again.

    ``number`` directions are drawn. The network and all attention of it are changed.

    Raises:
        ValueError: The maps that write into tokens are not found.
    """

    def __init__(
        self, network: Transformer, attentions: List[Attention], number: int, generator: torch.Generator
    ) -> None:
        width = attentions[0].width
        drawn = torch.randn(width, number, generator=generator, dtype=torch.float64, device='cpu')
        directions = torch.linalg.qr(torch.cat([torch.ones_like(drawn[:, :1]), drawn], 1))[0][:, 1:]
        self.directions = directions.to(attentions[0].weight('q').device)  # (D, number)
        self.norm = AMPLITUDE * math.sqrt(width)
        self.network, self.attentions = network, attentions
        self.patches: Any = network.patch_convolutions[-1]
        self.prefix = [token.data for token in network.tokens]
        learned = [*self.prefix, *([] if network.position is None else [network.position.data])]
        for module in [self.patches, *(x for a in attentions for x in (a.output, mlp_maps(a)[-1]))]:
            for rows in (module.weight, module.bias):
                if rows is not None:
                    rows.data.copy_(self._cleared(rows.data.movedim(0, -1)).movedim(-1, 0))
        for token in learned:
            token.copy_(self._cleared(token))

    def _cleared(self, tokens: Tensor) -> Tensor:
        """Returns tokens ``(…, D)`` with their part in U removed."""
        return (tokens.double() - self.read(tokens) @ self.directions.T).to(tokens)

    def read(self, tokens: Tensor) -> Tensor:
        """Computes Uᵀ of tokens ``(…, D)``: ``(…, number)``, float64."""
        return tokens.double() @ self.directions

    def hold(self, patches: Tensor, prefix: Tensor) -> None:
        """Puts functions of the position into the patches, ``(patches, number)``, constants into all prefix tokens."""
        rows = position_embedding(self.network, len(patches))[-len(patches) :]
        rows += (patches @ self.directions.T).to(rows)
        for token in self.prefix:
            token += (prefix @ self.directions.T).to(token)

    def hold_constant(self) -> None:
        """Puts a constant of norm ``norm`` into the first direction of every patch, by the patch embedding's bias."""
        if self.patches.bias is None:
            raise ValueError(f'the patch embedding of {self.network.kind} has no bias: rotations need it')
        self.patches.bias.data += (self.norm * self.directions[:, 0]).to(self.patches.bias)

    def in_turn(self, images: Tensor, set_heads: Callable[[Attention, Tensor], None]) -> None:
        """Calls ``set_heads(attention, tokens)`` layer by layer, with the tokens that layers already set give it.

        With the position in the tokens LayerNorm makes their content smaller, by √(1 − s) where s is the position's
        share of the squares. So values and MLPs read only the content, 1/√(1 − s) times as strongly, and begin as
        without the position. That is done here, layer after layer: the shares are those of the images.
        """

        def set_attention(attention: Attention, module: nn.Module, args: Any, kwargs: Any) -> None:
            tokens: Tensor = (*args, *kwargs.values())[0]
            number, (height, width) = tokens[0, ..., 0].numel(), self.network.grid
            if number != height * width + self.network.num_prefix_tokens:
                raise ValueError(
                    f'{attention.name} gets {number} tokens, but a {self.network.kind} has {height}×{width} patches '
                    f'and {self.network.num_prefix_tokens} other tokens'
                )
            self._keep_content(attention.weight('v'), tokens)
            set_heads(attention, tokens)

        def set_map(module: Any, args: Tuple[Tensor, ...]) -> None:
            self._keep_content(module.weight.data, args[0])

        with ExitStack() as stack:
            for attention in self.attentions:
                see = partial(set_attention, attention)
                stack.enter_context(attention.module.register_forward_pre_hook(see, with_kwargs=True))
                for module in mlp_maps(attention)[:-1]:
                    if module.in_features == attention.width:
                        stack.enter_context(module.register_forward_pre_hook(set_map))
            self.network.module(images)

    def _keep_content(self, weight: Tensor, tokens: Tensor) -> None:
        """Sets W ← W(I − UUᵀ)/√(1 − s) of a map that reads tokens."""
        share = self.read(tokens).square().sum() / tokens.double().square().sum()
        weight.copy_(self._cleared(weight) / (1 - share).sqrt())


def mlp_maps(attention: Attention) -> List[nn.Linear]:
    """Returns the linear maps of the MLP beside an attention: the last one writes into the tokens."""
    own, block = set(attention.module.modules()), attention.block
    found = [module for module in block.modules() if isinstance(module, nn.Linear) and module not in own]
    if not found or {found[-1].out_features, attention.output.out_features} != {attention.width}:
        raise ValueError(
            f'{attention.name} needs an MLP beside it in its {type(block).__name__}, both with a last linear '
            f'map to the {attention.width} channels of a token'
        )
    return found
