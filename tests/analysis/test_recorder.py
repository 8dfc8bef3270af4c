"""Attention maps of any transformer, recorded and rolled out: against what the libraries give and dense equations."""

import gc
import itertools
import sys
from functools import partial

import pytest
import timm
import torch
import torch.distributed as dist
import torchvision
from helpers.versions import new_hugging_face
from helpers.vits import OF_HUGGING_FACE, SIZE, output_of, small_vit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from attncnn_plugin import AttentionRecorder, attention_maps, rollout
from attncnn_plugin.analysis import mean_attention
from attncnn_plugin.analysis.recorder import attention_layers
from attncnn_plugin.convert import conv_to_mhsa
from attncnn_plugin.heads.seen import watching
from attncnn_plugin.pruning import head_importance

IMAGES = 2, 3, SIZE, SIZE
FUSED = ['vit_tiny_patch16_224', 'beit_base_patch16_224', 'eva02_tiny_patch14_224', 'vit_small_patch16_dinov3']
IN_WINDOWS = ['swin_tiny_patch4_window7_224', 'transformers.Swin', 'torchvision.SwinTransformer']


def images(dtype=torch.float64):
    return torch.randn(IMAGES, dtype=dtype)


def by_windows(probs, size=4):
    """Maps of a grid without a shift, ``(B·windows, N_h, M, M)``, from ``(B, N_h, N, N)``."""
    height = int(probs.shape[-1] ** 0.5)
    numbers = torch.arange(height**2).view(-1, size, height // size, size).transpose(1, 2).reshape(-1, size**2)
    return torch.stack([probs[:, :, own][..., own] for own in numbers], 1).flatten(0, 1)


def maps_of_hugging_face(model, x):
    """What its eager attention returns."""
    eager = type(model)._from_config(model.config, attn_implementation='eager').to(x.dtype).eval()
    eager.load_state_dict(model.state_dict())
    return eager(x, output_attentions=True).attentions


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize('name', [name for name in OF_HUGGING_FACE if 'Swin' not in name])
def test_hugging_face_says_the_same(name, dtype):
    """``output_attentions`` of its eager attention, whose softmax some classes compute in float32."""
    model, x = small_vit(name).to(dtype), images(dtype)
    maps = attention_maps(model, x)
    expected = maps_of_hugging_face(model, x)
    assert len(maps) == len(expected) == 2
    for own, theirs in zip(maps.values(), expected):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-7)
    in_double = name in ('transformers.Dinov2', 'transformers.DINOv3ViT') and new_hugging_face()
    if in_double and dtype == torch.float64:
        torch.testing.assert_close(torch.stack(list(maps.values())), torch.stack(expected), rtol=1e-12, atol=1e-14)


