"""Attention for PyTorch: operators with autograd, fake tensors and `torch.compile`; modules; `install()`.

>>> import torch, qkv.torch
>>> from qkv import Attention, Mask
>>> q, k, v = (torch.randn(1, 8, 64, 32, requires_grad=True) for _ in range(3))
>>> local = Attention.scaled_dot().mask(Mask.causal() & Mask.window(16, 0))
>>> qkv.torch.attention(q, k, v, local).sum().backward()

`sdpa` has the arguments of `torch.nn.functional.scaled_dot_product_attention`, and `install()` puts the library behind
that function itself, for every model on the CPU. Tensors are read and written where PyTorch has them, with any strides.
Only CPU tensors can be computed with; others are refused.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from . import Attention, Bias, Mask, Weights, _qkv

__all__ = [
    "BahdanauAttention",
    "LuongAttention",
    "MultiheadAttention",
    "Result",
    "attend",
    "attention",
    "install",
    "sdpa",
    "uninstall",
    "weights",
]

# The optional inputs in the order in which the native module takes them; those in front have gradients.
_DIFFERENTIABLE = ("w", "w_q", "w_k", "v_score", "scale", "bias", "table", "sinks", "center")
_OPTIONAL = _DIFFERENTIABLE + (
    "lengths",
    "segments_q",
    "segments_k",
    "bits",
    "positions",
    "buckets_q",
    "buckets_k",
)

_LIBRARY = Library("qkv", "FRAGMENT")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor[] more, Tensor? seed, str names, str description"
_LIBRARY.define(f"forward({_INPUTS}) -> (Tensor, Tensor)")
_LIBRARY.define(f"backward(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] needs, {_INPUTS}) -> Tensor[]")
_LIBRARY.define(f"select({_INPUTS}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"select_backward(Tensor d_out, Tensor? d_lse, Tensor? d_extra, bool[] needs, {_INPUTS}) -> Tensor[]")

# PyTorch before DLPack 1.3 exports no tensor that requires a gradient, even where none is recorded.
_EXCHANGES = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _empty_values(q: Tensor, v: Tensor) -> Tensor:
    # [B, N, H, Dv] in memory, seen as [B, H, N, Dv]: the projection that follows then reads it without a copy.
    b, h, n, _ = q.shape
    return q.new_empty((b, n, h, v.shape[3])).transpose(1, 2)


@functools.lru_cache(1024)
def _places(names: str) -> tuple[int, ...]:
    return tuple(3 + _OPTIONAL.index(name) for name in names.split(",")) if names else ()


def _tensors(q: Tensor, k: Tensor, v: Tensor, more: list[Tensor], names: str) -> tuple[Tensor | None, ...]:
    if not more:
        return (q, k, v) if _EXCHANGES else (q.detach(), k.detach(), v.detach())
    places = _places(names)
    every: list[Tensor | None] = [q, k, v, *[None] * (max(places) - 2)]
    for place, tensor in zip(places, more, strict=True):
        every[place] = tensor
    return tuple(every) if _EXCHANGES else tuple(t if t is None else t.detach() for t in every)


def _number(seed: Tensor | None) -> int | None:
    return None if seed is None else int(seed) & (2**64 - 1)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise ValueError(f"`q`, `k` and `v` have shapes {shapes}, expected [batch, heads, length, width]")


def _forward(q, k, v, more, seed, names, description):
    _check(q, k, v)
    values, lse = _empty_values(q, v), q.new_empty((*q.shape[:3], 1), dtype=_sums(q.dtype))
    tensors = _tensors(q, k, v, more, names)
    _qkv.forward_into(description, tensors, values, lse, None, _number(seed), torch.get_num_threads())
    return values, lse.squeeze(3)


def _wanted(q, k, v, more, names, needs):
    """Memory for the gradients of q, k and v, and of those of `more` that have one and need it."""
    listed = names.split(",") if names else []
    first = [torch.empty_like(t) for t in (q, k, v)]
    rest = [
        torch.zeros_like(t) if need and name in _DIFFERENTIABLE else None
        for t, need, name in zip(more, needs[3:], listed, strict=True)
    ]
    return first, rest


def _backward(d_out, d_lse, out, lse, needs, q, k, v, more, seed, names, description):
    first, rest = _wanted(q, k, v, more, names, needs)
    gradients = [*first, *[None] * len(_DIFFERENTIABLE)]
    for place, gradient in zip(_places(names), rest, strict=True):
        if gradient is not None:
            gradients[place] = gradient
    upstream = (d_out, None if d_lse is None else d_lse.unsqueeze(3), None)
    saved = (out, lse.unsqueeze(3), None)
    if not _EXCHANGES:
        upstream, saved = (
            tuple(t if t is None else t.detach() for t in upstream),
            tuple(t if t is None else t.detach() for t in saved),
        )
    _qkv.backward_into(
        description,
        _tensors(q, k, v, more, names),
        saved,
        upstream,
        tuple(gradients),
        _number(seed),
        torch.get_num_threads(),
    )
    return [*first, *(q.new_empty(0) if t is None else t for t in rest)]


def _described(q, k, v, more, seed, names):
    inputs = {name: t.detach() for name, t in zip(names.split(",") if names else [], more, strict=True)}
    for name in ("segments", "buckets"):
        if f"{name}_q" in inputs:
            inputs[name] = (inputs.pop(f"{name}_q"), inputs.pop(f"{name}_k"))
    if seed is not None:
        inputs["seed"] = _number(seed)
    return (q.detach(), k.detach(), v.detach()), inputs


def _extra(out, q):
    found = out.entropy if out.entropy is not None else out.log_prob
    return q.new_empty(0, dtype=_sums(q.dtype)) if found is None else found


def _select(q, k, v, more, seed, names, description):
    _check(q, k, v)
    tensors, inputs = _described(q, k, v, more, seed, names)
    out = Attention.from_json(description).forward(*tensors, **inputs)
    return out.values, out.threshold if out.lse is None else out.lse, _extra(out, q)


def _select_backward(d_out, d_lse, d_extra, needs, q, k, v, more, seed, names, description):
    # What a selection keeps for its backward pass is not a tensor of PyTorch's: the forward pass is computed again.
    tensors, inputs = _described(q, k, v, more, seed, names)
    attention = Attention.from_json(description)
    out = attention.forward(*tensors, **inputs)
    upstream = {"d_lse": None if d_lse is None or out.lse is None else d_lse.detach()}
    if d_extra is not None and d_extra.numel() > 0:
        upstream["d_entropy" if out.entropy is not None else "d_log_prob"] = d_extra.detach()
    grad = attention.backward(*tensors, out, d_out.detach(), **upstream, **inputs)
    listed = names.split(",") if names else []
    found = [getattr(grad, name, None) if need else None for name, need in zip(listed, needs[3:], strict=True)]
    return [grad.q, grad.k, grad.v, *(q.new_empty(0) if t is None else t for t in found)]


def _elsewhere(*arguments, **_):
    tensor = next(t for t in arguments if isinstance(t, Tensor) and t.device.type != "cpu")
    raise NotImplementedError(
        f"a tensor is on {tensor.device}: qkv.torch computes on the CPU; move tensors there first"
    )


for _name, _function in (
    ("forward", _forward),
    ("backward", _backward),
    ("select", _select),
    ("select_backward", _select_backward),
):
    _LIBRARY.impl(_name, _function, "CPU")
    _LIBRARY.impl(_name, _elsewhere, "CUDA")


def _check_fake(q, k, v, more):
    _check(q, k, v)
    for t in (k, v, *more):
        if t.device != q.device:
            raise ValueError(f"tensors are on {q.device} and on {t.device}, expected one device")


@register_fake("qkv::forward", lib=_LIBRARY)
def _(q, k, v, more, seed, names, description):
    _check_fake(q, k, v, more)
    return _empty_values(q, v), q.new_empty(q.shape[:3], dtype=_sums(q.dtype))


@register_fake("qkv::backward", lib=_LIBRARY)
def _(d_out, d_lse, out, lse, needs, q, k, v, more, seed, names, description):
    first, rest = _wanted(q, k, v, more, names, needs)
    return [*first, *(q.new_empty(0) if t is None else t for t in rest)]


@register_fake("qkv::select", lib=_LIBRARY)
def _(q, k, v, more, seed, names, description):
    _check_fake(q, k, v, more)
    b, h, n, _ = q.shape
    rows = q.new_empty((b, h, n), dtype=_sums(q.dtype))
    extra = torch.empty_like(rows) if _has_extra(description) else rows.new_empty(0)
    return q.new_empty((b, h, n, v.shape[3])), rows, extra


@register_fake("qkv::select_backward", lib=_LIBRARY)
def _(d_out, d_lse, d_extra, needs, q, k, v, more, seed, names, description):
    listed = names.split(",") if names else []
    contiguous = torch.contiguous_format
    rest = [
        torch.empty_like(t, memory_format=contiguous) if need and name in _DIFFERENTIABLE else q.new_empty(0)
        for t, need, name in zip(more, needs[3:], listed, strict=True)
    ]
    return [*(torch.empty_like(t, memory_format=contiguous) for t in (q, k, v)), *rest]


@functools.lru_cache(1024)
def _has_extra(description: str) -> bool:
    return '"entropy":true' in description or '"hard"' in description


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


def _returned(gradients, needs, more):
    # An input without a gradient comes back as an empty tensor.
    first = [g if need else None for g, need in zip(gradients[:3], needs[:3], strict=True)]
    rest = [g if need and g.numel() > 0 else None for g, need in zip(gradients[3:], needs[3:], strict=True)]
    return (*first, rest if more else [], None, None, None)


def _differentiate(ctx, d_out, d_lse):
    inputs, out, lse, needs = _kept(ctx)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    return _returned(torch.ops.qkv.backward(d_out, d_lse, out, lse, needs, *inputs), needs, ctx.more)


def _differentiate_select(ctx, d_out, d_lse, d_extra):
    inputs, out, _, needs = _kept(ctx)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    return _returned(torch.ops.qkv.select_backward(d_out, d_lse, d_extra, needs, *inputs), needs, ctx.more)


register_autograd("qkv::forward", _differentiate, setup_context=_keep, lib=_LIBRARY)
register_autograd("qkv::select", _differentiate_select, setup_context=_keep, lib=_LIBRARY)


def _no_second_derivative(ctx, *_):
    raise RuntimeError("qkv::backward has no gradient: second derivatives are not computed")


register_autograd("qkv::backward", _no_second_derivative, lib=_LIBRARY)
register_autograd("qkv::select_backward", _no_second_derivative, lib=_LIBRARY)


class _Transformed(torch.autograd.Function):
    """The operator for `torch.func`, whose transforms ask for a function of this form."""

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
        d_q, d_k, d_v, d_more, *_ = _returned(_TransformedBackward.apply(*saved), needs, True)
        return (d_q, d_k, d_v, None, None, None, *d_more)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(_Transformed.apply, info, in_dims, inputs)


class _TransformedBackward(torch.autograd.Function):
    """Its gradient, which has none of its own."""

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
        return _mapped(_TransformedBackward.apply, info, in_dims, inputs)


def _mapped(function, info, in_dims, inputs):
    """One call for each entry of the mapped axis."""
    entry = lambda t, dim, at: t if dim is None else t.select(dim, at)  # noqa: E731
    calls = [
        function(*(entry(t, dim, at) if isinstance(t, Tensor) else t for t, dim in zip(inputs, in_dims, strict=True)))
        for at in range(info.batch_size)
    ]
    return tuple(torch.stack(found) for found in zip(*calls, strict=True)), (0,) * len(calls[0])


class _Eager(torch.autograd.Function):
    """The operator outside of graphs and transforms: the same computation without the dispatcher, which costs more than
    a small attention."""

    @staticmethod
    def forward(ctx, q, k, v, seed, names, text, *more):
        tensors = _tensors(q, k, v, more, names)
        out, lse = _qkv.forward_new(text, tensors, _number(seed), torch.get_num_threads())
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
        found = _backward(d_out, d_lse, out, lse, needs, q, k, v, more, seed, ctx.names, ctx.text)
        d_q, d_k, d_v, d_more, *_ = _returned(found, needs, True)
        return (d_q, d_k, d_v, None, None, None, *d_more)


class _EagerValues(torch.autograd.Function):
    """The same for values alone and no further inputs: each output and each argument costs a microsecond or more."""

    @staticmethod
    def forward(ctx, q, k, v, text):
        out, lse = _qkv.forward_new(text, (q, k, v), None, _threads())
        ctx.text, ctx.lse = text, lse
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, d_out):
        # The engine records gradients of gradients only where it was asked to: `create_graph`.
        return (_values_gradients_once if _recording() else _values_gradients)(ctx, d_out)


def _values_gradients(ctx, d_out):
    q, k, v, out = ctx.saved_tensors
    d_q, d_k, d_v = _like(q), _like(k), _like(v)
    gradients = (d_q, d_k, d_v, *_NO_GRADIENTS)
    saved, upstream = (out, ctx.lse.unsqueeze(3), None), (d_out, None, None)
    _qkv.backward_into(ctx.text, (q, k, v), saved, upstream, gradients, None, _threads())
    return d_q, d_k, d_v, None


_values_gradients_once = torch.autograd.function.once_differentiable(_values_gradients)
_NO_GRADIENTS = (None,) * len(_DIFFERENTIABLE)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_modes, _interpreters = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_autocast, _compiling, _like = torch.is_autocast_enabled, torch.compiler.is_compiling, torch.empty_like
_recording, _threads = torch.is_grad_enabled, torch.get_num_threads


def _plain(every: tuple[Tensor, ...]) -> bool:
    """Whether they are PyTorch's own tensors on the CPU."""
    for t in every:
        if type(t) not in _PLAIN_TYPES or not t.is_cpu:
            return False
    return True


