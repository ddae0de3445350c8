"""The modules of `qkv.torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import Attention, Bias, Mask
from . import _call as ops


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with the same parameters, arguments and state dict, and any description.

    `description` is what the heads compute; masks of the call are joined to its own. The weights that come back
    are exact and have no gradient.
    """

    def __init__(self, *args: Any, description: Attention | None = None, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.description = Attention.scaled_dot() if description is None else description

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `torch.nn.MultiheadAttention.forward`: masks of bool are true where a key must not be seen."""
        single = query.dim() == 2
        if single:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._projected(query, key, value)
        k, v, added = self._extended(k, v)
        b, h, n, m = q.shape[0], self.num_heads, q.shape[2], k.shape[2]
        description, inputs = self._masked(
            is_causal and attn_mask is None, attn_mask, key_padding_mask, (b, h, n, m), added, q
        )
        p = self.dropout if self.training else 0.0
        described = description.dropout(p) if p > 0.0 else description
        out = ops.attention(q, k, v, described, **inputs)
        out = F.linear(out.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        weights = None
        if need_weights:
            weights = ops.weights(q, k, v, description, **inputs).all().to(out)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if single else weights
        if single:
            return out.squeeze(0), weights
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self._qkv_same_embed_dim:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        made = (F.linear(x, w, bias) for x, w, bias in zip((query, key, value), matrices, biases, strict=True))
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in made)
        return q, k, v

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys and values with the learned pair and the pair of zeros appended; and how many were appended."""
        b, h, _, d = k.shape
        added = 0
        if self.bias_k is not None and self.bias_v is not None:
            one = [t.view(1, 1, h, d).transpose(1, 2).expand(b, h, 1, d) for t in (self.bias_k, self.bias_v)]
            k, v, added = torch.cat([k, one[0]], 2), torch.cat([v, one[1]], 2), 1
        if self.add_zero_attn:
            zeros = k.new_zeros(b, h, 1, d)
            k, v, added = torch.cat([k, zeros], 2), torch.cat([v, zeros], 2), added + 1
        return k, v, added

    def _masked(
        self,
        causal: bool,
        attn_mask: Tensor | None,
        padding: Tensor | None,
        sizes: tuple[int, int, int, int],
        added: int,
        q: Tensor,
    ) -> tuple[Attention, dict[str, Tensor]]:
        b, h, n, m = sizes
        description, inputs = self.description, {}
        if causal:
            if added:
                raise ValueError("`is_causal` cannot go with `add_bias_kv` or `add_zero_attn`: pass the mask")
            description = description.mask(Mask.causal())
        hidden: list[Tensor] = []
        added_scores: list[Tensor] = []
        for mask, shape in ((attn_mask, None), (padding, (b, 1, 1, m - added))):
            if mask is None:
                continue
            mask = F.pad(mask.reshape(shape) if shape else mask, (0, added))
            if shape is None:
                mask = mask.view(b, h, n, m) if mask.dim() == 3 else mask.view(1, 1, n, m)
            (hidden if mask.dtype == torch.bool else added_scores).append(mask)
        if hidden:
            seen = ~hidden[0] if len(hidden) == 1 else ~(hidden[0] | hidden[1])
            description, inputs["bits"] = description.mask(Mask.bits()), seen
        if added_scores:
            description = description.bias(Bias.tensor())
            inputs["bias"] = sum(added_scores[1:], added_scores[0]).to(q.dtype)
        return description, inputs


class BahdanauAttention(nn.Module):
    """Additive attention (Bahdanau et al. 2014): `vᵀ tanh(W₁q + W₂k)`.

    Queries `[B, N, query_size]`, keys `[B, M, key_size]`; the values are the keys unless others are given.
    """

    def __init__(
        self, query_size: int, key_size: int, hidden_size: int, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.w_q = nn.Parameter(torch.empty(hidden_size, query_size, **made))
        self.w_k = nn.Parameter(torch.empty(hidden_size, key_size, **made))
        self.v_score = nn.Parameter(torch.empty(hidden_size, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters."""
        nn.init.xavier_uniform_(self.w_q)
        nn.init.xavier_uniform_(self.w_k)
        nn.init.uniform_(self.v_score, -(self.v_score.numel() ** -0.5), self.v_score.numel() ** -0.5)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The context `[B, N, Dv]` and the log-sum-exp of the scores `[B, N]`; `lengths [B]` are those of the keys."""
        described = Attention.additive()
        return _single_head(described, queries, keys, values, lengths, w_q=self.w_q, w_k=self.w_k, v_score=self.v_score)


class LuongAttention(nn.Module):
    """Luong's attention (2015): `score="general"` is `qᵀ W k`, `"dot"` and `"scaled_dot"` have no parameter.

    With `window=D` it is local: monotonic, within `D` keys of the query's own place.
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        score: str = "general",
        *,
        window: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if score not in ("general", "dot", "scaled_dot"):
            raise ValueError(f'`score` is {score!r}, expected "general", "dot" or "scaled_dot"')
        self.score = score
        self.window = window
        self.w = (
            nn.Parameter(torch.empty(query_size, key_size, device=device, dtype=dtype)) if score == "general" else None
        )
        if self.w is not None:
            nn.init.xavier_uniform_(self.w)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The context `[B, N, Dv]` and the log-sum-exp of the scores `[B, N]`; `lengths [B]` are those of the keys."""
        described: Attention = getattr(Attention, self.score)()
        if self.window is not None:
            described = described.mask(Mask.window(self.window, self.window))
        return _single_head(described, queries, keys, values, lengths, **({} if self.w is None else {"w": self.w}))


def _single_head(
    described: Attention,
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    lengths: Tensor | None,
    **parameters: Tensor,
) -> tuple[Tensor, Tensor]:
    inputs: dict[str, Tensor] = dict(parameters)
    if lengths is not None:
        described, inputs["lengths"] = described.mask(Mask.lengths()), lengths
    q, k = queries.unsqueeze(1), keys.unsqueeze(1)
    out = ops.attend(q, k, k if values is None else values.unsqueeze(1), described, **inputs)
    return out.values.squeeze(1), out.lse.squeeze(1)
