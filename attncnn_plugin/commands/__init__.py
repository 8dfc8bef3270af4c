"""The verbs of the command ``attncnn``, a module for each: ``run(args)`` returns what was done, where it is, what next.

The options are in ``attncnn.py``, beside this package.
"""
