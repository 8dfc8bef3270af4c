"""switch_to_deploy() of the self-attention networks: the same outputs, its state dicts, its programs, convolutions."""

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.adapter import Adapter
from helpers.processes import run
from helpers.small import SMALL_ARCH, TIMM_KINDS, small_timm
from hypothesis import given
from hypothesis import strategies as st
from timm.utils.model import reparameterize_model
from torch import nn

from attncnn_plugin.layers import ContentAttention
from attncnn_plugin.layers.grid_convolution import GridConvolution
from attncnn_plugin.layers.linear import joined_maps

SIZES = [(32, 32), (12, 20), (32, 32)]  # the last one from what is kept


def relative_error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def deployed(model, **kwargs):
    model = copy.deepcopy(model)
    model.switch_to_deploy(**kwargs)
    return model


@pytest.mark.parametrize('name', TIMM_KINDS)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_outputs(name, dtype, tolerance):
    model = small_timm(name).to(dtype).eval()
    model.blocks[0].attn.value.bias.data.normal_()
    other = copy.deepcopy(model)
    report = other.switch_to_deploy()
    assert report.merged == (0, 1) and report.parameters_before - report.parameters_after == 2 * (16 * 16 + 16)
    assert 'Linear maps of 2 blocks merged' in str(report)
    assert not any(p.requires_grad for p in other.parameters()) and not other.training
    for size in SIZES:
        x = torch.randn(2, 3, *size, dtype=dtype)
        assert relative_error(other(x), model(x)) <= tolerance
        with torch.inference_mode():
            assert relative_error(other(x), model(x)) <= tolerance
    assert other.switch_to_deploy().merged == ()  # once is enough


