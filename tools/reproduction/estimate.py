"""About how long the trainings that are left take."""

from functools import cache
from typing import Dict, List, Optional, Sequence

from .results import step_seconds
from .runs import Run


def seconds_left(runs: Sequence[Run], jobs: int) -> float:
    """About how long what is left takes: by the trainings of a row that are done, or by one step.

    No less than the longest training that is left, after that which it begins with.
    """
    of_image: Dict[str, List[float]] = {}
    for run in runs:
        if run.result is not None:
            seconds = run.result['seconds'] / (run.images * run.epochs)
            of_image.setdefault(run.label, []).append(seconds)
    left: Dict[Optional[Run], float] = {}
    ends: Dict[Optional[Run], float] = {}
    for run in runs:  # those that others begin with come first
        if run.result is None:
            if run.label not in of_image:
                of_image[run.label] = [seconds_of_image(run)]
            seconds = sum(of_image[run.label]) / len(of_image[run.label])
            left[run] = seconds * run.images * (run.epochs - run.epochs_done)
            ends[run] = ends.get(run.start, 0.0) + left[run]
    return max([sum(left.values()) / jobs, *ends.values()])


@cache
def seconds_of_image(run: Run) -> float:
    """By one step of the training, measured once."""
    return step_seconds(run.config) / run.config.train_dataloader.batch_size


def in_words(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f'{minutes // 60} h {minutes % 60} min' if minutes >= 60 else f'{max(minutes, 1)} min'


def progress(runs: Sequence[Run], jobs: int) -> str:
    left = sum(run.result is None for run in runs)
    about = f'; the others take about {in_words(seconds_left(runs, jobs))}' if left else ''
    return f'{len(runs) - left} of {len(runs)} trainings are done{about}'
