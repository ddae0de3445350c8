"""Calls outside of graphs and transforms: the computation of the operators without the dispatcher, which costs more
than a small attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _qkv
from . import _cpu, _cuda
from ._inputs import EXCHANGES, NO_GRADIENTS, arranged, check, empty_gradient, number
from ._operators import Transformed, returned

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_modes, _interpreters = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_compiling = torch.compiler.is_compiling
_recording, _threads = torch.is_grad_enabled, torch.get_num_threads


class _Eager(torch.autograd.Function):
    """The operator with all of its inputs."""

    @staticmethod
    def forward(ctx, q, k, v, seed, names, text, *more):
        compute = _cuda.forward if q.is_cuda else _cpu.forward_new
        out, lse = compute(q, k, v, more, seed, names, text)
        ctx.names, ctx.text = names, text
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, seed, out, lse, *more)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, seed, out, lse, *more = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:]]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        compute = _cuda.backward if q.is_cuda else _cpu.backward
        found = compute(d_out, d_lse, out, lse, needs, q, k, v, more, seed, ctx.names, ctx.text)
        d_q, d_k, d_v, d_more, *_ = returned(found, needs, True)
        return (d_q, d_k, d_v, None, None, None, *d_more)


class _EagerValues(torch.autograd.Function):
    """The same for values only and no further inputs: each output and each argument costs a microsecond or more."""

    @staticmethod
    def forward(ctx, q, k, v, text):
        if q.is_cuda:
            out, lse = _cuda.forward(q, k, v, (), None, "", text)
        else:
            out, lse = _qkv.forward_new(text, (q, k, v), None, _threads())
        ctx.text, ctx.lse = text, lse
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, d_out):
        # Autograd records the backward pass only with `create_graph`.
        return (_values_gradients_once if _recording() else _values_gradients)(ctx, d_out)


def _values_gradients(ctx, d_out):
    q, k, v, out = ctx.saved_tensors
    if q.is_cuda:
        return (*_cuda.values_backward(d_out, out, ctx.lse, q, k, v, ctx.text), None)
    d_q, d_k, d_v = empty_gradient(q), empty_gradient(k), empty_gradient(v)
    gradients = (d_q, d_k, d_v, *NO_GRADIENTS)
    saved, upstream = (out, ctx.lse.unsqueeze(3), None), (d_out, None, None)
    _qkv.backward_into(ctx.text, (q, k, v), saved, upstream, gradients, None, _threads())
    return d_q, d_k, d_v, None


_values_gradients_once = torch.autograd.function.once_differentiable(_values_gradients)

# `apply` without its handling of `torch.func`, whose transforms do not get here; tensors that left one are unwrapped.
_apply = super(torch.autograd.Function, _Eager).apply
_apply_values = super(torch.autograd.Function, _EagerValues).apply
_unwrap = torch._C._functorch.unwrap_if_dead


def _plain(every: tuple[Tensor, ...]) -> bool:
    """Whether all are plain PyTorch tensors on GPUs, or on the CPU if PyTorch has DLPack's exchange functions."""
    if every[0].is_cpu:
        for t in every:
            if type(t) not in _PLAIN_TYPES or not t.is_cpu:
                return False
        return EXCHANGES
    for t in every:
        if type(t) not in _PLAIN_TYPES or not t.is_cuda:
            return False
    return True


def _require_gradients(every: tuple[Tensor, ...]) -> bool:
    if _recording():
        for t in every:
            if t.requires_grad:
                return True
    return False


def run(
    q: Tensor, k: Tensor, v: Tensor, more: list[Tensor], seed: Tensor | None, names: str, text: str
) -> tuple[Tensor, Tensor]:
    """Values and log-sum-exp of a softmax attention."""
    if _compiling():
        return torch.ops.qkv.forward(q, k, v, more, seed, names, text)
    if _interpreters() is not None:
        return Transformed.apply(q, k, v, seed, names, text, *more)
    every = (q, k, v, *more)
    if _modes() > 0 or not _plain(every):
        return torch.ops.qkv.forward(q, k, v, more, seed, names, text)
    check(q, k, v)
    if _require_gradients(every):
        return _apply(_unwrap(q), _unwrap(k), _unwrap(v), seed, names, text, *map(_unwrap, more))
    if q.is_cuda:
        return _cuda.forward(q, k, v, more, seed, names, text)
    return _qkv.forward_new(text, arranged(q, k, v, more, names), number(seed), _threads())


def values_of(
    q: Tensor, k: Tensor, v: Tensor, more: list[Tensor], seed: Tensor | None, names: str, text: str
) -> Tensor:
    """`run` that returns only the values."""
    every = (q, k, v)
    if more or seed is not None or _compiling() or _interpreters() is not None:
        return run(q, k, v, more, seed, names, text)[0]
    if _modes() > 0 or not _plain(every):
        return run(q, k, v, more, seed, names, text)[0]
    check(q, k, v)
    if _require_gradients(every):
        return _apply_values(_unwrap(q), _unwrap(k), _unwrap(v), text)
    if q.is_cuda:
        return _cuda.forward(q, k, v, more, seed, names, text)[0]
    return _qkv.values_new(text, every, None, _threads())
