"""Trainings in plain PyTorch: models that turn to attention, and heads that go.

Examples:
    From convolution to attention (L21), with an optimizer of the second phase:

    >>> import timm, torch
    >>> model = timm.create_model('cmhsa3_patch16_224', img_size=32, patch_size=4, depth=1)
    >>> changes = to_attention(model)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)

    Heads that go while the optimizer keeps training what is left (C20, appendix E):

    >>> from torch.nn.functional import cross_entropy
    >>> pruner = HeadPruner(
    ...     forward=lambda model, batch: model(batch[0]),
    ...     loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    ...     criteria=[dict(type='importance', keep=8)],
    ... )
    >>> batches = [(torch.rand(2, 3, 32, 32), torch.tensor([1, 2]))]
    >>> pruner.remove(model, pruner.judge(model, batches), [optimizer])
    >>> model.blocks[0].attn.num_heads
    8
"""

from .head_pruner import HeadPruner, JudgedHeads
from .two_phases import TwoPhases, parts_in_phases, to_attention

__all__ = ['HeadPruner', 'JudgedHeads', 'TwoPhases', 'parts_in_phases', 'to_attention']
