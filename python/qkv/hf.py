"""Hugging Face models on this library, on the CPU and on GPUs: `qkv.hf.register()`, then `attn_implementation="qkv"`.

>>> import qkv.hf
>>> qkv.hf.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="qkv")      # doctest: +SKIP

Padding, sliding windows, soft-cap, sinks, position bias (with its gradient), packed sequences, static and dynamic
caches, and `output_attentions=True` with exact weights. A query that sees nothing (left padding) gets 0, where `eager`
gives the mean of all values: a loss should not look at it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import Attention, Bias, Mask, Place
from .torch import _call as ops

__all__ = ["attention", "mask", "observe", "register"]

# The attribute by which a mask made by `mask` carries more than padding: (causal, window, padded, segments).
_CARRIED = "_qkv_mask"

# The types of a mask with padding only, and with padding and a window: a copy loses the attribute but keeps the type.
_PADDED, _WINDOWED = torch.bool, torch.uint8
_PADDING = (_PADDED, _WINDOWED)

# Called with every attention inside `observe`: (module, q, k, v, description, inputs, lse).
_observer: Callable[..., None] | None = None


def register(name: str = "qkv") -> None:
    """Makes the library an `attn_implementation` of this name, masks included."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


class observe:
    """A context in which `observer(module, q, k, v, description, inputs, lse)` is called with every attention."""

    def __init__(self, observer: Callable[..., None]) -> None:
        self._new, self._old = observer, None

    def __enter__(self) -> None:
        global _observer
        self._old, _observer = _observer, self._new  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        global _observer
        _observer = self._old


@functools.lru_cache(4096)
def _described(
    causal: bool,
    window: int | None,
    end: bool,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    inputs: tuple[str, ...],
) -> Attention:
    found = Attention.scaled_dot()
    found = found if scale is None else found.scale(scale)
    found = found.softcap(softcap) if softcap else found
    found = found.mask(Mask.causal()) if causal else found
    if window is not None:
        # A window of w is the token itself and the w − 1 before it; if not causal, also the w − 1 after it.
        found = found.mask(Mask.window(window - 1, 0) if causal else Mask.window(window - 1, window - 1))
    found = found.mask(Mask.bits()) if "bits" in inputs else found
    found = found.mask(Mask.segments()) if "segments" in inputs else found
    found = found.bias(Bias.tensor()) if "bias" in inputs else found
    found = found.with_sinks() if "sinks" in inputs else found
    found = found.place(Place.end()) if end else found
    return found.dropout(dropout) if dropout > 0.0 else found


