"""What came of a training, as plain data."""

import copy
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from mmengine.runner import load_checkpoint
from mmpretrain.registry import MODELS
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import attncnn_plugin
import attncnn_plugin.mm.safe_loading
from attncnn_plugin.analysis import read_scalars
from attncnn_plugin.utils.checkpoint_files import load_from_local

METRICS = ('accuracy/top1', 'accuracy/top5', 'cross_entropy/mean')
IMAGE = (3, 32, 32)
Step = Callable[[Tensor], None]
# What a result has, and of which types.
NUMBER = (int, float)
RESULT = dict(
    label=str,
    images=int,
    epochs=int,
    seed=int,
    start=(str, type(None)),
    top1=NUMBER,
    seconds=NUMBER,
    parameters=int,
    multiply_adds=int,
    curves=dict,
    versions=dict,
    machine=dict,
    config=dict,
)


def collect(run, threads: int) -> None:
    """Writes the result of a training that has ended into its folder."""
    scalars = read_scalars(run.folder)
    curves = {name: scalars[name].tolist() for name in METRICS if name in scalars}
    last = curves['accuracy/top1'][-1][0]
    if last != run.epochs:
        raise RuntimeError(f'{run.folder} has its last accuracy after epoch {last:g}, not {run.epochs}: remove it')
    parameters, multiply_adds = cost(trained_model(run.config, run.last_checkpoint))
    result = dict(
        label=run.label,
        images=run.images,
        epochs=run.epochs,
        seed=run.seed,
        start=run.start and run.start.folder.name,
        top1=curves['accuracy/top1'][-1][1],
        seconds=training_seconds(run.last_checkpoint),
        parameters=parameters,
        multiply_adds=multiply_adds,
        curves=curves,
        versions=versions(),
        machine=dict(machine(), threads=threads),
        config=run.config.to_dict(),
    )
    run.write_result(result)


def check_result(result: dict, source: str) -> None:
    """Looks at a result that may not be of :func:`collect`.

    Args:
        result (dict): The result.
        source (str): Where it is, in words.

    Raises:
        ValueError: It lacks something, or has something of another type.
    """

    def check(of: dict, kinds: Dict[str, Any], where: str) -> None:
        for name, kind in kinds.items():
            if name not in of:
                raise ValueError(f'{source} has a result without {where}{name!r}')
            if not isinstance(of[name], kind) or isinstance(of[name], bool):
                raise ValueError(f'{source} has a result whose {where}{name!r} is {str(of[name])[:40]}')

    check(result, RESULT, '')
    check(result['versions'], dict(torch=str), 'versions: ')
    check(result['machine'], dict(processor=str, gpu=(str, type(None)), threads=int), 'machine: ')
    check(result['curves'], {'accuracy/top1': list, 'cross_entropy/mean': list}, 'curves: ')
    for name, curve in result['curves'].items():
        pairs = isinstance(curve, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in curve)
        if not (pairs and curve and all(isinstance(value, NUMBER) for pair in curve for value in pair)):
            raise ValueError(f'{source} has a result whose curves: {name!r} is no list of epochs and values')


def build(config: Config) -> nn.Module:
    """The classifier of a config."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        # A copy: mmpretrain adds settings of the model to those of the preprocessor.
        return MODELS.build(copy.deepcopy({'data_preprocessor': config.data_preprocessor, **config.model}))


def trained_model(config: Config, checkpoint: Path) -> nn.Module:
    """The classifier of a config with the structure and the weights of a checkpoint."""
    model = build(config)
    load_checkpoint(model, str(checkpoint), map_location='cpu', strict=True, logger='silent')
    return model


def cost(model: nn.Module) -> Tuple[int, int]:
    """Parameters, and multiply-adds of one image: all products of matrices and convolutions, half of torch's count."""
    model.eval()
    # Fused kernels on the CPU are not counted by every version of PyTorch; the plain products are. With gradients, so
    # that generalized heads are computed as in training.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        model(torch.zeros(1, *IMAGE))
    return sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops() // 2


def training_seconds(checkpoint: Path) -> float:
    """The time of all iterations of a training, those before it was stopped too, with the loading of the images."""
    times = load_from_local(str(checkpoint))['message_hub']['log_scalars']['train/time']
    return float(times.data[0].sum())


def step_seconds(config: Config) -> float:
    """The time of a training step of one batch, without its data; of two phases the mean over the epochs."""

    def training(model: nn.Module) -> Step:
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            wrapper = build_optim_wrapper(model.train(), config.optim_wrapper)

        def step(images: Tensor) -> None:
            with wrapper.optim_context(model):
                loss = model.extract_feat(images)[0].sum()
            loss.backward()
            loss.item()  # a GPU has come to the end

        return step

    return _mean_over_phases(config, training)


def validation_seconds(config: Config) -> float:
    """The time of the validation of as many images as in a training batch; of two phases the mean over the epochs."""

    def validation(model: nn.Module) -> Step:
        model.eval()

        @torch.no_grad()
        def step(images: Tensor) -> None:
            model.extract_feat(images)[0].sum().item()

        return step

    return _mean_over_phases(config, validation)


def _mean_over_phases(config: Config, step_of: Callable[[nn.Module], Step]) -> float:
    """The seconds of a step in each phase, weighted by its epochs."""
    hook = next((hook for hook in config.get('custom_hooks') or [] if hook.type == 'PhaseTransitionHook'), None)
    model, shares = build(config), [1.0]
    turning = [module for module in model.modules() if hasattr(module, 'to_attention')]
    if hook is not None and turning:
        first = hook.epoch / config.train_cfg.max_epochs
        shares = [first, 1 - first]
    device = get_device()
    images = torch.randn(config.train_dataloader.batch_size, *IMAGE, device=device)
    seconds = 0.0
    for phase, share in enumerate(shares):
        if phase == 1:
            turning[0].to_attention()
        step, times = step_of(model.to(device)), []
        for _ in range(2):  # the first one makes room
            begun = time.perf_counter()
            step(images)
            times.append(time.perf_counter() - begun)
        seconds += share * min(times)
    return seconds


def versions() -> Dict[str, str]:
    """Those of Python, of this package, and of what it computes with."""
    names = ('torch', 'timm', 'mmengine', 'mmpretrain', 'numpy')
    modules = {name: sys.modules[name].__version__ for name in names if name in sys.modules}
    return dict(python=platform.python_version(), attncnn_plugin=attncnn_plugin.__version__, **modules)


def machine() -> Dict[str, object]:
    """The processor, its cores, and the GPU if there is one."""
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return dict(processor=names[0] if names else platform.processor(), cores=os.cpu_count(), gpu=gpu)
