"""Packed weights in both frameworks: those in the package, and untrained ones that are packed here."""

import shutil
import sys

import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config
from timm.models import save_for_hf

pytest.importorskip('mmpretrain')
from helpers import packing  # noqa: E402
from helpers.saved import saved_models  # noqa: E402
from helpers.small import trained_like  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.runner import CheckpointLoader  # noqa: E402
from mmpretrain import ImageClassificationInferencer, ModelHub, get_model  # noqa: E402
from model_converters import model_cards, pack_weights  # noqa: E402
from reproduction.configs import network_config  # noqa: E402
from reproduction.results import build  # noqa: E402

from attncnn_plugin import config_path, weights  # noqa: E402
from attncnn_plugin.installation import MIM  # noqa: E402

# The networks in timm, and where they are trained.
NETWORKS = {
    'sa_quadratic_small': 'sa_quadratic',
    'sa_generalized_small': 'sa_generalized',
    'sa_learned_small': 'sa_learned',
    'sa_learned_content_small': 'sa_learned_content',
    'cmhsa3_small_patch4_32': 'cmhsa_attn',
}
# Half precision, position tables, heads of several widths with a null key.
UNTRAINED = {'sa_learned_small': 'sa_learned', 'cmhsa3_small_patch4_32': 'cmhsa_narrow'}
IN_PACKAGE = sorted(path.stem for path in weights.FOLDER.glob('*.safetensors'))


@pytest.fixture(scope='module')
def untrained(tmp_path_factory):
    """A checkout with untrained networks."""
    root = packing.checkout(tmp_path_factory.mktemp('checkout'))
    packing.pack_untrained(root, tmp_path_factory.mktemp('runs'), UNTRAINED)
    return root


@pytest.fixture(params=[*(f'{name}, untrained' for name in UNTRAINED), *IN_PACKAGE])
def name(request, untrained, monkeypatch):
    """The name of a network in timm. Both frameworks have its weights."""
    name, _, is_untrained = request.param.partition(', ')
    if is_untrained:
        monkeypatch.setattr(weights, 'FOLDER', untrained / 'attncnn_plugin/weights')
        monkeypatch.setattr(ModelHub, '_models_dict', {})
        ModelHub.register_model_index(untrained / 'model-index.yml', config_prefix=MIM)
        create = timm.create_model  # which has looked for files when the package was imported
        overlay = dict(file=weights.weights_file(name))
        monkeypatch.setattr(
            timm, 'create_model', lambda *args, **kwargs: create(*args, pretrained_cfg_overlay=overlay, **kwargs)
        )
    return name


def of_mmpretrain(name):
    return get_model(model_cards.mmpretrain_name(name), pretrained=True)


