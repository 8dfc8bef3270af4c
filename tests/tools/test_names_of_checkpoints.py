"""The converter of checkpoints, in the process of the tests; engine/test_*_tools.py have it as a tool."""

import importlib.util
import sys

import pytest
import torch

pytest.importorskip('mmpretrain')
from mmengine.config import Config  # noqa: E402
from mmengine.registry import MODELS, init_default_scope  # noqa: E402

CONFIG = """
custom_imports = dict(imports=['attncnn_plugin'])
backbone = dict(
    type='mmpretrain.ConvToAttention',
    backbone=dict(type='mmpretrain.ResNet', depth=18, stem_channels=4, base_channels=4),
    layers='layer4.1.*',
    phase='{phase}')
"""
ALONE = 'model = backbone\n'
IN_A_MODEL = """
model = dict(
    type='mmpretrain.ImageClassifier',
    backbone=backbone,
    neck=dict(type='mmpretrain.GlobalAveragePooling'),
    head=dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=32))
"""


@pytest.fixture
def convert(repository, monkeypatch):
    path = repository / 'tools/model_converters/conv_to_attention.py'
    spec = importlib.util.spec_from_file_location('conv_to_attention', path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def convert(*args):
        monkeypatch.setattr(sys, 'argv', ['conv_to_attention.py', *map(str, args)])
        tool.main()

    return convert


@pytest.mark.parametrize('phase', ['conv', 'attn'])
@pytest.mark.parametrize('model, before', [(ALONE, ''), (IN_A_MODEL, ''), (IN_A_MODEL, 'module.')])
def test_names_of_checkpoints(model, before, phase, convert, tmp_path):
    """The backbone alone, whose own name is empty; and names as a wrapper for distributed training has them."""
    for kind in ('conv', 'attn'):
        (tmp_path / f'{kind}.py').write_text(CONFIG.format(phase=kind) + model)
    init_default_scope('mmpretrain')
    cnn = MODELS.build(Config.fromfile(tmp_path / 'conv.py').model)
    state = {f'{before}{name}': value for name, value in cnn.state_dict().items()}
    torch.save({'state_dict': state}, tmp_path / 'cnn.pth')
    convert(tmp_path / f'{phase}.py', tmp_path / 'cnn.pth', tmp_path / 'out.pth')
    attention = MODELS.build(Config.fromfile(tmp_path / 'attn.py').model)
    attention.load_state_dict(torch.load(tmp_path / 'out.pth')['state_dict'])
    x = torch.randn(2, 3, 32, 32)
    for module in (*cnn.modules(), *attention.modules()):
        module.training = False
    for expected, output in zip(cnn(x), attention(x)):
        assert torch.allclose(expected, output, atol=1e-4)
    with pytest.raises(SystemExit, match='out.pth is not of the convolution phase'):
        convert(tmp_path / f'{phase}.py', tmp_path / 'out.pth', tmp_path / 'no.pth')