def _require_gradients(every: tuple[Tensor, ...]) -> bool:
    if _recording():
        for t in every:
            if t.requires_grad:
                return True
    return False


def _run(
    q: Tensor, k: Tensor, v: Tensor, more: list[Tensor], seed: Tensor | None, names: str, text: str
) -> tuple[Tensor, Tensor]:
    if _compiling():
        return torch.ops.qkv.forward(q, k, v, more, seed, names, text)
    if _interpreters() is not None:
        return _Transformed.apply(q, k, v, seed, names, text, *more)
    every = (q, k, v, *more)
    if not _EXCHANGES or _modes() > 0 or not _plain(every):
        return torch.ops.qkv.forward(q, k, v, more, seed, names, text)
    _check(q, k, v)
    if _require_gradients(every):
        return _Eager.apply(q, k, v, seed, names, text, *more)
    return _qkv.forward_new(text, _tensors(q, k, v, more, names), _number(seed), _threads())


def _values(q: Tensor, k: Tensor, v: Tensor, more: list[Tensor], seed: Tensor | None, names: str, text: str) -> Tensor:
    """`_run` of which the values alone are wanted."""
    every = (q, k, v)
    if more or seed is not None or _compiling() or _interpreters() is not None:
        return _run(q, k, v, more, seed, names, text)[0]
    if not _EXCHANGES or _modes() > 0 or not _plain(every):
        return _run(q, k, v, more, seed, names, text)[0]
    _check(q, k, v)
    if _require_gradients(every):
        return _EagerValues.apply(q, k, v, text)
    return _qkv.values_new(text, every, None, _threads())


