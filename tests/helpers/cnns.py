"""Small convolutional networks, for the tests."""

from collections import OrderedDict

import torch
from torch import nn

from helpers.small import trained_like


class Residual(nn.Module):
    """With a depthwise convolution, batch norms and dropout."""

    def __init__(self, dim):
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.bn1 = nn.BatchNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.conv2(self.bn1(self.conv1(x)).relu()))


def small_cnn(seed=0):
    """Convolutions of several kinds in float64, trained-like, with running statistics; 3 channels to 5 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            OrderedDict(
                stem=nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode='reflect'),
                norm=nn.BatchNorm2d(4),
                stage=nn.Sequential(Residual(4), Residual(4)),
                down=nn.Conv2d(4, 6, (3, 2), stride=(2, 1), groups=2),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                head=nn.Linear(6, 5),
            )
        ).double()
        model(torch.randn(8, 3, 12, 13, dtype=torch.float64))
        return trained_like(model).eval()


CONVOLUTIONS = ['stem', 'stage.0.conv1', 'stage.0.conv2', 'stage.1.conv1', 'stage.1.conv2', 'down']