def test_hugging_face_windows():
    """Those of the grid, cut into windows, are its own: the last layer's, with and without a shift."""
    model, x = small_vit('transformers.Swin').double(), images()
    maps = [own for name, own in attention_maps(model, x).items() if '.blocks.1.' in name]
    expected = maps_of_hugging_face(model, x)
    torch.testing.assert_close(by_windows(maps[1]), expected[1], rtol=1e-5, atol=1e-7)
    # Shifted by 2: token (2, 2) is the first of the first window.
    rolled = maps[0].unflatten(3, (8, 8)).unflatten(2, (8, 8)).roll((-2, -2, -2, -2), (2, 3, 4, 5))
    torch.testing.assert_close(by_windows(rolled.flatten(4).flatten(2, 3)), expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
def test_torchvision_says_the_same(dtype):
    """``need_weights`` of each nn.MultiheadAttention, for its own input."""
    model, x = small_vit('torchvision.VisionTransformer').to(dtype), images(dtype)
    maps, inputs, tolerance = attention_maps(model, x), {}, 1e-12 if dtype == torch.float64 else 1e-5
    for name, layer in model.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            layer.register_forward_pre_hook(lambda module, args, name=name: inputs.update({name: args[0]}))
    model(x)
    assert list(maps) == list(inputs)
    for name, own in maps.items():
        layer = model.get_submodule(name)
        expected = layer(*[inputs[name]] * 3, need_weights=True, average_attn_weights=False)[1]
        torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('name', ['torchvision.SwinTransformer', 'torchvision.SwinTransformerV2'])
@pytest.mark.parametrize('size', [SIZE, 24, 20])
def test_windows_of_torchvision(name, size):
    """With P of these windows the output is that of torchvision's own function, padding and masks included."""
    model, x = small_vit(name).double(), torch.randn(2, 3, size, size, dtype=torch.float64)
    expected = model(x)
    product = lambda attention, output: attention.product(attention.probs)  # noqa: E731
    with watching(model, lambda *own: None, touch=product):
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'sa_learned_content_cifar', 'cmhsa3_small_patch4_32'])
def test_of_this_package(name):
    settings = dict(embed_dim=12, depth=2, num_heads=3) if 'sa_' in name else dict(phase='attn')
    model = timm.create_model(name, **settings).double().eval()
    x, maps = torch.randn(2, 3, 16, 16).double(), {}
    found = attention_maps(model, x)
    for layer_name, layer in attention_layers(model).items():
        layer.register_forward_pre_hook(lambda module, args, own=layer_name: maps.update({own: args[0]}))
    model(x)
    for layer_name, layer in attention_layers(model).items():
        tokens = maps[layer_name].shape[1] * maps[layer_name].shape[2]
        if layer.depends_on_content:
            expected = layer.attention_scores(maps[layer_name]).softmax(-1)[..., :tokens]
        else:
            expected = layer.attention_probs(maps[layer_name].shape[1:3]).expand(2, -1, -1, -1)
        torch.testing.assert_close(found[layer_name], expected, rtol=1e-12, atol=1e-14)


def test_reductions():
    model, x = small_vit('vit_tiny_patch16_224').double(), images()
    maps = attention_maps(model, x)
    for reduce, expected in {'class_token': lambda own: own[:, :, 0], torch.Tensor.sum: lambda own: own.sum()}.items():
        for name, own in attention_maps(model, x, reduce=reduce).items():
            assert torch.equal(own, expected(maps[name]))
            assert own.untyped_storage().nbytes() == own.nbytes  # no more is kept
    with pytest.raises(ValueError, match="reduce='max' must be 'class_token', or a function"):
        attention_maps(model, x, reduce='max')
    with pytest.raises(TypeError, match='reduce=.* gives a ndarray, but a tensor is needed'):
        attention_maps(model, x, reduce=lambda probs: probs.numpy())


def test_recorder_in_training():
    """Two steps of a training with dropout: maps of each, without gradients, and the step is the same as without."""
    torch.manual_seed(0)
    model, x = small_vit('vit_tiny_patch16_224', attn_drop_rate=0.5), images(torch.float32)
    model.train()
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    with AttentionRecorder(model) as recorder:
        output = model(x)
        output.sum().backward()
        model(x[:1])
    assert torch.equal(output, expected) and model.training
    assert [len(maps['blocks.1.attn']) for maps in recorder.passes] == [2, 1]
    first = recorder.passes[0]['blocks.0.attn']
    assert not first.requires_grad
    torch.testing.assert_close(first, attention_maps(model, x)['blocks.0.attn'])
    model(x)
    assert len(recorder.passes) == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_recorder_of_parts():
    """Passes that do not go through the model's own forward are passes too."""
    model, x = small_vit('vit_tiny_patch16_224').double(), images()
    with AttentionRecorder(model) as recorder:
        for part in (model.forward_features, model.forward_features, model, model.forward_features, model):
            part(x)
    assert len(recorder.passes) == 5
    for maps in recorder.passes:
        torch.testing.assert_close(maps, attention_maps(model, x))
    with AttentionRecorder(model) as recorder:
        model.blocks[1](torch.randn(1, 17, 24).double())  # one layer, and then a pass of all
        model(x)
    assert [list(maps) for maps in recorder.passes] == [['blocks.1.attn'], ['blocks.0.attn', 'blocks.1.attn']]
    with AttentionRecorder(model) as recorder:  # block after block
        x = torch.randn(1, 17, 24).double()
        for block in [*model.blocks, *model.blocks]:
            x = block(x)
    assert [list(maps) for maps in recorder.passes] == [['blocks.0.attn', 'blocks.1.attn']] * 2


