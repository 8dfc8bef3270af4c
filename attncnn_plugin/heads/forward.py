"""Forward passes of modules with fewer heads than their own can do with.

Many ask for views with as many channels as a token has, which the heads that are left no longer fill. Their own forward
pass, from its source, does with whatever size is left there. That of ``nn.MultiheadAttention``, a function of PyTorch
that checks its sizes, is written anew.
"""

import ast
import contextlib
import functools
import inspect
import textwrap
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VIEWS = 'reshape', 'view'


class _Sizes(ast.NodeTransformer):
    """Rewrites views to take what is left as their last size, and divisions to divide by the first number of heads.

    Methods of the class that the function calls, and functions of its module, are the rewritten ones too.
    """

    def __init__(self, cls: type, built: int, namespace: Dict[str, Any]) -> None:
        self.cls, self.built, self.namespace = cls, built, namespace
        self.called: Dict[str, Any] = {}  # rewritten, by name
        self.found = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name):
            self._rewrite(self.namespace.get(node.func.id), node.func.id)
        if not isinstance(node.func, ast.Attribute):
            return node
        name = node.func.attr
        new, of_self = f'{self.cls.__name__}.{name}', getattr(node.func.value, 'id', '') == 'self'
        if of_self and self._rewrite(vars(self.cls).get(name), new):
            return ast.Call(ast.Name(new, ast.Load()), [node.func.value, *node.args], node.keywords)
        sizes: Any = node.args
        if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
            sizes = sizes[0].elts
        is_known = any(isinstance(own, (ast.UnaryOp, ast.Starred)) for own in sizes)
        last = getattr(sizes[-1], 'attr', getattr(sizes[-1], 'id', '')) if sizes else ''
        is_known |= not sizes or isinstance(sizes[-1], ast.Constant) or 'head' in last and 'all' not in last
        if name in VIEWS and len(sizes) > 1 and not is_known:
            sizes[-1], self.found = ast.UnaryOp(ast.USub(), ast.Constant(1)), True
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        divisor = getattr(node.right, 'attr', getattr(node.right, 'id', ''))
        if isinstance(node.op, ast.FloorDiv) and 'heads' in divisor:
            node.right, self.found = ast.Constant(self.built), True
        return node

    def _rewrite(self, function: Any, name: str) -> bool:
        """Rewrites a function of the module, by the name it gets; says whether there was something to do."""
        if not inspect.isfunction(function) or function.__module__ != self.cls.__module__:
            return False
        with contextlib.suppress(TypeError):
            self.called[name] = rewritten(function, self.cls, self.built)
            self.found = True
            return True
        return False


def rewritten(function: Callable[..., Any], cls: type, built: int) -> Callable[..., Any]:
    """Returns a function of the same source for any number of heads, where it was written for some number ``built``.

    Raises:
        TypeError: There is no source, nothing in it that depends on the number, or it is a closure.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError) as error:
        raise TypeError(f'{function.__qualname__} has no source') from error
    sizes = _Sizes(cls, built, function.__globals__)
    tree = sizes.visit(tree)
    if function.__closure__ or not sizes.found:
        raise TypeError(f'{function.__qualname__} has no size that depends on heads, or is a closure')
    outer: Any = ast.parse('def outer(): pass')  # whose arguments are what is rewritten; all else stays in its module
    outer.body[0].args.args = [ast.arg(name) for name in sizes.called]
    outer.body[0].body = [*tree.body, ast.Return(ast.Name(function.__name__, ast.Load()))]
    made: Dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(outer), inspect.getfile(function), 'exec')
    exec(code, function.__globals__, made)
    return made['outer'](*sizes.called.values())


_cached = functools.cache(rewritten)


class RewrittenForward:
    """The forward pass of a module that was built with more heads; copies and pickles are those of the module's class.

    Raises:
        TypeError: It cannot be rewritten.
    """

    def __init__(self, module: Any, built: int) -> None:
        self.module, self.built, own = module, built, type(module).forward
        is_of_torch = own is nn.MultiheadAttention.forward
        self.function = forward_of_torch if is_of_torch else _cached(own, type(module), built)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the output of the module."""
        return self.function(self.module, *args, **kwargs)

    def __reduce__(self) -> Any:
        return type(self), (self.module, self.built)


def forward_of_torch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Optional[Tensor] = None,
    need_weights: bool = True,
    attn_mask: Optional[Tensor] = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Computes ``nn.MultiheadAttention`` with any number of heads."""
    given: Dict[str, Any] = dict(
        need_weights=need_weights, attn_mask=attn_mask, average_attn_weights=average_attn_weights
    )
    if query.is_nested:  # nn.TransformerEncoder has cut padding off
        rows = [forward_of_torch(module, *own, **given)[0] for own in zip(*(x.unbind() for x in (query, key, value)))]
        return torch.nested.as_nested_tensor(rows), None
    if query.ndim == 2:  # no batch
        dim = 0 if module.batch_first else 1
        padding = None if key_padding_mask is None else key_padding_mask[None]
        batch = (own.unsqueeze(dim) for own in (query, key, value))
        output, weights = forward_of_torch(module, *batch, padding, **given)
        return output.squeeze(dim), None if weights is None else weights[0]
    query, key, value = _projected(module, query, key, value)
    mask = _mask(query, key_padding_mask, attn_mask)
    rate = module.dropout if module.training else 0.0
    if need_weights:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
        heads = weights @ value
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        heads, weights = F.scaled_dot_product_attention(query, key, value, mask, rate), None
    output = module.out_proj(heads.transpose(1, 2).flatten(2))
    return (output if module.batch_first else output.transpose(0, 1)), weights


def _projected(module: Any, *tokens: Tensor) -> Tuple[Tensor, ...]:
    """Returns queries, keys and values, ``(B, N_h, N, d)`` each."""
    if module.bias_k is not None or module.add_zero_attn:
        raise TypeError('nn.MultiheadAttention with add_bias_kv or add_zero_attn needs all of its heads')
    weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    weights = weights if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    mapped = [F.linear(*own) for own in zip(tokens, weights, biases)]
    batch_first = mapped if module.batch_first else [own.transpose(0, 1) for own in mapped]
    return tuple(own.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for own in batch_first)


def _mask(query: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor]) -> Optional[Tensor]:
    """Returns the sum of both masks, which is added to the scores; True hides a key."""

    def added(mask: Tensor) -> Tensor:
        hidden = mask.dtype == torch.bool
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf) if hidden else mask

    total = None if key_padding_mask is None else added(key_padding_mask)[:, None, None]  # (B, K)
    if attn_mask is None:
        return total
    mask = added(attn_mask)
    mask = mask.unflatten(0, (len(query), -1)) if mask.ndim == 3 else mask  # (B·N_h, Q, K)
    if mask.ndim == 4 and mask.shape[1] != query.shape[1]:  # for the heads that there were at first
        if not (mask == mask[:, :1]).all():
            raise ValueError('attn_mask differs between heads, of which some are gone: give one that does not')
        mask = mask[:, :1]
    return mask if total is None else total + mask
