"""``attncnn convert``: convolutions as attention, of a first phase (L21, section 4) or of a CNN (C20, Theorem 1)."""

from argparse import Namespace
from typing import List

from ..convert import convs_to_attention
from ..training import TwoPhases, parts_in_phases
from .model import load, write_checkpoint


def run(args: Namespace) -> List[str]:
    """Converts the model and saves it."""
    loaded = load(args)
    model = loaded.model
    parts = parts_in_phases(model)
    if not parts and not args.layers:
        raise ValueError(
            f"{loaded.name} has no CMHSA and no ConvToAttention: say which convolutions, --layers 'layer4.*.conv2'"
        )
    if parts and (args.layers or args.alpha is not None):
        raise ValueError(f'--layers and --alpha are for a CNN: {loaded.name} has two phases, and turns as it was built')
    if parts:
        changes = TwoPhases(epoch=0, seed=args.seed).on_epoch_begin(model, (), 0)
        if not changes and getattr(loaded, 'entries', set()) <= model.state_dict().keys():
            raise ValueError(f'{loaded.name} is of attention already: nothing is left to convert')
    else:
        settings = {} if args.alpha is None else dict(alpha=args.alpha)
        changes = [convs_to_attention(model, args.layers, loaded.example(), **settings)]
    write_checkpoint(args.out, model.state_dict(), loaded.meta)
    for change in changes:
        print(change)
    return [
        f'Layers that are attention now: {sum(len(change.layers) for change in changes) or len(parts)}',
        f'Saved {args.out}',
        'Next: train it; a model as before takes it by attncnn_plugin.follow_state_dict'
        + (', a config by load_from' if args.mm else ''),
    ]
