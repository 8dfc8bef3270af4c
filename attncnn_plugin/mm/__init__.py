"""Everything for mmengine and mmpretrain. Importing it registers names, and does nothing else.

:mod:`~attncnn_plugin.mm.safe_loading` does more, and is not imported here.
"""

from ..installation import MIM, import_problem

if problem := import_problem():
    raise ImportError(problem)

from mmengine.runner import CheckpointLoader  # noqa: E402
from mmpretrain import ModelHub  # noqa: E402

from ..checkpoint_files import PACKAGE_SCHEME, load_from_package  # noqa: E402
from . import (  # noqa: E402, F401
    backbones,
    conv_to_attention,
    datasets,
    follow_state_dict,
    head_pruning,
    initializers,
    metrics,
    phase_transition,
    reliability,
    speed,
    visualization,
)

CheckpointLoader.register_scheme(prefixes=PACKAGE_SCHEME, loader=load_from_package, force=True)
if not ModelHub.has('sa_quadratic_cifar10'):  # it takes no name twice
    ModelHub.register_model_index(MIM / 'model-index.yml', config_prefix=MIM)
