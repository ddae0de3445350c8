"""The operators `qkv::forward`, `qkv::select` and their backward passes: schemas, the CPU and CUDA, fake tensors,
autograd, and functions in the form that `torch.func` requires.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from . import _cpu, _cuda
from ._inputs import DIFFERENTIABLE, check, empty_values, filled, has_extra, sums, wanted

_LIBRARY = Library("qkv", "FRAGMENT")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor[] more, Tensor? seed, str names, str description"
_LIBRARY.define(f"forward({_INPUTS}) -> (Tensor, Tensor)")
_LIBRARY.define(f"backward(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] needs, {_INPUTS}) -> Tensor[]")
_LIBRARY.define(f"select({_INPUTS}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"select_backward(Tensor d_out, Tensor? d_lse, Tensor? d_extra, bool[] needs, {_INPUTS}) -> Tensor[]")

for _name in ("forward", "backward", "select", "select_backward"):
    _LIBRARY.impl(_name, getattr(_cpu, _name), "CPU")
    _LIBRARY.impl(_name, getattr(_cuda, _name), "CUDA")


def _check_fake(q, k, v, more):
    check(q, k, v)
    for t in (k, v, *more):
        if t.device != q.device:
            raise ValueError(f"tensors are on {q.device} and on {t.device}, expected one device")


@register_fake("qkv::forward", lib=_LIBRARY)
def _(q, k, v, more, seed, names, description):
    _check_fake(q, k, v, more)
    return empty_values(q, v), q.new_empty(q.shape[:3], dtype=sums(q.dtype))


@register_fake("qkv::backward", lib=_LIBRARY)
def _(d_out, d_lse, out, lse, needs, q, k, v, more, seed, names, description):
    first, rest = wanted(q, k, v, more, names, needs)
    return filled(first, rest)


@register_fake("qkv::select", lib=_LIBRARY)
def _(q, k, v, more, seed, names, description):
    _check_fake(q, k, v, more)
    b, h, n, _ = q.shape
    rows = q.new_empty((b, h, n), dtype=sums(q.dtype))
    extra = torch.empty_like(rows) if has_extra(description) else rows.new_empty(0)
    return q.new_empty((b, h, n, v.shape[3])), rows, extra


@register_fake("qkv::select_backward", lib=_LIBRARY)
def _(d_out, d_lse, d_extra, needs, q, k, v, more, seed, names, description):
    listed = names.split(",") if names else []
    contiguous = torch.contiguous_format
    rest = [
        torch.empty_like(t, memory_format=contiguous) if need and name in DIFFERENTIABLE else q.new_empty(0)
        for t, need, name in zip(more, needs[3:], listed, strict=True)
    ]
    return [*(torch.empty_like(t, memory_format=contiguous) for t in (q, k, v)), *rest]


def _keep(ctx, inputs, output):
    q, k, v, more, seed, ctx.names, ctx.description = inputs
    ctx.more, ctx.seeded = len(more), seed is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *more, *(() if seed is None else (seed,)), *output[:2])


def _kept(ctx):
    q, k, v, *rest = ctx.saved_tensors
    more, rest = rest[: ctx.more], rest[ctx.more :]
    seed, (out, lse) = (rest[0], rest[1:]) if ctx.seeded else (None, rest)
    needs = [*ctx.needs_input_grad[:3], *(ctx.needs_input_grad[3] if ctx.more else ())]
    return (q, k, v, more, seed, ctx.names, ctx.description), out, lse, needs


def returned(gradients, needs, more):
    """Gradients in the form that autograd expects: `None` for an input without one, which operators return as an empty
    tensor."""
    first = [g if need else None for g, need in zip(gradients[:3], needs[:3], strict=True)]
    rest = [g if need and g.numel() > 0 else None for g, need in zip(gradients[3:], needs[3:], strict=True)]
    return (*first, rest if more else [], None, None, None)


def _differentiate(ctx, d_out, d_lse):
    inputs, out, lse, needs = _kept(ctx)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    return returned(torch.ops.qkv.backward(d_out, d_lse, out, lse, needs, *inputs), needs, ctx.more)


def _differentiate_select(ctx, d_out, d_lse, d_extra):
    inputs, out, _, needs = _kept(ctx)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    return returned(torch.ops.qkv.select_backward(d_out, d_lse, d_extra, needs, *inputs), needs, ctx.more)


register_autograd("qkv::forward", _differentiate, setup_context=_keep, lib=_LIBRARY)
register_autograd("qkv::select", _differentiate_select, setup_context=_keep, lib=_LIBRARY)


def _no_second_derivative(ctx, *_):
    raise RuntimeError("qkv::backward has no gradient: second derivatives are not computed")


register_autograd("qkv::backward", _no_second_derivative, lib=_LIBRARY)
register_autograd("qkv::select_backward", _no_second_derivative, lib=_LIBRARY)


class Transformed(torch.autograd.Function):
    """The operator for `torch.func`, whose transforms require a function of this form."""

    @staticmethod
    def forward(q, k, v, seed, names, description, *more):
        return torch.ops.qkv.forward(q, k, v, list(more), seed, names, description)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, seed, ctx.names, ctx.description, *more = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, seed, *more, *output)

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, seed, *more, out, lse = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:]]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        saved = (d_out, d_lse, out, lse, q, k, v, seed, ctx.names, ctx.description, needs, *more)
        d_q, d_k, d_v, d_more, *_ = returned(TransformedBackward.apply(*saved), needs, True)
        return (d_q, d_k, d_v, None, None, None, *d_more)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(Transformed.apply, info, in_dims, inputs)


class TransformedBackward(torch.autograd.Function):
    """The gradient of `Transformed`, which is not differentiable itself."""

    @staticmethod
    def forward(d_out, d_lse, out, lse, q, k, v, seed, names, description, needs, *more):
        return tuple(
            torch.ops.qkv.backward(d_out, d_lse, out, lse, needs, q, k, v, list(more), seed, names, description)
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        _no_second_derivative(ctx)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(TransformedBackward.apply, info, in_dims, inputs)


def _mapped(function, info, in_dims, inputs):
    """One call for each entry of the mapped axis."""
    entry = lambda t, dim, at: t if dim is None else t.select(dim, at)  # noqa: E731
    calls = [
        function(*(entry(t, dim, at) if isinstance(t, Tensor) else t for t, dim in zip(inputs, in_dims, strict=True)))
        for at in range(info.batch_size)
    ]
    return tuple(torch.stack(found) for found in zip(*calls, strict=True)), (0,) * len(calls[0])
