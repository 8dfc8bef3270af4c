"""The heads of any model, seen where PyTorch computes them."""
