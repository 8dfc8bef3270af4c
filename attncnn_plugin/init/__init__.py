"""Vision transformers that start as a convolution: each head looks at one shift, as a position of a kernel does.

C20 (Cordonnier et al. 2020), eq. 9, is a Gaussian head, P[q, k] = softmax_k(−α‖k − q − Δ‖²). Every kind of position
encoding can express it: embeddings of absolute positions (``init.absolute``), tables of relative ones
(``init.relative_tables``) and rotations (``init.rotary``). Beside it are the impulses of Zheng et al. 2025
(``init.impulse``) and the mimetic start of Trockman and Kolter 2023 (``init.mimetic``).
"""

from .embeddings import set_sine_cosine_embedding, sine_cosine_embedding
from .images import random_images
from .report import ConvolutionalStart, HeadStart, LayerStart
from .start import init_as_convolution

__all__ = [
    'ConvolutionalStart',
    'HeadStart',
    'LayerStart',
    'init_as_convolution',
    'random_images',
    'set_sine_cosine_embedding',
    'sine_cosine_embedding',
]
