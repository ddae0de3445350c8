"""`qkv.torch.install`: the library behind `F.scaled_dot_product_attention` on the CPU."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.library import Library

# The operators that PyTorch's function calls on the CPU where no weights are dropped and the mask needs no gradient.
_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"

_installed: Library | None = None


def install() -> None:
    """Puts the library behind `torch.nn.functional.scaled_dot_product_attention` on the CPU, and so behind every model
    that calls it. Dropout, and masks that need a gradient, stay PyTorch's. `uninstall` takes it away; installing twice
    is fine.
    """
    global _installed
    if _installed is not None:
        return
    missing = [name for name in (_FORWARD, _BACKWARD) if not hasattr(torch.ops.aten, name)]
    if missing:
        raise RuntimeError(f"PyTorch {torch.__version__} has no operator {missing[0]}: use `qkv.torch.sdpa` instead")
    library = Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        # PyTorch says that an operator is overridden: that is what was asked for.
        warnings.simplefilter("ignore")
        library.impl(_FORWARD, _forward)
        library.impl(_BACKWARD, _backward)
    _installed = library


def uninstall() -> None:
    """Gives PyTorch its own operators back."""
    global _installed
    if _installed is not None:
        _installed._destroy()
        _installed = None


def _given(
    query: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> tuple[list[Tensor], str, str]:
    from .torch import _sdpa_text

    if attn_mask is None:
        return [], "", _sdpa_text(is_causal, False, False, scale, 0.0)
    bits = attn_mask.dtype == torch.bool
    mask = attn_mask if bits or attn_mask.dtype == query.dtype else attn_mask.to(query.dtype)
    return [mask], "bits" if bits else "bias", _sdpa_text(is_causal, bits, not bits, scale, 0.0)


def _forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    from .torch import _forward as forward

    more, names, text = _given(query, is_causal, attn_mask, scale)
    return forward(query, key, value, more, None, names, text)


def _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    from .torch import _backward as backward

    more, names, text = _given(query, is_causal, attn_mask, scale)
    needs = [True, True, True, *[False] * len(more)]
    return tuple(backward(grad_out, None, out, logsumexp, needs, query, key, value, more, None, names, text)[:3])
