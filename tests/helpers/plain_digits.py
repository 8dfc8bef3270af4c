"""scikit-learn's digits, twice as large, 16×16 pixels, and small networks for them."""

import pytest
import timm
import torch
from torch.utils.data import TensorDataset


def digits():
    """Images ``(N, 1, 16, 16)`` and labels, mixed."""
    data = pytest.importorskip('sklearn.datasets').load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None].kron(torch.ones(2, 2)) / 8 - 1
    return TensorDataset(images, torch.tensor(data.target)[order])


def network(name='cmhsa3_patch16_224', **settings):
    torch.manual_seed(0)
    settings = dict(phase='conv', **settings) if name.startswith('cmhsa') else settings
    return timm.create_model(name, img_size=16, patch_size=4, in_chans=1, depth=2, num_classes=10, **settings)
