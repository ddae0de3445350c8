"""`qkv.torch.install`: the library behind `F.scaled_dot_product_attention`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from . import _cpu, _install_cuda
from ._call import sdpa_text

# The operators that PyTorch's function calls on the CPU if there is no dropout and the mask needs no gradient.
_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"

_installed: list[Library] = []


def install() -> None:
    """Puts the library behind `torch.nn.functional.scaled_dot_product_attention`, and so behind every model that calls
    it: on the CPU and, where PyTorch has CUDA, on GPUs. Dropout stays PyTorch's, and what the library does not compute
    there; on the CPU so do masks that need a gradient. `uninstall` takes it away; installing twice is fine.
    """
    if _installed:
        return
    _replace("CPU", {_FORWARD: _forward, _BACKWARD: _backward})
    if torch.version.cuda is not None:
        _replace("CUDA", _install_cuda.operators())


def uninstall() -> None:
    """Gives PyTorch its own operators back."""
    while _installed:
        _installed.pop()._destroy()


def _replace(key: str, operators: dict[str, Callable[..., Any]]) -> None:
    missing = [name for name in operators if not hasattr(torch.ops.aten, name)]
    if missing:
        uninstall()
        raise RuntimeError(f"PyTorch {torch.__version__} has no operator {missing[0]}: use `qkv.torch.sdpa` instead")
    library = Library("aten", "IMPL", key)
    _installed.append(library)
    with warnings.catch_warnings():
        # PyTorch warns that an operator is overridden, which is intended.
        warnings.simplefilter("ignore")
        for name, function in operators.items():
            library.impl(name, function)


def _given(
    query: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> tuple[list[Tensor], str, str]:
    if attn_mask is None:
        return [], "", sdpa_text(is_causal, False, False, scale, 0.0)
    bits = attn_mask.dtype == torch.bool
    mask = attn_mask if bits or attn_mask.dtype == query.dtype else attn_mask.to(query.dtype)
    return [mask], "bits" if bits else "bias", sdpa_text(is_causal, bits, not bits, scale, 0.0)


def _forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    more, names, text = _given(query, is_causal, attn_mask, scale)
    return _cpu.forward(query, key, value, more, None, names, text)


def _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    more, names, text = _given(query, is_causal, attn_mask, scale)
    needs = [True, True, True, *[False] * len(more)]
    return tuple(_cpu.backward(grad_out, None, out, logsumexp, needs, query, key, value, more, None, names, text)[:3])