@given(
    st.sampled_from([('qk', 'qr'), ('qk',), ('qr',), ('qk', 'uk'), ('qk', 'qr', 'uk', 'vr'), ('vr',)]),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_content_with_merged_matrices(terms, wide, height, width, batch, seed):
    """Many tokens of few channels are merged on the fly, few tokens of many channels only for inference."""
    torch.manual_seed(seed)
    layer = ContentAttention(64 if wide else 2, 2, (5, 5), terms=terms, dtype=torch.float64)
    x = torch.randn(batch, height, width, layer.dim, dtype=torch.float64)
    separate = copy.deepcopy(layer)
    for name in ('query', 'key'):
        if getattr(layer, name) is not None:
            setattr(separate, name, Adapter(getattr(layer, name)))  # no weights to multiply
            nn.init.zeros_(getattr(separate, name).up.weight)
    expected = separate(x)
    gradients = {
        name.replace('.linear', ''): gradient
        for (name, _), gradient in zip(
            separate.named_parameters(),
            torch.autograd.grad(expected.sin().sum(), list(separate.parameters()), allow_unused=True),
        )
    }
    output = layer(x)
    assert (output - expected).abs().max() <= 1e-10
    names, parameters = zip(*layer.named_parameters())
    for name, ours in zip(names, torch.autograd.grad(output.sin().sum(), parameters)):
        assert (ours - gradients[name]).abs().max() <= 1e-9, name
    layer.switch_to_deploy()
    for _ in range(2):
        assert (layer(x) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize('name', TIMM_KINDS)
def test_what_is_kept_follows_the_parameters(name):
    model = deployed(small_timm(name))
    x = torch.randn(1, 3, 16, 16)
    before = model(x)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    fresh = pickle.loads(pickle.dumps(model))  # keeps nothing
    assert relative_error(model(x), before) > 1e-3 and torch.equal(model(x), fresh(x))
    assert relative_error(model.double()(x.double()), fresh.double()(x.double())) <= 1e-12
    model.blocks[0].attn.prune_heads([1])
    fresh.blocks[0].attn.prune_heads([1])
    assert torch.allclose(model(x.double()), copy.deepcopy(fresh)(x.double()))


@pytest.mark.parametrize('name', TIMM_KINDS)
def test_state_dicts_carry_their_structure(name):
    model = small_timm(name).eval()
    model.prune_heads({0: [1]})
    x = torch.randn(2, 3, 16, 16)
    expected = model(x)
    other = deployed(model)
    fresh = small_timm(name).eval()
    fresh.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert fresh.blocks[0].is_deployed and torch.equal(fresh(x), other(x))
    again = small_timm(name).eval()
    again.switch_to_deploy()
    again.load_state_dict(model.state_dict())  # merged as it is loaded
    assert relative_error(again(x), expected) <= 1e-5
    state = model.state_dict()
    del state['blocks.0.proj.weight']
    for target in (again, small_timm(name)):
        with pytest.raises(RuntimeError, match='Missing key|Unexpected key'):
            target.load_state_dict(state)
    half = deployed(model).half()
    small_timm(name).half().load_state_dict(half.state_dict())


def test_reparameterized_by_timm():
    model = small_timm('sa_learned_cifar').eval()
    other = reparameterize_model(model)
    x = torch.randn(2, 3, 16, 16)
    assert all(block.is_deployed for block in other.blocks) and not model.blocks[0].is_deployed
    assert relative_error(other(x), model(x)) <= 1e-5


def test_an_adapter_cannot_be_merged():
    model = small_timm('sa_quadratic_cifar')
    model.blocks[1].proj = Adapter(model.blocks[1].proj)
    with pytest.raises(RuntimeError, match='proj is a Adapter'):
        model.switch_to_deploy()


def harden(model, blocks, shifts):
    with torch.no_grad():
        for block in blocks:
            encoding = model.blocks[block].attn.encoding
            encoding.center.copy_(torch.tensor(shifts))
            encoding.sqrt_precision.fill_(12.0)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_hard_heads_become_a_convolution(dtype, tolerance):
    model = small_timm('sa_quadratic_cifar').to(dtype).eval()
    harden(model, [1], [(0.0, 1.0), (-1.0, 0.0), (1.0, -1.0)])
    other = copy.deepcopy(model)
    report = other.switch_to_deploy(conv_tolerance=1e-6)
    assert list(report.convolutions) == [1] and report.convolutions[1].bound <= 1e-6
    assert 'block 1: attention became a convolution of 9 shifts' in str(report)
    assert isinstance(other.blocks[1].attn, GridConvolution) and not isinstance(other.blocks[0].attn, GridConvolution)
    for size in SIZES:
        x = torch.randn(2, 3, *size, dtype=dtype)
        assert relative_error(other(x), model(x)) <= tolerance
    fresh = small_timm('sa_quadratic_cifar').to(dtype).eval()
    fresh.load_state_dict(other.state_dict())
    assert torch.equal(fresh(x), other(x))
    with pytest.raises(ValueError, match='block 1, which has a convolution in the place of attention'):
        other.prune_heads({1: [0]})


def test_what_is_too_far_from_a_convolution_stays():
    model = small_timm('sa_quadratic_cifar')
    harden(model, [0, 1], [(0.0, 1.0), (-1.0, 0.0), (2.0, -1.0)])  # (2, −1) is not in 3x3, but in 5x5
    assert deployed(model, conv_tolerance=1e-3).blocks[0].attn is not GridConvolution
    assert model.switch_to_deploy(conv_tolerance=1e-3).convolutions == {}
    assert sorted(model.switch_to_deploy(conv_tolerance=1e-3, kernel_size=5).convolutions) == [0, 1]
    content = small_timm('sa_learned_content_cifar')
    assert content.switch_to_deploy(conv_tolerance=100.0).convolutions == {}
    with pytest.raises(ValueError, match='conv_tolerance=-1 must be at least 0'):
        content.switch_to_deploy(conv_tolerance=-1)


def test_error_of_a_soft_head_is_within_the_bound():
    model = small_timm('sa_quadratic_cifar', depth=1).eval()
    with torch.no_grad():
        model.blocks[0].attn.encoding.center.copy_(torch.tensor([(0.0, 1.0), (-1.0, 0.0), (1.0, -1.0)]))
        model.blocks[0].attn.encoding.sqrt_precision.fill_(3.0)
    soft, conv = deployed(model), copy.deepcopy(model)
    fit = conv.switch_to_deploy(conv_tolerance=10.0, size=(6, 7)).convolutions[0]
    x = nn.functional.normalize(torch.randn(8, 6, 7, 16), dim=-1)
    error = (soft.blocks[0].attn(x) - conv.blocks[0].attn(x)).norm(dim=-1).max()
    assert 0 < error <= fit.bound


def deployed_with_shapes(name, depth):
    """A network as deployed, with a convolution where there is one; two images; what may change of a shape."""
    model = small_timm(name, depth=depth)
    if name == 'sa_quadratic_cifar':
        harden(model, [depth - 1], [(0.0, 1.0), (-1.0, 0.0), (1.0, -1.0)])
    model.switch_to_deploy(conv_tolerance=1e-6)
    batch, rows, columns = (torch.export.Dim(n, min=1 if n == 'batch' else 2, max=16) for n in ('batch', 'r', 'c'))
    return model, torch.randn(2, 3, 32, 32), torch.randn(1, 3, 12, 20), {0: batch, 2: 2 * rows, 3: 2 * columns}


@pytest.mark.parametrize('depth', [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    'name',
    [
        'sa_quadratic_cifar',
        'sa_generalized_cifar',
        pytest.param('sa_learned_cifar', marks=pytest.mark.slow),
        'sa_learned_content_cifar',
    ],
)
def test_compiled_and_exported(name, depth):
    model, x, smaller, shapes = deployed_with_shapes(name, depth)
    expected, of_smaller = model(x), model(smaller)
    assert torch.allclose(torch.compile(model, fullgraph=True, backend='aot_eager')(x), expected, atol=1e-5)
    program = torch.export.export(model, (x,), dynamic_shapes=(shapes,))
    assert torch.allclose(program.module()(smaller), of_smaller, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', TIMM_KINDS[:1] + TIMM_KINDS[2:])
def test_in_onnx(name, tmp_path):
    model, x, smaller, shapes = deployed_with_shapes(name, depth=2)
    expected, of_smaller = model(x), model(smaller)
    pytest.importorskip('onnxscript')
    onnxruntime = pytest.importorskip('onnxruntime')
    torch.onnx.export(model, (x,), str(tmp_path / 'model.onnx'), dynamo=True, dynamic_shapes=(shapes,), verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / 'model.onnx'), providers=['CPUExecutionProvider'])
    for image, output in ((x, expected), (smaller, of_smaller)):
        (result,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
        assert (torch.from_numpy(result) - output).abs().max() <= 1e-4


@pytest.mark.parametrize(
    'kind', [dict(type='SAQuadratic'), dict(type='SAGeneralized'), dict(type='SALearned', content=True)]
)
def test_backbones(kind):
    models = pytest.importorskip('mmpretrain.models')
    backbone = models.build_backbone(dict(kind, arch=SMALL_ARCH, out_indices=(0, 1), frozen_stages=1)).eval()
    x = torch.randn(2, 3, 16, 16)
    expected = backbone(x)
    backbone.switch_to_deploy()
    for feature, reference in zip(backbone(x), expected):
        assert relative_error(feature, reference) <= 1e-5


def test_by_mmpretrains_tool(tmp_path, repository):
    mmpretrain = pytest.importorskip('mmpretrain')
    from mmengine.config import Config
    from mmengine.runner import save_checkpoint

    config = Config.fromfile(repository / 'configs/sa_learned_digits.py')
    config.model.backbone.arch = SMALL_ARCH
    config.model.head.in_channels = 16
    config.dump(tmp_path / 'config.py')
    model = mmpretrain.get_model(config, pretrained=False).eval()
    save_checkpoint(dict(state_dict=model.state_dict(), meta={}), str(tmp_path / 'model.pth'))
    code = (
        'import attncnn_plugin, mmpretrain, pathlib, runpy; runpy.run_path(str(pathlib.Path(mmpretrain.__file__)'
        ".parent / '.mim/tools/model_converters/reparameterize_model.py'), run_name='__main__')"
    )
    files = [tmp_path / name for name in ('config.py', 'model.pth', 'out.pth')]
    run('python', '-c', code, *files, folder=tmp_path)
    other = mmpretrain.get_model(config, pretrained=str(tmp_path / 'out.pth')).eval()
    assert other.backbone.blocks[0].is_deployed
    x = torch.randn(2, 1, 8, 8)
    assert relative_error(other(x), model(x)) <= 1e-5


def joins(block, tokens):
    return joined_maps(block.attn.value, block.proj, tokens.shape[:3].numel()) is not None


@pytest.mark.parametrize('name', TIMM_KINDS)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_two_maps_as_one_for_many_tokens(name, dtype, tolerance):
    model = small_timm(name).to(dtype)
    model.blocks[0].attn.value.bias.data.normal_()
    many, few = torch.randn(2, 3, 16, 16, dtype=dtype), torch.randn(1, 3, 12, 8, dtype=dtype)
    results = {}
    for merged in (True, False):
        if not merged:
            for block in model.blocks:
                block.proj.register_forward_hook(lambda *args: None)  # it has to be called
        assert all(joins(block, model.stem(many)) == merged for block in model.blocks)
        assert not any(joins(block, model.stem(few)) for block in model.blocks)
        outputs = model(many), model(few)
        results[merged] = [*outputs, *torch.autograd.grad(outputs[0].sin().sum(), list(model.parameters()))]
    for ours, expected in zip(results[True], results[False]):
        assert (ours - expected).abs().max() <= tolerance * max(1, expected.abs().max())


def test_hooks_of_the_attention_see_its_own_output():
    block = small_timm('sa_quadratic_cifar').blocks[0]
    x = torch.randn(2, 16, 16, 16)
    assert joins(block, x)
    block.attn.register_forward_hook(lambda module, args, output: output * 0)
    assert torch.equal(block._attend(x), block.proj(torch.zeros_like(x)))


def test_attention_of_another_kind():
    """Whatever its ``value`` may be, it is called and not merged."""

    class Attention(nn.Module):
        def __init__(self, dim, num_heads, attn_drop, attn_impl, device, dtype):
            super().__init__()
            self.value = nn.Linear(dim, dim)

        def forward(self, x):
            return self.value(x).tanh()

    model = small_timm('sa_quadratic_cifar', attn_layer=Attention)
    block, x = model.blocks[0], torch.randn(8, 16, 16, 16)
    assert torch.equal(block._attend(x), block.proj(block.attn(x)))
    with pytest.raises(TypeError, match=r'blocks\.0\.attn is a Attention'):
        model.switch_to_deploy()


def test_shared_by_threads():
    model = small_timm('sa_quadratic_cifar').eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        expected = model(x)

        def run_once(_):
            with torch.no_grad():
                return model(x)

        assert all(torch.allclose(output, expected, atol=1e-6) for output in pool.map(run_once, range(40)))


def test_nothing_is_changed_by_what_fails():
    model = small_timm('sa_learned_cifar', img_size=16)
    with pytest.raises(ValueError, match=r'size=\(16, 16\) is larger than the \(8, 8\)'):
        model.switch_to_deploy(conv_tolerance=1e-3, size=(16, 16))
    model.blocks[1].proj = Adapter(model.blocks[1].proj)
    with pytest.raises(RuntimeError, match=r'blocks\.1\.proj is a Adapter'):
        model.switch_to_deploy()
    assert model.training and not any(block.is_deployed for block in model.blocks)
    assert all(p.requires_grad for p in model.parameters())
    model = small_timm('sa_learned_cifar', img_size=16)
    assert model.switch_to_deploy(conv_tolerance=1e9).convolutions[0].size == (8, 8)


def test_loading_what_does_not_train_warns():
    state = deployed(small_timm('sa_quadratic_cifar')).state_dict()
    model = small_timm('sa_quadratic_cifar')
    model.load_state_dict(state)
    with pytest.warns(UserWarning, match='do not train'):
        model.train()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model.train()


def test_state_dicts_that_cannot_be_followed():
    model = small_timm('sa_quadratic_cifar')
    harden(model, [1], [(0.0, 1.0), (-1.0, 0.0), (1.0, -1.0)])
    conv = deployed(model, conv_tolerance=1e-6)
    with pytest.raises(RuntimeError, match=r'blocks\.1\.attn is a convolution here, but attention in the state dict'):
        conv.load_state_dict(deployed(model).state_dict())
    state = model.state_dict()
    state['blocks.0.proj.weight'] = torch.zeros(17, 15)
    with pytest.raises(RuntimeError, match=r'blocks\.0\.proj\.weight of the state dict has shape \(17, 15\)'):
        deployed(model).load_state_dict(state)
    fresh = small_timm('sa_quadratic_cifar')
    fresh.load_state_dict(conv.state_dict())
    assert not any(p.requires_grad for p in fresh.blocks.parameters()) and not fresh.blocks[1].training
