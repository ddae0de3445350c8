"""Makes `values.json`: what PyTorch gives for a few dozen small attentions, outputs and gradients, in float64.

    python make.py        (needs nothing but PyTorch; writes the file beside this script)

Each case is computed by a *formula*, attention written out in plain PyTorch, and its gradients come from autograd.
Where PyTorch has a function of its own for the case (`scaled_dot_product_attention`, `MultiheadAttention`,
`flex_attention`, `cosine_similarity`, `cdist`), that function is called too and has to agree with the formula to
1e-12: for those the file holds the function's output and the function's gradients, and the formula only adds what it
does not return (the log-sum-exp, the weights). The script refuses to write a file in which the two differ.

Inputs are not stored. Both sides make them from `number(seed, at)` below, whose values are whole multiples of 1/16384:
exact in float64 and in float32, on every machine.

Letters: B sequences, Hq query heads, Hk key heads, N queries, M keys, D and Dk the widths of queries and keys, Dv that
of values, A that of the additive score. All tensors are [B, H, length, width].
"""

import json
import math
import pathlib
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

INFINITY = float("inf")
# The seed of a tensor is 100 * (number of the case) + its place in this list. The Rust side has the same list.
FLOATS = ["q", "k", "v", "d_out", "w", "w_q", "w_k", "v_score", "scale", "bias", "table", "sinks", "d_lse", "d_entropy"]


def number(seed, at):
    """A number from [-2, 2): integer arithmetic modulo 2**32, then one exact division."""
    h = (at * 2654435761 + seed * 2246822519 + 374761393) % 2**32
    h ^= h >> 15
    h = h * 2246822507 % 2**32
    h ^= h >> 13
    h = h * 3266489909 % 2**32
    h ^= h >> 16
    return (h >> 16) / 16384 - 2


def made(seed, shape):
    return torch.tensor([number(seed, at) for at in range(math.prod(shape))]).reshape(shape)


# --- the formula ------------------------------------------------------------------------------------------------------


def shared(x, heads):
    """Keys or values with every head repeated for the query heads that share it."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def attend(scores, keep, v, sinks=None):
    """Softmax attention of final scores [B, Hq, N, M], with absent pairs and sinks: out, lse, weights, entropy."""
    keep = scores > -INFINITY if keep is None else (scores > -INFINITY) & keep
    logits = scores.masked_fill(~keep, -INFINITY)
    column = None if sinks is None else sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    sees = keep.any(-1, keepdim=True) if column is None else torch.ones_like(keep[..., :1])
    # A row that sees nothing is given equal scores, so that autograd meets no 0/0, and its weights are then taken away.
    logits = logits.masked_fill(~sees, 0.0)
    whole = logits if column is None else torch.cat([logits, column], dim=-1)
    weights = whole.softmax(-1)[..., : scores.shape[-1]] * sees * keep
    lse = whole.logsumexp(-1)
    logs = (logits - lse.unsqueeze(-1)).masked_fill(~(keep & sees), 0.0)
    return {
        "out": weights @ shared(v, scores.shape[1]),
        "lse": lse.masked_fill(~sees.squeeze(-1), -INFINITY),
        "weights": weights,
        "entropy": -(weights * logs).sum(-1),
    }


def dot(t):
    return t["q"] @ shared(t["k"], t["q"].shape[1]).mT


def scaled_dot(t):
    return dot(t) / math.sqrt(t["q"].shape[-1])


def general(t):
    """Luong: q W k."""
    return t["q"] @ t["w"] @ shared(t["k"], t["q"].shape[1]).mT


def additive(t):
    """Bahdanau: v tanh(W1 q + W2 k). A matrix that is not given is the identity."""
    q = t["q"] @ t["w_q"].mT if "w_q" in t else t["q"]
    k = t["k"] @ t["w_k"].mT if "w_k" in t else t["k"]
    k = shared(k, q.shape[1])
    return torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ t["v_score"]


def cosine(t):
    return F.normalize(t["q"], dim=-1) @ F.normalize(shared(t["k"], t["q"].shape[1]), dim=-1).mT


def distance(t):
    q, k = t["q"], shared(t["k"], t["q"].shape[1])
    return -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)


def a_head(x):
    """A number a head, against scores [B, Hq, N, M]."""
    return x.reshape(1, -1, 1, 1)


def capped(scores, cap):
    return cap * torch.tanh(scores / cap)


def alibi(scores, slopes):
    i, j = torch.arange(scores.shape[-2]).unsqueeze(-1), torch.arange(scores.shape[-1])
    return scores - a_head(torch.tensor(slopes)) * (i - j).abs()


def relative(scores, table, reach):
    i, j = torch.arange(scores.shape[-2]).unsqueeze(-1), torch.arange(scores.shape[-1])
    return scores + table[:, (j - i).clamp(-reach, reach) + reach]


def keep_where(rule):
    """A mask from a rule of (i, j), as in FlexAttention's mask_mod but for one sequence and one head."""

    def keep(n, m):
        return torch.tensor([[bool(rule(i, j)) for j in range(m)] for i in range(n)])

    return keep


