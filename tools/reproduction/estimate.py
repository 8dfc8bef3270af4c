"""About how long the trainings that are left take."""

import math
from typing import Callable, Dict, List, Optional, Sequence

import torch

from .results import machine, step_seconds, validation_seconds
from .runs import Run
from .trainings import number_of_test_images

MEASURED: Dict[tuple, float] = {}  # rows are measured once, whichever of their trainings is the next one


def seconds_left(runs: Sequence[Run], jobs: int) -> float:
    """About how long what is left takes: by the trainings of a row that this machine has done, or by one step.

    No less than the longest training that is left, after that which it begins with.
    """
    here = dict(machine(), threads=torch.get_num_threads())
    of_image: Dict[str, List[float]] = {}
    of_validation: Dict[str, float] = {}
    for run in runs:
        if run.result is not None and run.result['machine'] == here:
            seconds = run.result['seconds'] / (run.images * run.epochs)
            of_image.setdefault(run.label, []).append(seconds)
    left: Dict[Optional[Run], float] = {}
    ends: Dict[Optional[Run], float] = {}
    for run in runs:  # those that others begin with come first
        if run.result is None:
            if run.label not in of_image:
                of_image[run.label] = [measured(seconds_of_image, run)]
            if run.label not in of_validation:
                of_validation[run.label] = measured(seconds_of_validation, run)
            seconds = sum(of_image[run.label]) / len(of_image[run.label])
            interval = run.config.train_cfg.val_interval
            validations = math.ceil(run.epochs / interval) - run.epochs_done // interval
            epochs = run.epochs - run.epochs_done
            left[run] = seconds * run.images * epochs + validations * of_validation[run.label]
            ends[run] = ends.get(run.start, 0.0) + left[run]
    return max([sum(left.values()) / jobs, *ends.values()])


def seconds_of_image(run: Run) -> float:
    """By one step of the training."""
    return step_seconds(run.config) / run.config.train_dataloader.batch_size


def seconds_of_validation(run: Run) -> float:
    """By a part of a validation."""
    of_image = validation_seconds(run.config) / run.config.train_dataloader.batch_size
    return of_image * number_of_test_images(run.config)


def measured(measure: Callable[[Run], float], run: Run) -> float:
    """What a function gives for a training of a row; for others of the row and the folder it is the same."""
    key = measure, run.folder.parent, run.label
    if key not in MEASURED:
        MEASURED[key] = measure(run)
    return MEASURED[key]


def in_words(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f'{minutes // 60} h {minutes % 60} min' if minutes >= 60 else f'{max(minutes, 1)} min'


def progress(runs: Sequence[Run], jobs: int) -> str:
    left = sum(run.result is None for run in runs)
    about = f'; the others take about {in_words(seconds_left(runs, jobs))}' if left else ''
    return f'{len(runs) - left} of {len(runs)} trainings are done{about}'