def test_recorder_of_a_backbone_that_runs_twice():
    """It is one pass of the model: what runs again has another name."""
    model, x = small_vit('vit_tiny_patch16_224').double(), images()
    twice = nn.Sequential(model)
    twice.forward = lambda views: [model(view) for view in views]
    with AttentionRecorder(twice) as recorder:
        twice(x[:, None])
    (maps,), names = recorder.passes, [f'0.blocks.{i}.attn' for i in range(2)]
    assert list(maps) == [*names, *(f'{name}#2' for name in names)]
    expected = [own for view in x[:, None] for own in attention_maps(model, view).values()]
    torch.testing.assert_close(list(maps.values()), expected)


@pytest.mark.parametrize('reentrant', [True, False])
def test_recorder_with_checkpointing(reentrant):
    """What is computed again during backward is not recorded."""
    model, x = small_vit('vit_tiny_patch16_224').double(), images().requires_grad_()
    expected = [attention_maps(model, own) for own in (x, x[:1])]
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    with AttentionRecorder(model) as recorder:
        outputs = model(x), checkpoint(model, x[:1], use_reentrant=reentrant)
        sum(output.sum() for output in outputs).backward()
    assert len(recorder.passes) == 2
    torch.testing.assert_close(recorder.passes, expected)


def test_model_stays_as_it_was():
    model, x = small_vit('vit_tiny_patch16_224'), images()
    model.blocks[0].train()
    state, modes = {key: own.clone() for key, own in model.state_dict().items()}, [m.training for m in model.modules()]
    attention_maps(model, x)  # float64 for a float32 model
    rollout(model, x, target=1)
    assert all(torch.equal(own, state[key]) for key, own in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def peak(run):
    """Returns the largest number of bytes that a call has allocated at once."""
    gc.collect()  # what is freed meanwhile would count
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        run()
    events = profile.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == '[memory]']
    assert changes
    return max(itertools.accumulate(change for _, change in sorted(changes)))


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('fused', [False, True])
def test_peak_memory(fused, masked):
    """With ``reduce`` no more than the map of one layer is added to what the model needs."""
    name = 'beit_base_patch16_224' if masked else 'vit_tiny_patch16_224'
    model = timm.create_model(name, img_size=256, patch_size=8, embed_dim=16, num_heads=2, depth=4).eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    x = torch.randn(1, 3, 256, 256)
    reduced = {}
    first = lambda probs: probs[:, :, 0]  # noqa: E731
    before = peak(lambda: model(x))
    after = peak(lambda: reduced.update(attention_maps(model, x, reduce=first)))
    of_a_map = 2 * 1025**2 * 4
    assert after - before < 1.05 * of_a_map
    assert all(own.untyped_storage().nbytes() == own.nbytes == 2 * 1025 * 4 for own in reduced.values())
    assert peak(lambda: attention_maps(model, x)) - before > 3 * of_a_map  # what it counts is there


VERBS = {
    'maps': attention_maps,
    'rollout': rollout,
    'relevance': lambda model, x: rollout(model, x, target=1),
    'importance': lambda model, x: head_importance(model, [x], lambda model, x: model(x).square().mean()),
}


def number_of_tensors():
    return sum(type(own) is torch.Tensor for own in gc.get_objects())


@pytest.mark.parametrize('verb', VERBS)
@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'sa_quadratic_cifar'])
def test_memory_is_free_at_once(name, verb):
    """No cycle of references keeps maps until the garbage collector comes by."""
    model, x = small_vit(name) if name[0] == 'v' else timm.create_model(name, depth=1), torch.randn(2, 3, SIZE, SIZE)
    VERBS[verb](model, x)
    gc.collect()
    gc.disable()
    try:
        VERBS[verb](model, x)
        before = number_of_tensors()
        gc.collect()
        assert number_of_tensors() == before
    finally:
        gc.enable()


