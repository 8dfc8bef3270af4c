"""The base of all attention layers: their scores, probabilities and values, head by head, and which heads they have."""

import copy
import math
from typing import Any, Dict, Optional, Sequence, Tuple, cast

import torch
from torch import Tensor, nn

from ..change import resize
from .positions import GaussianHeads
from .precision import at_least_float32, full_precision
from .softmax import softmax
from .state_dicts import Restructurable, StateDict, StructureError, check_number
from .window import Window

# By name of a parameter: its dimension of heads, and how many entries a head has there, one number for all or for each.
HeadParameters = Dict[str, Tuple[int, Any]]


class AttentionLayer(Restructurable):
    """Attention of queries to keys, both of them the pixels or patches of an image.

    Scores are defined up to a constant for each query. A *null key* is one more key, after those of the grid, that
    stands for what lies outside of the grid; the methods that return probabilities leave it out, so that those of a
    query add up to less than 1. A layer can lose heads, also by loading a state dict with fewer of them.

    Attributes:
        num_heads (int): Number of heads N_h there are now.
        built_heads (int): Number of heads that the layer was built with, the most that it can load.
        window (Window | None): Where the queries are and how the image is padded, for attention instead of a
            convolution; None for attention over a grid, whose queries are its tokens.
        depends_on_content (bool): Whether the probabilities depend on the input.
        has_position_scores (bool): Whether a term of the scores depends only on position.
        padding_mode (str): What a head sees at a shift that leaves the grid, as the padding of a convolution that does
            the same: a hard Gaussian head the nearest pixel inside, ``'replicate'``, a null key ``'zeros'``.
    """

    num_heads: int
    built_heads: int
    output_name = 'value'
    window: Optional[Window] = None
    depends_on_content = False
    has_position_scores = True
    padding_mode: Any = 'replicate'

    def gaussian_heads(self) -> Optional[GaussianHeads]:
        """Returns centres and shapes of Gaussian scores by position, at least float32; None for other scores."""
        of_encoding = getattr(getattr(self, 'encoding', None), 'gaussian_heads', None)
        return None if of_encoding is None else of_encoding()

    def position_probs(self, size: Sequence[int]) -> Optional[Tensor]:
        """Returns the softmax of the terms of the scores that depend only on position; None without such a term.

        The probabilities are ``(N_h, Q, K)`` for a grid or an image of ``size``, row-major, at least float32.
        """
        return None

    def attention_probs(self, size: Sequence[int]) -> Tensor:
        """Returns the probabilities of a layer whose scores depend only on position: :meth:`position_probs`.

        Raises:
            ValueError: The probabilities depend on the input.
        """
        if self.depends_on_content:
            raise ValueError(
                f'the probabilities of {type(self).__name__}({self.extra_repr()}) depend on the input: only those of '
                'position-only attention do not; for an input x they are attention_scores(x).softmax(-1)'
            )
        return cast(Tensor, self.position_probs(size))

    @torch.no_grad()
    def exact_attention_probs(self, size: Sequence[int]) -> Tensor:
        """Computes :meth:`attention_probs` in float64 throughout, on the CPU."""
        return copy.deepcopy(self).cpu().double().attention_probs(size)

    def grid_of(self, x: Tensor) -> Tuple[int, ...]:
        """Returns height and width of the grid of keys for an input, tokens ``(B, H, W, D)``."""
        return tuple(x.shape[1:3])

    def attention_scores(self, x: Tensor) -> Tensor:
        """Returns all scores of an input, ``(B, N_h, Q, K)``, at least float32, those of a null key last.

        Their softmax gives the probabilities. It is for layers that depend on content.
        """
        raise NotImplementedError

    @torch.no_grad()
    def probs_of(self, x: Tensor) -> Tensor:
        """Returns the probabilities for an input, without a null key, ``(B, N_h, Q, K)``, at least float32."""
        size = self.grid_of(x)
        if self.depends_on_content:
            return softmax(self.attention_scores(x))[..., : math.prod(size)]
        return self.attention_probs(size).expand(len(x), -1, -1, -1)

    def content_scores(self, x: Tensor) -> Tensor:
        """Returns the scores without position, q·k/√D, without a null key, ``(B, N_h, H*W, H*W)``."""
        raise NotImplementedError

    def position_scores(self, x: Tensor) -> Tensor:
        """Returns the scores with relative position, q·r_δ or v·r_δ of C20's eq. 8, as :meth:`attention_scores`."""
        raise NotImplementedError

    def value_matrices(self) -> Tensor:
        """Returns W^V W^O of each head, transposed, ``(N_h, D_out, D)``, at least float32.

        Raises:
            RuntimeError: A linear map of the layer is more than its weight, for instance an adapter.
        """
        raise NotImplementedError

    def head_parameters(self) -> HeadParameters:
        """Returns, for each parameter with entries for heads, their dimension and how many a head has there.

        In general these are the parameters of an ``encoding``.
        """
        encoding = getattr(self, 'encoding', None)
        own = [] if encoding is None else encoding.named_parameters(recurse=False)
        return {f'encoding.{name}': (0, 1) for name, _ in own}

    def head_owners(self) -> Dict[str, Tuple[int, Tensor]]:
        """Returns, for each of these parameters, the dimension of heads and which head has each entry.

        The latter is ``(entries, N_h)``, bool.
        """
        heads = torch.eye(self.num_heads, dtype=torch.bool, device='cpu')
        return {
            name: (dim, torch.cat([head.expand(width, -1) for head, width in zip(heads, self._widths(entries))]))
            for name, (dim, entries) in self.head_parameters().items()
        }

    @property
    def output(self) -> Any:
        """The linear map that takes the outputs of all heads, which lie one after the other."""
        return self.get_submodule(self.output_name)

    @property
    def output_widths(self) -> Sequence[int]:
        """How many channels of the input of :attr:`output` each head has."""
        return self._widths(self.head_parameters()[f'{self.output_name}.weight'][1])

    def note_kept(self, heads: Sequence[int]) -> None:
        """Notes that the layer has only these of its heads from now on; its parameters have lost the others."""
        self.num_heads = len(heads)

    def structure_in(self, state_dict: StateDict, prefix: str) -> Any:
        """Returns the number of heads in a state dict; None if it is the layer's, or entries are missing.

        Raises:
            StructureError: Shapes that no number of heads explains, or more heads than the layer was built with.
        """
        places, counts = self.head_parameters(), {}
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, (dim, entries) in places.items():
            loaded, own = state_dict.get(prefix + name), parameters.get(name)  # None if something computes it
            if not isinstance(loaded, Tensor) or own is None:
                continue
            heads, rest = divmod(loaded.shape[dim], entries) if loaded.ndim == own.ndim else (0, 1)
            if rest or loaded.movedim(dim, 0).shape[1:] != own.movedim(dim, 0).shape[1:]:
                raise StructureError(
                    f'{prefix}{name} of the state dict has shape {tuple(loaded.shape)}, that of the model '
                    f'{tuple(own.shape)}: no number of heads explains it, so the model has another width or another '
                    'kind of attention; build it as the one that was saved'
                )
            counts[name] = heads
        if counts:
            check_number(prefix, max(counts.values()), self.built_heads)
        numbers = set(counts.values())  # not one, if the loading is to refuse it
        number = numbers.pop() if len(numbers) == 1 and len(counts) == len(places) else None
        return None if number == self.num_heads else number

    def take_structure(self, structure: Any) -> None:
        """Takes a number of heads, all 0 until they are loaded. The parameters stay the same objects."""
        self.num_heads = structure
        for name, (dim, entries) in self.head_parameters().items():
            parameter = self.get_parameter(name)
            resize(self, name, [*parameter.shape[:dim], sum(self._widths(entries)), *parameter.shape[dim + 1 :]])
            set_parameter(self, name, parameter)

    def _widths(self, entries: Any) -> Sequence[int]:
        return [entries] * self.num_heads if isinstance(entries, int) else entries


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Sets a parameter of a module by its name, and the sizes of the linear map that has it."""
    path, _, leaf = name.rpartition('.')
    owner = module.get_submodule(path)
    setattr(owner, leaf, parameter)
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = owner.weight.shape


def check_plain_linear(name: str, linear: nn.Module, *others: type) -> None:
    """Raises RuntimeError for what is more than a weight and a bias, as an adapter (LoRA) or a parametrization.

    Args:
        name (str): What the layer calls the linear map.
        linear (nn.Module): The linear map.
        *others (type): Classes that are their weight and bias too.
    """
    if type(linear) not in (nn.Linear, *others):
        raise RuntimeError(
            f'{name} is a {type(linear).__name__}, but only a plain nn.Linear is its weight: merge adapters and remove '
            'parametrizations first'
        )


def head_products(query: Tensor, key: Tensor, num_heads: int) -> Tensor:
    """Computes q·k/√D of all heads in full precision, for queries ``(B, Q, N_h·D)`` and keys ``(B, K, N_h·D)``.

    They are ``(B, N_h, Q, K)``, at least float32.
    """
    with full_precision(query.device.type):
        query, key = (at_least_float32(x).unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (query, key))
        return query @ (key * key.shape[-1] ** -0.5).mT
