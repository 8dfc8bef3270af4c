"""Heads with one matrix for their scores and one for their output: the same functions, trained, loaded and deployed."""

import copy
import pickle
import warnings

import pytest
import timm
import torch
from helpers.adapter import Adapter
from helpers.convolutions import relative_error
from helpers.small import SMALL_CMHSA, small_cmhsa, trained_like
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attncnn_plugin import follow_state_dict
from attncnn_plugin.layers import GridBias, MergedPatchAttention, PatchAttention, WindowBias
from attncnn_plugin.models.networks.deployment import Deployment

KINDS = ['conv', 'separate', 'merged', 'deployed']


def network(kind, name='cmhsa3_patch16_224', **kwargs):
    """A small network: of convolutions, of heads with four matrices or two, or deployed."""
    model = small_cmhsa(
        'conv' if kind == 'conv' else 'attn', name, merge_heads=kind == 'merged', attn_bias_init=40.0, **kwargs
    )
    trained_like(model).eval()
    if kind == 'deployed':
        model.switch_to_deploy()
    return model


def separate_path(attention):
    """The same layer, which never multiplies its matrices."""
    attention = copy.deepcopy(attention)
    attention._merges = lambda tokens: False
    return attention


@st.composite
def attentions(draw):
    """A layer in float64, with more or fewer tokens than channels, and its input."""
    dim, num_heads, out_dim = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.none() | st.integers(1, 7))
    batch, height, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    if draw(st.booleans()):
        position = GridBias(num_heads, (draw(st.integers(1, 4)), draw(st.integers(1, 4))))
    else:
        position = WindowBias(
            num_heads,
            (draw(st.integers(-4, 1)), draw(st.integers(-4, 1))),
            (draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        )
    attention = PatchAttention(dim, num_heads, position, out_dim, bias=draw(st.booleans())).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    return attention, torch.randn(batch, height, width, dim, dtype=torch.float64)


def gradients(layer, x):
    """Output and gradients of a loss that treats no entry like another."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.mul(torch.linspace(-1, 2, output.numel(), dtype=x.dtype).view_as(output)).sum().backward()
    return [output, x.grad, *(parameter.grad for parameter in layer.parameters())]


@given(attentions())
def test_products_in_the_forward_pass(case):
    """Outputs, and gradients of every matrix by itself, whichever path a layer takes."""
    attention, x = case
    whole = copy.deepcopy(attention)
    whole._merges = lambda tokens: True
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        expected = gradients(separate_path(attention), x)
        for actual, value in zip(gradients(copy.deepcopy(whole).to(dtype), x.to(dtype)), expected):
            assert (actual - value).norm() <= tolerance * max(value.norm(), expected[0].norm(), expected[1].norm())


@given(attentions())
def test_merged_layer(case):
    attention, x = case
    merged = attention.merge()
    assert isinstance(merged, MergedPatchAttention) and merged.num_heads == attention.num_heads
    expected = separate_path(attention)(x)
    assert relative_error(merged(x), expected) <= 1e-10
    single = attention.float().merge()
    assert relative_error(single(x.float()).double(), expected) <= 1e-5
    # Both are independent of each other.
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.zero_()
    assert relative_error(merged(x), expected) <= 1e-10


@pytest.mark.parametrize(
    'shape, out_dim, cheaper',
    [
        ((1, 2, 3), None, False),
        ((2, 1, 3), None, False),
        ((1, 1, 7), None, True),
        ((7, 1, 1), None, True),
        ((1, 2, 3), 5, True),
        ((1, 2, 4), 10, False),
        ((3, 3, 1), 10, True),
        ((0, 2, 3), None, False),
    ],
)
def test_products_only_where_they_save_multiply_adds(shape, out_dim, cheaper):
    """T tokens, D = 6: W^Q W^K costs N_h·D³ and saves N_h·T·D²."""
    attention = PatchAttention(6, 2, GridBias(2, (3, 3)), out_dim)
    x = torch.randn(*shape, 6)
    counts = []
    for layer in (attention, separate_path(attention)):
        with FlopCounterMode(display=False) as counter:
            layer(x)
        counts.append(counter.get_total_flops())
    assert (counts[0] < counts[1]) == cheaper and counts[0] <= counts[1]


def test_multiply_adds_of_the_paper():
    """Per image of 224 pixels, in billions; made without memory."""

    def count(model, batch):
        with FlopCounterMode(display=False) as counter, torch.device('meta'):
            model(torch.empty(batch, 3, 224, 224))
        return counter.get_total_flops() / batch / 2e9

    with torch.device('meta'):
        plain = timm.create_model('cmhsa5_patch16_224')
        merged = timm.create_model('cmhsa5_patch16_224', merge_heads=True)
        assert merged.blocks[0].attn.query_key.weight.shape == (9 * 768, 768)
        assert merged.blocks[0].attn.value_out.weight.shape == (768, 9 * 768)
        assert count(plain, 1) == pytest.approx(33.85, abs=0.1)
        assert count(plain, 8) == pytest.approx(27.5, abs=0.1)
        assert count(merged, 1) == count(merged, 8) == pytest.approx(21.36, abs=0.1)
        assert isinstance(plain.switch_to_deploy(), Deployment)
        assert count(plain, 1) == count(merged, 1)


@pytest.mark.parametrize('merge', [False, True])
def test_dropout_of_probabilities(merge):
    """Each probability by itself is kept with 1 − p, and then grows by 1/(1 − p)."""
    attention = PatchAttention(1, 2, GridBias(2, (2, 2)), attn_drop=0.25)
    with torch.no_grad():
        for linear in (attention.query, attention.value, attention.out):
            linear.weight.fill_(1.0)
        attention.key.weight.zero_()
        attention.position.table.fill_(-1e4)
        attention.position.table[:, 1, 1] = 0.0  # every token sees itself alone
    if merge:
        attention = attention.merge()
    torch.manual_seed(0)
    outputs = attention(torch.ones(4000, 2, 2, 1)).flatten()
    values, counts = outputs.round(decimals=4).unique(return_counts=True)
    assert values.tolist() == pytest.approx([0, 4 / 3, 8 / 3], abs=1e-3)  # of two heads
    assert torch.allclose(counts / len(outputs), torch.tensor([1 / 16, 6 / 16, 9 / 16]), atol=0.02)
    assert torch.equal(attention.eval()(torch.ones(1, 2, 2, 1)), torch.full((1, 2, 2, 1), 2.0))


def test_random_weights_have_the_scale_of_products():
    """Other seeds, the same standard deviation as the products of W^Q and W^K, and of W^V and W^O."""
    separate = PatchAttention(48, 9, GridBias(9, (3, 3))).merge()
    merged = MergedPatchAttention(48, 9, GridBias(9, (3, 3)))
    for name in ('query_key', 'value_out'):
        expected = getattr(separate, name).weight.std()
        assert abs(getattr(merged, name).weight.std() / expected - 1) < 0.03, name
    assert merged.value_out.bias.abs().max() == 0 == merged.position.table.abs().max()


@pytest.mark.parametrize('kernel_size, patch_size', [(3, 2), (5, 4), (5, 1)])
def test_output_does_not_move(kernel_size, patch_size):
    settings = dict(kernel_size=kernel_size, patch_size=patch_size, img_size=8, attn_bias_init=40.0)
    model = trained_like(small_cmhsa('conv', merge_heads=True, **settings)).eval()
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    transition = model.to_attention()
    assert relative_error(model(x), before) < 1e-4 and model.merged
    assert transition.parameters_after == sum(p.numel() for p in model.parameters())
    assert model.blocks[0].attn.query_key.weight.abs().max() == 0


def test_every_parameter_moves():
    """A product that is zero is no trap: it gets a gradient on the first step."""
    model = trained_like(small_cmhsa('conv', merge_heads=True))
    model.to_attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-7, name
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, start[name]), name


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('into', KINDS)
def test_state_dicts_carry_their_structure(kind, into):
    model, loaded = network(kind, 'cmhsa5_patch16_224'), network(into, 'cmhsa5_patch16_224')
    x = torch.randn(2, 3, 16, 16)
    loaded(x)  # with its own position biases
    state = model.state_dict()
    keys = set(state)
    loaded.load_state_dict(state, strict=True)
    assert set(state) == keys  # the caller's is not changed
    assert loaded.phase == ('conv' if kind == into == 'conv' else 'attn')
    assert loaded.merged == ({kind, into} & {'merged', 'deployed'} != set())
    assert relative_error(loaded(x), model(x)) < (1e-4 if kind == 'conv' != into else 1e-5)
    trainable = any(parameter.requires_grad for parameter in loaded.blocks.parameters())
    assert trainable == (into != 'deployed') and not any(module.training for module in loaded.modules())
    turned = {'conv': kind != 'conv', 'separate': kind in ('merged', 'deployed')}.get(into, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        loaded.train()
        loaded.train()
    assert [str(w.message).startswith('the network was built without') for w in caught] == [True] * turned
    if turned:
        assert ('merge_heads=True' in str(caught[0].message)) == (kind != 'separate')
        assert ("phase='attn'" in str(caught[0].message)) == (into == 'conv')


@pytest.mark.parametrize('kind', ['separate', 'merged'])
def test_a_convolutional_network_loads_what_its_setting_says(kind):
    """merge_heads=True, but built in the first phase."""
    model = network(kind)
    loaded = small_cmhsa('conv', merge_heads=True).eval()
    loaded.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 16, 16)
    assert loaded.merged and relative_error(loaded(x), model(x)) < 1e-5
    followed = small_cmhsa('conv', merge_heads=True).eval()
    follow_state_dict(followed, model.state_dict())  # an optimizer's state is of the same parameters
    assert followed.merged == (kind == 'merged')
    parameters = list(followed.parameters())
    followed.load_state_dict(model.state_dict())
    assert all(a is b for a, b in zip(parameters, followed.parameters()))
    assert torch.equal(followed(x), model(x))
    attention = network('merged' if kind == 'separate' else 'separate')
    follow_state_dict(attention, model.state_dict())
    assert attention.merged
    follow_state_dict(attention, small_cmhsa('conv').state_dict())
    assert attention.phase == 'attn'


def test_wrong_shapes_and_missing_keys():
    state = network('separate').state_dict()
    wrong = {**state, 'blocks.1.attn.key.weight': torch.zeros(108, 11)}
    with pytest.raises(RuntimeError, match=r'blocks.1.attn.key.weight .* \(108, 11\), but .* num_heads=9 and dim=12'):
        network('merged').load_state_dict(wrong)
    with pytest.raises(RuntimeError, match='size mismatch for blocks.1.attn.key.weight'):
        network('conv').load_state_dict(wrong)
    merged = network('merged').state_dict()
    merged['blocks.0.attn.value_out.weight'] = torch.zeros(12, 107)
    with pytest.raises(RuntimeError, match=r'blocks.0.attn.value_out.weight: .*\[12, 107\].*\[12, 108\]'):
        network('separate').load_state_dict(merged)
    with pytest.raises(RuntimeError, match='num_heads=9 is too few for a kernel of'):
        network('merged').load_state_dict(small_cmhsa('conv', kernel_size=7).state_dict())
    for name in ('query.weight', 'out.weight', 'out.bias'):
        missing = {key: value for key, value in state.items() if key != f'blocks.1.attn.{name}'}
        with pytest.raises(RuntimeError, match='Missing key.* "blocks.1.attn.(query_key.weight|value_out.bias)"'):
            network('merged').load_state_dict(missing)


def test_default_state_dict_is_as_it_was():
    from_convolutions, from_scratch = small_cmhsa('conv'), small_cmhsa('attn')
    from_convolutions.to_attention()
    names = {'position.table', 'query.weight', 'key.weight', 'value.weight', 'out.weight', 'out.bias'}
    for model, expected in ((from_convolutions, names), (from_scratch, names | {'position.no_null_key'})):
        assert {name.partition('attn.')[2] for name in model.state_dict() if 'attn.' in name} == expected
    deployed = network('deployed')
    deployed(torch.randn(1, 3, 16, 16))
    assert deployed.state_dict().keys() == network('merged').state_dict().keys()


def test_loaded_for_another_image_size():
    model, larger = network('separate'), network('merged', img_size=24)
    larger.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 24, 24)
    assert larger.blocks[0].attn.position.table.shape == (9, 23, 23)
    assert relative_error(larger(x), model(x)) < 1e-5


@pytest.mark.parametrize('kind', KINDS)
def test_deployed(kind):
    model = network(kind).train()
    for size in ((16, 16), (8, 20), (2, 2)):
        expected = copy.deepcopy(model).eval()(torch.ones(1, 3, *size))
        deployed = copy.deepcopy(model)
        report = deployed.switch_to_deploy()
        assert report.merged == ((0, 1) if kind == 'separate' else ())
        assert report.parameters_after == sum(p.numel() for p in deployed.parameters())
        assert report.parameters_before == sum(p.numel() for p in model.parameters())
        assert not any(p.requires_grad for p in deployed.parameters()) and not any(
            module.training for module in deployed.modules()
        )
        for _ in range(2):
            assert relative_error(deployed(torch.ones(1, 3, *size)), expected) < 1e-5
        state = deployed.state_dict()
        assert deployed.switch_to_deploy().merged == ()
        assert all(torch.equal(value, state[name]) for name, value in deployed.state_dict().items())
    x = torch.randn(3, 3, 16, 16)
    assert relative_error(deployed(x), model.eval()(x)) < 1e-5


def biases_computed(model, function):
    """How often position biases are computed in a call."""
    calls, positions = [], [module for module in model.modules() if isinstance(module, GridBias)]
    handles = [position.register_forward_hook(lambda *args: calls.append(0)) for position in positions]
    output = function()
    for handle in handles:
        handle.remove()
    return len(calls), output


def test_position_biases_are_computed_once_for_a_grid_size():
    model = network('deployed')
    x = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        count, expected = biases_computed(model, lambda: model(x))
    assert count == 2
    for image, times in ((x, 0), (x[:1], 0), (x[..., :8], 2), (x[..., :8], 0), (x, 0)):
        assert biases_computed(model, lambda: model(image))[0] == times
    for size in range(2, 22, 2):
        model(torch.randn(1, 3, size, 2))
    assert all(len(block.attn._cache) <= 8 for block in model.blocks)  # not without a limit
    count, output = biases_computed(model, lambda: model(x.requires_grad_()))
    assert count == 2 and torch.equal(output, expected)
    output.sum().backward()  # to the image
    merged = network('merged')
    assert [biases_computed(merged, lambda: merged(x))[0] for _ in range(2)] == [2, 2]


def test_kept_biases_follow_what_is_loaded_and_the_precision():
    model, other = network('deployed'), network('merged')
    x = torch.randn(2, 3, 16, 16)
    before = model(x)
    model.load_state_dict(other.state_dict())
    assert torch.allclose(model(x), other(x), atol=1e-6) and relative_error(model(x), before) > 1e-2
    assert biases_computed(model, lambda: model(x))[0] == 0
    assert model.double()(x.double()).dtype == torch.float64
    assert relative_error(model(x.double()), other.double()(x.double())) < 1e-12
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x.double()), model(x.double()))
        copied.load_state_dict(network('deployed').state_dict())
        assert relative_error(copied(x.double()), model(x.double())) > 1e-3


def test_training_goes_on_from_what_was_deployed():
    """Biases that train are not kept."""
    model = network('deployed')
    x = torch.randn(2, 3, 16, 16)
    model(x)
    model.requires_grad_(True)
    model(x).square().sum().backward()
    assert all(block.attn.position.table.grad.abs().max() > 0 for block in model.blocks)
    before = model(x)
    with torch.no_grad():
        model.blocks[0].attn.position.table.copy_(torch.randn(9, 15, 15))
    assert relative_error(model(x), before) > 1e-3


def test_parts_train_and_freeze_as_before():
    model = network('separate')
    model.blocks[0].requires_grad_(False)
    model.load_state_dict(network('merged').state_dict())
    assert not any(p.requires_grad for p in model.blocks[0].parameters())
    assert all(p.requires_grad for p in model.blocks[1].parameters())
    layer = PatchAttention(4, 2, GridBias(2, (2, 2))).eval().requires_grad_(False)
    assert not any(p.requires_grad for p in layer.merge().parameters()) and not layer.merge().training


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('inplace', [False, True])
def test_timm_reparameterizes(kind, inplace):
    model = network(kind)
    x = torch.randn(2, 3, 16, 16)
    expected = model(x)
    fast = timm.utils.reparameterize_model(model, inplace=inplace)
    assert (fast is model) == inplace and fast.merged == (kind != 'conv')
    assert inplace or model.merged == (kind in ('merged', 'deployed'))
    again = timm.utils.reparameterize_model(nn.Sequential(fast))
    for other in (fast, again):
        assert relative_error(other(x), expected) < 1e-5
    assert not any(p.requires_grad for p in fast.blocks.parameters())
    fast = timm.utils.reparameterize_model(model.train())
    assert not any(module.training for module in fast.blocks.modules() if module is not fast.blocks)
    assert again[0].switch_to_deploy().merged == ()
    if kind != 'conv':
        fast(x)
        assert biases_computed(fast, lambda: fast(x))[0] == 0


@pytest.mark.parametrize('kind', ['merged', 'deployed'])
def test_mixed_and_half_precision(kind):
    model = network('merged')
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    expected = model(torch.ones(4, 3, 16, 16))
    if kind == 'deployed':
        model.switch_to_deploy()
    x = torch.ones(4, 3, 16, 16)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        output = model(x)
    assert torch.allclose(output.float(), expected, atol=0.1)
    if kind == 'merged':
        output.float().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert torch.allclose(copy.deepcopy(model).half()(x.half()).float(), expected, atol=0.1)
    assert torch.allclose(model.to(torch.bfloat16)(x.bfloat16()).float(), expected, atol=0.1)


@pytest.mark.parametrize('kind', ['merged', 'deployed'])
def test_timm_interface(kind):
    model = network(kind, depth=4)
    x = torch.randn(2, 3, 16, 16)
    features = model.forward_features(x)
    last, intermediates = model.forward_intermediates(x, indices=[0, -1], norm=True)
    assert torch.equal(last, features) and torch.equal(intermediates[1].permute(0, 2, 3, 1), features)
    extractor = small_cmhsa('attn', depth=4, features_only=True, out_indices=(1, 3)).eval()
    extractor.load_state_dict({f'model.{k}': v for k, v in model.state_dict().items() if k[:4] not in ('head', 'norm')})
    expected = model.forward_intermediates(x, indices=[1, 3], intermediates_only=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(extractor(x), expected))
    model.set_grad_checkpointing()
    assert torch.allclose(model(x), model.forward_head(features), atol=1e-6)
    model.prune_intermediate_layers([1], prune_norm=True)
    assert model(x).shape == (2, 8, 8, 12) and len(model.blocks) == 2
    assert model.no_weight_decay() == {f'blocks.{i}.attn.position.table' for i in range(2)}
    assert network(kind)(torch.randn(0, 3, 16, 16)).shape == (0, 10)


@pytest.mark.parametrize('dynamic', [False, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', ['separate', pytest.param('merged', marks=pytest.mark.slow), 'deployed'])
def test_compiled(kind, dynamic):
    """Forward and backward, of more and of fewer tokens than channels; kept biases are neither read nor written."""
    model = network(kind, depth=1)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend='aot_eager', dynamic=dynamic)
    for x in (torch.randn(1, 3, 4, 4), torch.randn(2, 3, 16, 16)):
        for batch in (x, torch.cat([x, x])) if dynamic is None else (x,):
            expected, actual = (gradients(m, batch) for m in (model, compiled))
            for value, other in zip(expected, actual):
                assert value is other is None or torch.allclose(value, other, atol=1e-5)
            for m in (model, compiled):
                m.zero_grad()
    if kind == 'deployed':
        assert len(compiled.blocks[0].attn._cache) == 0


@pytest.mark.parametrize('strict', [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', ['separate', pytest.param('merged', marks=pytest.mark.slow), 'deployed'])
def test_exported(kind, strict):
    model = network(kind, depth=1)
    model(torch.randn(2, 3, 4, 4))  # kept, but not in the program
    batch = torch.export.Dim('batch', min=1, max=64)
    for size in ((16, 12), (4, 4)):  # the tokens of 4x4 pixels are as many as the channels in a batch of 3
        program = torch.export.export(model, (torch.randn(2, 3, *size),), dynamic_shapes=({0: batch},), strict=strict)
        assert not program.constants or not any(value.numel() > 1000 for value in program.constants.values())
        for n in (2, 5, 33):
            x = torch.randn(n, 3, *size)
            assert torch.allclose(program.module()(x), model(x), atol=1e-5)


@pytest.mark.parametrize('size', [pytest.param((16, 16), marks=pytest.mark.slow), (12, 8)])
def test_onnx(size, tmp_path):
    onnxruntime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    pytest.importorskip('torch', minversion='2.7', reason='torch 2.6 cannot export a batch of any size to ONNX')
    model = network('deployed')
    path, batch = str(tmp_path / 'model.onnx'), torch.export.Dim('batch', min=1, max=64)
    torch.onnx.export(
        model, (torch.randn(2, 3, *size),), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )
    session = onnxruntime.InferenceSession(path)
    (name,) = (value.name for value in session.get_inputs())
    for n in (1, 2, 5):
        x = torch.randn(n, 3, *size)
        (output,) = session.run(None, {name: x.numpy()})
        assert relative_error(torch.from_numpy(output), model(x)) < 1e-4


@pytest.mark.parametrize('kind', KINDS)
def test_backbone(kind):
    models = pytest.importorskip('mmpretrain.models')
    model = models.build_classifier(
        dict(
            type='ImageClassifier',
            backbone={
                **SMALL_CMHSA,
                'phase': 'conv' if kind == 'conv' else 'attn',
                'out_type': 'avg_featmap',
                'merge_heads': kind == 'merged',
                'out_indices': (0, -1),
                'frozen_stages': 1,
            },
            head=dict(type='LinearClsHead', num_classes=10, in_channels=12),
        )
    )
    trained_like(model).eval()
    if kind == 'deployed':
        model.backbone.switch_to_deploy()
    x = torch.randn(2, 3, 16, 8)
    expected = model.backbone(x)
    assert model.backbone.merged == (kind in ('merged', 'deployed'))
    model.train()
    assert not model.backbone.blocks[0].training and not any(
        p.requires_grad for p in model.backbone.blocks[0].parameters()
    )
    model.eval().backbone.switch_to_deploy()
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(model.backbone(x), expected))
    name = 'blocks.1.attn.' + ('conv.weight' if kind == 'conv' else 'query_key.weight')
    assert model.backbone.get_layer_depth(f'backbone.{name}', 'backbone.')[0] == 2
    assert name in dict(model.backbone.named_parameters())


@pytest.mark.parametrize('name', ['query_key', 'value_out'])
def test_what_stands_in_for_a_product_is_called(name):
    attention = PatchAttention(4, 2, GridBias(2, (4, 4))).merge()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 4, 4, 4)
    expected = attention(x)
    setattr(attention, name, Adapter(getattr(attention, name)))
    assert not torch.allclose(attention(x), expected, atol=1e-3)


@pytest.mark.parametrize('name', ['query', 'key', 'value', 'out'])
def test_an_adapter_cannot_be_merged(name):
    attention = PatchAttention(4, 2, GridBias(2, (4, 4)))
    setattr(attention, name, Adapter(getattr(attention, name)))
    with pytest.raises(RuntimeError, match=f'{name} is a Adapter'):
        attention.merge()
