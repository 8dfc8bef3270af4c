"""mmengine's record of how each parameter began, for models whose parameters change while a checkpoint is loaded."""

from torch import nn


def record_new_parameters(model: nn.Module, incompatible_keys=None) -> None:
    """Adds the parameters that a model got by loading a checkpoint to the record of ``init_weights``.

    While mmengine initializes weights, by a checkpoint here, every module holds the record of all parameters. It is a
    post-hook of ``load_state_dict``.

    Args:
        model (nn.Module): The model that was loaded.
        incompatible_keys: Of ``load_state_dict``; not used.
    """
    record = getattr(model, '_params_init_info', None)
    if record is None:
        return
    for module in model.modules():
        module._params_init_info = record
    for parameter in set(model.parameters()) - set(record):
        record[parameter] = dict(
            init_info='The structure of the checkpoint', tmp_mean_value=parameter.data.mean().cpu()
        )
