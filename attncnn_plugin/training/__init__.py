"""Two phases and pruning in any training loop, in plain PyTorch.

Examples:
    From convolution to attention (L21) after the first epoch, and heads that go (C20, appendix E) after the second:

    >>> import timm, torch
    >>> from torch.nn.functional import cross_entropy
    >>> model = timm.create_model('cmhsa3_patch16_224', phase='conv', img_size=32, patch_size=4, depth=1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    >>> batches = [(torch.rand(2, 3, 32, 32), torch.tensor([1, 2]))]
    >>> parts = TwoPhases(epoch=1), PruneHeads(epoch=2, keep=8, batches=batches)
    >>> for epoch in range(3):
    ...     for part in parts:
    ...         _ = part.on_epoch_begin(model, optimizer, epoch)
    ...     for images, labels in batches:
    ...         optimizer.zero_grad()
    ...         cross_entropy(model(images), labels).backward()
    ...         optimizer.step()
    >>> model.phase, model.blocks[0].attn.num_heads
    ('attn', 8)
"""

from .head_pruning import PruneHeads
from .loops import follow_with_optimizer
from .two_phases import PhasedModule, TwoPhases, parts_in_phases

__all__ = [
    'PhasedModule',
    'PruneHeads',
    'TwoPhases',
    'follow_with_optimizer',
    'parts_in_phases',
]