def causal(i, j):
    return j <= i


# --- PyTorch's own functions ------------------------------------------------------------------------------------------


def sdpa(**settings):
    """`scaled_dot_product_attention` itself; a setting may be made from the tensors of the case."""

    def call(t):
        made = {name: value(t) if callable(value) else value for name, value in settings.items()}
        return {"out": F.scaled_dot_product_attention(t["q"], t["k"], t["v"], **made)}

    return call


def multihead(add_zero_attn=False, **settings):
    """`nn.MultiheadAttention` with identity projections: what is left is its core, with a weight for every head."""

    def call(t):
        b, h, n, d = t["q"].shape
        layer = torch.nn.MultiheadAttention(h * d, h, bias=False, batch_first=True, add_zero_attn=add_zero_attn)
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.eye(h * d).repeat(3, 1))
            layer.out_proj.weight.copy_(torch.eye(h * d))
        layer.requires_grad_(False)
        wide = [x.transpose(1, 2).flatten(2) for x in (t["q"], t["k"], t["v"])]  # [B, N, H * D]
        out, weights = layer(*wide, need_weights=True, average_attn_weights=False, **settings)
        out = out.unflatten(2, (h, d)).transpose(1, 2)
        return {"out": out, "weights": weights[..., : t["k"].shape[2]]}

    return call


def flex(score_mod=None, mask=None):
    """`flex_attention`, which has no backward on CPU: it vouches for out and lse, the formula for the gradients."""

    def call(t):
        still = {name: x.detach() for name, x in t.items()}

        def mod(score, b, h, i, j):
            score = score if score_mod is None else score_mod(still, score, b, h, i, j)
            return score if mask is None else torch.where(mask(i, j), score, -INFINITY)

        gqa = still["q"].shape[1] != still["k"].shape[1]
        lse = AuxRequest(lse=True)
        out, aux = flex_attention(still["q"], still["k"], still["v"], score_mod=mod, enable_gqa=gqa, return_aux=lse)
        return {"out": out, "lse": aux.lse}

    return call


# --- the cases --------------------------------------------------------------------------------------------------------

cases = []