@pytest.fixture
def mesh():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh('cpu', (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'sa_learned_content_cifar'])
def test_fully_sharded(mesh, name):
    """The maps of a model in FSDP2, in training too; what needs whole parameters at rest says so."""
    settings = dict(img_size=32, patch_size=8) if name.startswith('vit') else {}
    model = timm.create_model(name, embed_dim=12, num_heads=3, depth=2, num_classes=5, **settings).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = attention_maps(model, images)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    maps = attention_maps(model, images)
    assert list(maps) == list(expected) and all(torch.equal(own, expected[key]) for key, own in maps.items())
    with AttentionRecorder(model.train()) as recorder:
        model(images).sum().backward()
    assert [list(own) for own in recorder.passes] == [list(expected)]
    if settings:
        assert torch.allclose(mean_attention(model, images)['blocks.1.attn'].probs.sum(-1), torch.ones(()))
    else:
        with pytest.raises(ValueError, match='blocks.0.attn has parameters that are DTensors'):
            mean_attention(model, images)


def test_compiled_and_wrapped():
    """Of torch.compile and of a wrapper for distributed training: the names are those of the model inside."""
    model, x = small_vit('vit_tiny_patch16_224'), images(torch.float32)
    expected = attention_maps(model, x)
    wrapped = nn.DataParallel(model)
    for other in (torch.compile(model, backend='eager'), wrapped):
        other(x)
        maps = attention_maps(other, x)
        assert list(maps) == list(expected)
        assert all(torch.equal(own, expected[name]) for name, own in maps.items())
    model.compile(backend='eager')
    model(x)
    with AttentionRecorder(model) as recorder:
        model(x)
    assert all(torch.equal(own, expected[name]) for name, own in recorder.passes[0].items())


def expected_rollout(model, x, target):
    """The rollout from the equations, by the maps themselves or by gradients of the unfused attention.

    Class tokens come first; they may come later than the patches, as in ConViT, and attend alone, as in CaiT.
    """
    maps = attention_maps(model, x)
    weights, keep = [own.mean(1) / 2 for own in maps.values()], 0.5
    if target is not None:
        found, handles = [], []

        def see(_, args):
            args[0].retain_grad()
            found.append(args[0])

        for layer_name in maps:
            layer = model.get_submodule(layer_name)
            layer.fused_attn = False
            handles.append(layer.attn_drop.register_forward_pre_hook(see))
        model(x)[torch.arange(len(x)), target].sum().backward()
        for layer_name, handle in zip(maps, handles):
            model.get_submodule(layer_name).fused_attn = True
            handle.remove()
        weights, keep = [(own.grad * own).clamp(min=0).mean(1).detach() for own in found], 1
    joint = torch.eye(weights[0].shape[-1], dtype=x.dtype).expand(len(x), -1, -1)
    for own in weights:
        new, queries = own.shape[2] - joint.shape[1], own.shape[1]
        joint = nn.functional.pad(joint, (new, 0, new, 0))
        joint[:, range(new), range(new)] = 1
        joint = torch.cat([own @ joint + keep * joint[:, :queries], joint[:, queries:]], 1)
    return joint


@pytest.mark.parametrize('name', [*FUSED, 'convit_tiny', 'cait_xxs24_224'])
@pytest.mark.parametrize('target', [None, [3, 1]])
@pytest.mark.parametrize('pool', ['token', 'avg'])
def test_rollout(name, target, pool):
    """Abnar and Zuidema's, and Chefer et al.'s by autograd through the unfused attention."""
    model, x = small_vit(name, global_pool=pool).double(), images()
    joint = expected_rollout(model, x, target)
    rows = joint[:, 0] if pool == 'token' else joint[:, -16:].mean(1)
    expected = rows[:, -16:].unflatten(1, (4, 4))
    heat = rollout(model, x, target)
    torch.testing.assert_close(heat, expected, rtol=1e-9, atol=1e-12)
    assert not heat.requires_grad and heat.any()


@pytest.mark.parametrize('target', [None, [3, 1]])
def test_rollout_in_inference_mode(target):
    model, x = small_vit('vit_tiny_patch16_224'), images(torch.float32)
    expected = rollout(model, x, target)
    with torch.inference_mode():
        assert torch.equal(rollout(model, x, target), expected)
        x, target = x.clone(), None if target is None else torch.tensor(target)
    assert torch.equal(rollout(model, x, target), expected)