# Constant in a compiled graph, because the choices are numbers and names.
_facts = torch.compiler.assume_constant_result(lambda *choices: ops.facts(_described(*choices)))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool = False,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of a Hugging Face model: `query [B, Hq, N, D]` to `(out [B, N, Hq, Dv], weights or None)`."""
    if cache is not None and type(cache).__name__ == "PagedAttentionCache":
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    n, m = query.shape[2], key.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and n > 1
    window = sliding_window if causal or n == 1 else None
    inputs: dict[str, Any] = {}
    if attention_mask is not None:
        carried = getattr(attention_mask, _CARRIED, None)
        if carried is not None:
            causal, window, padded, segments = carried
            if padded and segments is not None and (segments[0].shape[1], segments[1].shape[1]) == (n, m):
                inputs["segments"] = segments
            elif padded:
                inputs["bits"] = attention_mask[..., :m]
        elif attention_mask.dim() == 4 and attention_mask.shape[2] == 1 and n > 1 and attention_mask.dtype in _PADDING:
            # A mask made by `mask` that was copied on its way carries only padding. The rest is in the arguments.
            if attention_mask.dtype == _WINDOWED and sliding_window is None:
                raise ValueError(
                    "the model copied the mask of a sliding window and passes no `sliding_window`: use `eager`"
                )
            causal, inputs["bits"] = True, attention_mask[..., :m]
            window = sliding_window if attention_mask.dtype == _WINDOWED else None
        else:
            # The mask contains everything.
            causal, window = False, None
            given = attention_mask if attention_mask.dim() == 4 else attention_mask[:, None, None]
            if given.dtype == torch.bool:
                inputs["bits"] = given[..., :m]
            elif given.is_floating_point():
                inputs["bias"] = given[..., :m].to(query.dtype)
            else:
                inputs["bits"] = given[..., :m].bool()
    elif cu_seq_lens_q is not None:
        ends = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        inputs["segments"] = (_segments(cu_seq_lens_q, n), _segments(ends, m))
    if position_bias is not None:
        bias = position_bias[..., :m].to(query.dtype)
        inputs["bias"] = bias if "bias" not in inputs else inputs["bias"] + bias
    if s_aux is not None:
        inputs["sinks"] = s_aux.to(query.dtype)
    # Queries are at the end of the keys, where a cache grows.
    end = (causal or window is not None) and n != m
    choices = (causal, window, end, scaling, softcap)
    names = tuple(sorted(inputs))
    out = ops.attend_described(_facts(*choices, dropout, names), query, key, value, None, dict(inputs))
    weights = None
    if _observer is not None:
        _observer(module, query, key, value, _described(*choices, 0.0, names), inputs, out.lse)
    if output_attentions or _collecting():
        still = _described(*choices, 0.0, names)
        weights = ops.weights(query, key, value, still, **inputs).all().to(query)
    return out.values.transpose(1, 2), weights


def _segments(cumulative: Tensor, length: int) -> Tensor:
    """The segment of each of `length` tokens, `[1, length]`."""
    at = torch.arange(length, device=cumulative.device)
    return (torch.searchsorted(cumulative, at, right=True) - 1).to(torch.int32).unsqueeze(0)


def _collecting() -> bool:
    """Whether the model was called with `output_attentions=True`."""
    if torch.compiler.is_compiling():
        return False
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    collected = _active_collector.get()
    return bool(collected is not None and ("attentions" in collected or "cross_attentions" in collected))


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a Hugging Face model. Causal and sliding masks, with padding or without, stay linear in the sequence:
    a tensor `[B, 1, 1, M]` of padding that carries the rest as an attribute. Everything else becomes bits `[B, 1, N,
    M]`.
    """
    from transformers import masking_utils as theirs

    function = theirs.causal_mask_function if mask_function is None else mask_function
    at_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if allow_is_causal_skip and at_end and q_length > 1 and not torch.compiler.is_compiling():
        causal = function is theirs.causal_mask_function
        if causal or _is_window(function, local_size):
            window = None if causal or local_size is None or local_size >= kv_length else local_size
            padding = _padding(attention_mask, kv_length, kv_offset)
            if padding is None and window is None and q_length == kv_length:
                return None
            device = kwargs.get("device")
            found = torch.ones(1, 1, 1, kv_length, device=device) if padding is None else padding[:, None, None]
            found = found.to(_PADDED if window is None else _WINDOWED)
            segments = _padding_segments(padding, q_length) if padding is not None and padding.is_cuda else None
            setattr(found, _CARRIED, (True, window, padding is not None, segments))
            return found
    if allow_is_bidirectional_skip and function is theirs.bidirectional_mask_function:
        padding = _padding(attention_mask, kv_length, kv_offset)
        return None if padding is None else padding[:, None, None].expand(-1, 1, q_length, -1)
    return theirs.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **kwargs,
    )


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The padding of the keys `[B, M]`; `None` if there is none."""
    from transformers.masking_utils import prepare_padding_mask

    found = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if found is None:
        return None
    found = found[:, kv_offset : kv_offset + kv_length].bool()
    return None if bool(found.all()) else found


def _padding_segments(padding: Tensor, q_length: int) -> tuple[Tensor, Tensor]:
    """Padding as segments, which the fast GPU kernels support: queries and real keys are in segment 0, padding before
    them in −1 and after them in 1, so that segments are runs."""
    before = padding.cumsum(1) == 0
    keys = torch.where(padding, 0, torch.where(before, -1, 1)).to(torch.int32)
    return keys.new_zeros(keys.shape[0], q_length), keys


def _is_window(function: Callable[..., Any], size: int | None) -> bool:
    """Whether a mask function with a local size is a causal sliding window and not chunks, tested at the edges."""
    if size is None or size < 1:
        return False
    zero, edge = torch.tensor(0), torch.tensor(size)
    ask = lambda q, k: bool(function(zero, zero, q, k))  # noqa: E731
    return ask(edge, edge) and not ask(edge, zero) and not ask(zero, edge) and (size == 1 or ask(edge, edge - 1))
