"""Models that can start as a convolution, and what is said of the others."""

import pytest
import timm
import torch
from helpers.small import refused
from helpers.starts import small_vit
from helpers.vits import NO_START, OF_HUGGING_FACE, OF_TORCHVISION, SETTINGS, new_vit, output_of
from torch import nn

from attncnn_plugin.transformers import init_as_convolution, set_sine_cosine_embedding, vision_transformer


@pytest.mark.parametrize(
    'name, settings, message',
    [
        ('resnet18', {}, 'model is a ResNet without a vision transformer'),
        ('mixer_s32_224', {}, 'MlpMixer'),
        ('swinv2_tiny_window8_256', {}, 'a SwinTransformerV2 has no position encoding that is known'),
        ('convit_tiny', dict(depth=11), 'blocks.0.attn of a ConVit is a GPSA of .* that can start has num_heads or'),
        ('xcit_nano_12_p16_224', {}, 'a Xcit has no position encoding that is known'),
        ('vit_tiny_patch16_224', dict(depth=1, qk_norm=True), 'it normalizes queries and keys'),
        ('vit_tiny_patch16_224', dict(depth=1, pos_embed='none'), 'a VisionTransformer has no position encoding'),
        ('vit_relpos_small_patch16_224', dict(depth=1), 'blocks.0.attn are a RelPosMlp without a table of biases'),
        ('vit_tiny_patch16_224', dict(depth=1, embed_dim=16, num_heads=8), 'heads of blocks.0.attn have 2 channels'),
        ('vit_tiny_patch16_224', dict(depth=1, embed_dim=10, num_heads=2), 'have 5 channels, its tokens 10: absolute'),
        (
            'cait_xxs24_224',
            dict(depth=1),
            'blocks.0.attn gets 196 tokens, but a Cait has 14×14 patches and 1 other tokens',
        ),
        ('vit_small_patch16_18x2_224', dict(depth=1), 'blocks.0.attns.0.attn needs an MLP beside it in its Seq'),
    ],
)
def test_others_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        init_as_convolution(timm.create_model(name, pretrained=False, **settings))


ABSOLUTE = dict(use_absolute_position_embeddings=True, use_relative_position_bias=False)


@pytest.mark.parametrize(
    'name, settings',
    [
        *((name, {}) for name in (*OF_HUGGING_FACE, *OF_TORCHVISION) if name not in NO_START),
        ('transformers.Beit', ABSOLUTE),
    ],
)
def test_heads_of_other_libraries(name, settings):
    """Of models with as many channels as a Gaussian needs: the report is of what the model computes on images."""
    if 'Swin' in name:
        model = new_vit(name, **SETTINGS[name])
    else:
        width = 'hidden_dim' if name.startswith('torchvision') else 'hidden_size'
        model = new_vit(name, **{**SETTINGS[name], width: 96, 'patch_size': 4, 'image_size': 24, **settings})
    report = init_as_convolution(model.eval(), alpha=1.0)
    encoding = dict(Swin='relative', SwinTransformer='relative', DINOv3ViT='rotary')
    encoding['Beit'] = 'absolute' if settings else 'relative'
    for layer in report.layers:
        assert layer.encoding == encoding.get(name.rpartition('.')[2], 'absolute')
        bound = dict(absolute=0.1, relative=1e-6, rotary=0.12)[layer.encoding]
        assert max(head.total_variation for head in layer.heads) < bound, layer
        assert layer.prefix_share < 0.15, layer