class Result(NamedTuple):
    """What `attend` returns: values, and one number for each row; all have gradients."""

    values: Tensor
    """`[B, Hq, N, Dv]`."""
    lse: Tensor
    """The log-sum-exp `[B, Hq, N]`; sparsemax's threshold, which has no gradient."""
    extra: Tensor | None
    """The entropy of each row (`with_entropy`) or the log-probability of hard attention's choice, `[B, Hq, N]`."""


_SCALED_DOT = Attention.scaled_dot()


def _facts(description: Attention | None) -> tuple[str, bool, bool, bool]:
    """The description as text; whether it is a plain softmax, has an extra output, and draws."""
    description = _SCALED_DOT if description is None else description
    text = description._json
    extra = _has_extra(text)
    return text, '"select":"soft"' in text and not extra, extra, description.draws()


# In a compiled graph they are constants of the description.
_json = torch.compiler.assume_constant_result(lambda description: _facts(description))


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], str]:
    for name in ("segments", "buckets"):
        if inputs.get(name) is not None:
            both = inputs.pop(name)
            inputs[f"{name}_q"], inputs[f"{name}_k"] = both if isinstance(both, (tuple, list)) else (both, both)
    names, more = [], []
    for name, tensor in inputs.items():
        if tensor is not None:
            if name not in _OPTIONAL:
                raise TypeError(f"unexpected keyword argument '{name}'")
            names.append(name)
            more.append(tensor)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v, *more = (_cast(t, dtype) for t in (q, k, v, *more))
    return q, k, v, more, ",".join(names)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    description: Attention | None = None,
    *,
    seed: Tensor | int | None = None,
    **inputs: Any,
) -> Result:
    """Computes an attention: `q [B, Hq, N, D]`, `k [B, Hk, M, Dk]`, `v [B, Hk, M, Dv]` and the inputs that the
    description asks for.

    A description that draws gets its seed from PyTorch's generator unless `seed` gives one.
    """
    return _attend(_json(description), q, k, v, seed, inputs)


