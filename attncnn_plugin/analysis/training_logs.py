"""Logs of trainings as numbers: scalars by step, and the centres of heads (Cordonnier et al. 2020, Figure 3).

The logs are those of mmengine's local backend, ``dict(type='LocalVisBackend')``, which every config has by default:
``scalars.json``, and ``attention.json`` of this package's hooks beside it.
"""

import json
import math
import re
from pathlib import Path
from typing import Dict, Union

import numpy as np

ATTENTION = 'attention/'
CENTER = re.compile(ATTENTION + r'(?P<layer>.+)/head(?P<head>\d+)/center_(?P<axis>row|column)')


def read_centers(run: Union[str, Path]) -> Dict[str, Dict[int, np.ndarray]]:
    """Reads the centres of heads that an ``AttentionVisualizationHook`` recorded.

    Args:
        run (str | Path): See :func:`read_scalars`.

    Returns:
        dict[str, dict[int, ndarray]]: By layer and by the number that a head had when the training began: epoch, and
        row and column of its centre, ``(T, 3)``.

    Raises:
        FileNotFoundError: A run without a log.

    Examples:
        >>> import tempfile
        >>> log = Path(tempfile.mkdtemp()) / 'scalars.json'
        >>> center = {'attention/blocks.0/head2/center_row': 1.5, 'attention/blocks.0/head2/center_column': 0}
        >>> _ = log.write_text(json.dumps({**center, 'step': 7}))
        >>> read_centers(log)
        {'blocks.0': {2: array([[7. , 1.5, 0. ]])}}
    """
    axes: Dict[str, Dict[int, Dict[str, np.ndarray]]] = {}
    for name, values in read_scalars(run).items():
        if match := CENTER.fullmatch(name):
            axes.setdefault(match['layer'], {}).setdefault(int(match['head']), {})[match['axis']] = values
    return {
        layer: {head: np.column_stack([own['row'], own['column'][:, 1]]) for head, own in sorted(heads.items())}
        for layer, heads in axes.items()
    }


def read_scalars(run: Union[str, Path]) -> Dict[str, np.ndarray]:
    """Reads all scalars of a run.

    The logs of a run that was resumed are joined: from the first step that a later log has, the later one counts. For
    this all scalars of attention are one, since a head that the later log lacks was pruned.

    Args:
        run (str | Path): The folder of a run, or a file ``scalars.json``.

    Returns:
        dict[str, ndarray]: By name, step and value, ``(T, 2)``, sorted by step.

    Raises:
        FileNotFoundError: There is no such file, or none in the folder.

    Examples:
        >>> import tempfile
        >>> log = Path(tempfile.mkdtemp()) / 'scalars.json'
        >>> with log.open('w') as file:
        ...     for step, accuracy in ((1, 50.0), (2, 60.0)):
        ...         print(json.dumps({'accuracy/top1': accuracy, 'step': step}), file=file)
        >>> read_scalars(log)
        {'accuracy/top1': array([[ 1., 50.],
               [ 2., 60.]])}
    """
    run = Path(run)
    files = sorted(run.glob('*/vis_data/scalars.json')) or sorted(run.glob('vis_data/scalars.json'))
    files = [run] if run.is_file() else files
    if not files:
        raise FileNotFoundError(
            f'{run} has no */vis_data/scalars.json: give the work_dir of a run that was logged by '
            "dict(type='LocalVisBackend'), or the file itself"
        )
    scalars: Dict[str, Dict[float, float]] = {}
    for path in files:
        later: Dict[str, Dict[float, float]] = {}
        beside = path.with_name('attention.json')
        for text in '\n'.join(file.read_text() for file in (path, beside) if file.is_file()).splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue  # the last line of a run that was killed
            for name, value in line.items() if 'step' in line else ():
                if name != 'step' and isinstance(value, (int, float)):
                    later.setdefault(name, {})[line['step']] = value
        of_attention = [step for name, values in later.items() if name.startswith(ATTENTION) for step in values]
        for name in {**scalars, **later}:
            values = later.get(name, {})
            begin = min(of_attention if name.startswith(ATTENTION) else values, default=math.inf)
            earlier = {step: value for step, value in scalars.get(name, {}).items() if step < begin}
            scalars[name] = {**earlier, **values}
    return {name: np.array(sorted(values.items()), dtype=float) for name, values in scalars.items() if values}
