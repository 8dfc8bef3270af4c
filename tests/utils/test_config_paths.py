"""Configs that inherit from those of the package."""

import pytest
from mmengine.config import Config

import attncnn_plugin


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
