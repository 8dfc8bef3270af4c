"""Python processes that begin with the plugin already imported.

A short process spends most of its time importing PyTorch and mmpretrain. A server imports them once and forks a child
for each command. The executable ``python`` that ``start`` writes stands in front of a child: it takes the arguments of
Python, passes its input, output, environment and signals on, and ends as the child ends. A child that wants to know
who started it finds that process in the variable ``PARENT``.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Dict, List

# What the tools import, at once or later on.
IMPORTED = ['attncnn_plugin', 'mmpretrain.apis', 'sklearn.datasets', 'matplotlib.pyplot', 'torch.distributed.run']

# The executable. It imports little, since it is started for every command.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
request = dict(arguments=sys.argv[1:], directory=os.getcwd(), environment=dict(os.environ, PARENT=str(os.getppid())))
socket.send_fds(connection, [b'.'], [0, 1, 2])
connection.sendall(json.dumps(request).encode() + b'\\n')
answers = connection.makefile()
child = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(child, number))
code = os.waitstatus_to_exitcode(int(answers.readline()))
if code < 0:  # ended by a signal: so does this
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def start(folder: Path) -> subprocess.Popen:
    """Starts the server and writes the executable ``folder/python``.

    Args:
        folder (Path): An empty folder, with a short path.

    Returns:
        subprocess.Popen: The server. It ends when its standard input is closed, and so with this process.
    """
    executable = folder / 'python'
    executable.write_text(CLIENT.format(python=sys.executable, address=str(folder / 'socket')))
    executable.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / 'socket'))
        listener.listen(64)
        return subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            env={**os.environ, 'OMP_NUM_THREADS': '1'},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # a Ctrl-C is for the commands, not for the server
        )


def hasten_mmengine() -> None:
    """Spares mmengine what it does again in each of hundreds of short runs, more than half of their time.

    It formats every config that it logs or saves with yapf, asks for the installed packages and reads the 85 files of
    mmpretrain's model index for every base of a config, reads the digits, and collects garbage for every dataset.
    """
    import sklearn.datasets
    from mmengine.config import config, utils
    from mmengine.dataset import base_dataset

    config.FormatCode = lambda text, **settings: (text, True)
    config.is_installed = functools.lru_cache(maxsize=None)(config.is_installed)
    utils.load = functools.lru_cache(maxsize=None)(utils.load)
    sklearn.datasets.load_digits = functools.lru_cache(maxsize=None)(sklearn.datasets.load_digits)
    base_dataset.gc = SimpleNamespace(collect=lambda: None)


def warm_up() -> None:
    """Imports what the tools import, and reads what they read."""
    for name in IMPORTED:
        importlib.import_module(name)
    hasten_mmengine()
    importlib.import_module('sklearn.datasets').load_digits()
    Config = importlib.import_module('mmengine.config').Config
    Config.fromfile(Path(__file__).parents[2] / 'configs/sa_quadratic_digits.py')
    gc.freeze()  # a collection in a child would otherwise copy all that was imported


def serve(listener: socket.socket) -> List[str]:
    """Forks a child for each connection.

    Args:
        listener (socket.socket): To which the executable connects.

    Returns:
        list[str]: In a child: its arguments. The server does not return.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that watch a child
    warm = False
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            os._exit(0)
        connection, _ = listener.accept()
        if not warm:  # with the first command
            warm_up()
            warm = True
        if os.fork() == 0:
            listener.close()
            return fork_child(connection)
        connection.close()


def fork_child(connection: socket.socket) -> List[str]:
    """Forks the child of one command, and watches it.

    Args:
        connection (socket.socket): To the executable.

    Returns:
        list[str]: In the child: its arguments. The watching process does not return.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    child = os.fork()
    if child == 0:
        connection.close()
        become(streams, **request)
        return request['arguments']
    for stream in streams:
        os.close(stream)
    connection.sendall(b'%d\n' % child)
    watched = [connection]
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if watched:
                connection.sendall(b'%d\n' % status)
            os._exit(0)
        if select.select(watched, [], [], 0.01)[0]:  # the executable was killed
            os.kill(child, signal.SIGKILL)
            watched = []


def become(streams: List[int], arguments: List[str], directory: str, environment: Dict[str, str]) -> None:
    """Gives a child the streams, directory and environment of its command, and other random numbers than the last's."""
    import numpy as np

    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if 'WARM_CHILDREN' in environment:  # what it starts with its own interpreter begins warm, too
        sys.executable = environment['PYTHON_EXEC']
    sys.path[1:1] = [path for path in environment.get('PYTHONPATH', '').split(os.pathsep) if path]
    np.random.seed()


def run(arguments: List[str]) -> None:
    """What ``python`` does with its arguments: options, then a script, ``-m`` and a module, or ``-c`` and a program."""
    while arguments[0] == '-u':
        arguments = arguments[1:]
    kind, *rest = arguments
    if kind in ('-c', '-m'):
        sys.argv = [kind, *rest[1:]]
        sys.path[0] = os.getcwd()
        if kind == '-c':
            exec(rest[0], {'__name__': '__main__'})
        else:
            runpy.run_module(rest[0], run_name='__main__', alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name='__main__')


def end(code: int) -> None:
    """Ends a child as the interpreter would, but without clearing all that was imported."""
    threading._shutdown()  # waits for the other threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == '__main__':
    arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        run(arguments)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        end(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException:
        traceback.print_exc()
        end(1)
    end(0)
