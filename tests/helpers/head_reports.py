"""Layers for head reports, their numbers by brute force, and the form of their JSON."""

import itertools
import json
import math

import torch
from torch import nn

from attncnn_plugin.attention import (
    GeneralizedQuadraticAttention,
    GridBias,
    LearnedAttention,
    PatchAttention,
    QuadraticAttention,
)
from helpers.layers import with_outputs

LAYERS = {
    'quadratic': lambda: with_outputs(QuadraticAttention(3, 4), 2),
    'generalized': lambda: with_outputs(GeneralizedQuadraticAttention(3, 4), 2),
    'learned': lambda: with_outputs(LearnedAttention(3, 4, max_size=(9, 9)), 2),
    'patch': lambda: random_patches(),
}


def random_patches():
    layer = with_outputs(PatchAttention(3, 4, GridBias(4, (9, 9))), 2)
    nn.init.normal_(layer.position.table, std=2.0)
    nn.init.normal_(layer.value.weight)
    return layer


def hard_layer(centers, sqrt_precision=40.0):
    layer = with_outputs(QuadraticAttention(3, len(centers)), 2)
    with torch.no_grad():
        layer.encoding.center.copy_(torch.tensor(centers))
        layer.encoding.sqrt_precision.copy_(torch.as_tensor(sqrt_precision).expand(len(centers)))
    return layer


def values(layer):
    """V_h of each head, from the layer's own matrices."""
    if isinstance(layer, PatchAttention):
        into, out = layer.value.weight.chunk(layer.num_heads), layer.out.weight.chunk(layer.num_heads, dim=1)
        return [o @ i for o, i in zip(out, into)]
    weight = layer.value_out.weight if hasattr(layer, 'value_out') else layer.value.weight
    return weight.chunk(layer.num_heads, dim=1)


def brute_force(probs, height, width):
    """Entropy, masses, shares, the nearest shift and moments of one head, by loops."""
    pixels = list(itertools.product(range(height), range(width)))
    margins = [min(2, (n - 1) // 2) for n in (height, width)]
    rows = probs.tolist()
    entropies, mass3, mass5, moved, inner = [], [], [], [], []
    for q, (q1, q2) in enumerate(pixels):
        entropies.append(-sum(p * math.log(p) for p in rows[q] if p > 0))
        if not (margins[0] <= q1 < height - margins[0] and margins[1] <= q2 < width - margins[1]):
            continue
        inner.append((q1, q2))
        moved += [(p, k1 - q1, k2 - q2) for p, (k1, k2) in zip(rows[q], pixels)]
        for masses, reach in ((mass3, 1), (mass5, 2)):
            masses.append(sum(p for p, (k1, k2) in zip(rows[q], pixels) if max(abs(k1 - q1), abs(k2 - q2)) <= reach))
    total = sum(p for p, _, _ in moved)
    center = [sum(m[0] * m[i] for m in moved) / total for i in (1, 2)]
    covariance = [
        [sum(m[0] * (m[i] - center[i - 1]) * (m[j] - center[j - 1]) for m in moved) / total for j in (1, 2)]
        for i in (1, 2)
    ]

    distances = [
        [p * math.hypot(k1 - q1, k2 - q2) for p, (k1, k2) in zip(row, pixels)] for row, (q1, q2) in zip(rows, pixels)
    ]

    def mean(numbers):
        return sum(numbers) / len(numbers)

    def given(query, shift):
        """P[q, q + δ], and whether δ stays in the grid; the nearest key where it does not."""
        key = [q + d for q, d in zip(query, shift)]
        inside = [min(max(k, 0), n - 1) for k, n in zip(key, (height, width))]
        return rows[query[0] * width + query[1]][inside[0] * width + inside[1]], key == inside

    shares, wholes = {}, {}
    for shift in itertools.product(range(1 - height, height), range(1 - width, width)):
        by_inner, by_all = ([given(query, shift) for query in queries] for queries in (inner, pixels))
        wholes[shift] = tuple(mean([p for p, _ in values]) for values in (by_inner, by_all))
        values = by_inner if all(stays for _, stays in by_inner) else [entry for entry in by_all if entry[1]]
        if sum(stays for _, stays in by_all) >= len(pixels) / 4:
            shares[shift] = mean([p for p, _ in values])
    nearest = max(wholes, key=lambda shift: ([round(p, 6) for p in wholes[shift]], -math.hypot(*shift)))
    return dict(
        entropy=mean(entropies),
        distance=sum(map(sum, distances)) / sum(map(sum, rows)),
        mass_3x3=mean(mass3),
        mass_5x5=mean(mass5),
        center=center,
        covariance=covariance,
        shares=shares,
        wholes=wholes,
        share=shares.get(nearest, wholes[nearest][1]),
    )


def window_shifts(kernel_size):
    return list(itertools.product(*(range(-(n // 2), n // 2 + 1) for n in kernel_size)))


def shift_operators(shifts, size, padding_mode):
    """S_δ as matrices, by loops."""
    height, width = size
    operators = []
    for row, column in shifts:
        operator = torch.zeros(height * width, height * width, dtype=torch.float64)
        for q1, q2 in itertools.product(range(height), range(width)):
            k1, k2 = q1 + row, q2 + column
            if padding_mode == 'replicate':
                k1, k2 = min(max(k1, 0), height - 1), min(max(k2, 0), width - 1)
            if 0 <= k1 < height and 0 <= k2 < width:
                operator[q1 * width + q2, k1 * width + k2] = 1
        operators.append(operator)
    return torch.stack(operators)


SCHEMA = dict(
    layer='grid convolutions spanned heads name attention num_images summary best',
    head='head center covariance entropy relative_entropy distance mass_3x3 mass_5x5 nearest_shift share '
    'kind degenerate criterion why prefix_mass',
    convolutions='kernel_size dilation stride padding_mode error interior_error',
    spanned='kernel_size expressible missing residual error worst rank',
)
SCHEMA = {part: set(names.split()) for part, names in SCHEMA.items()}


def check_schema(content):
    """What a JSON file holds, whatever the model."""

    def fail(token):
        raise AssertionError(f'{token} is no JSON')

    loaded = json.loads(content, parse_constant=fail)
    assert loaded['layers']
    for layer in loaded['layers']:
        assert layer.keys() == SCHEMA['layer']
        for head in layer['heads']:
            assert head.keys() == SCHEMA['head']
        for part in ('convolutions', 'spanned'):
            assert all(entry.keys() == SCHEMA[part] for entry in layer[part])
    return loaded
