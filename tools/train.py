#!/usr/bin/env python
"""mmpretrain's own tools/train.py with the plugin and its safe loading imported: --help lists its options."""

from attncnn_plugin.mm.tools import run_mmpretrain_tool

if __name__ == '__main__':
    run_mmpretrain_tool('train.py')
