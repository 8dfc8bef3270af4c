"""What a training with this package needs, in plain PyTorch: models in two phases, and heads that go."""
