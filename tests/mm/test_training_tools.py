"""Models that turn to attention or lose heads, with the framework's tools: killed, distributed, tested, converted."""

import re
import shutil
import sys

import mmpretrain
import numpy as np
import pytest
import torch
from helpers.payload import Payload
from helpers.processes import assert_equal, run, train, train_on_ranks, write_configs
from helpers.small import SMALL_ARCH, save_degenerate, small_cmhsa, small_timm
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmpretrain import FeatureExtractor, ImageClassificationInferencer
from mmpretrain.registry import MODELS

import attncnn_plugin.mm.safe_loading  # noqa: F401
from attncnn_plugin.commands.config_model import ConfigModel
from attncnn_plugin.convert import convs_to_attention

EPOCHS, SWITCH, ITERATIONS = 4, 2, 3  # epochs, the epoch of the transition or the pruning, iterations of an epoch

VIT = dict(type='VisionTransformer', arch=dict(SMALL_ARCH, num_heads=4), img_size=16, patch_size=4, in_channels=1)
KINDS = dict(  # what they begin with, heads that go, other settings, and what is said
    CMHSA=(  # both, one after the other
        'cmhsa3_digits',
        dict(epochs=[3], keep=11, num_batches=1),
        {'model.backbone.attn_bias_init': 40.0},
        'Transition at epoch 2:\nlayer          before      after',
    ),
    CNN=(  # norms of fixed statistics: those of a batch are another rank's too
        'resnet18_to_attention_digits',
        None,
        {'model.backbone.backbone.norm_eval': True},
        'Transition at epoch 2:\nlayer           before      after',
    ),
    SAGeneralized=(
        'sa_generalized_digits',
        dict(epochs=[2], num_batches=1),
        {},
        "Removed heads {'backbone.blocks.0.attn': [1], 'backbone.blocks.1.attn': [2]}",
    ),
    VisionTransformer=(
        'sa_quadratic_digits',
        dict(epochs=[2], num_batches=2, criteria=['duplicate'], multiply_adds=0.9),
        {'model.backbone': dict(VIT, _delete_=True)},
        "Removed heads {'backbone.layers.",
    ),
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    """The configs, and a checkpoint with two degenerate heads."""
    folder = tmp_path_factory.mktemp('tools')
    for kind, (base, pruning, changes, _) in KINDS.items():
        write_configs(folder, kind, base, pruning, **changes, **{'train_cfg.max_epochs': EPOCHS})
    save_degenerate(folder / 'start.pth')
    return folder


def options_of(kind, folder):
    options = ['randomness.seed=0', *([f'load_from={folder}/start.pth'] if kind == 'SAGeneralized' else [])]
    return ['--cfg-options', *options]


@pytest.fixture(scope='module')
def whole_of(folder):
    """Runs that are never stopped, by their kind."""
    made = {}

    def whole_of(kind):
        if kind not in made:
            made[kind] = folder / f'{kind}_whole'
            assert KINDS[kind][-1] in train(folder / f'{kind}8.py', made[kind], *options_of(kind, folder))
        return made[kind]

    return whole_of


def assert_as_one_process(two, whole):
    # Their sums have another order: 2e-7 apart at most, with the kernels of AVX-512 and those of any CPU.
    for rank in (0, 1):
        assert_equal(two, two, rank, tolerance=0)
        assert_equal(two, whole, rank, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('kind', list(KINDS))
def test_two_processes(kind, whole_of, folder):
    """Equal weights on both ranks, those of one process with the same batches; also if the ranks are killed and resume.

    Each rank has a seed of its own, and the first one that of the process. One rank is killed after the change, in its
    epoch, so that it is made again, or in the next one.
    """
    config, two = folder / f'{kind}4.py', folder / f'{kind}_two'
    options = [*options_of(kind, folder), 'randomness.diff_rank_seed=True', 'train_dataloader.sampler.seed=0']
    log = train_on_ranks(config, two, *options)
    assert 'GPU number: 2' in log and 'Epoch(val) [4]' in log and KINDS[kind][-1] in log
    assert 'Removed heads' in log or kind == 'CNN'
    assert_as_one_process(two, whole_of(kind))
    killed, epoch = folder / f'{kind}_killed', 3 if kind in ('CMHSA', 'VisionTransformer') else 2
    train_on_ranks(config, killed, *options, killed_at=epoch * ITERATIONS + 1)
    assert not (killed / 'rank0.pt').exists()
    again = [option for option in options if 'load_from' not in option]
    assert f'resumed epoch: {epoch}' in train_on_ranks(config, killed, '--resume', *again)
    for rank in (0, 1):
        assert_equal(killed, two, rank, tolerance=0)


@pytest.mark.slow
def test_two_processes_compile_both_phases(whole_of, folder):
    options = [*options_of('CMHSA', folder), 'compile.backend=eager']
    log = train_on_ranks(folder / 'CMHSA4.py', folder / 'compiled', *options)
    assert log.count('Model has been "compiled"') == 3  # at the start, at the transition, at the pruning
    for rank in (0, 1):
        assert_equal(folder / 'compiled', whole_of('CMHSA'), rank, tolerance=1e-5)


@pytest.fixture
def modules(folder, monkeypatch):
    """The configs' own imports."""
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop('hooks_of_a_test', None)


@pytest.mark.slow
def test_checkpoints_load_everywhere(whole_of, folder, repository, tmp_path, modules):
    """Those of both phases and pruned ones, with the config that made the run, and nothing said."""
    for kind, epoch in (('CMHSA', SWITCH), ('CMHSA', EPOCHS), ('CNN', EPOCHS), ('SAGeneralized', EPOCHS)):
        config, checkpoint = str(folder / f'{kind}8.py'), str(whole_of(kind) / f'epoch_{epoch}.pth')
        log = run('python', repository / 'tools/test.py', config, checkpoint, '--work-dir', tmp_path, folder=folder)
        assert 'Epoch(test)' in log and 'accuracy/top1' in log and 'do not match' not in log
        model = mmpretrain.get_model(config, pretrained=checkpoint)
        if kind != 'SAGeneralized':
            assert model.backbone.phase == ('conv' if epoch == SWITCH else 'attn')
        saved = torch.load(checkpoint)['state_dict']
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
        image = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
        (result,) = ImageClassificationInferencer(model)([image])
        assert np.isclose(sum(result['pred_scores']), 1)
        size, ours = 16, None
        if kind == 'CMHSA':
            kwargs = dict(img_size=32, patch_size=8, in_chans=1, mlp_dim=256)
            size, ours = 32, small_cmhsa('conv', **kwargs, checkpoint_path=checkpoint)
        elif kind == 'SAGeneralized':
            assert FeatureExtractor(model)([image])[0][-1].shape == (16,)
            ours = small_timm('sa_generalized_cifar', in_chans=1, checkpoint_path=checkpoint)
        x = torch.randn(1, 1, size, size)
        assert ours is None or torch.equal(ours.eval()(x), model(x))


def converter(config, checkpoint, out, *options, folder, **kwargs):
    words = 'convert', '--mm', config, checkpoint, '--out', out, *options
    return run('python', '-m', 'attncnn_plugin', *words, folder=folder, **kwargs)


@pytest.mark.parametrize('kind, size, tolerance', [('CMHSA', 32, 1e-5), ('CNN', 8, 0.02)])
def test_converter(kind, size, tolerance, whole_of, folder, modules):
    """A first-phase checkpoint as one of the second, for either phase's config; the output stays as it was."""
    config, first = folder / f'{kind}8.py', whole_of(kind) / f'epoch_{SWITCH}.pth'
    before, x = mmpretrain.get_model(str(config), str(first)), torch.randn(2, 1, size, size)
    for phase in ('conv', 'attn'):
        out = folder / f'converted/{kind}{phase}.pth'
        out.unlink(missing_ok=True)
        options = ('--cfg-options', f'model.backbone.phase={phase}')
        assert f'Saved {out}' in converter(config, first, out, *options, folder=folder)
        after = mmpretrain.get_model(str(config), str(out))
        assert (before.backbone.phase, after.backbone.phase) == ('conv', 'attn')
        with torch.no_grad():
            assert torch.allclose(before(x), after(x), atol=tolerance * before(x).abs().max().item())
        assert torch.load(out)['meta']['dataset_meta']['classes']
    log = converter(config, out, folder / 'no.pth', folder=folder, expected=2)
    assert log.strip().endswith(f'{config} is of attention already: nothing is left to convert')
    log = converter(folder / 'SAGeneralized8.py', folder / 'start.pth', folder / 'no.pth', folder=folder, expected=2)
    assert 'SAGeneralized8.py has no CMHSA and no ConvToAttention: say which convolutions, --layers' in log
    assert not (folder / 'no.pth').exists()


def test_converter_refuses_a_file_in_one_sentence(folder, tmp_path):
    """Missing, damaged, malicious, no dictionary, of another model."""
    path = tmp_path / 'bad.pth'
    for content, message in (
        (None, 'can not be found'),
        (b'PK\x03\x04 cut', 'is damaged or no checkpoint at all: give a whole file'),
        (Payload(print, 'run'), 'was refused and nothing in it was run: it asks for .*print, but'),
        ([1], 'holds a list, but a checkpoint is a dictionary of weights'),
        ({'state_dict': {}}, 'does not fit the model of .*/CMHSA8.py: .*backbone'),
    ):
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        log = converter(folder / 'CMHSA8.py', path, tmp_path / 'no.pth', folder=folder, expected=2)
        assert 'Traceback' not in log and re.match(f'attncnn convert: {path} {message}', log.strip().splitlines()[-1])
    assert not (tmp_path / 'no.pth').exists()


def pruned(kind, start, options, folder, **kwargs):
    (folder / 'pruned.pth').unlink(missing_ok=True)
    words = 'prune', '--mm', folder / f'{kind}8.py', start, '--out', folder / 'pruned.pth', *options
    return run('python', '-m', 'attncnn_plugin', *words, folder=folder, **kwargs)


def test_pruned_without_a_training(folder):
    log = pruned('SAGeneralized', folder / 'start.pth', ['--criterion', 'degenerate'], folder)
    assert 'multiply-adds per image' in log and f'Saved {folder}/pruned.pth' in log
    before, after = (torch.load(folder / f'{name}.pth')['state_dict'] for name in ('start', 'pruned'))
    for block, kept in enumerate([[0, 2], [0, 1]]):
        name = f'backbone.blocks.{block}.attn.encoding.center'
        assert torch.equal(after[name], before[name][kept])
    model = small_timm('sa_generalized_cifar', in_chans=1, checkpoint_path=str(folder / 'pruned.pth'))
    assert [block.attn.num_heads for block in model.blocks] == [2, 2]


def test_transformer_pruned_without_a_training(whole_of, folder):
    log = pruned('VisionTransformer', whole_of('VisionTransformer') / 'epoch_1.pth', ['--keep', '3'], folder)
    assert 'multiply-adds per image' in log and 'right is what its training labels say' in log
    state = torch.load(folder / 'pruned.pth')['state_dict']
    assert sum(state[f'backbone.layers.{i}.attn.proj.weight'].shape[1] for i in range(2)) == 4 * 3


def test_ranked_by_the_images_of_the_training(whole_of, folder, modules):
    """The accuracy is that of the predictions for these images."""
    checkpoint, out = whole_of('VisionTransformer') / 'epoch_1.pth', folder / 'heads.png'
    words = 'rank', '--mm', folder / 'VisionTransformer8.py', checkpoint, '--num-images', '24', '--out', out
    log = run('python', '-m', 'attncnn_plugin', *words, folder=folder)
    assert log.count('backbone.layers.1.attn') == 4 and 'right is what its training labels say' in log and out.is_file()
    loaded = ConfigModel(words[2], str(checkpoint))
    (batch,), *_ = loaded.batches(None, 24)
    right = sum(sample.pred_label == sample.gt_label for sample in loaded.model.test_step(batch)).item()
    assert right > 0 and f', accuracy {right / 24:.1%}; right is' in log
    assert len(re.findall(r' [+-]\d\.\d{4} +[+-]\d+\.\d%', log)) == 8  # of the heads


def test_a_config_without_hooks_of_the_plugin(whole_of, folder, repository, tmp_path):
    """The tools add what the model and its average need: a test, and a training that keeps on."""
    whole, path = whole_of('VisionTransformer'), tmp_path / 'stock.py'
    hooks = "[dict(type='EMAHook', momentum=0.2)]"
    path.write_text(f"_base_ = '{folder}/VisionTransformer8.py'\ncustom_hooks = {hooks}\n")
    checkpoint = whole / 'epoch_3.pth'
    log = run('python', repository / 'tools/test.py', path, checkpoint, '--work-dir', tmp_path / 'a', folder=folder)
    assert 'accuracy/top1' in log and 'do not match' not in log and 'FollowStateDictHook' in log
    copy = tmp_path / 'b'
    copy.mkdir()
    shutil.copy(checkpoint, copy)
    options = ('--work-dir', copy, '--resume', copy / checkpoint.name)
    log = run('python', repository / 'tools/train.py', path, *options, folder=folder)
    assert 'Saving checkpoint at 4 epochs' in log and 'do not match' not in log
    saved, before = (torch.load(of / 'epoch_4.pth')['state_dict'] for of in (copy, whole))
    assert {name: value.shape for name, value in saved.items()} == {name: value.shape for name, value in before.items()}


RESNET = """
_base_ = '{base}'
model = dict(
    backbone=dict(
        _delete_=True, type='ResNet', depth=18, in_channels=1, stem_channels=4, base_channels=4, strides=(1, 2, 2, 1)
    ),
    head=dict(in_channels=32),
)
train_dataloader = dict(batch_size=8, dataset=dict(indices=8))
test_dataloader = dict(dataset=dict(indices=8))
train_cfg = dict(max_epochs=1)
custom_hooks = []
"""


@pytest.fixture(scope='module')
def resnet(tmp_path_factory, repository):
    """A config of the zoo's ResNet without a hook of the plugin, and a checkpoint of it with attention."""
    folder = tmp_path_factory.mktemp('resnet')
    config, checkpoint = folder / 'config.py', folder / 'attention.pth'
    config.write_text(RESNET.format(base=repository / 'configs/resnet18_to_attention_digits.py'))
    init_default_scope('mmpretrain')
    model = MODELS.build(Config.fromfile(config).model)
    convs_to_attention(model, 'backbone.layer4.*')
    torch.save(dict(state_dict=model.state_dict(), meta={}), checkpoint)
    return config, checkpoint


@pytest.mark.parametrize('options', [[], ['--tta'], ['--cfg-options', 'default_hooks.average.type=EMAHook']])
def test_a_resnet_with_attention(options, resnet, repository, tmp_path):
    log = run('python', repository / 'tools/test.py', *resnet, '--work-dir', tmp_path, *options, folder=tmp_path)
    assert 'accuracy/top1' in log and 'do not match' not in log
    if options:
        return
    tool = repository / 'tools/mmpretrain_tool.py'
    log = run('python', tool, 'analysis_tools/confusion_matrix.py', *resnet, folder=tmp_path)
    assert 'do not match' not in log and 'confusion_matrix' in log
    scale = ('--cfg-options', 'test_dataloader.dataset.pipeline.0.scale=64')
    log = run('python', '-m', 'attncnn_plugin', 'report', '--mm', *resnet, *scale, folder=tmp_path)
    assert 'layer4.1.conv2' in log


def test_no_training_without_its_parameters(resnet, tmp_path):
    """The optimizer of the run was built before the checkpoint was loaded."""
    log = train(resnet[0], tmp_path, '--cfg-options', f'load_from={resnet[1]}', expected=1)
    last = log.strip().splitlines()[-1]
    assert 'the optimizer was built before the model took the structure of the checkpoint' in last
    assert "phase='attn' of CMHSA or of the backbone ConvToAttention" in last


@pytest.mark.slow
def test_the_config_of_two_minutes(repository, tmp_path):
    """As the documentation has it, from the beginning to the end."""
    log = train(repository / 'configs/resnet18_to_attention_digits.py', tmp_path)
    scores = [float(score) for score in re.findall(r'accuracy/top1: ([\d.]+)', log)]
    assert len(scores) == 30 and 'Transition at epoch 15:\n' in log
    assert min(scores[14], scores[-1]) > 97
