"""Self-attention over patches with a relative position bias (Li et al. 2021 (L21), sections 3 and 4)."""

from functools import partial
from typing import Any, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_layer import AttentionLayer, HeadParameters, check_plain_linear, head_products
from .precision import at_least_float32, full_precision
from .shifts import at_grid_shifts, resize_loaded, resize_shift_table
from .softmax import softmax
from .state_dicts import StateDict, StructureError, check_number, read_extra_state, write_extra_state

# Stands for −∞: the gradient of logsumexp is NaN where all entries are −∞. Beside trained scores e^−10000 is 0.
MASK_VALUE = -1e4


def image_to_patches(image: Tensor, patch_size: Tuple[int, int]) -> Tensor:
    """Cuts ``(B, C, H, W)`` into ``(B, H/P, W/P, C·P·P)``, a patch flattened channel by channel, row by row."""
    (height, width), (rows, columns) = image.shape[2:], patch_size
    if height % rows or width % columns:
        raise ValueError(
            f'the image of {height}x{width} pixels cannot be cut into patches of {rows}x{columns}: resize or pad it to '
            'multiples of these'
        )
    return image.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).permute(0, 2, 4, 1, 3, 5).flatten(3)


def patches_to_image(patches: Tensor, patch_size: Tuple[int, int]) -> Tensor:
    """Puts ``(B, H/P, W/P, C·P·P)`` together to ``(B, C, H, W)``, the inverse of :func:`image_to_patches`."""
    return patches.unflatten(3, (-1, *patch_size)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class GridBias(nn.Module):
    """Relative position bias b_δ for all shifts of a grid.

    A shift whose key lies outside the grid counts all the same: its key is the *null key*, one more key with the value
    0, whose bias for a query is log Σ exp(b_δ) over those shifts. So the probabilities of the keys inside do not depend
    on where the border is, and what lies beyond it is zero padding, exactly. L21's Theorem 1 leaves it out: then a head
    that finds no key at its shift spreads over the whole image. Randomly initialized attention has no null key: with
    biases of 0 it would take 73% of the attention of a 14×14 grid.

    On a smaller grid the shifts in the middle of the table are used; for a larger one, and for a checkpoint of another
    size, near shifts keep their biases and far ones are spread.

    Args:
        num_heads (int): Number of heads N_h.
        grid_size (tuple[int, int]): Height and width of the grid, in tokens.
        null_key (bool): Whether there is a null key. Defaults to True.
        **dd: ``device`` and ``dtype`` of the parameters, as of ``nn.Linear``.

    Attributes:
        table (Parameter): b, ``(N_h, 2·H − 1, 2·W − 1)``. Starts at 0.
    """

    def __init__(self, num_heads: int, grid_size: Tuple[int, int], null_key: bool = True, **dd: Any) -> None:
        super().__init__()
        self.null_key = null_key
        self.table = nn.Parameter(torch.zeros(num_heads, *(2 * n - 1 for n in grid_size), **dd))
        self.register_load_state_dict_pre_hook(partial(resize_loaded, (1, 2)))

    def forward(self, size: Sequence[int]) -> Tensor:
        """Returns the biases of every query and key of a grid, ``(N_h, H·W, H·W)``, at least float32.

        With a null key there is one more column, its own, the last.
        """
        table = resize_shift_table(at_least_float32(self.table), {1: 2 * size[0] - 1, 2: 2 * size[1] - 1})
        keys = at_grid_shifts(table, size)
        return torch.cat([keys, _outside(table, size).flatten(1)[..., None]], dim=-1) if self.null_key else keys


def _outside(table: Tensor, size: Sequence[int]) -> Tensor:
    """Returns log Σ exp(b_δ) over the shifts that lead out of the grid, of each query, ``(N_h, H, W)``."""
    positions = (torch.arange(n, device=table.device) for n in size)
    shifts = (torch.arange(1 - n, n, device=table.device) for n in size)
    targets = (position[:, None] + shift for position, shift in zip(positions, shifts))
    rows, columns = ((target < 0) | (target >= n) for target, n in zip(targets, size))  # (q, δ)
    # A shift leads out by its column, whatever its row is …
    by_column = table[:, :, None].masked_fill(~columns, MASK_VALUE).logsumexp(-1)  # (N_h, δ1, q2)
    # … or by its row, whatever its column is: (N_h, q1, δ1, q2).
    by_row = torch.where(rows[:, :, None], table.logsumexp(-1)[:, None, :, None], by_column[:, None])
    return by_row.logsumexp(2)


class PatchAttention(AttentionLayer):
    """Multi-head self-attention over a grid of tokens (L21, eq. 1 and 2).

    Queries, keys and values have no biases, as a null key has the key 0 and the value 0. A state dict with other
    widths, another choice of a null key, or fewer heads changes the layer as it is loaded.

    Args:
        dim (int): Channels D of a token.
        num_heads (int): Number of heads N_h.
        position (GridBias): The relative position bias.
        head_dim (int | Sequence[int], optional): Channels D_h of a head's values, for all heads or for each. Defaults
            to ``dim``, as L21's heads.
        qk_dim (int, optional): Channels D_k of a head's queries and keys. Defaults to ``dim``.
        **dd: ``device`` and ``dtype`` of the parameters, as of ``nn.Linear``.

    Raises:
        ValueError: A width below 1, or a number of them that is not the number of heads.

    Attributes:
        query, key (nn.Linear): W^Q and W^K, D to N_h·D_k.
        value (nn.Linear): W^V, D to Σ D_h, head after head.
        out (nn.Linear): W^O, Σ D_h to D, with a bias.
        head_dims (tuple[int, ...]): D_h of each head.
    """

    depends_on_content = True
    output_name = 'out'

    def __init__(
        self,
        dim: int,
        num_heads: int,
        position: GridBias,
        head_dim: Union[int, Sequence[int], None] = None,
        qk_dim: Optional[int] = None,
        **dd: Any,
    ) -> None:
        super().__init__()
        head_dim = dim if head_dim is None else head_dim
        self.head_dims = (head_dim,) * num_heads if isinstance(head_dim, int) else tuple(head_dim)
        self.qk_dim = dim if qk_dim is None else qk_dim
        if len(self.head_dims) != num_heads or min(self.head_dims, default=0) < 1:
            raise ValueError(
                f'head_dim={head_dim} must be at least 1, one for all heads or one for each of the {num_heads}'
            )
        if self.qk_dim < 1:
            raise ValueError(f'qk_dim={qk_dim} must be at least 1')
        self.dim = dim
        self.position = position
        self.query = nn.Linear(dim, num_heads * self.qk_dim, bias=False, **dd)
        self.key = nn.Linear(dim, num_heads * self.qk_dim, bias=False, **dd)
        self.value = nn.Linear(dim, sum(self.head_dims), bias=False, **dd)
        self.out = nn.Linear(sum(self.head_dims), dim, **dd)
        self.num_heads = self.built_heads = num_heads
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.trunc_normal_(linear.weight, std=0.02)
        nn.init.zeros_(self.out.bias)

    def extra_repr(self) -> str:
        widths = self.head_dims[0] if len(set(self.head_dims)) == 1 else self.head_dims
        return f'dim={self.dim}, num_heads={self.num_heads}, head_dim={widths}, qk_dim={self.qk_dim}'

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, H, W, D)`` to the same, for any H and W."""
        tokens = x.flatten(1, 2)
        query, key = (
            linear(tokens).unflatten(2, (self.num_heads, self.qk_dim)).transpose(1, 2)  # (B, N_h, N, D_k)
            for linear in (self.query, self.key)
        )
        scores = query @ (key * self.qk_dim**-0.5).transpose(2, 3)  # q·k/√D_k, in the precision of the model
        if self.position.null_key:
            scores = F.pad(scores, (0, 1))
        probs = softmax(scores + self.position(x.shape[1:3]))[..., : tokens.shape[1]]  # the null key's value is 0
        values = self.value(tokens).split(self.head_dims, dim=2)  # (B, N, D_h) of each head
        # By unbind, not by index: every indexing has a gradient as large as all probabilities.
        heads = [of_head.to(value.dtype) @ value for of_head, value in zip(probs.unbind(1), values)]
        return self.out(torch.cat(heads, dim=2).unflatten(1, x.shape[1:3]))

    @property
    def padding_mode(self) -> str:
        return 'zeros' if self.position.null_key else 'replicate'

    def position_probs(self, size: Sequence[int]) -> Tensor:
        return softmax(self.position(size))[..., : size[0] * size[1]]

    def position_scores(self, x: Tensor) -> Tensor:
        return self.position(x.shape[1:3]).expand(len(x), -1, -1, -1)

    def attention_scores(self, x: Tensor) -> Tensor:
        scores = self.content_scores(x)
        return (F.pad(scores, (0, 1)) if self.position.null_key else scores) + self.position(x.shape[1:3])

    def content_scores(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1, 2)
        return head_products(self.query(tokens), self.key(tokens), self.num_heads)

    def value_matrices(self) -> Tensor:
        for name in ('value', 'out'):
            check_plain_linear(name, getattr(self, name))
        values = at_least_float32(self.value.weight).split(self.head_dims)  # (D_h, D)
        outs = at_least_float32(self.out.weight).split(self.head_dims, dim=1)  # (D_out, D_h)
        with full_precision(self.value.weight.device.type):
            return torch.stack([out @ value for value, out in zip(values, outs)])

    def head_parameters(self) -> HeadParameters:
        return {
            'query.weight': (0, self.qk_dim),
            'key.weight': (0, self.qk_dim),
            'value.weight': (0, self.head_dims),
            'out.weight': (1, self.head_dims),
            'position.table': (0, 1),
        }

    def note_kept(self, heads: Sequence[int]) -> None:
        super().note_kept(heads)
        self.head_dims = tuple(self.head_dims[head] for head in heads)

    def get_extra_state(self) -> Tensor:
        """Returns the widths, and whether there is a null key, as JSON in bytes."""
        return write_extra_state(dict(qk_dim=self.qk_dim, head_dims=self.head_dims, null_key=self.position.null_key))

    def set_extra_state(self, state: Tensor) -> None:
        """Does nothing: :meth:`structure_in` has read it."""

    def structure_in(self, state_dict: StateDict, prefix: str) -> Any:
        """Returns ``qk_dim``, ``head_dims`` and ``null_key`` in a state dict; None if they are the layer's own."""
        state = read_extra_state(state_dict, prefix)
        if state is None or not all(prefix + name in state_dict for name in self.head_parameters()):
            return None
        try:
            structure = state['qk_dim'], tuple(state['head_dims']), state['null_key']
            qk_dim, head_dims, _ = structure
            rows = len(state_dict[f'{prefix}query.weight']), len(state_dict[f'{prefix}value.weight'])
            if rows != (len(head_dims) * qk_dim, sum(head_dims)):
                raise ValueError(f'query.weight and value.weight have {rows} rows, which {state} does not explain')
        except (KeyError, TypeError, ValueError) as error:
            raise StructureError(f'{prefix}_extra_state of the state dict is damaged: {error}') from error
        check_number(prefix, len(head_dims), self.built_heads)
        return None if structure == (self.qk_dim, self.head_dims, self.position.null_key) else structure

    def take_structure(self, structure: Any) -> None:
        self.qk_dim, self.head_dims, self.position.null_key = structure
        super().take_structure(len(self.head_dims))
