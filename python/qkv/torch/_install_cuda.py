"""The fused operators that `F.scaled_dot_product_attention` chooses among on CUDA (flash, memory-efficient, cuDNN),
with this library behind all three. It uses PyTorch's extension point for other implementations of flash attention
(`torch.nn.attention.register_flash_attention_impl`): kernels for the dispatch key CUDA, with PyTorch's own schemas,
fake tensors and derivatives. A call that is not computed here goes to PyTorch's own kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _cuda
from ._call import sdpa_text

_FLASH = "_scaled_dot_product_flash_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_CUDNN = "_scaled_dot_product_cudnn_attention"
_NAMES = [name + suffix for name in (_FLASH, _EFFICIENT, _CUDNN) for suffix in ("", "_backward")]

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

# PyTorch's own kernels, saved before they are replaced.
_own: dict[str, Any] = {}


def operators() -> dict[str, Callable[..., Any]]:
    """The operators by name. They need `torch.library.get_kernel`, which older releases of PyTorch lack."""
    find = getattr(torch.library, "get_kernel", None)
    if find is None:
        return {}
    for name in _NAMES:
        _own.setdefault(name, find(f"aten::{name}", "CUDA"))
    functions = (_flash, _flash_backward, _efficient, _efficient_backward, _cudnn, _cudnn_backward)
    return dict(zip(_NAMES, functions, strict=True))


def _theirs(name: str, *arguments: Any, **keywords: Any) -> Any:
    return _own[name].call_boxed(_KEYS, *arguments, **keywords)


def _is_ours(query: Tensor, value: Tensor, dropout_p: float, debug: bool = False) -> bool:
    return (
        dropout_p == 0.0
        and not debug
        and query.dtype in _TYPES
        and query.shape[3] <= 256
        and value.shape[3] <= 256
        and _is_recent(query.get_device())
    )


@functools.lru_cache(64)
def _is_recent(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _forward(query, key, value, attn_bias, is_causal, scale, values, rows):
    """Runs the forward pass into `values`; returns the log-sum-exp, whose last axis has `rows` entries."""
    b, h, n, _ = query.shape
    lse = query.new_empty((b, h, n), dtype=torch.float32)
    more, names = ([], "") if attn_bias is None else ([attn_bias], "bias")
    text = sdpa_text(is_causal, False, attn_bias is not None, scale, 0.0)
    _cuda.forward_into(query, key, value, more, None, names, text, values, lse, None)
    return lse if rows == n else torch.nn.functional.pad(lse, (0, rows - n))


def _backward(grad_out, query, key, value, attn_bias, out, logsumexp, is_causal, scale, bias_needs=False):
    more, names = ([], "") if attn_bias is None else ([attn_bias], "bias")
    needs = [True, True, True, *[bias_needs] * len(more)]
    text = sdpa_text(is_causal, False, attn_bias is not None, scale, 0.0)
    lse = logsumexp.reshape(*logsumexp.shape[:2], -1)[..., : query.shape[2]]
    return _cuda.backward(grad_out, None, out, lse, needs, query, key, value, more, None, names, text)


def _flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if not _is_ours(query, value, dropout_p, return_debug_mask):
        return _theirs(_FLASH, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)
    n, m = query.shape[2], key.shape[2]
    values = torch.empty_like(query)
    lse = _forward(query, key, value, None, is_causal, scale, values, n)
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return values, lse, None, None, n, m, seed, offset, query.new_empty(0)


def _flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    if not _is_ours(query, value, dropout_p):
        return _theirs(
            f"{_FLASH}_backward", grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
            dropout_p, is_causal, philox_seed, philox_offset, scale=scale,
        )  # fmt: skip
    return tuple(_backward(grad_out, query, key, value, None, out, logsumexp, is_causal, scale)[:3])


def _efficient(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None,
):  # fmt: skip
    if not _is_ours(query, value, dropout_p):
        return _theirs(
            _EFFICIENT, query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale=scale
        )
    b, h, n, _ = query.shape
    values = query.new_empty((b, n, h, value.shape[3])).transpose(1, 2)
    # PyTorch's kernel rounds the number of rows up, and its fake tensors have that shape.
    lse = _forward(query, key, value, attn_bias, is_causal, scale, values, (n + 31) // 32 * 32)
    seed, offset = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    return values, lse if compute_log_sumexp else lse[..., :0], seed, offset


def _efficient_backward(
    grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    if not _is_ours(query, value, dropout_p):
        return _theirs(
            f"{_EFFICIENT}_backward", grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed,
            philox_offset, dropout_p, grad_input_mask, is_causal, scale=scale,
        )  # fmt: skip
    bias_needs = attn_bias is not None and bool(grad_input_mask[3])
    d_q, d_k, d_v, *rest = _backward(
        grad_out, query, key, value, attn_bias, out, logsumexp, is_causal, scale, bias_needs
    )
    return d_q, d_k, d_v, rest[0] if bias_needs else None


def _cudnn(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
    scale=None,
):  # fmt: skip
    if not _is_ours(query, value, dropout_p, return_debug_mask):
        return _theirs(
            _CUDNN, query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask,
            scale=scale,
        )  # fmt: skip
    n, m = query.shape[2], key.shape[2]
    same = query.shape[3] == value.shape[3]
    values = torch.empty_like(query) if same else query.new_empty((*query.shape[:3], value.shape[3]))
    lse = _forward(query, key, value, attn_bias, is_causal, scale, values, n).unsqueeze(3)
    seed, offset = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    return values, lse, None, None, n, m, seed, offset, None


def _cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q,
    max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    if not _is_ours(query, value, dropout_p):
        return _theirs(
            f"{_CUDNN}_backward", grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
            cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale=scale,
        )  # fmt: skip
    bias = attn_bias if attn_bias is not None and attn_bias.numel() > 0 else None
    return tuple(_backward(grad_out, query, key, value, bias, out, logsumexp, is_causal, scale)[:3])
