"""The inputs of an operator: their names and order, and memory for what it computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

# The optional inputs in the order that the native module expects; the first ones have gradients.
DIFFERENTIABLE = ("w", "w_q", "w_k", "v_score", "scale", "bias", "table", "sinks", "center")
OPTIONAL = DIFFERENTIABLE + (
    "lengths",
    "segments_q",
    "segments_k",
    "bits",
    "positions",
    "buckets_q",
    "buckets_k",
)
NO_GRADIENTS = (None,) * len(DIFFERENTIABLE)

# PyTorch without DLPack 1.3 does not export tensors that require a gradient, even if none is being recorded.
EXCHANGES = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def sums(dtype: torch.dtype) -> torch.dtype:
    """The accumulator type for this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_values(q: Tensor, v: Tensor) -> Tensor:
    """Memory for values: `[B, N, H, Dv]`, seen as `[B, H, N, Dv]`. The projection that follows reads it without a
    copy."""
    b, h, n, _ = q.shape
    return q.new_empty((b, n, h, v.shape[3])).transpose(1, 2)


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Rejects tensors without four axes."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise ValueError(f"`q`, `k` and `v` have shapes {shapes}, expected [batch, heads, length, width]")


@functools.lru_cache(1024)
def places(names: str) -> tuple[int, ...]:
    """The indexes of inputs with these comma-separated names among all inputs."""
    return tuple(3 + OPTIONAL.index(name) for name in names.split(",")) if names else ()


def arranged(q: Tensor, k: Tensor, v: Tensor, more: Sequence[Tensor], names: str) -> tuple[Tensor | None, ...]:
    """All inputs in the order that the native module expects."""
    if not more:
        return (q, k, v) if EXCHANGES else (q.detach(), k.detach(), v.detach())
    at = places(names)
    every: list[Tensor | None] = [q, k, v, *[None] * (max(at) - 2)]
    for place, tensor in zip(at, more, strict=True):
        every[place] = tensor
    return tuple(every) if EXCHANGES else tuple(t if t is None else t.detach() for t in every)


def exported(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Tensors that the native module can read."""
    return tensors if EXCHANGES else tuple(t if t is None else t.detach() for t in tensors)


def number(seed: Tensor | None) -> int | None:
    """The seed as an unsigned 64-bit integer."""
    return None if seed is None else int(seed) & (2**64 - 1)


def empty_gradient(t: Tensor) -> Tensor:
    """Memory for a gradient, in the layout of its tensor if the rows of that are contiguous."""
    return torch.empty_like(t) if t.stride(3) == 1 else torch.empty_like(t, memory_format=torch.contiguous_format)


def wanted(
    q: Tensor, k: Tensor, v: Tensor, more: Sequence[Tensor], names: str, needs: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Memory for the gradients of q, k and v, and of those of `more` that have one and need it."""
    listed = names.split(",") if names else []
    first = [empty_gradient(t) for t in (q, k, v)]
    rest = [
        torch.zeros_like(t) if need and name in DIFFERENTIABLE else None
        for t, need, name in zip(more, needs[3:], listed, strict=True)
    ]
    return first, rest


def placed(first: list[Tensor], rest: list[Tensor | None], names: str) -> tuple[Tensor | None, ...]:
    """The memory of `wanted` in the order that the native module expects."""
    gradients: list[Tensor | None] = [*first, *NO_GRADIENTS]
    for place, gradient in zip(places(names), rest, strict=True):
        if gradient is not None:
            gradients[place] = gradient
    return tuple(gradients)


def filled(first: list[Tensor], rest: list[Tensor | None]) -> list[Tensor]:
    """Gradients as operators return them: one that does not exist is an empty tensor."""
    return [*first, *(first[0].new_empty(0) if t is None else t for t in rest)]


@functools.lru_cache(1024)
def has_extra(description: str) -> bool:
    """Whether a description has an output beside values and log-sum-exp."""
    return '"entropy":true' in description or '"hard"' in description
