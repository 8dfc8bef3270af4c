"""The base of all networks: a stem, blocks over a grid of tokens, and a norm."""

from typing import Dict, List, Optional, Sequence, Tuple, Union

from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ...layers.prunable_heads import PrunableHeads, Replacement


class GridNetwork(nn.Module):
    """Stem, blocks and norm: images ``(B, C, H, W)`` to features ``(B, H/r, W/r, D)``.

    Attributes:
        stem (nn.Module): Images to tokens ``(B, H/r, W/r, D)``; ``stem.reduction`` is r.
        blocks (nn.Sequential): Tokens to tokens.
        norm (nn.Module): After the last block.
        grad_checkpointing (bool): Whether the blocks recompute their activations in the backward pass.
    """

    output_fmt = 'NHWC'  # of forward_features, as timm says it
    grad_checkpointing = False

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``(B, C, H, W)`` to the features of the last block, normed, ``(B, H/r, W/r, D)``.

        :func:`~attncnn_plugin.analysis.visit_layers` finds the network of any model by this method, and runs it alone.
        """
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Optional[Union[int, Sequence[int]]] = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]]]:
        """Features of several blocks.

        Args:
            x (Tensor): Images ``(B, C, H, W)``.
            indices (int | Sequence[int], optional): The last n blocks for an int, the blocks of a sequence,
                all of them for None, the default.
            norm (bool): Whether to apply the final norm to all intermediates. Defaults to False.
            stop_early (bool): Whether to leave out the blocks after the last wanted one. Defaults to False.
            output_fmt (str): ``'NCHW'`` or ``'NHWC'`` intermediates. Defaults to ``'NCHW'``.
            intermediates_only (bool): Whether to return the intermediates alone. Defaults to False.

        Returns:
            The features of the last block that ran, normed, ``(B, H/r, W/r, D)``, and the list of intermediates in the
            order of the blocks; or the list alone.
        """
        if output_fmt not in ('NCHW', 'NHWC'):
            raise ValueError(f"output_fmt={output_fmt!r} is unknown: choose 'NCHW' or 'NHWC'")
        take_indices, last = feature_take_indices(len(self.blocks), indices)
        intermediates = []
        x = self.stem(x)
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
            if i in take_indices:
                feature = self.norm(x) if norm else x
                intermediates.append(feature.permute(0, 3, 1, 2) if output_fmt == 'NCHW' else feature)
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def prune_heads(
        self,
        heads: Dict[int, Sequence[int]],
        allow_empty: bool = False,
    ) -> Dict[nn.Parameter, Replacement]:
        """Removes heads of some blocks, see :meth:`~attncnn_plugin.layers.prunable_heads.PrunableHeads.prune_heads`.

        Args:
            heads (dict[int, Sequence[int]]): The heads to remove of each block, counted among those it has now.
            allow_empty (bool): Whether a block may lose all heads, which leaves its attention the bias. Defaults to
                False.

        Returns:
            dict[Parameter, Replacement]: What took the place of each old parameter.

        Raises:
            ValueError: A block or a head that is not there, or all heads of a block; nothing is removed then.
        """
        for block, indices in heads.items():
            if not isinstance(block, int) or not 0 <= block < len(self.blocks):
                raise ValueError(f'heads={heads} names block {block!r}, but the blocks are 0 to {len(self.blocks) - 1}')
            if not isinstance(self.blocks[block].attn, PrunableHeads):
                raise ValueError(
                    f'heads={heads} names block {block}, which has a convolution in the place of attention'
                )
            self.blocks[block].attn.check_heads(indices, allow_empty)
        replaced = {}
        for block, indices in heads.items():
            replaced.update(self.blocks[block].attn.prune_heads(indices, allow_empty))
        return replaced


def check_drop_path_rate(rate: float) -> None:
    """Refuses what is no rate of stochastic depth."""
    if not 0 <= rate < 1:
        raise ValueError(f'drop_path_rate={rate} must be from 0 to below 1')


def check_channels(x: Tensor, channels: int) -> None:
    """Refuses what is no batch of images with as many channels."""
    if x.ndim != 4 or x.shape[1] != channels:
        raise ValueError(f'the input has shape {tuple(x.shape)}, but (B, {channels}, H, W) is expected')
