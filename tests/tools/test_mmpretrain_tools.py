"""mmpretrain's own tools on a config of each family; docs/mmpretrain.md says what works."""

import inspect
import pickle
import re
import runpy
import sys
from types import SimpleNamespace

import matplotlib.pyplot as plt
import mmpretrain
import numpy as np
import pytest
import torch
from helpers.flops import paper_flops
from helpers.images import write_images
from helpers.processes import forget_runs, rates
from helpers.small_configs import small_config
from matplotlib import _tight_bbox
from mmpretrain.utils import load_json_log

EPOCHS, ITERATIONS = 2, 2  # epochs, iterations of an epoch
# At a relative entropy above 0 every head is degenerate: all but one a layer are pruned.
PRUNING = dict(type='HeadPruningHook', epochs=[1], criteria=[dict(type='entropy', threshold=0.0)])
QUICK = ('cmhsa3_digits', 'sa_generalized_pruned_digits')  # whose rates the hooks of this package change
FAMILIES = (*QUICK, 'deit_small_cifar100')  # of images of 32 and of 16 pixels, and those in a folder
PARAMETERS = [*QUICK, pytest.param(FAMILIES[-1], marks=pytest.mark.slow)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory, repository):
    """A small config of each family, and images."""
    folder = tmp_path_factory.mktemp('families')
    write_images(folder / 'images')
    for name in FAMILIES:
        config = small_config(repository / f'configs/{name}.py', folder / 'images', folder / name)
        if 'pruned' in name:
            config.custom_hooks = [PRUNING]
        if name == 'deit_small_cifar100':  # there are images of ten classes
            config.model.head.num_classes = config.data_preprocessor.num_classes = 10
        config.dump(folder / f'{name}.py')
    return folder


@pytest.fixture(scope='module')
def call(repository, folder):
    """Runs a tool in this process: mmpretrain's by their paths, from the folder of the configs."""

    def call(name, *arguments):
        path = str(repository / 'tools' / name)
        if not (repository / 'tools' / name).exists():
            path, arguments = str(repository / 'tools/mmpretrain_tool.py'), (name, *arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, 'argv', [path, *map(str, arguments)])
            patch.chdir(folder)
            forget_runs()
            runpy.run_path(path, run_name='__main__')

    yield call
    plt.close('all')


@pytest.fixture(scope='module', params=PARAMETERS)
def trained(request, folder, call):
    """A family after a training with tools/train.py: its config, its last checkpoint, the file of its log."""
    name = request.param
    config, work_dir = folder / f'{name}.py', folder / name
    call('train.py', config, '--work-dir', work_dir)
    (log,) = (path for path in work_dir.glob('*/vis_data/*.json') if path.name[0].isdigit())
    return SimpleNamespace(
        name=name, config=config, work_dir=work_dir, checkpoint=work_dir / f'epoch_{EPOCHS}.pth', log=log
    )


def numbers(text, key):
    """The values that a tool prints, such as ``'accuracy/top1': 12.5``."""
    return [float(value) for value in re.findall(re.escape(key) + r"'?: ([0-9.]+)", text)]


def test_vis_scheduler(trained, call):
    """The rates of the training, of its first phase where there are two: the tool trains no model."""
    out = trained.work_dir / 'rates.png'
    no_hooks = ('--cfg-options', 'custom_hooks=[]') if trained.name in QUICK else ()
    call('visualization/vis_scheduler.py', trained.config, '--not-show', '--save-path', out, *no_hooks)
    expected, shown = list(rates(trained.work_dir).values()), plt.gca().lines[0].get_ydata()
    assert len(expected) == len(shown) == EPOCHS * ITERATIONS and len(set(expected)) > ITERATIONS
    first = ITERATIONS if trained.name == 'cmhsa3_digits' else None
    assert np.allclose(shown[:first], expected[:first], rtol=1e-6, atol=0)
    assert out.stat().st_size


