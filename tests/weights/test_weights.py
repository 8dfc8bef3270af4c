"""Weights of the package in both frameworks, and the tool that packs them."""

import json
import shutil
import sys

import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config

pytest.importorskip('mmpretrain')
from helpers.small import trained_like  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.runner import CheckpointLoader  # noqa: E402
from mmpretrain import ImageClassificationInferencer, get_model  # noqa: E402
from model_converters import model_cards, pack_weights  # noqa: E402
from reproduction.configs import network_config, set_data, set_images  # noqa: E402
from reproduction.results import build, cost, machine, versions  # noqa: E402

from attncnn_plugin import config_path, weights  # noqa: E402

# The networks in timm, and where they are trained.
NETWORKS = {
    'sa_quadratic_small': 'sa_quadratic',
    'sa_generalized_small': 'sa_generalized',
    'sa_learned_small': 'sa_learned',
    'sa_learned_content_small': 'sa_learned_content',
    'cmhsa3_small_patch4_32': 'cmhsa_attn',
}


@pytest.mark.parametrize('name', NETWORKS)
def test_one_file_for_both_frameworks(name):
    """Inputs, logits, and what both say of ten images are the same, and what the model card says."""
    of_timm = timm.create_model(name, pretrained=True).eval()
    classifier = get_model(model_cards.mmpretrain_name(name), pretrained=True)
    transform = create_transform(**resolve_model_data_config(of_timm))
    files = list(weights.example_images().values())
    images = [Image.open(path) for path in files]
    inputs = torch.stack([transform(image) for image in images])
    pixels = [torch.tensor(bytearray(image.tobytes())).view(32, 32, 3).permute(2, 0, 1).flip(0) for image in images]
    theirs = classifier.data_preprocessor(dict(inputs=pixels), False)['inputs']  # from blue first
    assert torch.allclose(inputs, theirs, atol=1e-5)
    with torch.no_grad():
        logits = of_timm(inputs)
        assert torch.equal(logits, classifier(inputs))
    assert {value.dtype for value in of_timm.parameters()} == {torch.float32}
    found = logits.argmax(1).tolist()
    results = ImageClassificationInferencer(classifier)(files)
    assert [result['pred_label'] for result in results] == found
    assert [result['pred_class'] for result in results] == [weights.CLASSES[label] for label in found]
    right = sum(label == i for i, label in enumerate(found))
    card = model_cards.cards(weights.FOLDER)[name]
    assert (card.ten_images_right, card.parameters, card.multiply_adds) == (right, *cost(of_timm))
    errors = pack_weights.kernel_errors(of_timm, inputs)
    assert card.random_3x3_kernel_errors == pytest.approx(errors, abs=0.2)  # percent; other processors round otherwise
    assert model_cards.heads_row(card.random_3x3_kernel_errors) in (weights.FOLDER / f'{name}.md').read_text()
    tensors = load_file(weights.weights_file(name))
    assert {value.dtype for value in tensors.values() if value.is_floating_point()} == {torch.half}
    assert CheckpointLoader.load_checkpoint(f'attncnn://{name}')['state_dict'].keys() == {
        key if key.startswith('head.') else f'backbone.{key}' for key in tensors
    }


@pytest.mark.parametrize('name, config', NETWORKS.items())
def test_network_of_the_config(name, config):
    """The network of timm, that which is trained, and that for files are one."""
    trained = trained_like(build(network_config(config, {}))).eval()
    of_timm = timm.create_model(name).eval()
    of_timm.load_state_dict(trained.state_dict())
    for_files = build(Config.fromfile(config_path(f'pretrained/{name}.py'))).eval()
    for_files.load_state_dict(trained.state_dict())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(of_timm(x), trained(x)) and torch.equal(for_files(x), trained(x))
    assert for_files.data_preprocessor.to_rgb
    assert torch.equal(for_files.data_preprocessor.mean, trained.data_preprocessor.mean)


def test_unknown_weights():
    with pytest.raises(FileNotFoundError, match='attncnn_plugin has no weights of nothing, but of '):
        CheckpointLoader.load_checkpoint('attncnn://nothing')


def test_of_the_package(repository):
    """The page and the metafile are what the model cards say, and a wheel stays small."""
    files = {suffix: {path.stem for path in weights.FOLDER.glob(f'*.{suffix}')} for suffix in ('md', 'safetensors')}
    assert files['md'] == files['safetensors'] == set(NETWORKS)
    page = (repository / 'docs/models.md').read_text()
    start, end = model_cards.MARKS
    assert page.split(start)[1].split(end)[0].strip() == model_cards.table(weights.FOLDER)
    models = yaml.safe_load((repository / 'configs/pretrained/metafile.yml').read_text())['Models']
    assert models == model_cards.metafile(weights.FOLDER)
    assert sum(path.stat().st_size for path in weights.FOLDER.glob('*.safetensors')) < 6e6


