"""Vision transformers that start as a convolution: each head looks at one shift, as a position of a kernel does.

C20 (Cordonnier et al. 2020), eq. 9, is a Gaussian head, P[q, k] = softmax_k(−α‖k − q − Δ‖²). Embeddings of absolute
positions, tables of relative ones and rotations can express it (``gaussian``). Beside it is the mimetic start of
Trockman and Kolter 2023 (``mimetic``).
"""

from .embeddings import set_sine_cosine_embedding
from .start import init_as_convolution

__all__ = ['init_as_convolution', 'set_sine_cosine_embedding']
