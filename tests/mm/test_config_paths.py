"""Configs that inherit from those of the package."""

import pytest
from mmengine.config import Config

import attncnn_plugin
from attncnn_plugin.mm.tools import missing_file, read_config


def test_a_config_that_inherits(tmp_path):
    (tmp_path / 'user.py').write_text(
        "_base_ = __import__('attncnn_plugin').config_path('sa_quadratic_digits.py')\n"
        "model = dict(backbone=dict(arch='base'))\n"
    )
    backbone = Config.fromfile(tmp_path / 'user.py').model.backbone
    assert (backbone.type, backbone.arch) == ('SAQuadratic', 'base')


def test_a_config_that_is_not_there():
    with pytest.raises(
        FileNotFoundError, match="name='sa_nonsense.py' is no config of attncnn_plugin, which are .*sa_q"
    ):
        attncnn_plugin.config_path('sa_nonsense.py')


def test_similar_configs(tmp_path):
    """In the folder of the config, or of the one that it inherits from."""
    folder = tmp_path / 'configs'
    folder.mkdir()
    (folder / 'my_resnet.py').write_text("_base_ = './nothing_here.py'\n")
    cases = {
        folder / 'my_resnett.py': 'my_resnett.py is not there: did you mean my_resnet.py?',
        folder / 'my_resnet': 'my_resnet is not there: did you mean my_resnet.py?',
        folder / 'vit.py': 'vit.py is not there',
        folder / 'my_resnet.py': 'nothing_here.py is not there',
        tmp_path / 'config/vit.py': f'vit.py is not there: there is no folder {tmp_path}/config',
    }
    for path, message in cases.items():
        with pytest.raises(FileNotFoundError) as error:
            read_config(str(path))
        assert str(error.value).startswith(str(tmp_path)) and str(error.value).endswith(message)


def test_other_errors():
    assert missing_file(FileNotFoundError('a.pth can not be found.')) is None
    assert missing_file(PermissionError(13, 'Permission denied', 'a.py')) is None
