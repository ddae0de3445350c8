"""The operators on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from .. import Attention, _qkv
from ._inputs import arranged, check, empty_values, exported, filled, number, placed, sums, wanted


def forward(q, k, v, more, seed, names, description):
    check(q, k, v)
    values, lse = empty_values(q, v), q.new_empty((*q.shape[:3], 1), dtype=sums(q.dtype))
    tensors = arranged(q, k, v, more, names)
    _qkv.forward_into(description, tensors, values, lse, None, number(seed), torch.get_num_threads())
    return values, lse.squeeze(3)


def forward_new(q, k, v, more, seed, names, description):
    """`forward` where PyTorch's allocator can be called without Python."""
    return _qkv.forward_new(description, arranged(q, k, v, more, names), number(seed), torch.get_num_threads())


def backward(d_out, d_lse, out, lse, needs, q, k, v, more, seed, names, description):
    first, rest = wanted(q, k, v, more, names, needs)
    upstream = exported((d_out, None if d_lse is None else d_lse.unsqueeze(3), None))
    saved = exported((out, lse.unsqueeze(3), None))
    _qkv.backward_into(
        description,
        arranged(q, k, v, more, names),
        saved,
        upstream,
        placed(first, rest, names),
        number(seed),
        torch.get_num_threads(),
    )
    return filled(first, rest)


def _described(q, k, v, more, seed, names):
    inputs: dict[str, Any] = {
        name: t.detach() for name, t in zip(names.split(",") if names else [], more, strict=True)
    }
    for name in ("segments", "buckets"):
        if f"{name}_q" in inputs:
            inputs[name] = (inputs.pop(f"{name}_q"), inputs.pop(f"{name}_k"))
    if seed is not None:
        inputs["seed"] = number(seed)
    return (q.detach(), k.detach(), v.detach()), inputs


def _extra(out, q):
    found = out.entropy if out.entropy is not None else out.log_prob
    return q.new_empty(0, dtype=sums(q.dtype)) if found is None else found


def select(q, k, v, more, seed, names, description):
    check(q, k, v)
    tensors, inputs = _described(q, k, v, more, seed, names)
    out = Attention.from_json(description).forward(*tensors, **inputs)
    return out.values, out.threshold if out.lse is None else out.lse, _extra(out, q)


def select_backward(d_out, d_lse, d_extra, needs, q, k, v, more, seed, names, description):
    # The state that a selection saves for its backward pass is not a PyTorch tensor, so recompute the forward pass.
    tensors, inputs = _described(q, k, v, more, seed, names)
    attention = Attention.from_json(description)
    out = attention.forward(*tensors, **inputs)
    upstream = {"d_lse": None if d_lse is None or out.lse is None else d_lse.detach()}
    if d_extra is not None and d_extra.numel() > 0:
        upstream["d_entropy" if out.entropy is not None else "d_log_prob"] = d_extra.detach()
    grad = attention.backward(*tensors, out, d_out.detach(), **upstream, **inputs)
    listed = names.split(",") if names else []
    found = [getattr(grad, name, None) if need else None for name, need in zip(listed, needs[3:], strict=True)]
    return filled([grad.q, grad.k, grad.v], found)
