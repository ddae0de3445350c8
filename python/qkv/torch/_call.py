"""What a program calls: `attend`, `attention`, `sdpa` and `weights`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import Attention, Bias, Mask, Weights
from ._eager import run, values_of
from ._inputs import OPTIONAL, has_extra

_autocast = torch.is_autocast_enabled

# Before 2.15, this tells graphs that a description is a constant; later versions of PyTorch detect it themselves.
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15):
    from torch.utils._pytree import register_constant

    register_constant(Attention)


class Result(NamedTuple):
    """What `attend` returns: values, and one number for each row; all have gradients."""

    values: Tensor
    """`[B, Hq, N, Dv]`."""
    lse: Tensor
    """The log-sum-exp `[B, Hq, N]`; sparsemax's threshold, which has no gradient."""
    extra: Tensor | None
    """The entropy of each row (`with_entropy`) or the log-probability of hard attention's choice, `[B, Hq, N]`."""


_SCALED_DOT = Attention.scaled_dot()


def facts(description: Attention | None) -> tuple[str, bool, bool, bool]:
    """The description as text; whether it is a plain softmax, has an extra output, and draws."""
    description = _SCALED_DOT if description is None else description
    text = description._json
    extra = has_extra(text)
    return text, '"select":"soft"' in text and not extra, extra, description.draws()


# In a compiled graph, the facts of a description are constants.
_json = torch.compiler.assume_constant_result(lambda description: facts(description))


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
            if name not in OPTIONAL:
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
    return attend_described(_json(description), q, k, v, seed, inputs)


def attend_described(
    described: tuple[str, bool, bool, bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | int | None,
    inputs: dict[str, Any],
) -> Result:
    """`attend` with the facts of a description."""
    text, plain, extra, draws = described
    more: list[Tensor] = []
    names = ""
    if inputs or _autocast("cpu" if q.is_cpu else q.device.type):
        q, k, v, more, names = _prepared(q, k, v, inputs)
    number = _seed(seed) if draws else None
    if plain:
        return Result(*run(q, k, v, more, number, names, text), None)
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
    """The weights on demand, exact and without a gradient: see `qkv.Attention.weights`. They are computed where the
    tensors are; what only the CPU computes, from copies there."""
    description = Attention.scaled_dot() if description is None else description
    try:
        return _weights(description, Tensor.detach, q, k, v, inputs)
    except NotImplementedError:
        if q.is_cpu:
            raise
        return _weights(description, lambda t: t.detach().cpu(), q, k, v, inputs)


def _weights(
    description: Attention,
    of: Callable[[Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: dict[str, Any],
) -> Weights:
    q, k, v = of(q), of(k), of(v)
    plain = {name: _each(given, of) for name, given in inputs.items()}
    return description.weights(q, k, v, description.forward(q, k, v, **plain), **plain)


def _each(given: Any, of: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(given, (tuple, list)):
        return tuple(_each(t, of) for t in given)
    return of(given) if isinstance(given, Tensor) else given


@functools.lru_cache(1024)
def _sdpa_json(causal: bool, bits: bool, bias: bool, scale: float | None, dropout: float) -> str:
    found = Attention.scaled_dot()
    found = found.mask(Mask.causal()) if causal else found
    found = found.mask(Mask.bits()) if bits else found
    found = found.bias(Bias.tensor()) if bias else found
    found = found if scale is None else found.scale(scale)
    return (found.dropout(dropout) if dropout > 0.0 else found)._json


@torch.compiler.assume_constant_result
def sdpa_text(causal: bool, bits: bool, bias: bool, scale: float | None, dropout: float) -> str:
    """The description of `sdpa` as text."""
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
    text = sdpa_text(is_causal, bits, attn_mask is not None and not bits, scale, dropout_p)
    seed = _seed(None) if dropout_p > 0.0 else None
    values = values_of(query, key, value, more, seed, names, text)
    return values if len(shape) == 4 else values.reshape(*shape[:-1], values.shape[-1])


def _four(t: Tensor) -> Tensor:
    """Axes in front of the last three are one batch; those that are not there count as 1."""
    while t.dim() < 4:
        t = t.unsqueeze(0)
    return t if t.dim() == 4 else t.flatten(0, -4)
