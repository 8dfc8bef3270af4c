"""What every network of the package does in timm: its interface, precisions, copies, compilation and export."""

import copy
import pickle

import pytest
import timm.optim
import torch
from helpers.small import KINDS, small_model, trained_like

# One kind without content, one with it, and CMHSA; test_every_layer.py has the layers of the others.
ONCE_A_KIND = ['sa_quadratic_cifar', 'sa_learned_content_cifar', 'cmhsa_conv', 'cmhsa_narrow']
# Of torch.compile: what shows that a model is one graph, and what users have, which is more.
BACKENDS = [
    *((kind, 'aot_eager') for kind in ('sa_learned_content_cifar', 'cmhsa_narrow')),
    *(
        pytest.param(kind, 'inductor', marks=pytest.mark.slow)
        for kind in ('sa_quadratic_cifar', 'sa_generalized_cifar', 'sa_learned_content_cifar', 'cmhsa_attn')
    ),
]


@pytest.mark.parametrize('kind', KINDS)
def test_any_even_size_and_channels(kind):
    model = small_model(kind, in_chans=1, num_classes=7).eval()
    for height, width in [(16, 16), (32, 32), (10, 14), (2, 6)]:
        assert model(torch.randn(2, 1, height, width)).shape == (2, 7)
    assert model(torch.randn(0, 1, 8, 8)).shape == (0, 7)
    with pytest.raises(ValueError, match='9x8 pixels cannot be cut into patches of 2x2'):
        model(torch.randn(2, 1, 9, 8))
    with pytest.raises(ValueError, match=r'\(B, 1, H, W\) is expected'):
        model(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize('kind', KINDS)
def test_features(kind):
    model, x = small_model(kind, depth=4).eval(), torch.randn(2, 3, 16, 8)
    features, dim = model.forward_features(x), model.num_features
    assert features.shape == (2, 8, 4, dim) and torch.equal(model.forward_head(features), model(x))
    assert torch.equal(model.forward_head(features, pre_logits=True), features.mean((1, 2)))

    last, intermediates = model.forward_intermediates(x, indices=[0, -1], norm=True)
    assert torch.equal(last, features) and [tuple(i.shape) for i in intermediates] == [(2, dim, 8, 4)] * 2
    assert torch.equal(intermediates[1].permute(0, 2, 3, 1), features)
    with pytest.raises(ValueError, match="output_fmt='NLC'"):
        model.forward_intermediates(x, output_fmt='NLC')

    extractor = small_model(kind, depth=4, features_only=True, out_indices=(1, 3)).eval()
    own = {f'model.{key}': value for key, value in model.state_dict().items() if key[:4] not in ('head', 'norm')}
    extractor.load_state_dict(own)
    expected = model.forward_intermediates(x, indices=[1, 3], intermediates_only=True)
    assert all(torch.equal(feature, other) for feature, other in zip(extractor(x), expected))
    assert (extractor.feature_info.channels(), extractor.feature_info.reduction()) == ([dim, dim], [2, 2])
    model.prune_intermediate_layers([1], prune_norm=True)
    assert torch.equal(model(x).permute(0, 3, 1, 2), expected[0]) and len(model.blocks) == 2


@pytest.mark.parametrize('kind', KINDS)
def test_classifier(kind):
    model, x = small_model(kind, num_classes=0).eval(), torch.randn(2, 3, 8, 8)
    dim = model.num_features
    assert model(x).shape == (2, dim)
    model.reset_classifier(5)
    assert model(x).shape == (2, 5) and model.get_classifier().out_features == 5
    model.reset_classifier(0, '')
    assert model(x).shape == (2, 4, 4, dim)
    model.double().reset_classifier(5, 'avg')
    assert model(x.double()).dtype == torch.float64
    model.to('meta').reset_classifier(3)
    assert model.get_classifier().weight.is_meta
    assert small_model(kind, num_classes=0, global_pool='').eval()(x).shape == (2, 4, 4, dim)


@pytest.mark.parametrize('kind', KINDS)
def test_weight_decay_is_left_off_positions(kind):
    """Centres, widths and the biases of shifts, in timm's optimizers; with layer-wise rates too."""
    model = small_model(kind)
    ends = {'cmhsa_conv': [], 'cmhsa_attn': ['position.table'], 'cmhsa_narrow': ['position.table']}
    ends = ends.get(kind, [] if 'learned' in kind else ['encoding.center', 'encoding.sqrt_precision'])
    left_off = {f'blocks.{i}.attn.{end}' for i in range(2) for end in ends}
    assert model.no_weight_decay() == left_off <= {name for name, _ in model.named_parameters()}
    for layer_decay in (None, 0.5):
        optimizer = timm.optim.create_optimizer_v2(model, 'sgd', lr=0.1, weight_decay=1e-4, layer_decay=layer_decay)
        decays = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
        assert not any(decays[id(model.get_parameter(name))] for name in left_off)


@pytest.mark.parametrize('kind', KINDS)
def test_gradient_checkpointing_changes_nothing(kind):
    model, x = small_model(kind), torch.randn(2, 3, 8, 8)
    expected = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    model.set_grad_checkpointing()
    gradients = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients, expected))


@pytest.mark.parametrize('kind', KINDS)
def test_mixed_and_half_precision(kind):
    model, x = small_model(kind), torch.randn(4, 3, 16, 16)
    expected = model(x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        output = model(x)
    assert torch.allclose(output.float(), expected, atol=0.1)
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for dtype in (torch.float16, torch.bfloat16):
        output = copy.deepcopy(model).to(dtype)(x.to(dtype))
        assert output.dtype == dtype and torch.allclose(output.float(), expected, atol=0.1)
    built = small_model(kind, device='meta', dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in built.parameters()} == {('meta', torch.bfloat16)}


@pytest.mark.parametrize('kind, backend', BACKENDS)
def test_compiled_is_eager(kind, backend):
    model, x = trained_like(small_model(kind, depth=1)), torch.randn(2, 3, 8, 8)
    expected, output = model(x), torch.compile(model, fullgraph=True, backend=backend)(x)
    assert torch.allclose(output, expected, atol=1e-4)
    ours, eager = (torch.autograd.grad(y.sin().sum(), list(model.parameters())) for y in (output, expected))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, eager))


@pytest.mark.parametrize('kind', ONCE_A_KIND)
def test_copied_and_exported(kind):
    model, x = trained_like(small_model(kind, depth=1)).eval(), torch.randn(2, 3, 8, 12)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
    batch = torch.export.Dim('batch', min=2, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()
    x = torch.randn(5, 3, 8, 12)
    assert torch.allclose(exported(x), model(x), atol=1e-5)
