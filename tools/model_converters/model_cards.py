"""The model cards of the weights in the package, and what is made of them: a table, and mmpretrain's metafile."""

import re
from pathlib import Path
from typing import Dict, List, Sequence

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

MARKS = '<!-- table: made by tools/model_converters/pack_weights.py -->', '<!-- end of the table -->'
NONE_YET = 'There are none in this version yet.'


def mmpretrain_name(name: str) -> str:
    """Returns the name of a network in mmpretrain: ``'sa-quadratic-small_cifar10'`` for ``'sa_quadratic_small'``."""
    return f'{name.replace("_", "-")}_cifar10'


def model_card(
    name: str, result: dict, data: str, drift: float, right: int, kernel_errors: Sequence[float]
) -> ModelCard:
    """Returns the model card of a network, with all numbers in its header.

    Args:
        name (str): Its name in timm.
        result (dict): What came of its training, the ``result.json`` of ``tools/reproduce.py``.
        data (str): What its images are, in words.
        drift (float): The most that half precision changes a logit.
        right (int): How many of the ten images in the package it classifies rightly.
        kernel_errors (Sequence[float]): How far a random 3x3 kernel is from the span of each layer's heads, in percent.
    """
    number, machine = result['config']['val_dataloader']['dataset'].get('num_images'), result['machine']
    tested = f'{number:,} test images' if number else 'the test images'
    top1, top5 = (result['curves'][f'accuracy/{metric}'][-1][1] for metric in ('top1', 'top5'))
    header = ModelCardData(
        license='apache-2.0',
        library_name='timm',
        pipeline_tag='image-classification',
        tags=['image-classification', 'timm', 'mmpretrain', 'attncnn_plugin'],
        datasets=['cifar10'],
        model_name=name,
        eval_results=[
            EvalResult(
                task_type='image-classification',
                dataset_type='cifar10',
                dataset_name=data,
                metric_type='accuracy',
                metric_name='top-1, %',
                metric_value=round(top1, 2),
            )
        ],
        parameters=result['parameters'],
        multiply_adds=result['multiply_adds'],
        trained_with=f'{result["images"]:,} images, {result["epochs"]} epochs',
        tested_with=tested,
        ten_images_right=right,
        random_3x3_kernel_errors=list(kernel_errors),
    )
    rows = {
        'data': f'{data}, 32x32 pixels, ten classes; {result["images"]:,} training images, as many of each class',
        'training': f'the row “{result["label"]}” of `tools/reproduce.py`, {result["epochs"]} epochs, '
        f'seed {result["seed"]}',
        'accuracy': f'top-1 {top1:.2f} %, top-5 {top5:.2f} % of {tested}, after the last epoch, in single precision',
        'ten images': f'{right} of the ten test images in the package are classified rightly',
        'heads': heads_row(kernel_errors),
        'weights': f'half precision, which changes logits of these images by {drift:.4f} at most',
        'size': f'{result["parameters"]:,} parameters, {result["multiply_adds"] / 1e6:.1f}M multiply-adds an image',
        'time': f'{result["seconds"] / 60:.0f} minutes on {machine["gpu"] or machine["processor"]}',
        'versions': ', '.join(f'{library} {version}' for library, version in result['versions'].items()),
        'licence': 'Apache 2.0, as the package. CIFAR-10 is of Krizhevsky 2009, “Learning Multiple Layers of Features '
        'from Tiny Images”.',
    }
    table = '\n'.join(f'| {key} | {value} |' for key, value in rows.items())
    calls = f"timm.create_model('{name}'", f"mmpretrain.get_model('{mmpretrain_name(name)}'"
    use = '\n'.join(f'{call}, pretrained=True)' for call in calls)
    text = f'# {name}\n\n| | |\n| --- | --- |\n{table}\n\nAfter `import attncnn_plugin`:\n\n```python\n{use}\n```\n'
    return ModelCard(f'---\n{header.to_yaml()}\n---\n\n{text}')


def heads_row(kernel_errors: Sequence[float]) -> str:
    """Returns what a model card says of the kernels that the heads span."""
    errors = ', '.join(f'{error:.1f}%' for error in kernel_errors)
    return f'by position, those of each block span a random 3x3 kernel to within {errors} (0%: any convolution)'


def cards(folder: Path) -> Dict[str, ModelCardData]:
    """Returns the headers of all model cards of a folder by the names of the networks, only those with weights."""
    return {path.stem: ModelCard.load(path.with_suffix('.md')).data for path in sorted(folder.glob('*.safetensors'))}


def table(folder: Path) -> str:
    """Returns the table of the networks of a folder, in Markdown."""
    columns = ['timm', 'mmpretrain', 'parameters', 'multiply-adds', 'trained with', 'top-1, %']
    lines = [f'| {" | ".join(columns)} |', '| --- ' * len(columns) + '|']
    for name, card in cards(folder).items():
        cells = [
            f'`{name}`',
            f'`{mmpretrain_name(name)}`',
            f'{card.parameters:,}',
            f'{card.multiply_adds / 1e6:.1f}M',
            card.trained_with,
            f'{card.eval_results[0].metric_value:.1f} of {card.tested_with}',
        ]
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines) if len(lines) > 2 else NONE_YET


def write_table(page: Path, folder: Path) -> None:
    """Writes the table into a page, between its marks; raises ValueError if it does not have them once each."""
    start, end = map(re.escape, MARKS)
    new = '\n\n'.join([MARKS[0], table(folder), MARKS[1]])
    text, number = re.subn(f'{start}.*?{end}', lambda _: new, page.read_text(), flags=re.DOTALL)
    if number != 1:
        raise ValueError(f'{page} must have the lines {" and ".join(MARKS)} once each, for the table between them')
    page.write_text(text)


def metafile(folder: Path) -> List[dict]:
    """Returns the networks of a folder as mmpretrain's model index has them; their weights are found by name."""
    return [
        {
            'Name': mmpretrain_name(name),
            'Metadata': {'Training Data': card.eval_results[0].dataset_name, 'Parameters': card.parameters},
            'In Collection': 'CMHSA' if name.startswith('cmhsa') else 'Self-Attention CNN',
            'Results': [
                dict(
                    Task='Image Classification',
                    Dataset=card.eval_results[0].dataset_name,
                    Metrics={'Top 1 Accuracy': card.eval_results[0].metric_value},
                )
            ],
            'Config': f'configs/pretrained/{name}.py',
            'Weights': f'attncnn://{name}',
        }
        for name, card in cards(folder).items()
    ]


def write_metafile(path: Path, folder: Path) -> None:
    """Writes the metafile of the networks of a folder."""
    text = yaml.safe_dump({'Models': metafile(folder)}, sort_keys=False)
    path.write_text(
        f'# Made by tools/model_converters/pack_weights.py from the model cards in attncnn_plugin/weights.\n{text}'
    )