@pytest.mark.parametrize('name', [name for name in SETTINGS if name not in NO_START])
def test_a_trained_model_is_refused(name):
    """After a single step, of whatever size; a new model is not, and neither is one that was started before."""
    settings = SETTINGS[name]
    if 'eva' in name or 'dinov3' in name.lower():  # heads with frequencies enough
        settings = {**settings, 'hidden_size' if name.startswith('transformers') else 'embed_dim': 96}
    model = new_vit(name, **{**settings, 'qk_norm': False} if 'qk_norm' in settings else settings)
    if hasattr(model, 'init_cfg'):  # of mmpretrain: new without and with the weights that it draws
        init_as_convolution(model)
        model.init_weights()
    init_as_convolution(model)
    report = init_as_convolution(model, kernel_size=1)
    assert {head.shift for layer in report.layers for head in layer.heads} == {(0, 0)}
    if name == 'torchvision.VisionTransformer':
        nn.init.normal_(model.heads.head.weight)  # with zeros nothing before it has a gradient
    train_a_step(model)
    model.to(torch.bfloat16).float()  # as many checkpoints are saved
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = (
        r'\w+\.(weight|bias) of \w+ holds different numbers, so that model may be trained, which a start would undo: '
        'give a new one, or overwrite=True$'
    )
    for start in (init_as_convolution, set_sine_cosine_embedding):
        with refused(model, message):
            start(model)
    init_as_convolution(model, overwrite=True)
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def train_a_step(model, optimizer=torch.optim.SGD):
    optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    output_of(model, torch.randn(2, 3, 32, 32).to(next(model.parameters()))).float().square().sum().backward()
    optimizer.step()


DRAWN_BIASES = 'vit_relpos_base_patch32_plus_rpn_256', 'VisionTransformer'  # without those of norms nothing is known


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('name', [name for name in SETTINGS if name not in (*NO_START, *DRAWN_BIASES)])
def test_a_model_with_frozen_norms_is_refused(name, dtype):
    settings = {**SETTINGS[name], 'qk_norm': False} if 'qk_norm' in SETTINGS[name] else SETTINGS[name]
    model = new_vit(name, **settings)
    if name == 'torchvision.VisionTransformer':
        nn.init.normal_(model.heads.head.weight)
    if hasattr(model, 'init_cfg'):
        model.init_weights()
    for module in model.modules():
        module.requires_grad_('norm' not in type(module).__name__.lower()) if not list(module.children()) else None
    dtype = torch.float32 if name == 'SwinTransformer' else dtype  # mmpretrain's does not run in another
    train_a_step(model.to(dtype), torch.optim.AdamW)
    with pytest.raises(ValueError, match='holds different numbers, so that model may be trained'):
        init_as_convolution(model)


@pytest.mark.parametrize(
    'settings',
    [
        *(dict(weight_init=scheme, num_classes=10) for scheme in ('jax', 'jax_nlhb', 'moco', 'reset')),
        dict(init_values=1e-5, reg_tokens=4, pre_norm=True),
        dict(norm_layer='rmsnorm', class_token=False, global_pool='avg', fc_norm=True, num_classes=0),
    ],
    ids=str,
)
def test_new_models_of_all_kinds(settings):
    try:
        model = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, depth=1, **settings)
    except AssertionError:
        pytest.skip(f'timm {timm.__version__} has no such option')
    init_as_convolution(model)


@pytest.mark.parametrize(
    'name, settings',
    [
        ('vit_tiny_patch16_224', {}),
        ('beit_base_patch16_224', dict(init_values=None)),
        ('vit_relpos_small_patch16_224', dict(init_values=None, rel_pos_type='bias')),
        ('vit_small_patch16_dinov3', dict(init_values=None)),
    ],
)
def test_queries_and_keys_learn(name, settings):
    """After a step both have gradients, though content begins at 0 in the queries."""
    model = small_vit(name, **settings)
    init_as_convolution(model)
    before = [block.attn.qkv.weight.detach().clone() for block in model.blocks]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, 3, 12, 16).double()), torch.arange(4)).backward()
        optimizer.step()
    for block, weight in zip(model.blocks, before):
        queries, keys, _ = (block.attn.qkv.weight - weight).abs().amax(1).unflatten(0, (3, -1))
        assert (queries > 0).any() and (keys > 0).any()
        assert name == 'vit_small_patch16_dinov3' or (queries > 0).all() and (keys > 0).all()


