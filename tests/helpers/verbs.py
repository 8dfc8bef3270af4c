"""What the package does to a model: functions of a model and some images, which return numbers, for any device."""

import copy
import dataclasses
from functools import partial

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attncnn_plugin import AttentionRecorder, attention_maps, follow_state_dict, rollout
from attncnn_plugin.analysis import head_report
from attncnn_plugin.convert import attention_to_convs, convs_to_attention
from attncnn_plugin.pruning import head_ablation, head_importance, prunable_heads, prune_heads
from attncnn_plugin.training import PruneHeads, TwoPhases
from attncnn_plugin.transformers import init_as_convolution

from .small import KINDS, small_model, trained_like
from .vits import NO_START, SETTINGS, output_of, small_vit, vit_to_start

LABELS = [0, 4, 2]
CNN = 'resnet10t'
WITH_HEADS = [kind for kind in KINDS if kind != 'cmhsa_conv']
VITS = [
    'vit_tiny_patch16_224',
    'swin_tiny_patch4_window7_224',
    'VisionTransformer',
    'transformers.DINOv3ViT',
    'torchvision.SwinTransformer',
]
ALL_VITS = list(SETTINGS)
# Windows of other tokens than those of the layer before, and no logits.
NO_ROLLOUT = [name for name in SETTINGS if 'win' in name.lower()]
NO_ROLLOUT += ['VisionTransformer', 'DeiT3', 'BEiTViT', 'ViTEVA02', 'transformers.DINOv3ViT']


def model_and_images(name, new=False):
    """A model in float64, ``new`` or as if trained, and three images."""
    torch.manual_seed(0)
    if name == CNN:
        model = timm.create_model(
            CNN, num_classes=5, layers=(1, 1, 1, 1), channels=(8, 8, 8, 16), stem_width=8, zero_init_last=False
        )
    elif name in SETTINGS:
        changes = dict(qk_norm=False) if 'distilled' in name else {}
        model = vit_to_start(name, **changes) if new else small_vit(name)
    else:
        model = trained_like(small_model(name, num_classes=5))
    for module in model.modules():  # numbers that are drawn differ by device
        for rate in ('p', 'drop_prob'):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    size = 16 if name in KINDS else 32
    return model.double(), torch.randn(3, 3, size, size, dtype=torch.float64)


def loss(model, batch):
    images, labels = batch
    features = output_of(model, images)
    return cross_entropy(features if features.ndim == 2 else features.flatten(2).mean(2), labels)


def batch_of(images):
    return images, torch.tensor(LABELS, device=images.device)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def steps(model, images, optimizer=None):
    """Two steps of training."""
    optimizer, losses = optimizer or sgd(model), []
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(loss(model, batch_of(images)))
        losses[-1].backward()
        optimizer.step()
    return losses, model.state_dict()


def maps(model, images):
    return attention_maps(model, images)


def recorder(model, images):
    with AttentionRecorder(model) as recorder:
        output = output_of(model, images)
    return output, recorder.passes


def rollouts(model, images):
    return rollout(model, images), rollout(model, images, target=LABELS)


def report(model, images):
    return head_report(model, images)


def importance(model, images):
    return head_importance(model, [batch_of(images)], loss)


def ablation(model, images):
    return head_ablation(model, [batch_of(images)], loss)


def prune(model, images):
    """A head of the first layer, two of another; a fresh model follows and loads."""
    fresh = copy.deepcopy(model)
    layers = list(prunable_heads(model))
    prune_heads(model, {layers[0]: [0], layers[-1]: [0, 2]})
    follow_state_dict(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    fresh.eval()
    return output_of(fresh, images), steps(model, images)


def prune_in_training(model, images):
    """By what images say and by the loss; the optimizer goes on with what is left."""
    optimizer = sgd(model)
    steps(model, images, optimizer)
    keep = sum(layer.num_heads for layer in prunable_heads(model).values()) - 2
    criteria = ['entropy', 'duplicate']
    part = PruneHeads(epoch=1, batches=[batch_of(images)], loss=loss, keep=keep, criteria=criteria)
    assert part.on_epoch_begin(model, optimizer, 1)
    return steps(model, images, optimizer)


def turn(model, images):
    """From convolutions to attention between two epochs."""
    settings = dict(layers='layer4.*.conv2', content='additive', alpha=6.0) if hasattr(model, 'layer4') else {}
    optimizer = sgd(model)
    steps(model, images, optimizer)
    assert TwoPhases(epoch=1, **settings).on_epoch_begin(model, optimizer, 1)
    return steps(model, images, optimizer)


def convert(model, images):
    """A convolution exactly, one by fewer heads, and both back."""
    model.eval()
    drift = convs_to_attention(model, 'layer4.*.conv2', images).drift
    convs_to_attention(model, 'layer3.*.conv2')
    output = model(images)
    attention_to_convs(model, tolerance=1.0)
    return drift, output, model(images)


def start(model, images, method='gaussian'):
    return init_as_convolution(model, method=method, seed=1), output_of(model, images)


ABSOLUTE = 'vit_tiny_patch16_224'
MIMETIC = partial(start, method='mimetic')
OF_HEADS = (maps, recorder, report, importance, ablation, prune, prune_in_training)
CASES = [
    *((verb, name) for verb in OF_HEADS for name in (*WITH_HEADS, *ALL_VITS)),
    *((steps, name) for name in (*KINDS, CNN, *ALL_VITS)),
    *((rollouts, name) for name in (*WITH_HEADS, *ALL_VITS) if name not in NO_ROLLOUT),
    *((start, name) for name in ALL_VITS if name not in NO_START),
    (MIMETIC, ABSOLUTE),
    *((verb, CNN) for verb in (turn, convert)),
    (turn, 'cmhsa_conv'),
]
# What the package refuses, and says why; of cait's the probabilities of random weights are no numbers.
REFUSED = {(verb, 'cait_xxs24_224') for verb in (prune, prune_in_training, report)} | {(prune, 'SwinTransformerV2')}
CASES = [case for case in CASES if case not in REFUSED]


def numbers(values):
    """The tensors and numbers in what a verb returned, in order, on the devices where they are."""
    if dataclasses.is_dataclass(values):
        values = vars(values)
    if isinstance(values, Tensor):
        return [values.detach()]
    if isinstance(values, (int, float)):
        return [torch.tensor(float(values), device='cpu')]
    if values is None or isinstance(values, (str, nn.Module)):
        return []
    return [number for value in (values.values() if hasattr(values, 'values') else values) for number in numbers(value)]
