"""What the heads of a layer do: where they look, whether they do anything, what convolution they form."""