def case(
    name,
    group,
    attention,
    scores,
    *,
    torch_says=None,
    b=1,
    hq=2,
    hk=None,
    n=4,
    m=5,
    d=3,
    dk=None,
    dv=2,
    given=None,
    values=None,
    data=None,
    keep=None,
    upstream=("d_out",),
    every=1,
):
    """Adds a case.

    attention    the description, in the form in which qkv reads one from a file
    scores       the final scores before the mask, from the tensors
    torch_says   PyTorch's own function for it, if there is one
    given        the shapes of the float tensors beside q, k and v
    values       their elements, where they are not to come from `number`
    data         what masks look at: lengths, segments_q, segments_k, mask (shape and bits)
    keep         which pairs are kept, [N, M] or anything that broadcasts to [B, Hq, N, M]
    upstream     which gradients come from above
    every        keep one number in so many of each expected tensor (for the long cases)
    """
    hk = hk or hq
    shapes = {"q": [b, hq, n, d], "k": [b, hk, m, dk or d], "v": [b, hk, m, dv], "d_out": [b, hq, n, dv]}
    shapes |= given or {}
    shapes |= {name: [b, hq, n] for name in upstream if name != "d_out"}
    seed = 100 * len(cases)
    tensors = {}
    for tensor, shape in shapes.items():
        tensors[tensor] = made(seed + FLOATS.index(tensor), shape)
        if tensor in (values or {}):
            tensors[tensor] = torch.tensor(values[tensor]).reshape(shape)
    leaves = [tensor for tensor in shapes if not tensor.startswith("d_")]
    for tensor in leaves:
        tensors[tensor].requires_grad_(True)

    kept = keep(n, m) if callable(keep) else keep
    result = attend(scores(tensors), kept, tensors["v"], tensors.get("sinks"))
    asked = ["out", "lse", "weights"] + (["entropy"] if attention.get("entropy") else [])
    gradients = differentiate(result, tensors, leaves, upstream)
    if torch_says is not None:
        theirs = torch_says(tensors)
        for what, found in theirs.items():
            agree(name, what, found, result[what])
        if theirs["out"].requires_grad:
            their_gradients = differentiate(result | theirs, tensors, leaves, upstream)
            for what, found in their_gradients.items():
                agree(name, what, found, gradients[what])
            gradients |= their_gradients
        result |= theirs

    expected = {what: result[what] for what in asked} | gradients
    cases.append(
        {
            "name": name,
            "group": group,
            "seed": seed,
            "attention": attention,
            "shapes": shapes,
            **({"values": {tensor: plain(torch.tensor(x)) for tensor, x in values.items()}} if values else {}),
            **({"data": data} if data else {}),
            **({"every": every} if every != 1 else {}),
            "expected": {what: plain(x.flatten()[::every]) for what, x in expected.items()},
        }
    )


def differentiate(result, tensors, leaves, upstream):
    """The gradients of sum(out * d_out) + ..., for every leaf that has a part in it."""
    loss = sum((result[what.removeprefix("d_")] * tensors[what]).sum() for what in upstream)
    found = torch.autograd.grad(loss, [tensors[leaf] for leaf in leaves], allow_unused=True, retain_graph=True)
    return {"d_" + leaf: g for leaf, g in zip(leaves, found) if g is not None}


def agree(name, what, found, expected):
    largest = expected[expected.isfinite()].abs().max().clamp(min=1e-3)
    same = torch.where(found == expected, 0.0, (found - expected).abs())
    assert not found.isnan().any() and same.max() <= 1e-12 * largest, f"{name}: {what} differs by {same.max()}"


def plain(x):
    """Numbers for the file: 14 digits, and null for minus infinity."""
    return [None if y == -INFINITY else float(f"{y:.14g}") for y in x.detach().flatten().tolist()]


SCALED = {"score": "scaled-dot"}

# scaled_dot_product_attention, every argument of it
case("full", "sdpa", SCALED, scaled_dot, torch_says=sdpa())
case("two sequences", "sdpa", SCALED, scaled_dot, torch_says=sdpa(), b=2, n=3, m=3)
case("cross-attention to a longer sequence", "sdpa", SCALED, scaled_dot, torch_says=sdpa(), n=2, m=9, d=4)
case("values wider than keys", "sdpa", SCALED, scaled_dot, torch_says=sdpa(), d=2, dv=5)
case("one query, one key", "sdpa", SCALED, scaled_dot, torch_says=sdpa(), n=1, m=1)
case("a width of one", "sdpa", SCALED, scaled_dot, torch_says=sdpa(), d=1, dv=1)
case("scale", "sdpa", SCALED | {"scale": {"fixed": 0.3}}, lambda t: 0.3 * dot(t), torch_says=sdpa(scale=0.3))
case("causal", "sdpa", SCALED | {"mask": "causal"}, scaled_dot, keep=keep_where(causal),
     torch_says=sdpa(is_causal=True), m=4)
case("causal, more keys: the diagonal starts at the first", "sdpa", SCALED | {"mask": "causal"}, scaled_dot,
     keep=keep_where(causal), torch_says=sdpa(is_causal=True), n=3, m=6)