def test_norms_that_say_nothing():
    model = small_vit()
    for block in model.blocks:
        block.norm1, block.norm2 = (nn.LayerNorm(32, elementwise_affine=False) for _ in range(2))
    model.norm = nn.Identity()
    with pytest.raises(ValueError, match='no norm of VisionTransformer has parameters, so that model may be trained'):
        init_as_convolution(model)
    init_as_convolution(model.double(), overwrite=True)


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'eva02_tiny_patch14_224'])
def test_under_autocast(name):
    """What is measured there, with weights that are cast when they are set, is near, too."""
    model = small_vit(name, (6, 6), embed_dim=64, double=False)
    with torch.autocast('cpu', torch.bfloat16):
        report = init_as_convolution(model)
    assert all(head.total_variation < 0.1 for layer in report.layers for head in layer.heads)


def test_patches_of_a_cnn():
    """Of a hybrid model, whose images go through other convolutions first."""
    model = timm.create_model('vit_tiny_r_s16_p8_224', pretrained=False, img_size=64, depth=1)
    report = init_as_convolution(nn.Sequential(model))  # one inside of another
    assert [layer.name for layer in report.layers] == ['0.blocks.0.attn']
    assert all(head.total_variation < 0.1 for head in report.layers[0].heads)


class InParts(nn.Module):
    """Attention of no library, by parts whose names are known."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.to_out = heads, nn.Linear(dim, dim)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, tokens, **kwargs):
        maps = self.to_q, self.to_k, self.to_v
        q, k, v = (own(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2) for own in maps)
        return self.to_out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_other_classes():
    """They start by the names of their parts, and are proven by what they compute."""
    model = small_vit()
    model.blocks[1].attn = InParts(32, 2).double()
    report = init_as_convolution(model)
    assert len(report.layers) == 3 and max(head.total_variation for head in report.layers[1].heads) < 0.1


class Unknown(nn.Module):
    """Attention whose parts have other names, the number of heads included."""

    def __init__(self, dim, heads):
        super().__init__()
        self.parts, self.all, self.last = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, tokens, **kwargs):
        q, k, v = self.all(tokens).unflatten(2, (3, self.parts, -1)).permute(2, 0, 3, 1, 4)
        return self.last(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize('method', ['gaussian', 'mimetic'])
def test_attention_without_known_parts_is_not_left_out(method):
    """It is seen to run, and refused, whatever it is called."""
    model = small_vit()
    model.blocks[1].attn = Unknown(32, 2).double()
    with refused(model, 'blocks.1.attn of a VisionTransformer is a Unknown of .* the linear map proj'):
        init_as_convolution(model, method=method)


@pytest.mark.parametrize(
    'parts', [('k_proj', 'q_proj', 'v_proj'), ('q_proj', 'v_proj', 'k_proj'), ('v_proj', 'k_proj', 'q_proj')]
)
def test_a_wrong_entry_in_the_table_is_found(parts, monkeypatch):
    """The wrong way round: queries and keys, keys and values, queries and values."""
    model = small_vit('eva02_tiny_patch14_224', (4, 4), embed_dim=128, qkv_fused=False)
    monkeypatch.setattr(vision_transformer, 'MAPS', [parts])
    with refused(model, 'cannot start as a convolution: a head of it has the total variation'):
        init_as_convolution(model)
    monkeypatch.undo()
    init_as_convolution(model)


def test_too_few_frequencies():
    model = small_vit('eva02_tiny_patch14_224', (4, 4), embed_dim=16)
    with refused(model, 'attn cannot start .*: a head of it has the total variation 0.[5-9].* wanted'):
        init_as_convolution(model)


def test_nothing_to_embed():
    with pytest.raises(ValueError, match=r'pos_embed=None of a VisionTransformerRelPos must be .* \(1, N, D\)'):
        set_sine_cosine_embedding(small_vit('vit_relpos_small_patch16_224'))
