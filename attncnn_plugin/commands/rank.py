"""``attncnn rank``: which heads matter, by their importance and by what the model loses without each."""

from argparse import Namespace
from typing import List

from ..change import table
from ..pruning import head_ablation, prunable_heads
from ..pruning.importance import normalized
from ..visualization import plot_head_ablation, save_figure
from .model import load, progress


def run(args: Namespace) -> List[str]:
    """Prints the heads, the most important ones first, and draws them."""
    loaded = load(args)
    batches, loss, right = loaded.batches(args.images, args.num_images)
    heads = sum(layer.num_heads for layer in prunable_heads(loaded.model, batches[0], loss).values())
    with progress(loss, len(batches) * (2 + 2 * heads), f'{heads} heads') as counted:
        ablation = head_ablation(loaded.model, batches, counted, args.layers)
    save_figure(plot_head_ablation(ablation), args.out)
    importance = {name: normalized(own) for name, own in ablation.importance.items()}
    ranked = sorted((value, name, head) for name, own in importance.items() for head, value in enumerate(own.tolist()))
    rows = [['layer', 'head', 'importance', 'loss', 'accuracy']]
    for value, name, head in reversed(ranked):
        accuracy = f'{ablation.zero_accuracy[name][head]:+.1%}' if name in ablation.zero_accuracy else ''
        rows.append([name, str(head), f'{value:.3f}', f'{ablation.zero_loss[name][head]:+.4f}', accuracy])
    whole = f'loss {ablation.loss:.4f}' + ('' if ablation.accuracy is None else f', accuracy {ablation.accuracy:.1%}')
    print(f'The model has {whole}; right is what {right}.', 'Without one head they change by:', '', sep='\n')
    print(table(rows))
    return [
        f'{len(ranked)} heads; importance compares those of a layer, the loss all of them',
        f'Saved {args.out}',
        'Next: attncnn prune --share 30% with the same options removes the last ones',
    ]
