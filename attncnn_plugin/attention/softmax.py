"""The softmax of all attention layers, whose probabilities are never subnormal numbers."""

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 2.0**-100  # of a probability; the least normal number of float32 is 2⁻¹²⁶


def softmax(scores: Tensor) -> Tensor:
    """Computes the softmax over the last dimension, with every probability below 2⁻¹⁰⁰ at exactly 0.

    Many probabilities of Gaussian heads (C20, eq. 9) lie between e⁻⁸⁷ and e⁻¹⁰³: float32 has only subnormal numbers
    there, and some processors take many times as long for a matrix product that meets one. Outputs and gradients keep
    their bits, but for gradients below 10⁻¹⁶, those of heads that attend to a single key.
    """
    return without_subnormals(scores.softmax(-1))


def without_subnormals(probs: Tensor) -> Tensor:
    """Sets probabilities below 2⁻¹⁰⁰ to 0, such as those of a product of two distributions.

    Unless a graph is made they are the same tensor, changed in place, which takes a tenth of the time of a new one.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return F.threshold(probs, LEAST, 0.0)
    # As data: softmax has kept them for its gradient, in which a number that small is as good as 0.
    F.threshold(probs.data, LEAST, 0.0, True)
    return probs
