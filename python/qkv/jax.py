"""Attention for JAX on the CPU: a function for `jit`, `grad` and `vmap`.

>>> import jax, qkv.jax
>>> from qkv import Attention, Mask
>>> causal = Attention.scaled_dot().mask(Mask.causal())
>>> loss = lambda q, k, v: qkv.jax.attention(q, k, v, causal).sum()
>>> jax.grad(loss)(q, k, v)                                                        # doctest: +SKIP

It computes in a callback on the host: arrays come as NumPy views, results are copied once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from . import Attention

__all__ = ["attention", "attend"]

# The optional inputs that have gradients.
_DIFFERENTIABLE = frozenset(("w", "w_q", "w_k", "v_score", "scale", "bias", "table", "sinks", "center"))


def _sums(dtype: Any) -> Any:
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _numbers(names: tuple[str, ...], more: tuple[Any, ...]) -> dict[str, Any]:
    """Converts the arrays of a callback to inputs of a call: a seed becomes a number, and pairs become tuples."""
    inputs: dict[str, Any] = {name: np.asarray(x) for name, x in zip(names, more, strict=True)}
    if "seed" in inputs:
        inputs["seed"] = int(inputs["seed"])
    for name in ("segments", "buckets"):
        if f"{name}_q" in inputs:
            inputs[name] = (inputs.pop(f"{name}_q"), inputs.pop(f"{name}_k"))
    return inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(text: str, names: tuple[str, ...], q: Any, k: Any, v: Any, *more: Any) -> tuple[Any, Any]:
    def compute(q, k, v, *more):
        q, k, v = (np.asarray(x) for x in (q, k, v))
        out = Attention.from_json(text).forward(q, k, v, **_numbers(names, more))
        return np.asarray(out.values), np.asarray(out.threshold if out.lse is None else out.lse)

    shapes = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], _sums(q.dtype)),
    )
    return jax.pure_callback(compute, shapes, q, k, v, *more, vmap_method="sequential")


def _forward(text, names, q, k, v, *more):
    return _attend(text, names, q, k, v, *more), (q, k, v, more)


def _backward(text, names, saved, upstream):
    q, k, v, more = saved
    wanted = [name in _DIFFERENTIABLE for name in names]

    def compute(d_out, d_lse, q, k, v, *more):
        q, k, v, d_out, d_lse = (np.asarray(x) for x in (q, k, v, d_out, d_lse))
        attention, inputs = Attention.from_json(text), _numbers(names, more)
        # State for the backward pass cannot be passed through a callback, so recompute the forward pass.
        out = attention.forward(q, k, v, **inputs)
        d_lse = None if out.lse is None or not d_lse.any() else d_lse
        grad = attention.backward(q, k, v, out, d_out, d_lse=d_lse, **inputs)
        found = (getattr(grad, name) for name, want in zip(names, wanted, strict=True) if want)
        return tuple(np.asarray(x) for x in (grad.q, grad.k, grad.v, *found))

    given = (q, k, v, *(x for x, want in zip(more, wanted, strict=True) if want))
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given)
    d_q, d_k, d_v, *found = jax.pure_callback(compute, shapes, *upstream, q, k, v, *more, vmap_method="sequential")
    rest = iter(found)
    zero = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
    return (d_q, d_k, d_v, *(next(rest) if want else zero(x) for x, want in zip(more, wanted, strict=True)))


_attend.defvjp(_forward, _backward)


def attend(q: Any, k: Any, v: Any, description: Attention | None = None, **inputs: Any) -> tuple[Any, Any]:
    """Values `[B, Hq, N, Dv]` and log-sum-exp `[B, Hq, N]` of an attention, both with gradients.

    The inputs are those of `qkv.Attention.forward`; a `seed` is a number or an array of whole numbers.
    """
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"`q`, `k` and `v` have {q.ndim}, {k.ndim} and {v.ndim} axes, expected [batch, heads, length, width]"
        )
    for name in ("segments", "buckets"):
        if inputs.get(name) is not None:
            both = inputs.pop(name)
            inputs[f"{name}_q"], inputs[f"{name}_k"] = both if isinstance(both, (tuple, list)) else (both, both)
    given = {name: jnp.asarray(x) for name, x in inputs.items() if x is not None}
    text = (Attention.scaled_dot() if description is None else description).to_json()
    return _attend(text, tuple(given), q, k, v, *given.values())


def attention(q: Any, k: Any, v: Any, description: Attention | None = None, **inputs: Any) -> Any:
    """`attend`, of which only the values are wanted."""
    return attend(q, k, v, description, **inputs)[0]
