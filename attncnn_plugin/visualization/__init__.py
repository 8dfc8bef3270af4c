"""Figures of the heads of a model (Cordonnier et al. 2020, Figures 3 to 14); they need matplotlib."""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError("the figures need matplotlib: pip install 'attncnn_plugin[vis]'") from error

from .center_figures import plot_attention_centers, plot_attention_distance, plot_center_movement
from .map_figures import plot_attention, plot_head_ablation, plot_heads
from .style import save_figure

__all__ = [
    'plot_attention',
    'plot_attention_centers',
    'plot_attention_distance',
    'plot_center_movement',
    'plot_head_ablation',
    'plot_heads',
    'save_figure',
]
