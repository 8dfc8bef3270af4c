#!/usr/bin/env python
"""Does all that needs a GPU, in one go: tests, benchmarks, C20's networks at their size, starts with 50,000 images.

  on_a_gpu.py --data data/images --out work_dirs/gpu --minutes 14
  on_a_gpu.py --smoke --out /tmp/rehearsal   # all of it with random images and small networks, on a CPU too

DATA has images of 32x32 pixels, train/CLASS/* and test/CLASS/*; without it nothing is trained. Each part writes
OUT/PART.json, and OUT/log.txt has all that was printed. Run the command again after a stop: parts that are done are
left alone, and a training goes on from its last epoch. A training gets as many epochs as fit into its share of the time
that is left as it begins; all networks of C20 get those of the first one.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, TextIO, Tuple

import gpu
import numpy as np
import timm
import torch
import torch.nn.functional as F
from benchmark import machine
from torch import Tensor, nn
from torchvision.datasets import ImageFolder

from attncnn_plugin.transformers import init_as_convolution, set_sine_cosine_embedding

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'tools'))
from reproduction.impulses import start_impulses  # noqa: E402

DROP = dict(drop_rate=0.1, attn_drop_rate=0.1)  # C20, Table 2
SHARES = {'tests': 0.22, 'benchmarks': 0.4, 'c20': 0.55, 'starts': 0.6, 'c20_more': 1.0}  # of the time that is left
STARTS: Dict[str, Callable[[nn.Module], Any]] = {
    'as it comes': lambda model: None,
    'impulse': start_impulses,
    'mimetic': lambda model: init_as_convolution(model, method='mimetic'),
    'Gaussian': init_as_convolution,
    'sine-cosine embedding': set_sine_cosine_embedding,
}
DIFFERS = {
    'c20': 'From C20: fewer epochs, over which the schedule is stretched; images after JPEG; bfloat16; one seed. The '
    'rate of ResNet-18 falls after the same shares of the training as in one of 300 epochs.',
    'starts': 'From the notebook of Zheng et al., which reports 68.6 (impulse), 61.2 (mimetic) and 64.1 (plain): a ViT '
    'of timm, 2x2 pixels a patch, 512 channels, 6 blocks, 8 heads, embedded once; AdamW, a rate of 3e-4 and a cosine '
    'over all epochs; images after JPEG; bfloat16; one seed.',
}


Log = Callable[[str], None]


def say(file: TextIO, line: str) -> None:
    """Prints a line, into a file too."""
    for out in (sys.stdout, file):
        print(f'{time.strftime("%H:%M:%S")} {line}', file=out, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, help='folder of the images (default: none, and no training)')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/gpu'), help='default: work_dirs/gpu')
    parser.add_argument('--minutes', type=float, default=14, help='of this call (default: 14)')
    parser.add_argument(
        '--only', nargs='+', choices=SHARES, default=list(SHARES), metavar='PART', help=', '.join(SHARES)
    )
    parser.add_argument('--smoke', action='store_true', help='small networks and random images: to see that it runs')
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log, end = partial(say, (args.out / 'log.txt').open('a')), time.monotonic() + 60 * args.minutes
    log(machine(args.smoke))
    if not torch.cuda.is_available() and not args.smoke:
        sys.exit('there is no GPU: --smoke rehearses this on a CPU')
    for part in args.only:
        file = args.out / f'{part}.json'
        if file.exists():
            log(f'{part}: done before')
            continue
        seconds = SHARES[part] * (end - time.monotonic())
        if part not in ('tests', 'benchmarks') and args.data is None and not args.smoke:
            log(f'{part}: --data is not given')
            continue
        if seconds < 20:
            log(f'{part}: no time is left')
            continue
        log(f'{part}: up to {seconds:.0f} s')
        start = time.monotonic()
        try:
            result = PARTS[part](args, seconds, log)
        except Exception as error:  # the other parts go on
            log(f'{part}: {type(error).__name__}: {error}')
            continue
        if result is not None:
            result.update(machine=machine(args.smoke), seconds=time.monotonic() - start)
            file.write_text(json.dumps(result, indent=1))
            log(f'{part}: done')


def called(command: List[Any], seconds: float, log: Log) -> Optional[Dict[str, Any]]:
    """Runs a command, prints what it says, and returns that and its status; None where it took too long."""
    process = subprocess.Popen(
        ['timeout', f'{seconds:.0f}', sys.executable, *map(str, command)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        log(lines[-1])
    if process.wait() == 124:
        return log('it took too long')
    return dict(status=process.returncode, output=lines)


def tests(args: argparse.Namespace, seconds: float, log: Log) -> Optional[Dict[str, Any]]:
    """Runs tests/test_cuda.py, with --smoke two of its tests."""
    some = ['--slow', '-k', 'one_rank or autocast'] if args.smoke else []
    options = ['-q', '-p', 'no:cacheprovider', '--tb=short', '--show-capture=no', '--durations=5', '-W', 'ignore']
    return called(['-m', 'pytest', 'tests/test_cuda.py', *options, *some], seconds, log)


def benchmarks(args: argparse.Namespace, seconds: float, log: Log) -> Optional[Dict[str, Any]]:
    """Runs the benchmarks; their page is OUT/benchmarks_gpu.md."""
    device = ['--device', 'cpu', '--quick', '--only', 'layers'] if args.smoke else ['--device', 'cuda']
    page = (args.out / 'benchmarks_gpu.md').resolve()
    return called(['tools/benchmarks/benchmark.py', '--page', page, *device], seconds, log)


def load_images(args: argparse.Namespace) -> Dict[str, Tuple[Tensor, Tensor]]:
    """Returns images, ``(N, 3, 32, 32)`` of bytes, and labels, for training and for testing, on the device."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if args.data is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (96, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return {part: (images.to(device), torch.arange(96, device=device) % 10) for part in ('train', 'test')}
    found = {}
    for part in ('train', 'test'):
        folder = ImageFolder(args.data / part, np.asarray)
        with ThreadPoolExecutor() as pool:
            pixels, labels = zip(*pool.map(folder.__getitem__, range(len(folder))))
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
        found[part] = images.to(device), torch.tensor(labels, device=device)
    return found