@pytest.mark.parametrize('name', ['transformers.ViT', 'transformers.Dinov2', 'torchvision.VisionTransformer'])
@pytest.mark.parametrize('target', [None, 2])
def test_rollout_of_other_libraries(name, target):
    """With ``target``: the gradient by a map is that of the loss when the map itself is moved."""
    model, x = small_vit(name).double(), images()
    heat, maps = rollout(model, x, target), attention_maps(model, x)
    joint = torch.eye(17, dtype=torch.float64).expand(2, -1, -1)
    for layer_name, own in maps.items():
        if target is None:
            joint = (own.mean(1) + torch.eye(17)) / 2 @ joint
        else:
            joint = joint + (own * gradient_by_map(model, x, layer_name, target)).clamp(min=0).mean(1) @ joint
    torch.testing.assert_close(heat, joint[:, 0, 1:].unflatten(1, (4, 4)), rtol=1e-9, atol=1e-12)


def gradient_by_map(model, x, name, target):
    """∂y/∂A by autograd, of attention as PyTorch documents it, with a map that is a variable."""
    found, number = [], list(attention_maps(model, x)).index(name)

    def unfused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **options):
        probs = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        found.append(probs.detach().requires_grad_() if len(found) == number else probs)
        return found[-1] @ value

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nn.functional, 'scaled_dot_product_attention', unfused)
        output_of(model, x)[:, target].sum().backward()
    model.zero_grad()
    return found[number].grad


@pytest.mark.parametrize(
    ('name', 'settings', 'of_class'),
    [
        ('transformers.Beit', {}, False),
        ('transformers.Beit', dict(use_mean_pooling=False), True),
        ('VisionTransformer', {}, True),
        ('VisionTransformer', dict(out_type='avg_featmap'), False),
    ],
)
def test_what_the_model_reads(name, settings, of_class):
    model, x = small_vit(name, **settings).double(), images()
    joint = expected_rollout(model, x, None)
    rows = joint[:, 0] if of_class else joint[:, 1:].mean(1)
    torch.testing.assert_close(rollout(model, x), rows[:, 1:].unflatten(1, (4, 4)), rtol=1e-12, atol=1e-14)


def test_rollout_without_a_class_token():
    """The mean over all patches; a head of equal attention spreads it."""
    model = timm.create_model('sa_quadratic_cifar', embed_dim=12, depth=2, num_heads=3).double()
    x = torch.randn(2, 3, 8, 8).double()
    joint = expected_rollout(model, x, None)
    torch.testing.assert_close(rollout(model, x), joint.mean(1).unflatten(1, (4, 4)), rtol=1e-12, atol=1e-14)
    assert rollout(model, x, target=3).shape == (2, 4, 4)


@pytest.mark.parametrize(
    ('build', 'shape', 'error', 'message'),
    [
        (lambda: timm.create_model('resnet18'), IMAGES, ValueError, 'no attention of a ResNet was seen for these'),
        (lambda: timm.create_model('efficientvit_b0'), IMAGES, ValueError, 'Convolutions, mixers and linear attention'),
        (lambda: torch.jit.script(nn.MultiheadAttention(4, 2)), (3, 2, 4), ValueError, 'is scripted, which hides it'),
        # The model's own.
        (lambda: small_vit('vit_tiny_patch16_224'), (2, 1, SIZE, SIZE), RuntimeError, 'to have 3 channels, but got 1'),
    ],
)
def test_what_cannot_be_seen(build, shape, error, message):
    model, x = build(), torch.zeros(shape)
    call = (lambda model, x: model(x, x, x)) if len(shape) == 3 else None
    for function in (attention_maps, rollout):
        with pytest.raises(error, match=message):
            function(model, x, call=call)


