"""Models that Hugging Face transformers has saved, without the heads that they have lost."""

from pathlib import Path
from typing import Any, Union

import torch

from .attention.state_dicts import EXTRA_STATE
from .structure import follow_state_dict


def load_hugging_face(folder: Union[str, Path], **settings: Any) -> Any:
    """Loads a model that was saved by ``save_pretrained``, pruned or not.

    The configuration of a model of Hugging Face transformers has one number of heads for all layers, and
    ``from_pretrained`` builds them all. Here a layer gets as many as the saved weights have for it.

    Args:
        folder (str | Path): With ``config.json`` and the weights.
        **settings: Of ``from_pretrained``, such as ``dtype``; for other classes ``num_labels=7`` and
            ``ignore_mismatched_sizes=True``.

    Returns:
        nn.Module | tuple[nn.Module, dict]: A model of the class that was saved, in evaluation mode; with
        ``output_loading_info=True`` also what transformers says of the loading.

    Raises:
        ImportError: Hugging Face transformers is not installed.
        ValueError: The configuration names no model of transformers; or weights of other shapes, which no number of
            heads explains, or which transformers before 5.20 cannot take; or attention instead of a convolution.
    """
    try:
        import transformers
        from transformers import AutoConfig  # not what another package of this name has
    except ImportError as error:
        raise ImportError("this needs Hugging Face transformers: pip install 'attncnn_plugin[hf]'") from error
    name = (AutoConfig.from_pretrained(folder).architectures or ['none'])[0]
    cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise ValueError(f'{folder}/config.json has the architecture {name}, which is no model of transformers')
    settings, returns_info = {**settings, 'output_loading_info': True}, settings.get('output_loading_info')
    strict, verbosity = not settings.get('ignore_mismatched_sizes'), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would report what has another shape
    try:
        model, info = cls.from_pretrained(folder, **{**settings, 'ignore_mismatched_sizes': True})
    finally:
        transformers.logging.set_verbosity(verbosity)
    converted = [key for key in info['unexpected_keys'] if key.endswith(EXTRA_STATE)]
    if converted:
        raise ValueError(
            f'{folder} has attention instead of a convolution, {min(converted).rpartition(".")[0]}: save and load '
            'the state dict of such a model, with attncnn_plugin.follow_state_dict(model, state_dict) in between'
        )
    knows_heads = tuple(map(int, transformers.__version__.split('.')[:2])) >= (5, 20)
    if info['mismatched_keys'] and strict and not knows_heads:
        raise ValueError(
            f'{folder} has weights of other shapes than its configuration says: if the model has lost heads, load it '
            f'with transformers 5.20 or newer, not {transformers.__version__}'
        )
    loaded = cls
    if info['mismatched_keys'] and knows_heads:
        shapes = model.state_dict()
        shapes.update({key: torch.empty(shape, device='meta') for key, shape, _ in info['mismatched_keys']})

        def init(self: Any, config: Any) -> None:
            cls.__init__(self, config)
            follow_state_dict(self, shapes, strict)

        # By these names transformers chooses the loss, and knows the older names of weights that it writes to files.
        loaded = type(name, (cls,), dict(__init__=init, __module__=cls.__module__))
    if any(info.values()):  # again, so that transformers reports what is missing
        model, info = loaded.from_pretrained(folder, **settings)
        model.__class__ = cls
    return (model, info) if returns_info else model
