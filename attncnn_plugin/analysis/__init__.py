"""The heads of a model in numbers, no figures: attention maps, centres, head reports, logs of trainings.

Plain PyTorch and NumPy. The numbers are those of Cordonnier et al. 2020, section 4.
"""

from ..transformers.attention import mean_vit_attention, vit_attention, vit_grids, vit_layers
from ..transformers.vision_transformer import is_vit, patch_grid
from .attention_maps import (
    attention_layers,
    attention_probs_of,
    content_only_probs_of,
    layer_label,
    layer_labels,
    position_only_probs_of,
    require_attention_layers,
    visit_layers,
)
from .head_centers import head_centers, query_maps, query_of
from .head_reports import (
    BestConvolution,
    ExpressibleShifts,
    HeadStatistics,
    LayerReport,
    head_report,
    maps_report,
    model_reports,
    reports_to_dict,
    reports_to_text,
    vit_reports,
)
from .model_attention import grid_of, grids_of, mean_attention_probs_of, shown_layers
from .training_logs import read_centers, read_scalars

__all__ = [
    'BestConvolution',
    'ExpressibleShifts',
    'HeadStatistics',
    'LayerReport',
    'attention_layers',
    'attention_probs_of',
    'content_only_probs_of',
    'grid_of',
    'grids_of',
    'head_centers',
    'head_report',
    'is_vit',
    'layer_label',
    'layer_labels',
    'maps_report',
    'mean_vit_attention',
    'mean_attention_probs_of',
    'model_reports',
    'patch_grid',
    'position_only_probs_of',
    'query_maps',
    'query_of',
    'read_centers',
    'read_scalars',
    'reports_to_dict',
    'reports_to_text',
    'require_attention_layers',
    'shown_layers',
    'vit_attention',
    'vit_grids',
    'vit_layers',
    'vit_reports',
    'visit_layers',
]
