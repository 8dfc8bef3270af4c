"""What both networks share: the stem, the forward pass, timm's interface and the names that state dicts may have."""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from timm.layers import ClassifierHead, to_2tuple
from timm.models import build_model_with_cfg, checkpoint, checkpoint_seq, register_notrace_module
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..attention import AttentionLayer
from ..attention.patches import image_to_patches
from ..attention.state_dicts import Restructurable, without_prefix
from ..attention.window import check_choice
from ..weights import CLASSES, in_single_precision, weights_file

register_notrace_module(AttentionLayer)  # forward passes that look at sizes, which a symbolic trace does not know

# Of default configurations. timm can adapt a first convolution to other channels, but not the linear map of the stem.
NETWORK: Dict[str, Any] = dict(first_conv=(), classifier='head.fc', license='apache-2.0')
CIFAR: Dict[str, Any] = dict(
    num_classes=10, input_size=(3, 32, 32), crop_pct=1.0, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)
)


@register_notrace_module
class SpaceToDepthStem(nn.Module):
    """Cuts images into squares of r×r pixels, r²·C channels each, which ``proj`` maps to tokens (C20, 4.1)."""

    def __init__(self, in_chans: int, reduction: int, proj: nn.Module) -> None:
        super().__init__()
        self.in_chans = in_chans
        self.reduction = reduction
        self.proj = proj

    def forward(self, x: Tensor) -> Tensor:
        """Maps images ``(B, C, H, W)`` to tokens ``(B, H/r, W/r, D)``.

        Raises:
            ValueError: The image does not have the stem's channels, or its sides are no multiples of r.
        """
        if x.ndim != 4 or x.shape[1] != self.in_chans:
            raise ValueError(f'the input has shape {tuple(x.shape)}, but (B, {self.in_chans}, H, W) is expected')
        return self.proj(image_to_patches(x, (self.reduction, self.reduction)))


class TimmNetwork(Restructurable):
    """Runs a ``stem``, ``blocks`` and a ``norm``, which a subclass builds, and a ``head``, which this class builds."""

    output_fmt = 'NHWC'  # of forward_features, as timm says it
    undecayed: Tuple[str, ...] = ()  # parameters whose names end so have no weight decay
    stem: Any
    blocks: Any
    norm: nn.Module

    def _init_interface_of_timm(
        self, in_chans: int, dim: int, reduction: int, num_classes: int, global_pool: str, drop_rate: float, **dd: Any
    ) -> None:
        """Builds the head and sets what timm reads; called last, as it counts the blocks."""
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = dim
        self.grad_checkpointing = False
        self.feature_info = [
            dict(num_chs=dim, reduction=reduction, module=f'blocks.{i}') for i in range(len(self.blocks))
        ]
        self.head = ClassifierHead(
            dim, num_classes, pool_type=global_pool, drop_rate=drop_rate, input_fmt=self.output_fmt, **dd
        )
        self.head_hidden_size = dim * self.head.global_pool.feat_mult()

    def forward_features(self, x: Tensor) -> Tensor:
        """Maps images ``(B, C, H, W)`` to the features of the last block, normed, ``(B, H/r, W/r, D)``."""
        x = self.stem(x)
        return self.norm(checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def no_weight_decay(self) -> Set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(self.undecayed)}

    def group_matcher(self, coarse: bool = False) -> Dict[str, Any]:
        return dict(stem=r'^stem', blocks=[(r'^blocks\.(\d+)', None), (r'^norm', (99999,))])

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)
        self.head.to(next(self.blocks.parameters()))  # its device and dtype
        self.head_hidden_size = self.num_features * self.head.global_pool.feat_mult()

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Optional[Union[int, Sequence[int]]] = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]]]:
        """Computes the features of several blocks, by the arguments of timm's models.

        Returns:
            The features of the last block that ran, normed, ``(B, H, W, D)``, and those of the blocks ``indices``.
        """
        check_choice('output_fmt', output_fmt, ('NCHW', 'NHWC'))
        take_indices, last = feature_take_indices(len(self.blocks), indices)
        intermediates = []
        x = self.stem(x)
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
            if i in take_indices:
                feature = self.norm(x) if norm else x
                intermediates.append(feature.permute(0, 3, 1, 2).contiguous() if output_fmt == 'NCHW' else feature)
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def prune_intermediate_layers(
        self, indices: Union[int, Sequence[int]] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> List[int]:
        """Drops the blocks after the last wanted one, the norm and the classifier; returns the wanted blocks."""
        take_indices, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, '')
        return take_indices

    def load_state_dict(self, state_dict: Mapping[str, Any], *args, **kwargs):
        """Loads a state dict, also one of mmpretrain's classifiers, whose names begin with ``backbone.``."""
        return super().load_state_dict(without_prefix(state_dict, 'backbone.'), *args, **kwargs)


def check_sizes(drop_path_rate: float, **sizes: int) -> None:
    """Raises ``ValueError`` for a size below 1, and for a stochastic depth that leaves out every image."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f'{name}={size} must be at least 1')
    if not 0 <= drop_path_rate < 1:
        raise ValueError(f'drop_path_rate={drop_path_rate} must be from 0 to below 1')


def token_grid(img_size: Union[int, Tuple[int, int]], side: int, name: str = 'reduction') -> Tuple[int, int]:
    """Returns the height and width of an image in tokens, squares of ``side`` pixels.

    Args:
        name (str): What the network calls ``side``, for the error.

    Raises:
        ValueError: The image cannot be cut into tokens.
    """
    height, width = to_2tuple(img_size)
    if side < 1 or min(height, width) < side or height % side or width % side:
        raise ValueError(f'img_size={img_size} must be a multiple of {name}={side}, the side of a token in pixels')
    return height // side, width // side


def trained(name: str, cfg: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns the default configuration of a network with weights in the package, by its name."""
    return {f'{name}.cifar10': {**cfg, 'file': weights_file(name), 'label_names': CLASSES}}


def build(network: Callable[..., TimmNetwork], variant: str, pretrained: bool, **kwargs: Any) -> Any:
    """Builds a network that timm knows by the name ``variant``."""
    return build_model_with_cfg(
        network,
        variant,
        pretrained,
        pretrained_filter_fn=in_single_precision,
        feature_cfg=dict(out_indices=kwargs.pop('out_indices', 3), feature_cls='getter'),
        **kwargs,
    )
