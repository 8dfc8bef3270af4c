#!/usr/bin/env python
"""Runs any of mmpretrain's own tools with the plugin imported, by its path below mmpretrain's tools.

mmpretrain_tool.py visualization/vis_scheduler.py configs/sa_quadratic_cifar10.py --not-show --save-path rates.png
"""

import sys

from attncnn_plugin.mm.tools import run_mmpretrain_tool

if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] in ('-h', '--help'):
        print(__doc__)
    else:
        del sys.argv[0]  # the tool's own arguments are left
        run_mmpretrain_tool(sys.argv[0])
