"""timm's interface of a model, for every network of this package."""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import torch
from timm.layers import ClassifierHead
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ...layers.structure import StructureError, without_prefix
from ..networks import GridNetwork

BACKBONE = 'backbone.'  # mmpretrain's prefix of the names of the network


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> Dict[str, Any]:
    """timm's filter of pretrained weights: from half precision to single, in which they are converted and resized."""
    return {name: value.float() if value.dtype == torch.half else value for name, value in state_dict.items()}


class GridClassifier(GridNetwork):
    """Classifier on top of a :class:`~attncnn_plugin.models.networks.GridNetwork`: mean over the grid, linear map.

    A model inherits from this class first and from its network second, and calls :meth:`_add_head` when the network is
    built. It loads state dicts with the names of mmpretrain's classifiers too.
    """

    def _add_head(self, embed_dim, num_classes, in_chans, global_pool, drop_rate, device=None, dtype=None) -> None:
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = embed_dim
        self.feature_info = [
            dict(num_chs=embed_dim, reduction=self.stem.reduction, module=f'blocks.{i}')
            for i in range(len(self.blocks))
        ]
        self.head = ClassifierHead(
            embed_dim,
            num_classes,
            pool_type=global_pool,
            drop_rate=drop_rate,
            input_fmt=self.output_fmt,
            device=device,
            dtype=dtype,
        )
        self.head_hidden_size = self.num_features * self.head.global_pool.feat_mult()

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Dict[str, Any]:
        return dict(stem=r'^stem', blocks=[(r'^blocks\.(\d+)', None), (r'^norm', (99999,))])

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> torch.nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)
        self.head.to(next(self.blocks.parameters()))  # its device and dtype
        self.head_hidden_size = self.num_features * self.head.global_pool.feat_mult()

    def prune_intermediate_layers(
        self,
        indices: Union[int, Sequence[int]] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> List[int]:
        """Drops the blocks after the last wanted one.

        Args:
            indices (int | Sequence[int]): The last n blocks for an int, or the wanted blocks. Defaults to 1.
            prune_norm (bool): Whether to drop the final norm. Defaults to False.
            prune_head (bool): Whether to drop the classifier and the pooling too. Defaults to True.

        Returns:
            list[int]: The wanted blocks, counted from 0.
        """
        take_indices, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, '')
        return take_indices

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args, **kwargs):
        """Loads a state dict, as of any module; the names of mmpretrain's classifiers will do too.

        Raises:
            RuntimeError: It does not fit, or has an entry under both names.
        """
        # Not in a pre-hook: the network's own hook comes first and wants its own names.
        try:
            state_dict = without_prefix(state_dict, BACKBONE)
        except StructureError as error:
            raise RuntimeError(f'Error(s) in loading state_dict for {type(self).__name__}: {error}') from error
        return super().load_state_dict(state_dict, *args, **kwargs)