case("causal, more queries", "sdpa", SCALED | {"mask": "causal"}, scaled_dot,
     keep=keep_where(causal), torch_says=sdpa(is_causal=True), n=5, m=3)
case("causal_lower_right: the diagonal ends at the last", "sdpa", SCALED | {"mask": "causal", "place": "end"},
     scaled_dot, keep=keep_where(lambda i, j: j <= i + 3), n=3, m=6,
     torch_says=sdpa(attn_mask=causal_lower_right(3, 6)))

checkers = torch.tensor([[(i * 2 + j) % 3 != 0 for j in range(5)] for i in range(4)])
bits = {"mask": {"shape": [1, 1, 4, 5], "bits": checkers.flatten().int().tolist()}}
case("boolean mask", "sdpa", SCALED | {"mask": "bits"}, scaled_dot, keep=checkers, data=bits,
     torch_says=sdpa(attn_mask=checkers))
holes = torch.tensor([[[h == 0 or i != 2 for _ in range(5)] for i in range(4)] for h in range(2)]) & checkers
bits = {"mask": {"shape": [1, 2, 4, 5], "bits": holes.flatten().int().tolist()}}
case("boolean mask with a row that sees nothing", "sdpa", SCALED | {"mask": "bits"}, scaled_dot, keep=holes, data=bits,
     torch_says=sdpa(attn_mask=holes))

BIASED = SCALED | {"bias": {"tensor": True}}
float_mask = sdpa(attn_mask=lambda t: t["bias"])
with_bias = lambda t: scaled_dot(t) + t["bias"]
case("float mask with its gradient", "sdpa", BIASED, with_bias, given={"bias": [1, 2, 4, 5]}, torch_says=float_mask)
case("float mask shared by batch and heads", "sdpa", BIASED, with_bias, given={"bias": [1, 1, 3, 4]},
     torch_says=float_mask, b=2, n=3, m=4)
case("float mask for keys only", "sdpa", BIASED, with_bias, given={"bias": [1, 2, 1, 5]}, torch_says=float_mask)
case("float mask for queries only", "sdpa", BIASED, with_bias, given={"bias": [1, 2, 4, 1]}, torch_says=float_mask,
     upstream=("d_out", "d_lse"))  # a shift of a whole row changes nothing but its log-sum-exp
walls = [[(0.25 * (i - j) if (i + j) % 3 else -INFINITY) for j in range(5)] for i in range(4)]
case("float mask with minus infinity in it", "sdpa", BIASED, with_bias, given={"bias": [1, 1, 4, 5]},
     values={"bias": walls}, torch_says=float_mask)

case("enable_gqa", "sdpa", SCALED, scaled_dot, torch_says=sdpa(enable_gqa=True), hq=4, hk=2, n=3)
case("one key head for all, causal", "sdpa", SCALED | {"mask": "causal"}, scaled_dot, keep=keep_where(causal),
     torch_says=sdpa(enable_gqa=True, is_causal=True), hq=3, hk=1, n=4, m=4)
case("longer than a tile", "sdpa", SCALED, scaled_dot, torch_says=sdpa(), hq=1, n=70, m=300, d=5, dv=3, every=29)
case("longer than a tile, causal, grouped", "sdpa", SCALED | {"mask": "causal"}, scaled_dot, keep=keep_where(causal),
     torch_says=sdpa(enable_gqa=True, is_causal=True), hq=2, hk=1, n=200, m=200, d=4, dv=3, every=53)

# nn.MultiheadAttention without its projections
case("weights of every head", "multihead", SCALED, scaled_dot, torch_says=multihead(), dv=3)
padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])  # True: not to be seen
case("key_padding_mask", "multihead", SCALED | {"mask": "lengths"}, scaled_dot, keep=~padding[:, None, None, :],
     data={"lengths": [5, 3]}, torch_says=multihead(key_padding_mask=padding), b=2, n=2, dv=3)
