"""The tool that trains with each of some learning rates."""

import runpy
import subprocess
import sys

import pytest
from helpers.logs import accuracy, write_log
from helpers.processes import run
from mmengine.config import Config


@pytest.fixture
def tool(repository, monkeypatch, tmp_path):
    """Runs the tool in this process, without its trainings; gives their commands and the exit status."""
    monkeypatch.chdir(tmp_path)

    def run_tool(*options, trained=lambda command: None):
        path, commands = repository / 'tools/learning_rates.py', []

        def training(command):
            commands.append(command)
            trained(command)
            return subprocess.CompletedProcess(command, 0)

        monkeypatch.setattr(subprocess, 'run', training)
        monkeypatch.setattr(sys, 'argv', [str(path), *map(str, options)])
        try:
            runpy.run_path(str(path), run_name='__main__')
        except SystemExit as error:
            return commands, error.code
        return commands, 0

    return run_tool


def settings_of(command):
    options = command[command.index('--cfg-options') + 1 :]
    return dict(option.split('=', 1) for option in options)


@pytest.mark.parametrize('name, second', [('cmhsa5_cifar100', True), ('cmhsa5_nowarmup_cifar100', False)])
def test_the_grid_of_the_paper(name, second, tool, repository, capsys):
    """Every first rate with every second one, as the framework reads them; warm-ups begin at 1e-6, DeiT's."""
    path = repository / f'configs/{name}.py'
    commands, status = tool(path, '--lr', 1e-4, 5e-4, '--second-lr', 1e-5, 7e-5, '--gpus', 4, '--amp')
    assert status == 1 and len(commands) == 4  # nothing was trained
    assert capsys.readouterr().out.count('stopped before the first validation') == 4
    found = set()
    for command in commands:
        assert command[:4] == ['bash', str(repository / 'tools/dist_train.sh'), str(path), '4']
        assert '--amp' in command and '--resume' in command
        config = Config.fromfile(path)
        config.merge_from_dict({key: float(value) for key, value in settings_of(command).items()})
        hook = config.custom_hooks[0]
        rates = [phase.optim_wrapper.optimizer.lr for phase in (config, hook)]
        found.add((*rates, command[command.index('--work-dir') + 1]))
        for phase, rate in zip([config, hook] if second else [config], rates):
            assert phase.param_scheduler[0].start_factor * rate == pytest.approx(1e-6, rel=1e-12)
        assert second or hook.param_scheduler.type == 'CosineAnnealingLR'
    folder = f'work_dirs/{name}_learning_rates'
    assert found == {(a, b, f'{folder}/{a:g}_{b:g}') for a in (1e-4, 5e-4) for b in (1e-5, 7e-5)}


def test_what_is_finished_is_left_alone(tool, repository, tmp_path, capsys):
    path = repository / 'configs/sa_quadratic_digits.py'
    write_log(tmp_path / 'out/0.001', '1', accuracy(50.0, 70.0, 60.0))
    write_log(tmp_path / 'out/0.01', '1', accuracy(55.0))
    options = [path, '--lr', 0.001, 0.01, '--work-dir', 'out', '--cfg-options', 'train_cfg.max_epochs=3']
    commands, status = tool(*options)
    assert [settings_of(command) for command in commands] == [
        {
            'train_cfg.max_epochs': '3',
            'optim_wrapper.optimizer.lr': '0.01',
            'param_scheduler.0.start_factor': str(1e-6 * 3e-3 / 0.01),
        }
    ]
    assert commands[0][:3] == [sys.executable, str(repository / 'tools/train.py'), str(path)]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert status == 1 and rows == [
        ['rate', 'last,', '%', 'best,', '%'],
        ['0.001', '60.00', '70.00'],
        ['0.01', '55.00', '55.00', 'stopped', 'after', 'epoch', '1', 'of', '3'],
    ]
    commands, status = tool(
        *options, trained=lambda _: write_log(tmp_path / 'out/0.01', '2', accuracy(65.0, 75.0, first=2))
    )
    assert len(commands) == 1 and status == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ['0.01', '75.00', '75.00']
    assert tool(*options) == ([], 0)


def test_a_second_rate_without_a_second_phase(tool, repository):
    commands, message = tool(repository / 'configs/sa_quadratic_digits.py', '--lr', 0.1, '--second-lr', 0.1)
    assert not commands and '--second-lr is for configs with a PhaseTransitionHook' in message


@pytest.mark.slow
def test_two_rates_on_the_digits(repository, tmp_path):
    """Trained, then left alone, then resumed for one more epoch."""

    def grid(epochs):
        command = [sys.executable, repository / 'tools/learning_rates.py', repository / 'configs/cmhsa3_digits.py']
        options = [f'train_cfg.max_epochs={epochs}', 'train_dataloader.dataset.indices=100']
        options += ['custom_hooks.0.epoch=1', 'custom_hooks.0.param_scheduler=None']
        rates = ['--lr', '2e-3', '--second-lr', '5e-4', '1e-5', '--work-dir', tmp_path]
        return run(*command, *rates, '--cfg-options', *options, folder=tmp_path)

    output = grid(1)
    assert 'Epoch(val) [1]' in output and 'stopped' not in output
    assert [line.split()[:2] for line in output.splitlines()[-2:]] == [['0.002', '0.0005'], ['0.002', '1e-05']]
    assert 'Epoch' not in grid(1)
    output = grid(2)
    assert 'resumed epoch: 1' in output and 'Epoch(val) [2]' in output and 'Epoch(val) [1]' not in output
    assert 'Transition at epoch 1' in output
