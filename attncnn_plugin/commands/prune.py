"""``attncnn prune``: removes heads from a model, those that are named, or those that matter least."""

from argparse import Namespace
from fnmatch import fnmatchcase
from typing import Dict, List, Mapping, Tuple

import torch
from tqdm import tqdm

from .. import pruning
from ..heads.found import Heads, layer_names
from .model import LoadedModel, load, progress


def run(args: Namespace) -> List[str]:
    """Chooses the heads, removes them and saves the model."""
    loaded = load(args)
    model, image = loaded.model, loaded.example()
    every = pruning.prunable_heads(model, image)
    number = sum(layer.num_heads for layer in every.values())
    layers = {name: layer for name, layer in every.items() if fnmatchcase(name, args.layers)}
    if not layers:
        raise ValueError(f'--layers {args.layers} of {loaded.name} has no heads that can go: there are {list(every)}')
    if args.heads:
        heads, said = layer_names(every, args.heads), ''
    elif args.criterion == 'degenerate':
        found = pruning.find_degenerate_heads(model, inputs=loaded.inputs_for_means(args.images, args.num_images))
        said = str(found)
        heads = {name: own for name, own in found.items() if name in layers}
    else:
        heads, said = by_score(loaded, layers, args)
    cost = lambda: None if image is None else pruning.count_multiply_adds(model, lambda: model(image))[0]  # noqa: E731
    before = cost()
    change = pruning.prune_heads(model, heads, image)
    after = cost()
    loaded.save(args.out)
    if said:
        print(said)
    for layer in change.layers if args.criterion != 'degenerate' else ():
        print(f'{layer.name}: {layer.before}, now without {", ".join(map(str, sorted(heads[layer.name])))}')
    short = tqdm.format_sizeof  # 98.3k, 1.25G
    costs = f'; multiply-adds per image: {short(before)} → {short(after)} ({after / before:.0%})' if before else ''
    how = 'attncnn_plugin.' + ('load_hugging_face' if args.hf else 'follow_state_dict')
    if args.mm:
        how = f'tools/train.py {args.mm[0]} --cfg-options load_from={args.out}'
    return [
        f'{sum(map(len, heads.values()))} of {number} heads removed{costs}',
        f'Saved {args.out}, {short(change.parameters_after)} of {short(change.parameters_before)} parameters',
        f'Next: fine-tune it; {how} loads it, and so do these commands',
    ]


def by_score(loaded: LoadedModel, layers: Mapping[str, Heads], args: Namespace) -> Tuple[Dict[str, List[int]], str]:
    """Returns the heads with the lowest importance, those the loss rises least without, or random ones; and how."""
    model, names, image, said = loaded.model, list(layers), loaded.example(), ''
    number = sum(layer.num_heads for layer in layers.values())
    if args.criterion == 'random':
        scores = {name: torch.rand(layer.num_heads, dtype=torch.float64) for name, layer in layers.items()}
    else:
        batches, loss, right = loaded.batches(args.images, args.num_images)
        ablating = args.criterion == 'ablation'
        with progress(loss, len(batches) * (2 + 2 * number if ablating else 1), f'{number} heads') as counted:
            if ablating:
                scores = pruning.head_ablation(model, batches, counted, names).zero_loss
            else:
                scores = pruning.head_importance(model, batches, counted, layers=names)
        said = f'Judged by {args.criterion or "importance"} on images; right is what {right}.'
    keep, costs = args.keep if args.share is None else 1 - args.share, None
    if args.multiply_adds is not None:
        if image is None:
            raise ValueError(f'--multiply-adds: the size of an image of {loaded.name} is unknown: give --share')
        costs = pruning.head_costs(model, lambda: model(image))
    return pruning.least_important(scores, args.threshold, keep, args.multiply_adds, costs), said
