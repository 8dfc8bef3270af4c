"""What the heads of a model attend to. Plain PyTorch; the figures also need matplotlib."""
