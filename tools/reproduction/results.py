"""What came of a training, as plain data."""

import copy
import os
import platform
import sys
import time
from pathlib import Path
from typing import Dict, Tuple

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import DefaultScope
from mmengine.runner import load_checkpoint
from mmpretrain.registry import MODELS
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import attncnn_plugin
from attncnn_plugin.analysis import read_scalars
from attncnn_plugin.utils.checkpoint_files import load_from_local

METRICS = ('accuracy/top1', 'accuracy/top5', 'cross_entropy/mean')
IMAGE = (3, 32, 32)


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


def build(config: Config) -> nn.Module:
    """The classifier of a config."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        # A copy: mmpretrain adds settings of the model to those of the preprocessor.
        return MODELS.build(copy.deepcopy({'data_preprocessor': config.data_preprocessor, **config.model}))


def trained_model(config: Config, checkpoint: Path) -> nn.Module:
    """The classifier of a config with the structure and the weights of a checkpoint."""
    model = build(config)
    load_checkpoint(model, str(checkpoint), map_location='cpu', strict=True)
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
    hook = next((hook for hook in config.get('custom_hooks') or [] if hook.type == 'PhaseTransitionHook'), None)
    model, shares = build(config), [1.0]
    turning = [module for module in model.modules() if hasattr(module, 'to_attention')]
    if hook is not None and turning:
        first = hook.epoch / config.train_cfg.max_epochs
        shares = [first, 1 - first]
    device = get_device()
    seconds = 0.0
    for phase, share in enumerate(shares):
        if phase == 1:
            turning[0].to_attention()
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            wrapper = build_optim_wrapper(model.to(device), config.optim_wrapper)
        images = torch.randn(config.train_dataloader.batch_size, *IMAGE, device=device)
        seconds += share * _seconds(model.train(), images, wrapper)
    return seconds


def _seconds(model: nn.Module, images: Tensor, wrapper: OptimWrapper) -> float:
    """The shorter of two steps: the first one makes room."""
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        with wrapper.optim_context(model):
            loss = model.extract_feat(images)[0].sum()
        loss.backward()
        loss.item()  # a GPU has come to the end
        times.append(time.perf_counter() - begun)
    return min(times)


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