@pytest.mark.parametrize('content', [None, 'additive'])
@pytest.mark.parametrize('axes', [1, 3])
def test_attention_of_one_or_three_axes(axes, content):
    """It has maps, but no heads that are drawn."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](3, 4, 3, padding=1)
    layer, x = conv_to_mhsa(conv, content=content)[0], torch.randn(1, 3, *[4] * axes)
    expected = layer.attention_scores(x).softmax(-1) if content else layer.attention_probs([4] * axes)[None]
    torch.testing.assert_close(attention_maps(layer, x)[''], expected[..., : 4**axes])  # without the null key
    with pytest.raises(ValueError, match=f'layer has {axes} axes of pixels, but heads are shown for two'):
        mean_attention(layer, x)


@pytest.mark.parametrize(
    ('target', 'message'),
    [
        (5, r'target=5 must be a class from 0 to 4'),
        ([1, 7], 'must be a class from 0 to 4'),
        ([1, 2, 3], 'or one for each image'),
        (1.5, r'target=1\.5 must be a class'),
    ],
)
def test_no_such_class(target, message):
    with pytest.raises(ValueError, match=message):
        rollout(small_vit('vit_tiny_patch16_224'), images(torch.float32), target)


@pytest.mark.parametrize('name', IN_WINDOWS)
def test_rollout_of_windows(name):
    with pytest.raises(ValueError, match='blocks.1|1.1.* has attention of 16 tokens that are not the 16 of the layers'):
        rollout(small_vit(name), images(torch.float32))


def test_an_outer_model():
    """What it does to the images before counts."""
    model, x = small_vit('vit_tiny_patch16_224').double(), images()
    normalize = torchvision.transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    whole = nn.Sequential(normalize, model)
    expected = {f'1.{name}': own for name, own in attention_maps(model, normalize(x)).items()}
    torch.testing.assert_close(attention_maps(whole, x), expected, rtol=0, atol=0)
    for target in (None, 1):
        torch.testing.assert_close(rollout(whole, x, target), rollout(model, normalize(x), target), rtol=0, atol=0)


def test_all_towers():
    """Of two transformers, those that run are seen."""
    towers = nn.ModuleDict({name: small_vit('vit_tiny_patch16_224') for name in ('teacher', 'student')})
    x = images(torch.float32)
    for ran in (['student'], ['student', 'teacher']):
        with AttentionRecorder(towers) as recorder:
            towers.forward = lambda x, ran=ran: [towers[name](x) for name in ran]
            towers(x)
        (maps,) = recorder.passes
        assert list(maps) == [f'{name}.blocks.{i}.attn' for name in ran for i in range(2)]
        for name in ran:
            own = attention_maps(towers[name], x)
            assert all(torch.equal(maps[f'{name}.{layer}'], probs) for layer, probs in own.items())


class Attend(nn.Module):
    """Attention as in vit-pytorch: no ``num_heads``, a module for the softmax, and no class that is known."""

    def __init__(self, width=24, heads=3):
        super().__init__()
        self.heads, self.to_qkv, self.attend = heads, nn.Linear(width, 3 * width), nn.Softmax(-1)

    def forward(self, x, **_):
        query, key, value = self.to_qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        self.probs = self.attend(query @ key.mT / query.shape[-1] ** 0.5)
        return (self.probs @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize('of_library', [False, True])
def test_classes_that_nobody_knows(of_library):
    """Such as one that had other parts in another version of the library."""
    model, x = small_vit('vit_tiny_patch16_224', depth=3).double(), images()
    parts = dict(__module__='transformers.models.vit.modeling_vit', forward=Attend.forward)
    other = (type('ViTAttention', (Attend,), parts) if of_library else Attend)().double()
    model.blocks[1].attn = other
    maps = attention_maps(model, x)
    assert list(maps) == [f'blocks.{i}.attn' for i in range(3)]
    assert torch.equal(maps['blocks.1.attn'], other.probs)


def test_a_forward_pass_that_was_replaced():
    """Linear attention runs: there is no softmax."""
    model, x = small_vit('vit_tiny_patch16_224'), images(torch.float32)
    first = model.blocks[0].attn

    def linear(x, **_):
        query, key, value = first.qkv(x).chunk(3, -1)
        return first.proj(query.sigmoid() @ (key.sigmoid().mT @ value) / x.shape[1])

    first.forward = linear
    assert list(attention_maps(model, x)) == ['blocks.1.attn']


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'vit_relpos_small_patch16_224'])
def test_maps_that_are_wrapped(name):
    """As LoRA wraps them."""
    model, x = small_vit(name).double(), images()
    expected = attention_maps(model, x)
    for block in model.blocks:
        block.attn.qkv = nn.Sequential(block.attn.qkv)
    torch.testing.assert_close(attention_maps(model, x), expected, rtol=0, atol=0)


def test_attention_pooling():
    """A map of one query, at which a rollout ends; no token that the model reads."""
    model, x = small_vit('vit_base_patch16_siglip_224').double(), images()
    maps, pool, keys = attention_maps(model, x), model.attn_pool, []
    pool.kv.register_forward_hook(lambda module, args, output: keys.append(output[..., :24]))
    model(x)
    query, key = (own.unflatten(2, (3, 8)).transpose(1, 2) for own in (pool.q(pool.latent), *keys))
    expected = (pool.q_norm(query) @ pool.k_norm(key).mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(maps['attn_pool'], expected, rtol=1e-12, atol=1e-14)
    joint = torch.eye(16, dtype=torch.float64)
    for own in list(maps.values())[:2]:
        joint = (own.mean(1) + torch.eye(16)) / 2 @ joint
    expected = (expected.mean(1) / 2 @ joint).unflatten(2, (4, 4))[:, 0]
    heat = rollout(model, x)
    torch.testing.assert_close(heat / heat.sum((1, 2), keepdim=True), expected / expected.sum((1, 2), keepdim=True))


class ToQueries(nn.Module):
    """Attention of two images, or of queries of its own, by the same or by another layer."""

    def __init__(self, queries):
        super().__init__()
        self.stem, self.queries = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, queries, 8))
        self.first, self.second = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x, other=None):
        x, other = (None if own is None else self.stem(own).flatten(2).mT for own in (x, other))
        x = x + self.first(x, x, x)[0]
        z = self.queries.expand(len(x), -1, -1) if other is None else other
        return z + self.second(z, *[x if other is None else z] * 2)[0]


@pytest.mark.parametrize('queries', [15, 16])
def test_rollout_to_as_many_queries_as_there_are_tokens(queries):
    """A decoder's queries have nothing of the patches beside what they attend to."""
    model, x = ToQueries(queries).double().eval(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    first, second = (own.mean(1) for own in attention_maps(model, x).values())
    expected = (second / 2 @ (first + torch.eye(16)) / 2).mean(1)
    torch.testing.assert_close(rollout(model, x).flatten(1), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('target', [None, 1])
def test_no_rollout_of_a_difference_of_two_attentions(target):
    """It is no product of both."""
    model = timm.create_model('vit_dlittle_patch16_reg1_gap_256', img_size=32, embed_dim=32, depth=1, num_heads=4)
    with pytest.raises(ValueError, match='blocks.0.attn computes 2 attentions in a run'):
        rollout(model, torch.randn(2, 3, 32, 32), target=target)


def test_no_rollout_of_two_images():
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(ValueError, match='second has attention of 16 tokens that are not the 16 of the layers before'):
        rollout(ToQueries(1).eval(), x, call=lambda model, x: model(x, x.flip(3)))


@pytest.mark.parametrize(
    ('name', 'settings'),
    [
        ('vit_base_patch16_siglip_224', {}),
        ('swin_tiny_patch4_window7_224', {}),
        ('vit_tiny_patch16_224', dict(class_token=False, reg_tokens=2, global_pool='avg')),
    ],
)
def test_models_that_read_no_token(name, settings):
    with pytest.raises(ValueError, match="reduce='class_token', but a .* reads no single token: choose layers"):
        attention_maps(small_vit(name, **settings), images(), reduce='class_token')


def test_registers_are_not_read():
    model, x = small_vit('vit_small_patch16_dinov3', global_pool='token').double(), images()
    maps = attention_maps(model, x)
    for name, own in attention_maps(model, x, reduce='class_token').items():
        assert torch.equal(own, maps[name][:, :, 0])


class TokenBehind(nn.Module):
    """A transformer whose class token comes after the patches."""

    def __init__(self, encoder):
        super().__init__()
        self.patches, self.encoder = nn.Conv2d(3, 24, 8, 8), encoder
        self.token = nn.Parameter(torch.randn(1, 1, 24))

    def forward(self, x):
        x = torch.cat([self.patches(x).flatten(2).mT, self.token.expand(len(x), -1, -1)], 1)
        return self.encoder(x)[:, -1]


@pytest.mark.parametrize(
    'encoder',
    [
        nn.Sequential(Attend(), Attend()),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 3, 24, batch_first=True), 2, enable_nested_tensor=False),
    ],
)
def test_tokens_behind_the_patches(encoder):
    model, x = TokenBehind(encoder).double().eval(), images()
    maps, joint = attention_maps(model, x), torch.eye(17, dtype=torch.float64)
    for own in maps.values():
        joint = (own.mean(1) + torch.eye(17)) / 2 @ joint
    torch.testing.assert_close(rollout(model, x), joint[:, 16, :16].unflatten(1, (4, 4)), rtol=1e-12, atol=1e-14)
    for name, own in attention_maps(model, x, reduce='class_token').items():
        assert torch.equal(own, maps[name][:, :, 16])


