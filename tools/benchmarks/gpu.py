"""Times and memory of layers, networks and trainings on one device, against what a user would pick instead.

benchmark.py --device cuda runs these groups. A cell is the time of a forward pass, then that of a training step, in
milliseconds, and the largest memory of the step.
"""

import contextlib
import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import timm
import torch
import torch.nn.functional as F
from original import DENSE
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from attncnn_plugin import attention
from attncnn_plugin.convert import conv_to_mhsa

Cells = Iterator[Tuple[str, str, str]]  # of a row and a column

# Whether products have TF32, whether numbers of 16 bits, and whether what can be compiled is.
PRECISIONS = {
    'float32': (False, False, False),
    'TF32': (True, False, False),
    'bfloat16': (True, True, False),
    'bfloat16, compiled': (True, True, True),
}
SECONDS = 0.15  # of a measurement, and one call at least
DIM, HEADS, SIDE, IMAGES = 400, 9, 16, 100  # of C20's layers, and its batch
# Images of a training; batch, pixels, classes.
OF_C20, OF_L21 = (300 * 50_000, IMAGES, 32, 10), (400 * 50_000, 128, 224, 100)

C20 = {
    'quadratic': 'sa_quadratic_cifar',
    'generalized': 'sa_generalized_cifar',
    'learned': 'sa_learned_cifar',
    'learned + content': 'sa_learned_content_cifar',
}
PHASES = {
    'convolution': dict(phase='conv'),
    'attention': dict(phase='attn', null_key=True),
    "attention, head_dim='exact'": dict(phase='attn', null_key=True, head_dim='exact', qk_dim=64),
}
TRANSFORMERS = ('deit_small_patch16_224', 'vit_base_patch16_224')


class Flex(nn.Module):
    """A quadratic layer by ``flex_attention``: scores −α‖δ − Δ‖² of queries and keys without content.

    Its kernels take values of few channels, so that a head is computed in parts.
    """

    def __init__(self, dim: int, num_heads: int, side: int, quick: bool, part: int = 100) -> None:
        super().__init__()
        self.center, self.alpha = nn.Parameter(torch.randn(num_heads, 2)), nn.Parameter(torch.ones(num_heads))
        self.value = nn.Linear(dim * num_heads, dim)
        self.num_heads, self.side, self.part = num_heads, side, part
        self.attend = flex_attention if quick else torch.compile(flex_attention)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, D)`` to the same."""

        def scores(score: Tensor, image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            rows = key // self.side - query // self.side - self.center[head, 0]
            columns = key % self.side - query % self.side - self.center[head, 1]
            return -self.alpha[head] * (rows * rows + columns * columns)

        x = x.bfloat16() if torch.is_autocast_enabled(x.device.type) else x
        tokens = x.flatten(1, 2)[:, None].expand(-1, self.num_heads, -1, -1)
        nothing = tokens.new_zeros(*tokens.shape[:3], 16)
        parts = [self.attend(nothing, nothing, own.contiguous(), scores) for own in tokens.split(self.part, dim=-1)]
        heads = torch.cat(parts, -1).transpose(1, 2).flatten(2)
        return self.value(heads).view(x.shape)


class Measurement(NamedTuple):
    """Of a call."""

    seconds: float
    gigabytes: Optional[float]  # at most, on a GPU


def measured(step: Callable[[], object], device: torch.device, quick: bool) -> Measurement:
    """Measures a step after some that compile it, choose kernels and fill caches."""
    on_gpu = device.type == 'cuda'
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(1 if quick else 3):
        step()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start, calls = time.perf_counter(), 0
    while not calls or not quick and time.perf_counter() - start < SECONDS:
        for _ in range(1 if quick else 5):  # a GPU works through them while the next are sent
            step()
            calls += 1
        wait()
    seconds = (time.perf_counter() - start) / calls
    return Measurement(seconds, torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None)


@contextlib.contextmanager
def precision(device: torch.device, tf32: bool, half: bool) -> Iterator[None]:
    """Sets TF32 and autocast to bfloat16, for a block."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def compiled(model: nn.Module, quick: bool) -> nn.Module:
    """Compiles a model block by block, one after the other by the same code, or whole where it has no blocks.

    Where nothing is measured, by what takes little time.
    """
    for part in getattr(model, 'blocks', [model]):
        part.compile(dynamic=False, backend='aot_eager' if quick else 'inductor')
    return model


