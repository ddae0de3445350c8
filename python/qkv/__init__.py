"""Attention: every mechanism, forward and backward, exact, in linear memory.

An `Attention` is a description: a score, a mask, a bias, a selection. Tensors come with the call, from NumPy, PyTorch,
JAX or anything with `__dlpack__` or a buffer, with any strides, without copies; results come in the library of `q`.

>>> import numpy as np, qkv
>>> x = np.random.default_rng(1).normal(size=(1, 2, 16, 8)).astype(np.float32)   # [B, H, N, D]
>>> causal = qkv.Attention.scaled_dot().mask(qkv.Mask.causal())
>>> out = causal.forward(x, x, x)
>>> out.values.shape, out.lse.shape
((1, 2, 16, 8), (1, 2, 16))

`qkv.torch`, `qkv.hf` and `qkv.jax` are imported on their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._qkv import (
    Array,
    Attention,
    Bias,
    Features,
    Gradients,
    Mask,
    Output,
    Place,
    Score,
    Select,
    Weights,
    __version__,
    alibi_slopes,
    get_num_threads,
    lsh_buckets,
    segments_of,
    set_num_threads,
)

if TYPE_CHECKING:
    from ._qkv import _ArrayLike as ArrayLike
    from .looking import explore, show


def __getattr__(name: str) -> Any:
    # Drawing needs NumPy, computing does not.
    if name in ("explore", "show"):
        from . import looking

        return getattr(looking, name)
    raise AttributeError(f"module 'qkv' has no attribute {name!r}")


__all__ = [
    "Array",
    "Attention",
    "Bias",
    "Features",
    "Gradients",
    "Mask",
    "Output",
    "Place",
    "Score",
    "Select",
    "Weights",
    "__version__",
    "alibi_slopes",
    "explore",
    "get_num_threads",
    "lsh_buckets",
    "sdpa",
    "segments_of",
    "set_num_threads",
    "show",
]


def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: int | None = None,
    threads: int | None = None,
) -> Any:
    """Scaled dot-product attention with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    `attn_mask` is of bool (true where a query sees a key) or of the type of `query` (added to the scores). Dropout
    needs a `seed`. Returns the values alone.
    """
    attention = Attention.scaled_dot()
    inputs: dict[str, Any] = {}
    if attn_mask is not None:
        if is_causal:
            raise ValueError("`attn_mask` was given, but `is_causal` is set: join them in the mask")
        if str(getattr(attn_mask, "dtype", None)).rpartition(".")[2] in ("bool", "uint8"):
            attention, inputs["bits"] = attention.mask(Mask.bits()), attn_mask
        else:
            attention, inputs["bias"] = attention.bias(Bias.tensor()), attn_mask
    if is_causal:
        attention = attention.mask(Mask.causal())
    if scale is not None:
        attention = attention.scale(scale)
    if dropout_p > 0.0:
        attention, inputs["seed"] = attention.dropout(dropout_p), seed
    if not enable_gqa and _heads(query) != _heads(key):
        raise ValueError(f"`query` has {_heads(query)} heads and `key` has {_heads(key)}: pass `enable_gqa=True`")
    return attention.forward(query, key, value, threads=threads, **inputs).values


def _heads(array: Any) -> int:
    shape: tuple[int, ...] = getattr(array, "shape", ())
    return int(shape[-3]) if len(shape) > 2 else 1
