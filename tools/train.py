#!/usr/bin/env python
"""mmpretrain's own tools/train.py with the plugin and its safe loading imported: --help lists its options."""

import attncnn_plugin.mm.safe_loading  # noqa: F401
from attncnn_plugin.utils.frameworks import run_mmpretrain_tool

if __name__ == '__main__':
    run_mmpretrain_tool('train.py')