def _attend(
    described: tuple[str, bool, bool, bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | int | None,
    inputs: dict[str, Any],
) -> Result:
    text, plain, extra, draws = described
    more: list[Tensor] = []
    names = ""
    if inputs or _autocast("cpu" if q.is_cpu else q.device.type):
        q, k, v, more, names = _prepared(q, k, v, inputs)
    number = _seed(seed) if draws else None
    if plain:
        return Result(*_run(q, k, v, more, number, names, text), None)
    values, lse, found = torch.ops.qkv.select(q, k, v, more, number, names, text)
    return Result(values, lse, found if extra else None)


def _seed(seed: Tensor | int | None) -> Tensor:
    if seed is None:
        return torch.randint(0, 2**62, (), dtype=torch.int64)
    return seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    description: Attention | None = None,
    *,
    seed: Tensor | int | None = None,
    **inputs: Any,
) -> Tensor:
    """`attend`, of which only the values are wanted."""
    return attend(q, k, v, description, seed=seed, **inputs).values


def weights(q: Tensor, k: Tensor, v: Tensor, description: Attention | None = None, **inputs: Any) -> Weights:
    """The weights on demand, exact and without a gradient: see `qkv.Attention.weights`."""
    description = Attention.scaled_dot() if description is None else description
    q, k, v = q.detach(), k.detach(), v.detach()
    plain: dict[str, Any] = {name: t.detach() if isinstance(t, Tensor) else t for name, t in inputs.items()}
    return description.weights(q, k, v, description.forward(q, k, v, **plain), **plain)