def hugging_face_calls(x):
    """What an image processor gives, keyword arguments, and a call of one's own."""
    batch = pytest.importorskip('transformers.models') and sys.modules['transformers'].BatchFeature(
        dict(pixel_values=x)
    )
    return [(dict(pixel_values=x), None), (batch, None), (x, lambda model, x: model(pixel_values=x))]


def test_inputs_by_name():
    model, x = small_vit('transformers.ViT'), images(torch.float32)
    expected, means = attention_maps(model, x), mean_attention(model, x)
    for inputs, call in hugging_face_calls(x):
        torch.testing.assert_close(attention_maps(model, inputs, call=call), expected, rtol=0, atol=0)
        for target in (None, 1):
            torch.testing.assert_close(rollout(model, inputs, target, call=call), rollout(model, x, target))
        found = mean_attention(model, inputs, call=call)
        assert all(torch.equal(found[name].probs, own.probs) for name, own in means.items())


def test_layers_that_are_chosen():
    model, x = small_vit('vit_tiny_patch16_224', depth=3), images(torch.float32)
    names = [f'blocks.{i}.attn' for i in range(3)]
    for layers, expected in [
        (names[1], names[1:2]),
        ('blocks.[12].*', names[1:]),
        (['blocks.0*', names[2]], [names[0], names[2]]),
        (lambda name: name < names[1], names[:1]),
    ]:
        for function in (attention_maps, mean_attention):
            assert list(function(model, x, layers=layers)) == expected
    with pytest.raises(ValueError, match='layers chooses none of the attention that was seen: blocks.0.attn, blocks.1'):
        attention_maps(model, x, layers='layers.*')
    with pytest.raises(TypeError, match=r'layers=\[\] must be names, globs'):
        attention_maps(model, x, layers=[])


