"""mmpretrain's interface of a backbone, for every network of this package."""

import copy
import inspect
from functools import wraps
from typing import Callable, List, Sequence, Tuple, Union

from mmpretrain.models.backbones.base_backbone import BaseBackbone
from torch import Tensor, nn

from ...utils.init_info import record_new_parameters
from ..networks import GridNetwork


def refusing_inherited(build: Callable) -> Callable:
    """A backbone's ``__init__``, or a function that builds one, whose error of other arguments says what to write."""
    known, name = inspect.signature(build).parameters, build.__qualname__.split('.')[0]

    @wraps(build)
    def checked(*args, **kwargs):
        unknown = [argument for argument in kwargs if argument not in known]
        if unknown:
            raise TypeError(
                f'{name} has no argument {", ".join(unknown)}: write _delete_=True in backbone if these come from the '
                'config that this one inherits from'
            )
        return build(*args, **kwargs)

    return checked


class ChannelsFirst(nn.Module):
    """Features ``(B, H, W, D)`` to ``(B, D, H, W)``, as a module, so that tools can look at what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)


class GridBackbone(GridNetwork, BaseBackbone):
    """Outputs, frozen stages and layer depths of a :class:`~attncnn_plugin.models.networks.GridNetwork`.

    A backbone inherits from this class first and from its network second, and calls :meth:`_set_interface` when the
    network is built.

    Attributes:
        featmap (nn.Module): What all outputs pass through, as ``(B, D, H, W)``: the target layer for class activation
            maps.
    """

    OUT_TYPES = {'featmap', 'avg_featmap'}
    frozen_stages = -1  # while the network is being built

    def _set_interface(self, out_indices, out_type, frozen_stages, with_cp, init_cfg) -> None:
        self.init_cfg = copy.deepcopy(init_cfg)
        self.num_layers = len(self.blocks)
        self.featmap = ChannelsFirst()
        self.out_indices = self._resolve_out_indices(out_indices)
        self.grad_checkpointing = with_cp

        if out_type not in self.OUT_TYPES:
            raise ValueError(f'Unsupported `out_type` {out_type}, please choose from {self.OUT_TYPES}')
        self.out_type = out_type

        if not isinstance(frozen_stages, int) or not -1 <= frozen_stages <= self.num_layers:
            raise ValueError(
                f'`frozen_stages` {frozen_stages} must be -1 (nothing is frozen), 0 (the stem) or the '
                f'number of blocks to freeze with it, at most {self.num_layers}'
            )
        self.frozen_stages = frozen_stages
        self._freeze_stages()
        self.register_load_state_dict_post_hook(record_new_parameters)

    def forward(self, x: Tensor) -> Tuple[Tensor, ...]:
        """Images ``(B, C, H, W)`` to the outputs of the blocks in ``out_indices``, in the order of the blocks.

        That of the last block is normed.
        """
        last, features = self.forward_intermediates(x, self.out_indices, stop_early=True, output_fmt='NHWC')
        if self.num_layers - 1 in self.out_indices:
            features[-1] = last
        features = [self.featmap(feature) for feature in features]
        if self.out_type == 'avg_featmap':
            return tuple(feature.mean(dim=(2, 3)) for feature in features)
        return tuple(features)

    def train(self, mode=True):
        super().train(mode)
        self._freeze_stages()
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> Tuple[int, int]:
        """Get the layer-wise depth of a parameter.

        Args:
            param_name (str): The name of the parameter.
            prefix (str): The prefix for the parameter. Defaults to an empty string.

        Returns:
            Tuple[int, int]: The layer-wise depth and the num of layers: 0 for the stem, i + 1 for block i, and the
            last one for the final norm and what follows the backbone.
        """
        num_layers = self.num_layers + 2
        part, *rest = param_name[len(prefix) :].split('.')
        if param_name.startswith(prefix) and part == 'stem':
            return 0, num_layers
        if param_name.startswith(prefix) and part == 'blocks':
            return int(rest[0]) + 1, num_layers
        return num_layers - 1, num_layers

    def _resolve_out_indices(self, out_indices: Union[int, Sequence[int]]) -> List[int]:
        if isinstance(out_indices, int):
            out_indices = [out_indices]
        if not isinstance(out_indices, Sequence) or not out_indices or {type(i) for i in out_indices} != {int}:
            raise ValueError(f'`out_indices` must be an int or a sequence of ints, but got {out_indices}')
        resolved = []
        for index in out_indices:
            if not -self.num_layers <= index < self.num_layers:
                raise ValueError(
                    f'Invalid out_indices {index}: there are {self.num_layers} blocks, so it must be '
                    f'from {-self.num_layers} to {self.num_layers - 1}'
                )
            resolved.append(index % self.num_layers)
        if len(set(resolved)) < len(resolved):
            raise ValueError(f'`out_indices` {out_indices} names a block twice')
        return resolved

    def _freeze_stages(self) -> None:
        """Stops the gradient of the stem and of the first blocks, in eval mode; of the norm after all of them too."""
        if self.frozen_stages >= 0:
            frozen = [self.stem, *self.blocks[: self.frozen_stages]]
            if self.frozen_stages == self.num_layers:
                frozen.append(self.norm)
            for module in frozen:
                module.eval()
                module.requires_grad_(False)
