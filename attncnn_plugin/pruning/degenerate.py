"""The degenerate heads of a model (C20, 4.3 and appendix E), by its parameters or by what it attends to on images."""

from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Union

import torch
from torch import Tensor, nn

from ..attention.evaluation_mode import evaluating
from ..heads.found import Call, Heads, called, own_heads
from ..heads.seen import watching
from .criteria import (
    BY_POSITION,
    OF_MAPS,
    ON_IMAGES,
    Criterion,
    DegeneracyReport,
    Measure,
    exact_maps,
    factor_of,
    finite,
    found_by,
    map_distances,
    relative_entropy_of_maps,
)
from .prune import prunable_heads

Size = Union[int, Sequence[int], None]

GRID = 16, 16  # on which Gaussian heads are compared where that of the model is unknown


class JudgedHeads(Dict[str, List[int]]):
    """The heads of a model that can go, by the name of the layer, as ``prune_heads`` takes them; as a string, a table.

    A layer all of whose heads are found keeps the least uniform one. Layers that lose none are left out.

    Attributes:
        reports (dict[str, DegeneracyReport]): Of every layer, which heads are found, and why.
        means (dict[str, HeadMeans]): Of layers that :class:`~attncnn_plugin.training.PruneHeads` has judged, the mean
            outputs of their heads.
    """

    def __init__(
        self, reports: Mapping[str, DegeneracyReport], going: Mapping[str, List[int]], means: Any = ()
    ) -> None:
        super().__init__(going)
        self.reports, self.means = dict(reports), dict(means)

    def __str__(self) -> str:
        return '\n'.join(f'{name}: {report}' for name, report in self.reports.items() if report.found) or 'none'


class ObservedAttention:
    """Means over images of what the criteria of degenerate heads ask for.

    Attributes:
        sums (dict[str, Tensor]): Sums over images, float64 on the CPU: of each head's ``'entropy'``, relative to that
            of uniform attention, ``(N_h,)``; its distance ``'from_uniform'`` attention, in total variation; the
            ``'distances'`` between heads, ``(N_h, N_h)``; and the ``'count'`` of images, or of windows of images.
        size (int | Sequence[int] | None): Height and width of the last grid of tokens, of a layer of this package.
    """

    def __init__(self, num_heads: int, size: Size = None) -> None:
        self.size, of_heads = size, (num_heads,)
        shapes = dict(entropy=of_heads, from_uniform=of_heads, distances=2 * of_heads, count=())
        self.sums = {name: torch.zeros(shape, dtype=torch.float64, device='cpu') for name, shape in shapes.items()}

    @torch.no_grad()
    def add(self, probs: Tensor) -> None:
        """Adds the probabilities of some images, ``(B, N_h, Q, K)``."""
        self.sums['entropy'] += relative_entropy_of_maps(probs).double().sum(0).cpu()
        self.sums['from_uniform'] += ((probs - 1 / probs.shape[-1]).abs().sum(-1).mean(-1) / 2).double().sum(0).cpu()
        self.sums['distances'] += sum(map_distances(maps).double().cpu() for maps in probs)
        self.sums['count'] += len(probs)

    def mean(self, name: str) -> Tensor:
        """Returns the mean over images of one of the sums."""
        return self.sums[name] / self.sums['count']


@contextmanager
def observed_attention(
    model: nn.Module, layers: Mapping[str, Heads], size: Size = None
) -> Iterator[Dict[str, ObservedAttention]]:
    """Collects what layers, some of :func:`prunable_heads`, attend to in every pass of a model inside, by their names.

    Keys are all tokens that a layer has, class tokens and null keys among them; each window of an image counts. Of
    layers whose attention depends only on position, it notes just the size of the grid; before, it is ``size``.

    Examples:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1).eval()
        >>> with torch.no_grad(), observed_attention(model, prunable_heads(model)) as observed:
        ...     logits = model(torch.rand(2, 3, 32, 32))
        >>> observed['blocks.0.attn'].mean('entropy').shape
        torch.Size([3])
    """
    observed = {name: ObservedAttention(layer.num_heads, size) for name, layer in layers.items()}

    def visit(name: str, probs: Tensor, places: Any) -> None:
        observed[name.partition('#')[0]].add(probs)

    def visit_own(name: str, layer: Any, x: Tensor) -> None:
        observed[name.partition('#')[0]].size = layer.grid_of(x)
        for image in x.split(1) if layer.depends_on_content else ():
            visit(name, layer.attention_scores(image).float().softmax(-1), None)

    with watching(model, visit, lambda name: name.partition('#')[0] in layers, visit_own=visit_own):
        yield observed