def both(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], quick: bool) -> List[Measurement]:
    """Measures a forward pass, and a training step with the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def train() -> None:
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

    model.eval()
    forward = measured(torch.no_grad()(lambda: model(x)), x.device, quick)
    model.train()
    return [forward, measured(train, x.device, quick)]


def cells_of(
    row: str, make: Callable[[], nn.Module], x: Tensor, loss: Callable[[Tensor], Tensor], quick: bool
) -> Iterator[Tuple[str, str, Any]]:
    """Yields the measurements of a model by its precisions, or why there are none."""
    for column, (tf32, half, compiles) in PRECISIONS.items():
        torch.compiler.reset()
        try:
            with precision(x.device, tf32, half):
                model = make().to(x.device)
                yield row, column, both(compiled(model, quick) if compiles else model, x, loss, quick)
        except Exception as error:  # memory, or a kernel that a device does not have: the others are measured
            yield row, column, f'{type(error).__name__}: {next(iter(str(error).splitlines()), "")[:60]}'
        model = None
        if x.device.type == 'cuda':
            torch.cuda.empty_cache()


def text(measurements: Any) -> str:
    """Returns a cell."""
    if isinstance(measurements, str):
        return measurements.replace('|', '/')
    forward, training = measurements
    memory = '' if training.gigabytes is None else f', {training.gigabytes:.2f} GB'
    return f'{1e3 * forward.seconds:.3g} / {1e3 * training.seconds:.3g} ms{memory}'


def layers(quick: bool, device: torch.device) -> Cells:
    """Layers.

    Layers of 400 channels and 9 heads on 16x16 tokens, batch 100, as in C20: a forward pass / a training step with
    SGD in milliseconds, and the largest memory of a step. The dense original is C20's code by its equations, flex
    attention the quadratic layer by PyTorch's `flex_attention` with a score of the shift, in parts of 100 channels.
    """
    dim, heads, side, images = (8, 3, 4, 2) if quick else (DIM, HEADS, SIDE, IMAGES)
    size = dict(max_size=(side, side))
    kinds: Dict[str, Callable[[], nn.Module]] = {
        'quadratic': partial(attention.QuadraticAttention, dim, heads),
        'generalized': partial(attention.GeneralizedQuadraticAttention, dim, heads),
        'learned': partial(attention.LearnedAttention, dim, heads, **size),
        'learned + content': partial(attention.ContentAttention, dim, heads, **size),
    }
    conv = partial(nn.Conv2d, dim, dim, 3, padding=1)
    on_images = {
        '3x3 convolution, channels last': lambda: conv().to(memory_format=torch.channels_last),
        'convolution as hard heads': lambda: conv_to_mhsa(conv())[0],
        'convolution as heads that learn': lambda: conv_to_mhsa(conv(), alpha=6.0)[0],
        'convolution as heads with content': lambda: conv_to_mhsa(conv(), alpha=6.0, content='additive')[0],
    }
    on_tokens = {
        **kinds,
        'patches, 9 heads of L21': lambda: attention.PatchAttention(dim, 9, attention.GridBias(9, (side, side))),
        **{f'{name}, dense original': partial(dense, make, side) for name, make in kinds.items()},
        'flex attention': partial(Flex, dim, heads, side, quick, min(100, dim)),
    }
    tokens = torch.randn(images, side, side, dim, device=device)
    pixels = tokens.permute(0, 3, 1, 2)
    for makes, x in ((on_images, pixels), (on_tokens, tokens)):
        for name, make in makes.items():
            for row, column, found in cells_of(name, make, x, lambda y: y.float().square().mean(), quick):
                yield row, column, text(found)


def dense(make: Callable[[], nn.Module], side: int) -> nn.Module:
    """Returns the dense original of a layer."""
    layer = make()
    return DENSE[type(layer)](layer, side, side)


def networks(quick: bool, device: torch.device) -> Cells:
    """Networks.

    Networks with the images and batches of the papers, 32x32 pixels and 100 images for C20, 224x224 and 128 for L21: a
    forward pass / a training step with SGD in milliseconds, and the largest memory of a step. Of the fastest training,
    images a second, and the hours of the paper's training, 300 epochs (C20) or 400 (L21) of 50,000 images, without
    loading them.
    """
    models: Dict[str, Tuple[Callable[..., nn.Module], Dict[str, Any], tuple]] = {
        'ResNet-18': (resnet18, {}, OF_C20),
        **{name: (timm.create_model, dict(model_name=name), OF_C20) for name in C20.values()},
        **{
            f'cmhsa5_patch16_224, {row}': (timm.create_model, dict(model_name='cmhsa5_patch16_224', **options), OF_L21)
            for row, options in PHASES.items()
        },
        **{name: (timm.create_model, dict(model_name=name), OF_L21) for name in TRANSFORMERS},
    }
    for name, (make, options, (images, batch, pixels, classes)) in models.items():
        options = dict(options, num_classes=classes)
        if quick:
            batch, pixels, options = 2, 16 if batch == IMAGES else 32, {**options, **smallest(name)}
        x = torch.randn(batch, 3, pixels, pixels, device=device)
        labels = torch.randint(classes, (batch,), device=device)
        fastest = None
        loss = lambda y, labels=labels: F.cross_entropy(y.float(), labels)  # noqa: E731
        for row, column, found in cells_of(name, partial(make, **options), x, loss, quick):
            yield row, column, text(found)
            if not isinstance(found, str):
                seconds = found[1].seconds
                fastest = min(seconds, fastest or seconds)
        if fastest is not None:
            yield name, 'images a second', f'{batch / fastest:,.0f}'
            yield name, "hours of the paper's training", f'{images / batch * fastest / 3600:.3g}'


def resnet18(num_classes: int, **sizes: Any) -> nn.Module:
    """Builds the ResNet-18 for images of 32x32 pixels: a 3x3 stem without pooling, channels last."""
    model = timm.create_model('resnet18', num_classes=num_classes, **sizes)
    model.conv1, model.maxpool = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False), nn.Identity()
    return model.to(memory_format=torch.channels_last)


def smallest(name: str) -> Dict[str, Any]:
    """Returns settings with which a network is as small as it can be."""
    if name.startswith('sa_'):
        return dict(embed_dim=16, depth=2, num_heads=3, mlp_dim=24)
    if name.startswith('cmhsa'):
        return dict(patch_size=4, img_size=32, depth=2, mlp_dim=24)
    if name == 'ResNet-18':
        return dict(layers=(1, 1, 1, 1), channels=(8, 8, 8, 8))
    return dict(patch_size=8, img_size=32, depth=2, num_heads=2, embed_dim=16)


GROUPS = {group.__name__: group for group in (layers, networks)}

INTRODUCTION = """# Benchmarks on a GPU

`python tools/benchmarks/benchmark.py --device cuda --page docs/tables/benchmarks_gpu.md` measures these tables in a few
minutes, each model after the one before, with the same random images and after three steps that are not counted.
"""
