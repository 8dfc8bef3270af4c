"""The heads of a model in numbers, no figures: reports, attention maps, centres, logs of trainings.

Plain PyTorch and NumPy. The numbers are those of Cordonnier et al. 2020, section 4.
"""

from .layer_maps import MeanAttention, mean_attention
from .report import HeadReport, head_report
from .shift_statistics import head_centers
from .training_logs import read_centers, read_scalars

__all__ = [
    'MeanAttention',
    'HeadReport',
    'mean_attention',
    'head_centers',
    'head_report',
    'read_centers',
    'read_scalars',
]