padding = torch.tensor([[True, False, False, True, False]])
bits = {"mask": {"shape": [1, 1, 1, 5], "bits": (~padding).flatten().int().tolist()}}
case("key_padding_mask in front", "multihead", SCALED | {"mask": "bits"}, scaled_dot, keep=~padding[:, None, None, :],
     data=bits, torch_says=multihead(key_padding_mask=padding), dv=3)
case("attn_mask, where true means no", "multihead", SCALED | {"mask": "causal"}, scaled_dot, keep=keep_where(causal),
     torch_says=multihead(attn_mask=~keep_where(causal)(4, 5)), dv=3)
case("add_zero_attn", "multihead", SCALED | {"sinks": True}, scaled_dot, given={"sinks": [2]},
     values={"sinks": [0.0, 0.0]}, torch_says=multihead(add_zero_attn=True), dv=3)

# scores
luong = lambda t: attend(torch.einsum("bhid,bhjd->bhij", t["q"], t["k"]), None, t["v"])
case("Luong's dot", "scores", {"score": "dot"}, dot, torch_says=luong)
case("Luong's general", "scores", {"score": "general"}, general, d=3, dk=4, given={"w": [3, 4]},
     torch_says=lambda t: attend(torch.einsum("bhid,de,bhje->bhij", t["q"], t["w"], t["k"]), None, t["v"]))
case("general with a matrix a head", "scores", {"score": "general"}, general, d=4, dk=2, n=3, given={"w": [2, 4, 2]})
case("general, grouped and causal", "scores", {"score": "general", "mask": "causal"}, general, hk=1, n=5, dk=2,
     given={"w": [3, 2]}, keep=keep_where(causal))
bahdanau = {"w_q": [6, 3], "w_k": [6, 4], "v_score": [6]}
case("Bahdanau's additive", "scores", {"score": "additive"}, additive, d=3, dk=4, given=bahdanau)
case("additive with matrices for every head", "scores", {"score": "additive"}, additive, hq=4, hk=2, n=2, m=4, d=2,
     dk=3, given={"w_q": [4, 3, 2], "w_k": [2, 3, 3], "v_score": [3]})
case("additive with keys projected beforehand", "scores", {"score": "additive"}, additive, n=1, m=6, d=3, dk=4,
     given={"w_q": [4, 3], "v_score": [4]})
similar = lambda t: F.cosine_similarity(t["q"].unsqueeze(-2), t["k"].unsqueeze(-3), dim=-1)
case("cosine", "scores", {"score": "cosine"}, cosine, torch_says=lambda t: attend(similar(t), None, t["v"]))
case("cosine with a learned scale", "scores", {"score": "cosine", "scale": "learned"}, lambda t: t["scale"] * cosine(t),
     given={"scale": [1]}, values={"scale": [8.5]}, torch_says=lambda t: attend(t["scale"] * similar(t), None, t["v"]))
case("cosine with a learned scale a head", "scores", {"score": "cosine", "scale": "learned"},
     lambda t: a_head(t["scale"]) * cosine(t), given={"scale": [4]}, hq=4, hk=2, n=3, m=4)
apart = lambda t: -torch.cdist(t["q"], t["k"], compute_mode="donot_use_mm_for_euclid_dist").square()
case("distance", "scores", {"score": "distance"}, distance, torch_says=lambda t: attend(apart(t), None, t["v"]))
case("distance with scale and temperature", "scores",
     {"score": "distance", "scale": {"fixed": 0.5}, "temperature": 3.0}, lambda t: 0.5 * distance(t) / 3.0)
case("dot with a learned scale", "scores", {"score": "dot", "scale": "learned"}, lambda t: a_head(t["scale"]) * dot(t),
     given={"scale": [2]})

# on top of any score
slopes_of_two, slopes_of_three = [2.0**-4, 2.0**-8], [2.0**-4, 2.0**-8, 2.0**-2]
case("soft-cap", "on top", SCALED | {"softcap": 0.75}, lambda t: capped(scaled_dot(t), 0.75),
     torch_says=flex(lambda t, s, b, h, i, j: 0.75 * torch.tanh(s / 0.75)))
