"""Loads models of Hugging Face transformers that were saved after some of their heads were pruned."""

from pathlib import Path
from typing import Any, Callable, Dict, Union

import torch

from .attention.state_dicts import EXTRA_STATE
from .heads.sizes import RECORD, RECORD_LENGTH
from .structure import follow_state_dict, weights_in


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
        FileNotFoundError: There is no such folder of a model.
        ValueError: The configuration names no model of transformers; or weights of other shapes, which no number of
            heads explains; or attention instead of a convolution.
    """
    try:
        import transformers
        from transformers import AutoConfig  # not what another package of this name has
    except ImportError as error:
        raise ImportError("this needs Hugging Face transformers: pip install 'attncnn_plugin[hf]'") from error
    if not Path(folder, 'config.json').is_file():
        raise FileNotFoundError(f'folder={folder} has no config.json: give one that save_pretrained has written')
    name = (AutoConfig.from_pretrained(folder).architectures or ['none'])[0]
    cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise ValueError(f'{folder}/config.json has the architecture {name}, which is no model of transformers')

    def loaded(prepare: Callable[[Any], Any], **options: Any) -> Any:
        """Loads the weights into a model that is prepared as soon as it is built."""

        class Prepared(cls):  # type: ignore[misc, valid-type]
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                prepare(self)

        # transformers chooses the loss, and translates old weights, by this name.
        Prepared.__name__, Prepared.__module__ = cls.__name__, cls.__module__
        return Prepared.from_pretrained(folder, **{**settings, **options, 'output_loading_info': True})

    def add_records(model: Any) -> None:
        for module in list(model.modules()):
            module.register_buffer(RECORD, torch.zeros(RECORD_LENGTH, dtype=torch.long))

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would report what has another shape
    try:
        model, info = loaded(add_records, ignore_mismatched_sizes=True)
    finally:
        transformers.logging.set_verbosity(verbosity)
    converted = [key for key in info['unexpected_keys'] if key.endswith(EXTRA_STATE)]
    if converted:
        raise ValueError(
            f'{folder} has attention instead of a convolution, {min(converted).rpartition(".")[0]}: save and load '
            'the state dict of such a model, with attncnn_plugin.follow_state_dict(model, state_dict) in between'
        )
    saved: Dict[str, Any] = {}
    for entry in info['mismatched_keys']:  # some releases say only the names
        key = entry if isinstance(entry, str) else entry[0]
        shape = weights_in(folder, model)[key].shape if isinstance(entry, str) else entry[1]
        saved[key] = torch.empty(shape, device='meta')
    own = model.state_dict()
    missing = {key for key in own if key.endswith(RECORD)} & set(info['missing_keys'])
    shapes = {key: saved.get(key, value) for key, value in own.items() if key not in missing}
    strict = not settings.get('ignore_mismatched_sizes')

    model, info = loaded(lambda model: follow_state_dict(model, shapes, strict))
    model.__class__ = cls
    return (model, info) if settings.get('output_loading_info') else model
