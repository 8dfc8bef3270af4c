"""What adapters put in the place of a linear layer."""

from torch import nn


class Adapter(nn.Module):
    """A linear layer and a term of low rank, as LoRA has it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 2, bias=False, dtype=linear.weight.dtype)
        self.up = nn.Linear(2, linear.out_features, bias=False, dtype=linear.weight.dtype)

    weight = property(lambda self: self.linear.weight)
    bias = property(lambda self: self.linear.bias)
    in_features = property(lambda self: self.linear.in_features)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))
