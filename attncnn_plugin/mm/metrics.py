"""The validation loss, as in Figure 2 of Li et al. 2021 (L21)."""

from typing import List, Sequence

import torch
from mmengine.evaluator import BaseMetric
from mmpretrain.registry import METRICS


@METRICS.register_module()
class CrossEntropy(BaseMetric):
    """The mean of −log p over images, with p the predicted probability of the true class: ``'cross_entropy/mean'``.

    It has no label smoothing or mixed images, as DeiT's evaluation. Put it after ``Accuracy`` in the list of
    evaluators: ``save_best='auto'`` goes by the first metric. A probability that is 0 in its floating point type counts
    as the type's smallest normal number, a loss of 87 in float32. The arguments are those of mmengine's ``BaseMetric``.

    Raises:
        ValueError: An image has several classes, or none.

    Examples:
        >>> import torch
        >>> metric = CrossEntropy()
        >>> metric.process({}, [dict(pred_score=torch.tensor([0.25, 0.75]), gt_label=torch.tensor([1]))])
        >>> {name: round(value, 4) for name, value in metric.evaluate(1).items()}
        {'cross_entropy/mean': 0.2877}
    """

    # Not 'loss': of each value with 'loss' in its name mmengine logs the mean over the last ten validations.
    default_prefix = 'cross_entropy'

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Keeps −log p of each image, of its ``'pred_score'`` and its ``'gt_label'``."""
        for sample in data_samples:
            label = torch.as_tensor(sample['gt_label'])
            if label.numel() != 1:
                raise ValueError(f'gt_label={label.tolist()} must be one class for CrossEntropy')
            probability = sample['pred_score'][label.item()]
            self.results.append(-probability.clamp(min=torch.finfo(probability.dtype).tiny).log().item())

    def compute_metrics(self, results: List[float]) -> dict:
        """Returns the mean over all images."""
        return {'mean': sum(results) / len(results)}