case("temperature", "on top", SCALED | {"temperature": 0.4}, lambda t: scaled_dot(t) / 0.4)
case("scale, temperature and cap, in that order", "on top",
     {"score": "dot", "scale": {"fixed": 0.7}, "temperature": 0.5, "softcap": 2.0},
     lambda t: capped(0.7 * dot(t) / 0.5, 2.0))
case("the cap comes before the bias", "on top", BIASED | {"softcap": 1.0},
     lambda t: capped(scaled_dot(t), 1.0) + t["bias"], given={"bias": [1, 1, 4, 5]})
case("a learned scale under a cap", "on top", {"score": "dot", "scale": "learned", "temperature": 2.0, "softcap": 1.5},
     lambda t: capped(a_head(t["scale"]) * dot(t) / 2.0, 1.5), given={"scale": [2]})
case("ALiBi", "on top", SCALED | {"bias": {"alibi": True}, "mask": "causal"},
     lambda t: alibi(scaled_dot(t), slopes_of_two), keep=keep_where(causal), m=4,
     torch_says=flex(lambda t, s, b, h, i, j: s - torch.tensor(slopes_of_two)[h] * (i - j), causal))
case("ALiBi on both sides, three heads", "on top", SCALED | {"bias": {"alibi": True}},
     lambda t: alibi(scaled_dot(t), slopes_of_three), hq=3, n=3, m=4)
case("relative table", "on top", SCALED | {"bias": {"relative": 2}}, lambda t: relative(scaled_dot(t), t["table"], 2),
     given={"table": [2, 5]}, n=5,
     torch_says=flex(lambda t, s, b, h, i, j: s + t["table"][h, (j - i).clamp(-2, 2) + 2]))
case("one relative table for all heads", "on top", SCALED | {"bias": {"relative": 1}, "mask": "causal"},
     lambda t: relative(scaled_dot(t), t["table"], 1), given={"table": [1, 3]}, b=2, n=3, m=3, keep=keep_where(causal))
case("three biases add up", "on top", SCALED | {"bias": {"alibi": True, "tensor": True, "relative": 1}},
     lambda t: relative(alibi(scaled_dot(t), slopes_of_two), t["table"], 1) + t["bias"],
     given={"table": [2, 3], "bias": [1, 1, 4, 5]})
case("additive under cap and bias", "on top",
     {"score": "additive", "softcap": 1.0, "bias": {"tensor": True}, "mask": "causal"},
     lambda t: capped(additive(t), 1.0) + t["bias"],
     given=bahdanau | {"bias": [1, 2, 4, 5]}, dk=4, keep=keep_where(causal))

# selection: sinks, and what else a caller may differentiate
case("sinks", "selection", SCALED | {"sinks": True}, scaled_dot, given={"sinks": [2]})
case("sinks, grouped and causal", "selection", SCALED | {"sinks": True, "mask": "causal"}, scaled_dot,
     given={"sinks": [4]}, hq=4, hk=2, n=3, m=3, keep=keep_where(causal))
case("entropy with its gradient", "selection", SCALED | {"entropy": True}, scaled_dot, upstream=("d_out", "d_entropy"))
case("entropy of causal rows with its gradient", "selection",
     {"score": "cosine", "scale": {"fixed": 4.0}, "mask": "causal", "entropy": True},
     lambda t: 4.0 * cosine(t), keep=keep_where(causal), upstream=("d_out", "d_entropy"))
case("log-sum-exp with its gradient", "selection", SCALED, scaled_dot, upstream=("d_out", "d_lse"))
case("log-sum-exp and entropy with sinks and a bias", "selection", BIASED | {"sinks": True, "entropy": True}, with_bias,
     given={"sinks": [2], "bias": [1, 2, 4, 5]}, upstream=("d_out", "d_lse", "d_entropy"))
case("log-sum-exp and entropy of an additive score", "selection", {"score": "additive", "entropy": True}, additive,
     given=bahdanau, dk=4, upstream=("d_out", "d_lse", "d_entropy"))

# masks
near = lambda i, j: (i - j <= 2) & (j - i <= 1)
case("window", "masks", SCALED | {"mask": {"window": {"left": 2, "right": 1}}}, scaled_dot, keep=keep_where(near), n=6,
     m=6, torch_says=flex(mask=near))
