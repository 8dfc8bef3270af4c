"""The tool that draws figures."""

from functools import partial

import mmcv
import numpy as np
import pytest
import torch
from helpers.digits import small_config
from helpers.logs import accuracy, write_log
from mmpretrain import get_model

from attncnn_plugin import visualization
from attncnn_plugin.analysis import mean_attention

QUADRATIC = ['quadratic.py', 'quadratic.pth', '--figure']


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory, repository):
    folder = tmp_path_factory.mktemp('checkpoints')
    for kind in ('quadratic', 'learned_content'):
        torch.manual_seed(0)
        small_config(repository, folder, f'sa_{kind}_digits').dump(str(folder / f'{kind}.py'))
        torch.save(get_model(str(folder / f'{kind}.py')).state_dict(), folder / f'{kind}.pth')
    center = 'attention/blocks.0.attn/head0/center'
    write_log(
        folder / 'run',
        '1',
        [
            *accuracy(10.0, 20.0),
            *({'step': step, 'cross_entropy/mean': loss} for step, loss in ((1, 2.5), (2, 1.5))),
            *({'step': step, f'{center}_row': 1.0, f'{center}_column': step} for step in range(3)),
        ],
    )
    mmcv.imwrite(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8), str(folder / 'image.png'))
    return folder


@pytest.fixture
def tool(tool):
    return partial(tool, 'visualization/plot_attention.py')


@pytest.mark.parametrize(
    'kind, options',
    [
        ('quadratic', ['--figure', 'probabilities', '--query', 1, 5, '--zoom', 3]),
        ('quadratic', ['--figure', 'probabilities', '--zoom', 0]),
        ('learned_content', ['--figure', 'centers', '--num-images', 5]),
        ('learned_content', ['--figure', 'content', '--image', 7, '--query', 4, 2]),
        (None, ['--figure', 'movement', '--runs', 'run']),
        (None, ['--figure', 'accuracy', '--runs', 'run', 'again=run', '--offsets', 'again=2']),
    ],
)
def test_figures_of_the_tool(checkpoints, tool, monkeypatch, kind, options):
    monkeypatch.chdir(checkpoints)
    model = [] if kind is None else [f'{kind}.py', f'{kind}.pth']
    (checkpoints / 'a.png').unlink(missing_ok=True)
    tool(*model, *options, '--out', 'a.png')
    assert mmcv.imread('a.png').std() > 10


def test_curves_that_the_tool_draws(checkpoints, tool, monkeypatch):
    drawn = []
    monkeypatch.setattr(visualization, 'plot_metric', lambda *args: drawn.append(args))
    monkeypatch.setattr(visualization, 'save_figure', lambda figure, path: None)
    runs = ['--runs', 'a=x', 'b=c=y', '--out', 'a.png']
    tool('--figure', 'accuracy', *runs, '--offsets', 'b=300')
    tool('--figure', 'loss', *runs)
    tool('--figure', 'loss', *runs, '--metric', 'loss')
    labelled = {'a': 'x', 'b': 'c=y'}
    assert drawn == [
        (labelled, 'accuracy/top1', {'b': 300.0}),
        (labelled, 'cross_entropy/mean', {}),
        (labelled, 'loss', {}),
    ]


def test_what_the_tool_draws(checkpoints, tool, monkeypatch):
    """The image that was named, and its attention."""
    drawn = {}
    monkeypatch.setattr(
        visualization, 'plot_attention_probs', lambda *args, **options: drawn.update(options, args=args)
    )
    monkeypatch.setattr(visualization, 'save_figure', lambda figure, path: None)
    monkeypatch.chdir(checkpoints)
    options = ['--figure', 'content', '--image', 'image.png', '--query', 4, 2, '--out', 'a.png']
    tool('learned_content.py', 'learned_content.pth', *options)
    maps, query = drawn['args']
    assert (query, drawn['zoom'], drawn['numbers']) == ([4, 2], None, None)
    grey = mmcv.imread('image.png', flag='grayscale')
    assert np.array_equal(drawn['image'], np.repeat(grey[..., None], 3, axis=2))
    model = get_model('learned_content.py', pretrained='learned_content.pth')
    tensor = (torch.from_numpy(grey)[None, None].float() - 77.9) / 95.9
    for name, expected in mean_attention(model, tensor).items():
        assert torch.allclose(maps[name].probs, expected.probs, atol=1e-5)


@pytest.mark.parametrize(
    'options, message',
    [
        (['--figure', 'centers'], 'a config and a checkpoint are needed, or --timm'),
        (['--figure', 'movement', '--runs', 'a', 'b'], 'one training'),
        (['--figure', 'accuracy', '--runs', 'x', '--out', 'a.pdf'], 'must end in .png or .svg'),
        (['a.py', 'a.pth', '--figure', 'content', '--num-images', '0'], '--num-images 0 must be at'),
        ([*QUADRATIC, 'content'], '--figure probabilities draws it'),
        ([*QUADRATIC, 'probabilities', '--query', '8', '0'], 'query=(8, 0) must be a row from 0 to 7'),
        (['learned_content.py', 'learned_content.pth', '--figure', 'content', '--size', '4', '4'], '--size is for'),
        ([*QUADRATIC, 'centers', '--image', '3'], '--image is for attention that depends'),
        (['--figure', 'accuracy', '--runs', 'run', 'run'], 'the same name'),
        (['--figure', 'accuracy', '--runs', 'run', '--offsets', 'run'], 'run must be LABEL=EPOCH'),
    ],
)
def test_what_the_tool_cannot_draw(checkpoints, tool, monkeypatch, capsys, options, message):
    monkeypatch.chdir(checkpoints)
    with pytest.raises(SystemExit) as end:
        tool('--out', 'none.png', *options)
    assert message in f'{end.value} {capsys.readouterr().err}'
    assert not (checkpoints / 'none.png').exists()