def test_grid_that_is_given():
    """Where patches cannot be followed: here a table says their order."""
    model, x = small_vit('vit_tiny_patch16_224').double(), images()
    expected, embed = rollout(model, x), model.patch_embed.forward
    model.patch_embed.forward = lambda x: torch.from_numpy(embed(x).detach().numpy())
    with pytest.raises(ValueError, match='which token is which patch could not be seen: give grid'):
        rollout(model, x)
    assert rollout(model, x, grid=(4, 4)).shape == expected.shape
    with pytest.raises(ValueError, match=r'grid=\(5, 4\) has 20 patches, but there are 17 tokens'):
        rollout(model, x, grid=(5, 4))


class Pooled(nn.Module):
    """Tokens are summed up by weights of their own, as the sequence pooling of CCT."""

    def __init__(self):
        super().__init__()
        self.patches, self.weights, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 1), nn.Linear(8, 5)
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), 1, 8), x], 1)
        return self.head(torch.einsum('bn,bnd->bd', self.weights(x).squeeze(-1).softmax(-1), x))


def test_sums_of_all_tokens_are_no_token():
    model, x = Pooled().double(), images()
    ((name, probs),) = attention_maps(model, x).items()
    assert name == '' and probs.shape == (2, 1, 1, 17)
    torch.testing.assert_close(rollout(model, x), probs[:, 0, 0, 1:].unflatten(1, (4, 4)) / 2)
    with pytest.raises(ValueError, match='reads no single token'):
        attention_maps(model, x, reduce='class_token')
