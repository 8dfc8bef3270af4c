"""What a model loses without a head: its loss and accuracy, measured (Michel et al. 2019, 3.2 and Table 1)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Dict, Iterable, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..attention.evaluation_mode import evaluating
from ..change import table
from ..heads.choice import Layers, chosen_by
from ..heads.seen import watching
from .importance import Loss, called_once, check_finite, head_importance, loss_and_right
from .means import head_means, replaced


@dataclass(frozen=True, eq=False)
class HeadAblation:
    """The loss and the accuracy of a model, and how they change where one head is taken out. As a string, a table.

    Changes are the value without the head minus that with it, by the name of the layer ``(N_h,)``, float64. Those of
    the accuracy are empty where the loss gave no number of right predictions.

    Attributes:
        loss (float): The mean loss of the whole model.
        accuracy (float | None): Its accuracy, from 0 to 1.
        mean_loss, mean_accuracy (dict[str, Tensor]): Changes with the head's output at its mean over all queries.
        zero_loss, zero_accuracy (dict[str, Tensor]): Changes with it at zero, as after
            :func:`~attncnn_plugin.pruning.prune_heads`.
        importance (dict[str, Tensor]): :func:`~attncnn_plugin.pruning.head_importance`, not normalized: in the loss's
            unit, as the changes at zero, which it estimates but for their sign.
    """

    loss: float
    accuracy: Optional[float]
    mean_loss: Dict[str, Tensor]
    mean_accuracy: Dict[str, Tensor]
    zero_loss: Dict[str, Tensor]
    zero_accuracy: Dict[str, Tensor]
    importance: Dict[str, Tensor]

    def __str__(self) -> str:
        header = ['layer', 'head', 'loss, at its mean', 'at zero', 'importance']
        model = ['model', '', f'{self.loss:.4f}', f'{self.loss:.4f}', '']
        if self.accuracy is not None:
            header[4:4], model[4:4] = ['accuracy, at its mean', 'at zero'], [f'{self.accuracy:.2%}'] * 2
        rows = [header, model]
        for name, importance in self.importance.items():
            for head, value in enumerate(importance.tolist()):
                cells = [f'{of[name][head]:+.4f}' for of in (self.mean_loss, self.zero_loss)]
                if self.accuracy is not None:
                    cells += [f'{of[name][head]:+.2%}' for of in (self.mean_accuracy, self.zero_accuracy)]
                rows.append([name, str(head), *cells, f'{value:.4f}'])
        return table(rows)


def head_ablation(model: nn.Module, batches: Iterable[Any], loss: Loss, layers: Layers = None) -> HeadAblation:
    """Computes how the loss and the accuracy change where one head is mean-ablated, or zeroed, for every head.

    The model runs in evaluation mode, twice over all batches for each head, and is as before afterwards.

    Args:
        model (nn.Module): Any model with softmax attention, see :func:`attncnn_plugin.attention_maps`.
        batches (Iterable): Some batches of images; all of them stay in memory.
        loss (Callable): ``loss(model, batch)`` is the mean loss of the batch's images, a scalar; or a pair of it and
            the number of right predictions, for the accuracy. It calls the model once, with the images first. Of
            Hugging Face, for instance, ``(output.loss, (output.logits.argmax(1) == batch['labels']).sum())``; of
            mmpretrain, ``model(**model.data_preprocessor(batch, True), mode='loss')['loss']``.
        layers (str | Iterable[str] | callable, optional): As of :func:`attncnn_plugin.attention_maps`. Defaults to
            None, all attention.

    Returns:
        HeadAblation: Changes of loss and accuracy, beside the importance, to first order in a gate of the head.

    Raises:
        ValueError: No attention is seen, or there are no batches; ``loss`` does not use the model as above, or is not a
            finite number.

    Examples:
        >>> import timm
        >>> from torch.nn.functional import cross_entropy
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1)
        >>> def loss(model, batch):
        ...     logits = model(batch[0])
        ...     return cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).sum()
        >>> ablation = head_ablation(model, [(torch.rand(4, 3, 32, 32), torch.arange(4))], loss)
        >>> ablation.mean_loss['blocks.0.attn'].shape, 0 <= ablation.accuracy <= 1
        (torch.Size([3]), True)
    """
    batches, wanted = list(batches), chosen_by(layers)
    if not batches:
        raise ValueError('batches are none, but at least one is needed; an iterator that was used up has none either')
    with evaluating(model):
        with head_means(model, wanted) as means:
            whole, accuracy = measured(model, batches, loss)
        importance = head_importance(model, batches, loss, normalize=False, layers=layers)
        changes: Dict[str, Dict[str, Tensor]] = {}
        for name, heads in importance.items():
            for kind in ('mean', 'zero'):
                found = torch.zeros(2, len(heads), dtype=torch.float64, device='cpu')
                for head in range(len(heads)):
                    touch = partial(replaced, means, head, kind == 'zero')
                    with watching(model, wanted=chosen_by([name]), touch=touch):
                        without, right = measured(model, batches, loss)
                    found[0, head] = without - whole
                    if accuracy is not None and right is not None:
                        found[1, head] = right - accuracy
                changes.setdefault(f'{kind}_loss', {})[name] = found[0]
                of_accuracy = changes.setdefault(f'{kind}_accuracy', {})
                if accuracy is not None:
                    of_accuracy[name] = found[1]
    return HeadAblation(whole, accuracy, importance=importance, **changes)


@torch.no_grad()
def measured(model: nn.Module, batches: Sequence[Any], loss: Loss) -> Tuple[float, Optional[float]]:
    """Returns the mean loss over images, and the accuracy where ``loss`` gives the numbers of right predictions."""
    total, images, right = 0.0, 0, []
    for number, batch in enumerate(batches):
        with called_once(model) as counted:
            mean, own = loss_and_right(loss(model, batch))
        check_finite(mean, number)
        if own is not None and not 0 <= own <= counted[0]:
            raise ValueError(
                f'loss(model, batch) gives {own} right predictions of {counted[0]} images for batch {number}: give '
                'their number, such as (logits.argmax(1) == labels).sum()'
            )
        total, images = total + mean.item() * counted[0], images + counted[0]
        right += [] if own is None else [own]
    return total / images, sum(right) / images if len(right) == len(batches) else None