@pytest.mark.slow
def test_testing(trained, call, capsys):
    """test.py, eval_metric.py and confusion_matrix.py agree with the last validation; analyze_logs.py reads the log."""
    expected = load_json_log(trained.log)['val'][-1]['accuracy/top1']
    results, matrix = trained.work_dir / 'results.pkl', trained.work_dir / 'matrix.pkl'
    options = ['--work-dir', trained.work_dir / 'test', '--out', results, '--out-item', 'pred']
    call('test.py', trained.config, trained.checkpoint, *options)
    (log,) = trained.work_dir.glob('test/*/2*.json')
    assert load_json_log(log)['val'][0]['accuracy/top1'] == pytest.approx(expected, abs=1e-3)
    capsys.readouterr()
    call('analysis_tools/eval_metric.py', results, '--metric', 'type=Accuracy', 'topk=1,5')
    assert numbers(capsys.readouterr().out, 'accuracy/top1') == pytest.approx([expected], abs=1e-3)
    for source in (results, trained.checkpoint):
        picture = trained.work_dir / 'matrix.png'
        call('analysis_tools/confusion_matrix.py', trained.config, source, '--out', matrix, '--show-path', picture)
        counts = pickle.loads(matrix.read_bytes())
        assert counts.sum() == 20 and 100 * counts.trace() / counts.sum() == pytest.approx(expected, abs=1e-3)
        assert picture.stat().st_size
    call('analysis_tools/analyze_logs.py', 'cal_train_time', trained.log)
    assert 'average iter time' in capsys.readouterr().out
    out = trained.work_dir / 'curves.png'
    plt.close('all')
    call('analysis_tools/analyze_logs.py', 'plot_curve', trained.log, '--keys', 'accuracy/top1', 'loss', '--out', out)
    assert out.stat().st_size


@pytest.mark.slow
def test_publish_and_reparameterize(trained, call):
    call('model_converters/publish_model.py', trained.checkpoint, trained.work_dir / 'published.pth')
    (published,) = trained.work_dir.glob('published*.pth')
    assert torch.load(published).keys() == {'meta', 'state_dict'}
    expected = torch.load(trained.checkpoint)['state_dict']
    model = mmpretrain.get_model(str(trained.config), pretrained=str(published))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    with pytest.raises(SystemExit, match='switch_to_deploy'):  # mmpretrain's own tool: there is nothing to merge
        call('model_converters/reparameterize_model.py', trained.config, trained.checkpoint, 'deployed.pth')


@pytest.mark.parametrize('name', PARAMETERS)
def test_browse_dataset(name, call, folder):
    modes = ['original']
    if 'renderer' not in inspect.signature(_tight_bbox.adjust_bbox).parameters:  # the tool gives none
        modes += ['transformed', 'concat', 'pipeline']
    for mode in modes:
        out = folder / f'browsed/{name}/{mode}'
        options = ['--output-dir', out, '--not-show', '--show-number', 2, '--mode', mode, '--channel-order', 'RGB']
        call('visualization/browse_dataset.py', f'{name}.py', *options)
        assert len(list(out.iterdir())) == 2


@pytest.mark.parametrize('name', PARAMETERS)
def test_get_flops(name, call, folder, capsys):
    """All linear layers and convolutions are counted; the tool has images of three channels alone."""
    path = folder / f'{name}_colour.py'
    path.write_text(f"_base_ = './{name}.py'\nmodel = dict(backbone=dict(in_channels=3))\n")
    backbone = mmpretrain.get_model(str(path)).backbone
    size, _ = getattr(backbone, 'img_size', (32, 32))
    expected = paper_flops(torch.nn.Sequential(backbone), torch.zeros(1, 3, size, size)) / 2
    call('analysis_tools/get_flops.py', path, '--shape', size)
    number, unit = re.search(r'Flops: ([0-9.]+)([KMG])', capsys.readouterr().out).groups()
    assert float(number) * dict(K=1e3, M=1e6, G=1e9)[unit] >= 0.999 * expected > 0


def test_no_such_tool(call):
    with pytest.raises(SystemExit, match='No such file or directory: .*tools/analysis_tools/get_flop.py'):
        call('analysis_tools/get_flop.py')
