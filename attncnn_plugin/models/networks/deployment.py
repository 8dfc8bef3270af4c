"""The report of a network that was switched to inference."""

from dataclasses import dataclass, field
from typing import Dict, Tuple

from ...convert.to_conv import ConvFit


@dataclass(frozen=True, eq=False)
class Deployment:
    """The result of ``switch_to_deploy()``.

    Attributes:
        merged (tuple[int, ...]): The blocks whose linear maps became fewer.
        convolutions (dict[int, ConvFit]): The blocks whose attention became a convolution, and how well it fits.
        parameters_before, parameters_after (int): Parameters of the network.
    """

    merged: Tuple[int, ...]
    parameters_before: int
    parameters_after: int
    convolutions: Dict[int, ConvFit] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f'Linear maps of {len(self.merged)} blocks merged; {self.parameters_before:,} parameters became '
            f'{self.parameters_after:,}'
        ]
        for block, fit in self.convolutions.items():
            lines.append(
                f'block {block}: attention became a convolution of {len(fit.shifts)} shifts, error at most '
                f'{fit.bound:.2g} for inputs of norm 1'
            )
        return '\n'.join(lines)
