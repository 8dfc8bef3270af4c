"""What the heads of a model attend to, as numbers: nothing is drawn here. Plain PyTorch."""