@functools.lru_cache(1024)
def _sdpa_json(causal: bool, bits: bool, bias: bool, scale: float | None, dropout: float) -> str:
    found = Attention.scaled_dot()
    found = found.mask(Mask.causal()) if causal else found
    found = found.mask(Mask.bits()) if bits else found
    found = found.bias(Bias.tensor()) if bias else found
    found = found if scale is None else found.scale(scale)
    return (found.dropout(dropout) if dropout > 0.0 else found)._json


@torch.compiler.assume_constant_result
def _sdpa_text(causal: bool, bits: bool, bias: bool, scale: float | None, dropout: float) -> str:
    return _sdpa_json(causal, bits, bias, scale, dropout)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with a gradient for `attn_mask` too.

    Unlike there, grouped heads need no flag, and a query that sees nothing gets 0.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("`attn_mask` was given, but `is_causal` is set: join them in the mask")
    shape = query.shape
    if len(shape) != 4:
        query, key, value = _four(query), _four(key), _four(value)
    more: list[Tensor] = []
    bits, names = False, ""
    if attn_mask is not None:
        bits = attn_mask.dtype == torch.bool
        attn_mask = attn_mask if attn_mask.dim() <= 4 else _four(attn_mask)
        more, names = [attn_mask], "bits" if bits else "bias"
    if _autocast("cpu" if query.is_cpu else query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value, *more = (_cast(t, dtype) for t in (query, key, value, *more))
    if more and not bits and more[0].dtype != query.dtype:
        more = [more[0].to(query.dtype)]
    text = _sdpa_text(is_causal, bits, attn_mask is not None and not bits, scale, dropout_p)
    seed = _seed(None) if dropout_p > 0.0 else None
    values = _values(query, key, value, more, seed, names, text)
    return values if len(shape) == 4 else values.reshape(*shape[:-1], values.shape[-1])


def _four(t: Tensor) -> Tensor:
    """Axes in front of the last three are one batch; those that are not there count as 1."""
    while t.dim() < 4:
        t = t.unsqueeze(0)
    return t if t.dim() == 4 else t.flatten(0, -4)


from ._torch_install import install, uninstall  # noqa: E402
from ._torch_modules import BahdanauAttention, LuongAttention, MultiheadAttention  # noqa: E402
