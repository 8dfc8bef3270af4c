"""The augmentation of a batch of small images."""

import pytest
import torch
import torch.nn.functional as F
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample

import attncnn_plugin  # noqa: F401
from attncnn_plugin.mm.datasets import FlipAndShift


def test_every_flip_and_shift_and_nothing_else():
    """Each image is one of the 2 · 3 · 3 that are to be had, written anew by padding and slicing; all of them come."""
    torch.manual_seed(0)
    images = torch.randint(1, 256, (1, 2, 4, 5), dtype=torch.uint8).expand(400, -1, -1, -1)
    padded = F.pad(images[0], (1, 1, 1, 1))
    wanted = [padded[:, a : a + 4, b : b + 5] for a in range(3) for b in range(3)]
    wanted = torch.stack(wanted + [image.flip(2) for image in wanted])
    seen = FlipAndShift(shift=1)(dict(inputs=images), training=True)['inputs']
    equal = (seen[:, None] == wanted).all(-1).all(-1).all(-1)
    assert (equal.sum(1) == 1).all() and (equal.sum(0) > 400 / 18 / 3).all()
    alone = FlipAndShift(flip=0, shift=1)(dict(inputs=images), training=True)['inputs']
    assert not (alone[:, None] == wanted[9:]).all(-1).all(-1).all(-1).any()


def test_as_the_preprocessor_of_mmpretrain():
    """Without training the same as it; normalized after the shift, so that zeros are black."""
    settings = dict(mean=[10.0, 20.0, 30.0], std=[2.0, 4.0, 5.0], to_rgb=True)
    ours, theirs = FlipAndShift(**settings), MODELS.build(dict(type='mmpretrain.ClsDataPreprocessor', **settings))
    images = list(torch.randint(256, (3, 3, 8, 8), dtype=torch.uint8))
    data = dict(inputs=images, data_samples=[DataSample().set_gt_label(i) for i in range(3)])
    for batch in (data, {**data, 'inputs': torch.stack(images)}):
        assert torch.equal(ours(batch)['inputs'], theirs(data)['inputs'])
    torch.manual_seed(0)
    seen = ours(data, training=True)
    assert not torch.equal(seen['inputs'], theirs(data)['inputs'])
    black = -torch.tensor(settings['mean']) / torch.tensor(settings['std'])
    assert (seen['inputs'] == black[:, None, None]).all(1).any()
    assert [sample.gt_label.item() for sample in seen['data_samples']] == [0, 1, 2]


@pytest.mark.parametrize('arguments', [dict(flip=1.5), dict(shift=-1)])
def test_errors(arguments):
    with pytest.raises(ValueError, match='of FlipAndShift must be'):
        FlipAndShift(**arguments)
