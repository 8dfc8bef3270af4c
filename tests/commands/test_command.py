"""The command itself: what it imports and when, and that its choices are those of the package."""

import subprocess
import sys

import pytest
from helpers.processes import environment, run

import attncnn
from attncnn_plugin.transformers.start import METHODS, SHIFTS

HELP = """
import sys, attncnn
try:
    attncnn.main([{words}])
except SystemExit as end:
    assert end.code == 0
assert not {{'torch', 'timm', 'numpy', 'attncnn_plugin'}} & set(sys.modules)
"""


@pytest.mark.parametrize('words', ["'--help'", "'prune', '--help'"])
def test_help_needs_no_pytorch(words, tmp_path):
    said = run(sys.executable, '-c', HELP.format(words=words), folder=tmp_path)
    assert said.startswith('usage: attncnn ') and max(map(len, said.splitlines())) <= 120


def test_choices():
    assert (tuple(METHODS), tuple(SHIFTS)) == (attncnn.METHODS, attncnn.SHIFTS)


def test_every_verb_has_a_module_and_an_example():
    assert attncnn.VERBS.keys() == attncnn.EXAMPLES.keys()
    for verb, words in attncnn.EXAMPLES.items():
        assert attncnn.parse_args([verb, *words.replace("'", '').split()]).verb == verb


@pytest.mark.slow
def test_only_mm_imports_mmpretrain(tmp_path):
    """And nothing is said beside the lines of the verb."""
    code = 'import sys, attncnn; attncnn.main(sys.argv[1:]); assert not {"mmengine", "mmpretrain"} & set(sys.modules)'
    words = ['plot', '--timm', 'sa_quadratic_small', '--pretrained', '--figure', 'heads', '--images']
    image = attncnn.__file__.replace('attncnn.py', 'attncnn_plugin/weights/images/frog.png')
    command = [sys.executable, '-W', 'default', '-c', code, *words, image]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, '') and (tmp_path / 'heads.png').is_file()
    said = run(sys.executable, '-m', 'attncnn_plugin', 'report', '--help', folder=tmp_path)
    assert said.endswith('for instance: attncnn report --hf FOLDER --images photos\n')
