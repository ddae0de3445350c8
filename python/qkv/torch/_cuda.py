"""The operators on NVIDIA GPUs: on PyTorch's current stream of the device, in memory of its allocator.

The native module keeps a plan for each description and layout of the tensors. Making one compiles kernels (once for a
machine: they are cached on disk) and waits for the device, which a captured CUDA graph does not allow: a call has to
have been made before with the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _qkv
from ._inputs import (
    NO_GRADIENTS,
    OPTIONAL,
    arranged,
    check,
    empty_gradient,
    empty_values,
    exported,
    filled,
    has_extra,
    number,
    placed,
    wanted,
)

# The integer types that the kernels accept, where PyTorch programs often use wider ones.
_INTEGERS = {
    "lengths": torch.int32,
    "segments_q": torch.int32,
    "segments_k": torch.int32,
    "positions": torch.int64,
    "buckets_q": torch.int32,
    "buckets_k": torch.int32,
}
_CONTIGUOUS = ("scale", "sinks", *_INTEGERS)


def _stream_of(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# The same without creating a stream object; compiled graphs use this function.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


def _place(q: Tensor) -> tuple[int, int]:
    """The device and its current stream; for tensors on the host, those of the emulated device, for tests."""
    index = q.get_device()
    return (index, _stream(index)) if index >= 0 else (-1, 0)


def _allocator(q: Tensor) -> Callable[[int], Tensor]:
    """An allocator of workspaces. PyTorch may reuse the memory when the call returns, for work on the same stream."""
    return lambda size: q.new_empty(size, dtype=torch.uint8)


def _ready(more: list[Tensor], names: str) -> list[Tensor]:
    """Inputs in the form that the kernels accept."""
    found = []
    for name, t in zip(names.split(",") if names else (), more, strict=True):
        t = t.to(_INTEGERS[name]) if name in _INTEGERS else t
        found.append(t.contiguous() if name in _CONTIGUOUS else t)
    return found


def forward_into(q, k, v, more, seed, names, description, values, lse, entropy):
    """The forward pass into given outputs, in any layout."""
    if more:
        more = _ready(more, names)
    tensors = arranged(q, k, v, more, names)
    _qkv.cuda_forward_into(
        description,
        tensors,
        (values, lse, entropy),
        number(seed),
        *_place(q),
        _allocator(q),
    )


def forward(q, k, v, more, seed, names, description):
    check(q, k, v)
    values, lse = empty_values(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)
    forward_into(q, k, v, more, seed, names, description, values, lse, None)
    return values, lse


def _gradients(saved, upstream, needs, q, k, v, more, seed, names, description):
    first, rest = wanted(q, k, v, more, names, needs)
    if q.numel() == 0 or k.shape[2] == 0:
        return filled([t.zero_() for t in first], rest)
    # Gradients of vectors and tables are written contiguously.
    dense = lambda t: t is None or t.dim() > 2 or t.is_contiguous()  # noqa: E731
    into = [t if dense(t) else torch.zeros_like(t, memory_format=torch.contiguous_format) for t in rest]
    _qkv.cuda_backward_into(
        description,
        arranged(q, k, v, _ready(more, names) if more else more, names),
        exported(saved),
        exported(upstream),
        placed(first, into, names),
        number(seed),
        *_place(q),
        _allocator(q),
    )
    return filled(first, into)


def values_backward(d_out, out, lse, q, k, v, description):
    """`backward` for values only and without further inputs: small models are limited by its overhead on the host."""
    gradients = (empty_gradient(q), empty_gradient(k), empty_gradient(v))
    if q.numel() == 0 or k.shape[2] == 0:
        return tuple(t.zero_() for t in gradients)
    _qkv.cuda_backward_into(
        description,
        exported((q, k, v)),
        exported((out, lse, None)),
        exported((d_out, None, None)),
        gradients + NO_GRADIENTS,
        None,
        *_place(q),
        _allocator(q),
    )
    return gradients


def backward(d_out, d_lse, out, lse, needs, q, k, v, more, seed, names, description):
    upstream = (d_out, None if d_lse is None else d_lse.contiguous(), None)
    return _gradients(
        (out, lse.contiguous(), None), upstream, needs, q, k, v, more, seed, names, description
    )


def _selected(q, k, v, more, seed, names, description):
    check(q, k, v)
    b, h, n, _ = q.shape
    values, lse = q.new_empty((b, h, n, v.shape[3])), q.new_empty((b, h, n), dtype=torch.float32)
    entropy = torch.empty_like(lse) if has_extra(description) else None
    forward_into(q, k, v, more, seed, names, description, values, lse, entropy)
    return values, lse, entropy


def select(q, k, v, more, seed, names, description):
    values, lse, entropy = _selected(q, k, v, more, seed, names, description)
    return values, lse, lse.new_empty(0) if entropy is None else entropy


def select_backward(d_out, d_lse, d_extra, needs, q, k, v, more, seed, names, description):
    # As on the CPU, recompute the forward pass; gradients are contiguous.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    saved = _selected(q, k, v, more, seed, names, description)
    rows = (t if t is None or t.numel() == 0 else t.contiguous() for t in (d_lse, d_extra))
    upstream = (d_out, *(None if t is None or t.numel() == 0 else t for t in rows))
    return _gradients(saved, upstream, needs, q, k, v, more, seed, names, description)


def kernels(q: Tensor, k: Tensor, v: Tensor, description: str, **inputs: Tensor) -> tuple[str, str | None]:
    """The names of the kernels that compute a call, forward and backward."""
    names = [name for name in OPTIONAL if name in inputs]
    more = _ready([inputs[name] for name in names], ",".join(names))
    return _qkv.cuda_kernels(description, arranged(q, k, v, more, ",".join(names)), None, *_place(q))
