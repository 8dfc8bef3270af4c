#!/usr/bin/env python
"""mmpretrain's own tools/train.py with the plugin imported: its options are listed by --help."""

import attncnn_plugin  # noqa: F401
from attncnn_plugin.utils.frameworks import run_mmpretrain_tool

if __name__ == '__main__':
    run_mmpretrain_tool('train.py')
