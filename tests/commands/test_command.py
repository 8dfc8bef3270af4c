"""The command itself: what it imports and when, and that its choices are those of the package."""

import subprocess
import sys

import pytest
from helpers.processes import environment, run

from attncnn_plugin import commands
from attncnn_plugin.transformers.start import METHODS, SHIFTS


@pytest.mark.parametrize('words', [['--help'], ['prune', '--help']])
def test_help(words, command):
    status, said, _ = command(*words)
    assert status == 0 and said.startswith('usage: attncnn ') and max(map(len, said.splitlines())) <= 120


def test_choices():
    assert (tuple(METHODS), tuple(SHIFTS)) == (commands.METHODS, commands.SHIFTS)


def test_every_verb_has_a_module_and_an_example():
    assert commands.VERBS.keys() == commands.EXAMPLES.keys()
    for verb, words in commands.EXAMPLES.items():
        assert commands.parse_args([verb, *words.replace("'", '').split()]).verb == verb


@pytest.mark.slow
def test_nothing_is_said_beside_the_lines_of_the_verb(repository, tmp_path):
    words = ['plot', '--timm', 'sa_quadratic_small', '--pretrained', '--figure', 'heads', '--images']
    image = repository / 'attncnn_plugin/weights/images/frog.png'
    command = [sys.executable, '-W', 'default', '-m', 'attncnn_plugin', *words, image]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, '') and (tmp_path / 'heads.png').is_file()
    said = run(sys.executable, '-m', 'attncnn_plugin', 'report', '--help', folder=tmp_path)
    assert said.endswith('for instance: attncnn report --hf FOLDER --images photos\n')


@pytest.mark.slow
@pytest.mark.parametrize('encoding', ['utf-8', 'latin-1'])
def test_nobody_reads_what_is_said(encoding, tmp_path):
    """Or cannot read all of it: the file is written, and nothing else is said."""
    words = ['convert', '--timm', 'resnet18', '--layers', 'layer4.1.conv2', '--out', 'new.pth']
    variables = environment(tmp_path, PYTHONIOENCODING=encoding)
    process = subprocess.Popen(
        [sys.executable, '-m', 'attncnn_plugin', *words],
        **dict(cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE),
    )
    if encoding == 'utf-8':
        process.stdout.close()
    else:
        assert b'Layers that are attention now: 1' in process.stdout.read()
    said = process.stderr.read().decode()
    assert (process.wait(), said) == (0, 'The weights of resnet18 are random: give --pretrained or --checkpoint\n')
    assert (tmp_path / 'new.pth').is_file()