@torch.inference_mode(False)
@torch.no_grad()
def find_degenerate_heads(
    model: nn.Module,
    criteria: Optional[Sequence[Criterion]] = None,
    size: Size = None,
    inputs: Any = None,
    call: Call = None,
) -> JudgedHeads:
    """Finds the heads that a model can do without: those that take a mean over the grid, or repeat another head.

    Attention that depends only on position, as of C20's networks, is judged by its parameters, in float64 on the CPU:
    equal models have equal reports on every rank. All other attention is judged by what it does on ``inputs``.

    Args:
        model (nn.Module): Any model with softmax attention, or a layer of this package.
        criteria (Sequence, optional): Each a name, or a ``dict(type=name, threshold=number)``. A head is degenerate if
            any of them says so; the report has the first.

            - ``'uniform'``: the largest eigenvalue of Σ⁻¹, 2α for the quadratic encoding, is below 1e-5 (C20, appendix
              E): all keys are attended to alike. On images: the distance from uniform attention, in total variation,
              is below 0.01. Not for the learned encoding.
            - ``'stripe'``: the condition number of Σ⁻¹ is above 1000 (released code of C20; appendix E has 1e5). It is
              1 for a quadratic head and for Σ⁻¹ = 0. Only for Gaussian heads.
            - ``'entropy'``: the entropy, mean over queries, is above 0.99 of that of uniform attention: all keys of
              the grid are attended to almost alike.
            - ``'duplicate'``: the map of an earlier head is nearer than 0.01 in total variation, mean over queries
              (C20, 4.3, has such heads with the learned encoding). Only heads that no other criterion finds are
              compared, wherever it stands among the criteria. The first of a group is kept. Each head is compared
              with kept ones, so that a chain of small steps does not lead away from them.

            Defaults to None: ``('uniform', 'stripe')`` for Gaussian heads, ``('entropy', 'duplicate')`` for others.
        size (int | Sequence[int], optional): Height and width of the grid in tokens, by which ``'entropy'`` and
            ``'duplicate'`` judge attention that depends only on position. Defaults to None, that of ``inputs``.
        inputs (Any, optional): Images, as of :func:`attncnn_plugin.attention_maps`; all of them in one pass. Defaults
            to None: only layers of this package are judged, by their parameters.
        call (Callable, optional): As there.

    Returns:
        JudgedHeads: The heads by the name of the layer, for :func:`~attncnn_plugin.pruning.prune_heads`, with
        reports of criterion and value.

    Raises:
        TypeError: A criterion that is not for a layer, such as that of Gaussian heads for others.
        ValueError: There is no attention of this package, or some that depends on content, without ``inputs``; a
            criterion that is unknown or has other settings; no ``size`` for a criterion that needs one; parameters or
            probabilities that are not finite.

    Examples:
        >>> from attncnn_plugin.attention import QuadraticAttention
        >>> model = torch.nn.Sequential(QuadraticAttention(dim=8, num_heads=3))
        >>> model[0].encoding.center.data = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.9]])
        >>> model[0].encoding.sqrt_precision.data = torch.tensor([1.0, 1e-4, 1.0])
        >>> found = find_degenerate_heads(model, ['uniform', dict(type='duplicate', threshold=0.05)], size=(16, 16))
        >>> print(found)
        0: 2 of 3 heads degenerate
        head  criterion  why
           1  uniform    largest eigenvalue 1e-08 < 1e-05
           2  duplicate  distance 0.0352 < 0.05 from head 0
        >>> dict(found)
        {'0': [1, 2]}
    """
    layers = own_heads(model) if inputs is None else prunable_heads(model, inputs, call)
    if not layers:
        raise ValueError(
            f'a {type(model).__name__} has no attention of this package, whose parameters could be judged: give '
            'inputs, some images, by which other attention is judged'
        )
    with observed_attention(model, layers, size) as observed, evaluating(model):
        if inputs is not None:
            called(model, inputs, call)
    reports = {}
    for name, layer in layers.items():
        own = ('uniform', 'stripe') if measures_of(layer) is BY_POSITION else ('entropy', 'duplicate')
        try:
            reports[name] = report_of(layer, own if criteria is None else criteria, observed[name])
        except (TypeError, ValueError) as error:
            raise type(error)(f'{name or type(model).__name__}: {error}') from error
    return JudgedHeads(reports, heads_to_remove(reports, layers, observed))


@torch.no_grad()
def report_of(layer: Heads, criteria: Sequence[Criterion], observed: ObservedAttention) -> DegeneracyReport:
    """Returns the degenerate heads of a layer, see :func:`find_degenerate_heads`.

    Raises:
        ValueError: No images were observed of attention that depends on content.
    """
    measures, own = measures_of(layer), layer.layer
    if measures is not ON_IMAGES:
        maps = cache(partial(exact_maps, own, observed.size))
        return found_by(layer.num_heads, criteria, measures, lambda: factor_of(own.gaussian_heads()), maps)
    if not observed.sums['count']:
        raise ValueError(
            'attention that depends on content is judged by what it does on images, but none were observed: give some'
        )
    finite(observed.sums['distances'])
    return found_by(layer.num_heads, criteria, measures, observed)


def heads_to_remove(
    reports: Mapping[str, DegeneracyReport],
    layers: Mapping[str, Heads],
    observed: Mapping[str, ObservedAttention],
) -> Dict[str, List[int]]:
    """Returns the heads that reports find; of a layer all of whose heads are found, the least uniform one stays."""
    heads = {name: list(report.heads) for name, report in reports.items() if report.heads}
    for name in [name for name, gone in heads.items() if len(gone) == reports[name].num_heads]:
        own, layer = observed[name], layers[name]
        maps = partial(exact_maps, layer.layer, own.size or GRID)
        entropy = own.mean('entropy') if depends_on_content(layer) else relative_entropy_of_maps(maps())
        heads[name].remove(int(entropy.argmin()))
    return {name: gone for name, gone in heads.items() if gone}


def depends_on_content(heads: Heads) -> bool:
    """Returns True if heads attend by what is in an image, so that images judge them."""
    return heads.layer is None or heads.layer.depends_on_content


def measures_of(heads: Heads) -> Mapping[str, Measure]:
    """Returns the criteria that are for the heads of a layer, by name."""
    if depends_on_content(heads):
        return ON_IMAGES
    return OF_MAPS if heads.layer.gaussian_heads() is None else BY_POSITION
