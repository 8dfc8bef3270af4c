"""Glue to mmengine: all that it keeps in private attributes, and names of its information."""

from typing import Any, Optional

from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

HEAD_NUMBERS = 'attention_heads'  # in ``runtime_info``: by layer, what its heads were called when the training began


def is_resumed(runner: Runner) -> bool:
    """Whether the run goes on from a checkpoint with its optimizer and its schedule."""
    return runner._resume


def checkpoint_to_load(runner: Runner) -> Optional[str]:
    """The checkpoint that the run is told to load or to resume from; None where none is named."""
    return runner._load_from


def load_from(runner: Runner, filename: Optional[str]) -> None:
    """Names the checkpoint that the run will load or resume from."""
    runner._load_from = filename


def forward_tensors(model: BaseModel, batch) -> Any:
    """The outputs of the model for a batch of a data loader, in its mode ``'tensor'``: no loss, no prediction."""
    data = model.data_preprocessor(batch, False)
    return model(**data, mode='tensor') if isinstance(data, dict) else model(*data, mode='tensor')


def training_loss(model: BaseModel, batch: Any) -> Tensor:
    """The loss that a model is trained with, on a batch of a data loader as it is for tests: no mixing of images."""
    data = model.data_preprocessor(batch, False)
    losses = model(**data, mode='loss') if isinstance(data, dict) else model(*data, mode='loss')
    return model.parse_losses(losses)[0]


def images_of_one_size(batch: Any) -> Any:
    """The images of a batch that are as large as the first: mmsegmentation pads the others in training alone.

    Args:
        batch: A batch of a data loader: what is no list of images by their samples stays as it is.
    """
    images = batch.get('inputs') if isinstance(batch, dict) else None
    if not isinstance(images, list) or not all(isinstance(image, Tensor) for image in images):
        return batch
    kept = [i for i, image in enumerate(images) if image.shape == images[0].shape]
    return {key: [values[i] for i in kept] for key, values in batch.items()}


def compile_train_step(runner: Runner) -> None:
    """Compiles the training step of a model that is new, if the config says ``compile``."""
    runner._maybe_compile('train_step')


def accumulative_counts(optim_wrapper: OptimWrapper) -> int:
    """Number of iterations whose gradients make one step of the optimizer."""
    return getattr(optim_wrapper, '_accumulative_counts', 1)


def release_parameters(wrapper: DistributedDataParallel) -> None:
    """Ends what PyTorch's wrapper does with the gradients of its parameters, so that there can be another wrapper."""
    wrapper._remove_autograd_hooks()


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
