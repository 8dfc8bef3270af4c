"""The command ``attncnn``, as ``python -m attncnn_plugin``."""

from .commands import main

if __name__ == '__main__':
    main()
