# Not in the paper: the same heads removed, their mean outputs added to the biases of their layers.
_base_ = './sa_generalized_pruned.py'

custom_hooks = [dict(type='HeadPruningHook', epochs=[0])]