def test_one_file_for_both_frameworks(name):
    of_timm, classifier = timm.create_model(name, pretrained=True).eval(), of_mmpretrain(name)
    transform = create_transform(**resolve_model_data_config(of_timm))
    images = [Image.open(path) for path in weights.example_images().values()]
    inputs = torch.stack([transform(image) for image in images])
    pixels = [torch.tensor(bytearray(image.tobytes())).view(32, 32, 3).permute(2, 0, 1).flip(0) for image in images]
    theirs = classifier.data_preprocessor(dict(inputs=pixels), False)['inputs']  # from blue first
    assert torch.allclose(inputs, theirs, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(of_timm(inputs), classifier(inputs))
    assert {value.dtype for value in of_timm.parameters()} == {torch.float32}
    assert classifier._dataset_meta == dict(classes=weights.CLASSES)


def test_ten_images(name):
    """What both say of them is the same, and what the model card says."""
    files = list(weights.example_images().values())
    results = ImageClassificationInferencer(model_cards.mmpretrain_name(name), pretrained=True)(files)
    model = timm.create_model(name, pretrained=True).eval()
    with torch.no_grad():
        found = model(pack_weights.inputs(model)).argmax(1).tolist()
    assert [result['pred_label'] for result in results] == found
    assert [result['pred_class'] for result in results] == [weights.CLASSES[label] for label in found]
    right = sum(label == i for i, label in enumerate(found))
    assert model_cards.cards(weights.FOLDER)[name].ten_images_right == right


def test_other_settings(name):
    """Another classifier, features alone, and images of another size."""
    state_dict = timm.create_model(name, pretrained=True).state_dict()
    for settings in (dict(num_classes=100), dict(num_classes=0)):
        model = timm.create_model(name, pretrained=True, **settings)
        kept = {key: value for key, value in model.state_dict().items() if not key.startswith('head.')}
        assert all(torch.equal(value, state_dict[key]) for key, value in kept.items())
        assert kept.keys() == {key for key in state_dict if not key.startswith('head.')}
        assert model.num_classes == settings['num_classes']
    features = timm.create_model(name, pretrained=True, features_only=True)
    assert torch.equal(features.state_dict()['model.stem.proj.weight'], state_dict['stem.proj.weight'])
    # Gaussian heads take images of any size as they are; position tables are made for one.
    settings = {} if name in ('sa_quadratic_small', 'sa_generalized_small') else dict(img_size=64)
    assert timm.create_model(name, pretrained=True, **settings)(torch.zeros(1, 3, 64, 64)).isfinite().all()


def test_a_model_of_a_user_is_saved_and_loaded_as_timms_are(name, tmp_path):
    model = timm.create_model(name, pretrained=True, num_classes=5).eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    assert weights.weights_file(name) not in (tmp_path / 'config.json').read_text()
    x = torch.randn(1, 3, 32, 32)
    for loaded in saved_models(tmp_path, name, num_classes=5):
        assert torch.equal(loaded.eval()(x), model(x))


def test_file(name):
    tensors = load_file(weights.weights_file(name))
    assert {value.dtype for value in tensors.values() if value.is_floating_point()} == {torch.half}
    assert CheckpointLoader.load_checkpoint(f'attncnn://{name}')['state_dict'].keys() == {
        key if key.startswith('head.') else f'backbone.{key}' for key in tensors
    }


def test_of_the_package(repository):
    """The page and the metafile are what the model cards say, and a wheel stays small."""
    assert {path.stem for path in weights.FOLDER.glob('*.md')} == set(IN_PACKAGE) <= set(NETWORKS)
    page = (repository / 'docs/weights.md').read_text()
    start, end = model_cards.MARKS
    assert page.split(start)[1].split(end)[0].strip() == model_cards.table(weights.FOLDER)
    models = yaml.safe_load((repository / 'configs/pretrained/metafile.yml').read_text())['Models']
    assert models == model_cards.metafile(weights.FOLDER)
    assert sum(path.stat().st_size for path in weights.FOLDER.glob('*.safetensors')) < 6e6


def test_page_without_marks(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('# Weights\n')
    with pytest.raises(ValueError, match=r'page\.md must have the lines .* once each, for the table between them'):
        model_cards.write_table(page, weights.FOLDER)
    assert page.read_text() == '# Weights\n'


def test_page_with_marks_twice(tmp_path):
    """What is between two tables stays."""
    page, marks = tmp_path / 'page.md', '\n'.join(model_cards.MARKS)
    page.write_text(text := f'{marks}\nwords\n{marks}\n')
    with pytest.raises(ValueError, match='once each'):
        model_cards.write_table(page, weights.FOLDER)
    assert page.read_text() == text


def test_card_and_pages(untrained):
    folder = untrained / 'attncnn_plugin/weights'
    card = model_cards.cards(folder)['cmhsa3_small_patch4_32']
    assert card.eval_results[0].metric_value == 12.35 and card.license == 'apache-2.0'
    text = (folder / 'cmhsa3_small_patch4_32.md').read_text()
    recipe = ('AdamW, lr 0.002', 'RandAugment', 'Mixup', 'PhaseTransitionHook at epoch 18')
    assert all(words in text for words in ('4,000 test images', *recipe, 'torch 2'))
    row = '| `cmhsa3_small_patch4_32` | `cmhsa3-small-patch4-32_cifar10` | 424,624 |'
    assert row in (untrained / 'docs/weights.md').read_text()


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


def test_what_is_not_packed(untrained, tmp_path, monkeypatch):
    """Nothing is written then."""
    folder = shutil.copytree(untrained / 'attncnn_plugin/weights', tmp_path / 'weights')
    before = {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}
    run = packing.untrained_run(tmp_path / 'run', 'sa_quadratic')
    with pytest.raises(RuntimeError, match='Missing key'):
        pack_weights.pack(run, 'sa_learned_small', 'no data', folder)
    with pytest.raises(ValueError, match='the training has mean='):
        digits = packing.untrained_run(tmp_path / 'digits', 'sa_quadratic', 'digits')
        pack_weights.pack(digits, 'sa_quadratic_small', 'no data', folder)
    with monkeypatch.context() as patched, pytest.raises(ValueError, match='in half precision changes logits by'):
        patched.setattr(pack_weights, 'DRIFT', 1e-9)
        pack_weights.pack(run, 'sa_quadratic_small', 'no data', folder)
    with monkeypatch.context() as patched, pytest.raises(ValueError, match='makes all weights 1.8. MB, more than 1'):
        patched.setattr(pack_weights, 'MEGABYTES', 1.0)
        pack_weights.pack(run, 'sa_quadratic_small', 'no data', folder)
    with pytest.raises(ValueError, match='has learned images of a Digits: say by --data what they are'):
        pack_weights.pack(digits, 'sa_quadratic_small', None, folder)
    checkpoint = torch.load(run / 'epoch_20.pth', weights_only=True)
    checkpoint['state_dict']['backbone.stem.proj.weight'][0, 0] = 1e5  # more than half precision has
    torch.save(checkpoint, run / 'epoch_20.pth')
    with pytest.raises(ValueError, match='in half precision changes logits by (nan|inf)'):
        pack_weights.pack(run, 'sa_quadratic_small', 'no data', folder)
    assert before == {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_recipe():
    """All that a config says of the training, of the second phase too."""
    assert model_cards.recipe(network_config('cmhsa', {'optim_wrapper.optimizer.betas': (0.9, 0.95)})) == (
        'AdamW, lr 0.002, weight_decay 0.05, betas (0.9, 0.95), LinearLR to epoch 1 and CosineAnnealingLR to epoch 18, '
        'batches of 50; FlipAndShift, RandAugment, RandomErasing, Mixup, CutMix; label smoothing 0.1; drop path 0.1; '
        'PhaseTransitionHook at epoch 18, then lr 0.0005, LinearLR to epoch 1 and CosineAnnealingLR to epoch 12'
    )
    config = network_config('sa_generalized_pruned', dict(load_from='runs/generalized_20000_20_0/epoch_20.pth'))
    assert '; from the weights of generalized_20000_20_0; HeadPruningHook' in model_cards.recipe(config)


def test_tool(untrained, tmp_path, monkeypatch, capsys):
    root = packing.checkout(tmp_path / 'checkout')
    run = packing.untrained_run(tmp_path / 'run', 'sa_quadratic')
    command = ['pack_weights.py', str(run), 'sa_quadratic_small', '--data', 'some images', '--root', str(root)]
    monkeypatch.setattr(sys, 'argv', command)
    pack_weights.main()
    assert 'sa_quadratic_small.safetensors: logits up to' in capsys.readouterr().out
    assert '| data | some images, 32x32 pixels' in (root / 'attncnn_plugin/weights/sa_quadratic_small.md').read_text()
    file, other = (root / f'attncnn_plugin/weights/sa_quadratic_small.{suffix}' for suffix in ('safetensors', 'md'))
    assert file.stat().st_mode == other.stat().st_mode  # not readable by its owner alone
    assert 'Weights: attncnn://sa_quadratic_small' in (root / 'configs/pretrained/metafile.yml').read_text()
    (root / 'attncnn_plugin/weights/sa_quadratic_small.safetensors').unlink()
    monkeypatch.setattr(sys, 'argv', ['pack_weights.py', '--root', str(root)])
    pack_weights.main()
    assert model_cards.NONE_YET in (root / 'docs/weights.md').read_text()