def augmented(images: Tensor) -> Tensor:
    """Flips each image or not, and shifts it by up to four pixels, with zeros outside."""
    number, device = len(images), images.device
    shifts = torch.randint(9, (2, number, 1), device=device)
    places = torch.arange(32, device=device)
    columns = torch.where(torch.rand(number, 1, device=device) < 0.5, 31 - places, places) + shifts[1]
    padded = F.pad(images, (4, 4, 4, 4))
    return padded[
        torch.arange(number, device=device)[:, None, None], :, (places + shifts[0])[:, :, None], columns[:, None]
    ]


def normalized(images: Tensor) -> Tensor:
    """Returns ``(N, 3, 32, 32)`` or ``(N, 32, 32, 3)`` bytes with the mean and the deviation of CIFAR-10."""
    images = images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
    mean, std = images.new_tensor([[125.3, 123.0, 113.9], [51.6, 50.8, 51.3]], dtype=torch.float32)[:, :, None, None]
    return (images - mean) / std


class Training:
    """One network: its recipe, its curve, and a checkpoint of the last epoch."""

    def __init__(
        self, file: Path, model: nn.Module, data: Dict[str, Tuple[Tensor, Tensor]], batch: int, recipe: Dict[str, Any]
    ) -> None:
        self.file, self.data, self.batch, self.recipe = file, data, batch, recipe
        device = data['train'][0].device
        self.model = model.to(device)
        ours = [[p for n, p in model.named_parameters() if self._decays(n) == decays] for decays in (True, False)]
        groups = [dict(params=ours[0]), dict(params=ours[1], weight_decay=0.0)]
        settings = dict(lr=recipe['lr'], weight_decay=recipe['weight_decay'])
        adam = recipe.get('optimizer') == 'AdamW'
        self.optimizer = (
            torch.optim.AdamW(groups, **settings) if adam else torch.optim.SGD(groups, momentum=0.9, **settings)
        )
        self.epoch, self.seconds, self.curve, self.per_epoch = 0, 0.0, [], math.ceil(len(data['train'][0]) / batch)
        if file.exists():
            saved = torch.load(file, map_location=device)
            self.model.load_state_dict(saved['model'])
            self.optimizer.load_state_dict(saved['optimizer'])
            self.epoch, self.seconds, self.curve = saved['epoch'], saved['seconds'], saved['curve']
        if device.type == 'cuda':
            gpu.compiled(self.model, quick=False)

    @staticmethod
    def _decays(name: str) -> bool:
        return not name.endswith(('encoding.center', 'encoding.sqrt_precision'))  # as in the released code

    def factor(self, share: float) -> float:
        """Returns the rate over the largest one after a share of the training."""
        if 'milestones' in self.recipe:
            return 0.1 ** sum(share >= milestone for milestone in self.recipe['milestones'])
        warm_up = self.recipe['warm_up']
        if share < warm_up:
            return share / warm_up
        return (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up))) / 2

    def step(self, images: Tensor, labels: Tensor, share: float) -> None:
        """Trains with a batch."""
        for group in self.optimizer.param_groups:
            group['lr'] = self.recipe['lr'] * self.factor(share)
        self.optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16):
            logits = self.model(normalized(augmented(images)))
        F.cross_entropy(logits.float(), labels).backward()
        self.optimizer.step()

    def seconds_an_epoch(self) -> float:
        """Measures steps, which change the model."""
        self.model.train()
        images, labels = (own[: self.batch] for own in self.data['train'])
        step = gpu.measured(lambda: self.step(images, labels, 0.0), images.device, quick=False)
        return step.seconds * self.per_epoch * 1.2  # and the accuracy

    def run(self, epochs: int, end: float, log: Log) -> Optional[Dict[str, Any]]:
        """Trains the epochs that are left; None where there is no time for them."""
        images, labels = self.data['train']
        drop_last = len(images) - len(images) % self.batch
        while self.epoch < epochs:
            start = time.monotonic()
            if start > end:
                return log(f'{self.file.stem}: no time is left')
            self.model.train()
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.epoch)).to(images.device)
            for number, chosen in enumerate(order[:drop_last].split(self.batch)):  # one size: compiled once
                self.step(images[chosen], labels[chosen], (self.epoch + number / self.per_epoch) / epochs)
            self.epoch += 1
            accuracy = self.accuracy()
            self.seconds += time.monotonic() - start
            self.curve.append(accuracy)
            log(f'{self.file.stem}: epoch {self.epoch} of {epochs}, {accuracy:.2f} %, {self.seconds:.0f} s')
            states = dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict())
            torch.save(dict(states, epoch=self.epoch, seconds=self.seconds, curve=self.curve), self.file)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return dict(top1=self.curve[-1], curve=self.curve, epochs=epochs, seconds=self.seconds, parameters=parameters)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Returns the top-1 accuracy with the test images, in percent."""
        self.model.eval()
        images, labels = self.data['test']
        right = torch.zeros((), device=images.device)
        for own, label in zip(images.split(500), labels.split(500)):
            with torch.autocast(images.device.type, torch.bfloat16):
                right += (self.model(normalized(own)).argmax(1) == label).sum()
        return 100 * float(right) / len(images)


def c20(
    args: argparse.Namespace, seconds: float, log: Log, names: Sequence[str] = ('quadratic', 'ResNet-18')
) -> Optional[Dict[str, Any]]:
    """Trains networks of C20, all for the epochs that fit into the time for the first two of them."""
    end = time.monotonic() + seconds
    data, batch = load_images(args), 32 if args.smoke else 100

    def training(name: str, file: str) -> Training:
        recipe: Dict[str, Any] = dict(lr=0.1, weight_decay=1e-4)
        torch.manual_seed(0)
        if name == 'ResNet-18':
            model = gpu.resnet18(num_classes=10, **(gpu.smallest(name) if args.smoke else {}))
            recipe.update(milestones=[0.8 / 3, 0.5, 2.5 / 3])
        else:
            model = timm.create_model(f'sa_{name}_cifar', **DROP, **(gpu.smallest('sa_') if args.smoke else {}))
            recipe.update(warm_up=0.05)
        return Training(args.out / file, model, data, batch, recipe)

    plan = args.out / 'c20_epochs.json'
    if not plan.exists():
        rates = {name: training(name, 'none.pth').seconds_an_epoch() for name in ('quadratic', 'ResNet-18')}
        left = end - time.monotonic()
        plan.write_text(json.dumps(2 if args.smoke else min(300, max(1, int(left / sum(rates.values()))))))
        log(f'seconds an epoch: {rates}')
    epochs = json.loads(plan.read_text())
    log(f'{epochs} epochs of {len(data["train"][0]):,} images')
    found = {name: training(name, f'{name}.pth').run(epochs, end + 30, log) for name in names}
    return None if None in found.values() else dict(networks=found, differs=DIFFERS['c20'])


def starts(args: argparse.Namespace, seconds: float, log: Log) -> Optional[Dict[str, Any]]:
    """Trains the same vision transformer from each start."""
    end, data = time.monotonic() + seconds, load_images(args)
    sizes: Dict[str, Any] = dict(embed_dim=512, depth=6, num_heads=8, mlp_ratio=1)
    if args.smoke:
        sizes.update(embed_dim=64, depth=2, num_heads=2)
    recipe = dict(optimizer='AdamW', lr=3e-4, weight_decay=0.05, warm_up=0.05)
    found = {}
    for name, start in STARTS.items():
        torch.manual_seed(0)
        model = timm.models.VisionTransformer(32, 2, class_token=False, global_pool='avg', num_classes=10, **sizes)
        start(model)
        training = Training(args.out / f'{name}.pth', model, data, 32 if args.smoke else 256, recipe)
        found[name] = training.run(2 if args.smoke else 10, end, log)
    return None if None in found.values() else dict(networks=found, differs=DIFFERS['starts'])


PARTS: Dict[str, Callable[[argparse.Namespace, float, Log], Optional[Dict[str, Any]]]] = {
    'tests': tests,
    'benchmarks': benchmarks,
    'c20': c20,
    'starts': starts,
    'c20_more': partial(c20, names=('generalized', 'learned')),
}

if __name__ == '__main__':
    main()
