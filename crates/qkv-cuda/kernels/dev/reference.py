"""Attention by its definition, in float64, with every feature of the kernels: the reference they are checked against."""
import torch


def philox_keep(seed, b, h, n, m, threshold, device):
    """[b, h, n, m] booleans: kept. Counter (j / 8, i, head, sequence), 16 bits per score."""
    groups = -(-m // 8)
    B, H, I, G = torch.meshgrid(*(torch.arange(x, device=device, dtype=torch.int64) for x in (b, h, n, groups)), indexing="ij")
    w = [G, I, H, B]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    mask = 0xFFFFFFFF

    def mul(a, c):  # 32 × 32 bits without overflow of int64
        low, high = (a & 0xFFFF) * c, (a >> 16) * c
        lo = (low + ((high & 0xFFFF) << 16))
        return ((high >> 16) + (lo >> 32)) & mask, lo & mask

    for _ in range(10):
        h0, l0 = mul(w[0], 0xD2511F53)
        h1, l1 = mul(w[2], 0xCD9E8D57)
        w = [h1 ^ w[1] ^ k0, l1, h0 ^ w[3] ^ k1, l0]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    halves = torch.stack([half for x in w for half in (x & 0xFFFF, x >> 16)], -1)
    return halves.reshape(b, h, n, groups * 8)[..., :m] >= threshold


def attention(q, k, v, scale=None, band=None, offset=0, lengths=None, segments=None, bits=None, softcap=None, alibi_slopes=None,
              bias=None, sinks=None, dropout=None, kind=torch.float64):
    """out, lse; differentiable. bits: [.., n, m] booleans that broadcast."""
    q, k, v = (x.to(kind) for x in (q, k, v))
    b, hq, n, d = q.shape
    hk, m = k.shape[1], k.shape[2]
    k, v = (x.repeat_interleave(hq // hk, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (scale or d ** -0.5)
    i, j = torch.arange(n, device=q.device)[:, None] + offset, torch.arange(m, device=q.device)[None, :]
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(kind)[None, :, None, None] * (i - j).abs()
    if bias is not None:
        s = s + bias.to(kind)
    keep = torch.ones(n, m, dtype=torch.bool, device=q.device)
    if band:
        keep = keep & (j >= i - band[0]) & (j <= i + band[1])
    keep = keep.expand(b, hq, n, m)
    if lengths is not None:
        keep = keep & (j[None, None] < lengths[:, None, None, None])
    if segments is not None:
        keep = keep & (segments[0][:, None, :, None] == segments[1][:, None, None, :])
    if bits is not None:
        keep = keep & bits
    s = s.masked_fill(~keep, float("-inf"))
    full = s if sinks is None else torch.cat([s, sinks.to(kind)[None, :, None, None].expand(b, hq, n, 1)], -1)
    none = full.isinf().all(-1)
    lse = torch.logsumexp(full.masked_fill(none[..., None], 0.0), -1)
    p = torch.exp(s - lse[..., None])
    lse = lse.masked_fill(none, float("-inf"))
    if dropout:
        threshold, seed = dropout
        p = p * philox_keep(seed, b, hq, n, m, threshold, q.device) * (65536 / (65536 - threshold))
    return p @ v, lse