@pytest.mark.parametrize('text', ['# Weights\n', 2 * '\n'.join(['', *model_cards.MARKS, 'words'])])
def test_page_without_marks_or_with_marks_twice(text, tmp_path):
    """What is between two tables stays."""
    page = tmp_path / 'page.md'
    page.write_text(text)
    with pytest.raises(ValueError, match=r'page\.md must have the lines .* once each, for the table between them'):
        model_cards.write_table(page, weights.FOLDER)
    assert page.read_text() == text


def untrained_run(folder, config_name, data='cifar10'):
    """A folder as tools/reproduce.py leaves it, of a network with any weights, in its second phase if it has two."""
    config = network_config(config_name, {})
    set_data(config, data, None, test_images=4000)
    set_images(config, 20000, 0)
    model = build(config)
    if getattr(model.backbone, 'phase', None) == 'conv':
        model.backbone.to_attention()
    parameters, multiply_adds = cost(trained_like(model))
    folder.mkdir(parents=True)
    torch.save(dict(state_dict=model.state_dict()), folder / 'epoch_20.pth')
    result = dict(label='quadratic', images=20000, epochs=20, seed=0, top1=12.345, seconds=90.0, parameters=parameters)
    curves = {'accuracy/top1': [[1, 10.0], [20, 12.345]], 'accuracy/top5': [[1, 50.0], [20, 51.5]]}
    result.update(multiply_adds=multiply_adds, curves=curves, versions=versions(), machine=machine())
    (folder / 'result.json').write_text(json.dumps(dict(result, config=config.to_dict()), default=str))
    return folder


def test_packing(tmp_path, repository, monkeypatch, capsys):
    """Heads of several widths with a null key; the model card, the table and the metafile. Then they go again."""
    root = tmp_path / 'checkout'
    for name in ('configs/pretrained/metafile.yml', 'docs/models.md'):
        (root / name).parent.mkdir(parents=True)
        shutil.copy(repository / name, root / name)
    folder = root / 'attncnn_plugin/weights'
    folder.mkdir(parents=True)

    def pack(*words):
        monkeypatch.setattr(sys, 'argv', ['pack_weights.py', *map(str, words), '--root', str(root)])
        pack_weights.main()

    name = 'cmhsa3_small_patch4_32'
    pack(untrained_run(tmp_path / 'run', 'cmhsa_narrow'), name, '--data', 'some images')
    assert f'{name}.safetensors: logits up to' in capsys.readouterr().out
    file, page = folder / f'{name}.safetensors', folder / f'{name}.md'
    assert file.stat().st_mode == page.stat().st_mode  # not readable by its owner alone
    card, text = model_cards.cards(folder)[name], page.read_text()
    assert card.eval_results[0].metric_value == 12.35 and card.license == 'apache-2.0'
    assert len(card.random_3x3_kernel_errors) == 6 and '| heads | by position, those of each block span' in text
    assert '| data | some images, 32x32 pixels' in text and '4,000 test images' in text and 'torch 2' in text
    row = f'| `{name}` | `cmhsa3-small-patch4-32_cifar10` | 424,624 |'
    assert row in (root / 'docs/models.md').read_text()
    assert f'Weights: attncnn://{name}' in (root / 'configs/pretrained/metafile.yml').read_text()
    settings = dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(file)))
    assert sum(parameter.numel() for parameter in timm.create_model(name, **settings).parameters()) == 424_624
    file.unlink()
    pack()
    assert model_cards.NONE_YET in (root / 'docs/models.md').read_text()


def test_what_is_not_packed(tmp_path, monkeypatch):
    """Nothing is written then."""
    folder = tmp_path / 'weights'
    folder.mkdir()
    run, digits = (
        untrained_run(tmp_path / 'run', 'sa_quadratic'),
        untrained_run(tmp_path / 'd', 'sa_quadratic', 'digits'),
    )
    cases = [
        (run, 'sa_learned_small', {}, 'Missing key'),
        (digits, 'sa_quadratic_small', {}, 'the training has mean='),
        (run, 'sa_quadratic_small', dict(DRIFT=1e-9), 'in half precision changes logits by'),
        (run, 'sa_quadratic_small', dict(MEGABYTES=0.1), r'makes all weights 0\.47 MB, more than 0\.1'),
    ]
    for path, name, limits, message in cases:
        with monkeypatch.context() as patched, pytest.raises((RuntimeError, ValueError), match=message):
            for limit, value in limits.items():
                patched.setattr(pack_weights, limit, value)
            pack_weights.pack(path, name, 'no data', folder)
    checkpoint = torch.load(run / 'epoch_20.pth', weights_only=True)
    checkpoint['state_dict']['backbone.stem.proj.weight'][0, 0] = 1e5  # more than half precision has
    torch.save(checkpoint, run / 'epoch_20.pth')
    with pytest.raises(ValueError, match='in half precision changes logits by (nan|inf)'):
        pack_weights.pack(run, 'sa_quadratic_small', 'no data', folder)
    assert not list(folder.iterdir())
