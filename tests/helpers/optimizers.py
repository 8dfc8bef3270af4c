"""Optimizers around optimizers, as people write them, and what they hold."""

import functools
import gc
import types

import torch
from torch import nn

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


class Sharpness(torch.optim.Optimizer):
    """As SAM is written: the base optimizer has the same groups, and SAM a state of its own."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))
        self.base_optimizer = ADAMW(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            torch.enable_grad()(closure)()
        for parameter in (p for group in self.param_groups for p in group['params'] if p.grad is not None):
            self.state[parameter]['old_p'] = parameter.clone()
        self.base_optimizer.step()


class OfModel(Sharpness):
    """As GSAM is written, which also holds the model and a schedule."""

    def __init__(self, params, model):
        super().__init__(params)
        self.model, self.schedule = model, torch.optim.lr_scheduler.StepLR(self.base_optimizer, 5)


class Around:
    """No optimizer by its class: one inside, under the name that libraries use."""

    def __init__(self, params, name='optimizer'):
        self.name, self.state = name, {}
        setattr(self, name, ADAMW(params))

    inner = property(lambda self: getattr(self, self.name))
    param_groups = property(lambda self: self.inner.param_groups)

    def zero_grad(self):
        self.inner.zero_grad()

    def step(self):
        self.inner.step()


class SlowByParameter(Around):
    """A Lookahead with slow weights in its state."""

    def step(self):
        self.inner.step()
        for parameter in (p for group in self.param_groups for p in group['params']):
            slow = self.state.setdefault(parameter, dict(slow_buffer=parameter.detach().clone()))['slow_buffer']
            slow.add_(parameter.detach() - slow, alpha=0.5)
            parameter.data.copy_(slow)


class Momenta(Around):
    """A tensor for each parameter, without a dict."""

    def step(self):
        for parameter in (p for group in self.param_groups for p in group['params']):
            momentum = self.state.setdefault(parameter, torch.zeros_like(parameter))
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.data.sub_(momentum, alpha=1e-3)


class Several:
    """Optimizers of some parameters each, in a dict, as of Muon for matrices and AdamW for the rest."""

    def __init__(self, params):
        params = list(params)
        matrices, others = ([p for p in params if (p.ndim > 1) == wanted] for wanted in (True, False))
        self.optimizers = dict(matrices=torch.optim.SGD(matrices, lr=0.1, momentum=0.9), others=[ADAMW(others)])

    @property
    def param_groups(self):
        return [*self.optimizers['matrices'].param_groups, *self.optimizers['others'][0].param_groups]

    def zero_grad(self):
        self.optimizers['matrices'].zero_grad()
        self.optimizers['others'][0].zero_grad()

    def step(self):
        self.optimizers['matrices'].step()
        self.optimizers['others'][0].step()


class SlowInLists(Around):
    """A Lookahead with slow weights in lists of its own."""

    def __init__(self, params):
        super().__init__(params)
        self.slow_weights = [[p.detach().clone() for p in group['params']] for group in self.param_groups]


class Halves(Around):
    """As Apex's FP16_Optimizer: the optimizer trains copies of the parameters, which are in lists of their own."""

    def __init__(self, params):
        self.fp16_groups = [list(params)]
        super().__init__([nn.Parameter(parameter.detach().clone()) for parameter in self.fp16_groups[0]])

    def step(self):
        for parameter, master in zip(self.fp16_groups[0], self.param_groups[0]['params']):
            master.grad = parameter.grad
        self.inner.step()
        for parameter, master in zip(self.fp16_groups[0], self.param_groups[0]['params']):
            parameter.data.copy_(master)


class Flat(Around):
    """All entries in one tensor, which the parameters are parts of."""

    def __init__(self, params):
        params = list(params)
        flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in params]))
        for parameter, part in zip(params, flat.data.split([parameter.numel() for parameter in params])):
            parameter.data = part.view_as(parameter)
        super().__init__([flat])


class FlatMomenta(Around):
    """Momenta in one tensor."""

    def __init__(self, params):
        super().__init__(params)
        self.momenta = torch.zeros(sum(p.numel() for p in self.param_groups[0]['params']))


class Squares(torch.optim.SGD):
    """A preconditioner as Shampoo's, which has a square weight's shape by chance."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]['params']:
            self.state[parameter]['precond_0'] = torch.eye(len(parameter))


class Lists(torch.optim.SGD):
    """With a list of tensors as its state, as timm's Kron."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]['params']:
            self.state[parameter]['Q'] = [torch.eye(n) for n in parameter.shape]


class Objects(torch.optim.SGD):
    """With an object as its state."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]['params']:
            self.state[parameter] = types.SimpleNamespace(average=torch.zeros_like(parameter))


def hooked(params):
    """With a hook that knows a parameter."""
    params = list(params)
    optimizer = ADAMW(params)
    optimizer.register_step_post_hook(lambda *args: params[0].numel())
    return optimizer


def ranked(params):
    """With a table of the ranks that parameters are on."""
    optimizer = ADAMW(params)
    optimizer.ranks = {parameter: 0 for group in optimizer.param_groups for parameter in group['params']}
    return optimizer


def reachable(root):
    """All objects that one holds, by Python's own account of it; not through modules, classes and global names."""
    seen, left = {}, [root]
    while left:
        own = left.pop()
        if id(own) in seen or isinstance(own, (nn.Module, type, types.ModuleType, types.FrameType)):
            continue
        seen[id(own)] = own
        if isinstance(own, types.FunctionType):
            left += [own.__closure__, own.__defaults__]
        elif not isinstance(own, torch.Tensor):
            getattr(own, '__dict__', None)  # which Python makes when it is asked for
            left += gc.get_referents(own)
    return seen
