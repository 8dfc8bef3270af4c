"""The learning rate at every iteration of a config, the one that papers have, and what has weight decay."""

import copy

import numpy as np
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import PARAM_SCHEDULERS


def phases_of(config):
    """The optimizer, the schedulers and the epochs of each phase of a config."""
    phases = [(config.optim_wrapper, config.param_scheduler, config.train_cfg.max_epochs)]
    for hook in config.get('custom_hooks') or []:
        if hook.type == 'PhaseTransitionHook':
            second = Config(dict(optim_wrapper=copy.deepcopy(config.optim_wrapper)))
            second.merge_from_dict(dict(optim_wrapper=hook.optim_wrapper))
            phases = [
                (*phases[0][:2], hook.epoch),
                (second.optim_wrapper, hook.param_scheduler, phases[0][2] - hook.epoch),
            ]
    return phases


def rates(config, per_epoch):
    """The learning rate at every iteration of all phases, ``(T,)``, by mmengine's own optimizers and schedulers."""
    found = []
    for optim_wrapper, param_scheduler, epochs in phases_of(config):
        optimizer = build_optim_wrapper(torch.nn.Linear(1, 1), copy.deepcopy(optim_wrapper)).optimizer
        schedulers = [
            PARAM_SCHEDULERS.build(dict(cfg), default_args=dict(optimizer=optimizer, epoch_length=per_epoch))
            for cfg in ([param_scheduler] if isinstance(param_scheduler, dict) else param_scheduler)
        ]
        for i in range(epochs * per_epoch):
            found.append(optimizer.param_groups[0]['lr'])
            optimizer.step()
            for scheduler in schedulers:
                if not scheduler.by_epoch or (i + 1) % per_epoch == 0:
                    scheduler.step()
    return np.array(found)


def warm_up_and_cosine(first, peak, least, warm_up, total):
    """From ``first`` up to ``peak`` at iteration ``warm_up - 1``, then down to ``least``, which would be next."""
    linear = first + (peak - first) * np.arange(warm_up) / max(warm_up - 1, 1)
    cosine = (1 + np.cos(np.pi * np.arange(total - warm_up) / (total - warm_up))) / 2
    return np.concatenate([linear, least + (peak - least) * cosine])


def weight_decays(model, optim_wrapper):
    """The weight decay of each parameter that is trained, by its name."""
    groups = build_optim_wrapper(model, copy.deepcopy(optim_wrapper)).optimizer.param_groups
    decays = {id(parameter): group['weight_decay'] for group in groups for parameter in group['params']}
    return {name: decays[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in decays}