late = lambda i, j: (j <= i + 3) & (i + 3 - j <= 2)
case("sliding window at the end of a cache", "masks",
     SCALED | {"mask": {"and": ["causal", {"window": {"left": 2, "right": 0}}]}, "place": "end"}, scaled_dot,
     keep=keep_where(late), n=3, m=6, torch_says=flex(mask=late))
case("a query placed three keys on", "masks", SCALED | {"mask": "causal", "place": {"offset": 3}}, scaled_dot,
     keep=keep_where(lambda i, j: j <= i + 3), n=2, m=7, torch_says=flex(mask=lambda i, j: j <= i + 3))
case("padding", "masks", SCALED | {"mask": "lengths"}, scaled_dot, data={"lengths": [2, 0]}, b=2, n=3, m=4,
     keep=torch.tensor([[True, True, False, False], [False] * 4])[:, None, None, :])
case("packed sequences", "masks", SCALED | {"mask": {"and": ["causal", "segments"]}}, scaled_dot,
     data={"segments_q": [0, 0, 1, 1, 1, 2], "segments_k": [0, 0, 1, 1, 1, 2]}, n=6, m=6,
     keep=keep_where(lambda i, j: j <= i and [0, 0, 1, 1, 1, 2][i] == [0, 0, 1, 1, 1, 2][j]),
     torch_says=lambda t: {
         "out": torch.cat(
             [
                 F.scaled_dot_product_attention(*(t[x][:, :, part] for x in ("q", "k", "v")), is_causal=True)
                 for part in (slice(0, 2), slice(2, 5), slice(5, 6))
             ],
             dim=2,
         )
     })
prefix = lambda i, j: (j <= i) | (j < 3)
case("prefix language model", "masks", SCALED | {"mask": {"or": ["causal", "lengths"]}}, scaled_dot,
     data={"lengths": [3]}, n=5, keep=keep_where(prefix), torch_says=flex(mask=prefix))
case("not a window", "masks", SCALED | {"mask": {"not": {"window": {"left": 0, "right": 1}}}}, scaled_dot, n=5,
     keep=keep_where(lambda i, j: not (i <= j <= i + 1)))
seen = [[True, False, True], [False, True, False], [False, False, False]]
case("blocks", "masks", SCALED | {"mask": {"blocks": {"size": 2, "seen": seen}}}, scaled_dot, n=5, m=6,
     keep=keep_where(lambda i, j: seen[i // 2][j // 2]))
case("strided", "masks", SCALED | {"mask": {"and": ["causal", {"strided": {"stride": 3}}]}}, scaled_dot, n=8, m=8, hq=1,
     keep=keep_where(lambda i, j: j <= i and (i - j < 3 or (i - j) % 3 == 0)))
case("fixed", "masks", SCALED | {"mask": {"fixed": {"stride": 3, "summary": 1}}}, scaled_dot, n=8, m=8, hq=1,
     keep=keep_where(lambda i, j: i // 3 == j // 3 or j % 3 >= 2))
case("Longformer", "masks", SCALED | {"mask": {"longformer": {"window": 2, "globals": [0, 5]}}}, scaled_dot, n=8, m=8,
     hq=1, keep=keep_where(lambda i, j: abs(i - j) <= 1 or {i, j} & {0, 5}))
bird = {"block": 2, "window": 3, "globals": 1, "random": 0, "seed": 0}  # what is drawn at random is qkv's own
case("BigBird without its draws", "masks", SCALED | {"mask": {"big-bird": bird}}, scaled_dot, n=10, m=10, hq=1,
     keep=keep_where(lambda i, j: abs(i // 2 - j // 2) <= 1 or i // 2 < 1 or j // 2 < 1))

if __name__ == "__main__":
    path = pathlib.Path(__file__).parent / "values.json"
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    path.write_text(f'{{"torch":"{torch.__version__.split("+")[0]}","cases":[\n{lines}\n]}}\n')
    print(f"{len(cases)} cases, {path.stat().st_size} bytes")
