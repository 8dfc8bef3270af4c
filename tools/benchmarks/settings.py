"""Where and how a benchmark runs."""

import os
import platform
from dataclasses import dataclass
from typing import Any, Dict

import timm
import torch
from timing import Repetitions

NUM_THREADS = 2
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """What is the same for all measurements of a run.

    Attributes:
        device (str): ``'cpu'`` or ``'cuda'``. Defaults to ``'cpu'``.
        dtype_name (str): ``'float32'``, or ``'bfloat16'`` by autocast. Defaults to ``'float32'``.
        quick (bool): Whether models, images and repetitions are as small as possible: to see that everything runs, not
            to measure. Defaults to False.
    """

    device: str = 'cpu'
    dtype_name: str = 'float32'
    quick: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def repetitions(self) -> Repetitions:
        return Repetitions(1, 1) if self.quick else Repetitions()

    @property
    def threads(self) -> int:
        return 1 if self.quick else NUM_THREADS

    @property
    def has_targets(self) -> bool:
        """Targets are for float32 on a CPU."""
        return self.device == 'cpu' and self.dtype_name == 'float32' and not self.quick

    def start(self) -> None:
        """Sets the number of threads, for this process and those that it starts, and the random seed."""
        os.environ['OMP_NUM_THREADS'] = str(self.threads)
        torch.set_num_threads(self.threads)
        torch.manual_seed(0)

    def describe(self) -> Dict[str, Any]:
        """For the results: the settings, versions, and the machine by its number of cores (or the GPU's name)."""
        return dict(
            device=self.device,
            gpu=torch.cuda.get_device_name() if self.device == 'cuda' else None,
            dtype=self.dtype_name,
            quick=self.quick,
            threads=self.threads,
            cores=os.cpu_count(),
            torch=torch.__version__,
            timm=timm.__version__,
            python=platform.python_version(),
        )
