"""Head reports: where heads look, whether they do anything, what convolution they form.

They answer, for any layer, the questions of Cordonnier et al. 2020, section 4.
"""

from .layer import head_report, maps_report
from .model import model_reports, reports_to_dict, reports_to_text
from .report import BestConvolution, ExpressibleShifts, HeadStatistics, LayerReport
from .vision_transformers import vit_reports

__all__ = [
    'BestConvolution',
    'ExpressibleShifts',
    'HeadStatistics',
    'LayerReport',
    'head_report',
    'maps_report',
    'model_reports',
    'reports_to_dict',
    'reports_to_text',
    'vit_reports',
]
