"""What PyTorch's own layers give for a few small cases, in f64: outputs, and gradients of sum(out * d_out).
Inputs and parameters are made by arithmetic that `golden.rs` repeats, so that only results are stored.
usage: python make.py > values.json   (PyTorch 2.x)"""
import json, zlib, torch, torch.nn as nn, torch.nn.functional as F

torch.set_default_dtype(torch.float64)


def number(seed, at):
    h = (at * 2654435761 + seed * 2246822519 + 374761393) & 0xFFFFFFFF
    h ^= h >> 15; h = h * 2246822507 & 0xFFFFFFFF
    h ^= h >> 13; h = h * 3266489909 & 0xFFFFFFFF
    h ^= h >> 16
    return (h >> 16) / 16384.0 - 2.0


def made(name, *shape, scale=1.0):
    count = 1
    for axis in shape: count *= axis
    seed = zlib.crc32(name.encode()) & 0xFFFF
    return torch.tensor([number(seed, at) * scale for at in range(count)]).reshape(shape)


def fill(pairs):
    """Each of our names with the torch parameters it stands for (several are laid one after the other)."""
    for name, parameter in pairs.items():
        with torch.no_grad(): parameter.copy_(made(name, *parameter.shape, scale=0.3))


def result(out, inputs, parameters):
    wanted = list(inputs.values()) + list(parameters.values())
    grads = torch.autograd.grad((out * made("d_out", *out.shape)).sum(), wanted)
    names = list(inputs) + list(parameters)
    return {"out": out.flatten().tolist(), "grad": {n: g.flatten().tolist() for n, g in zip(names, grads)}}


def attention_names(ours, module):
    c = module.embed_dim
    w, b = module.in_proj_weight, module.in_proj_bias
    return {f"{ours}.{p}_proj.{k}": (t, i * c) for k, t in (("weight", w), ("bias", b)) for i, p in enumerate("qkv")}


def fill_attention(ours, module):
    with torch.no_grad():
        for name, (tensor, start) in attention_names(ours, module).items():
            part = tensor[start:start + module.embed_dim]
            part.copy_(made(name, *part.shape, scale=0.3))
    fill({f"{ours}.out_proj.weight": module.out_proj.weight, f"{ours}.out_proj.bias": module.out_proj.bias})


def attention_grads(ours, module, out):
    flat = torch.autograd.grad(out, [module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias], retain_graph=True)
    c, found = module.embed_dim, {}
    for kind, whole in (("weight", flat[0]), ("bias", flat[1])):
        for i, p in enumerate("qkv"): found[f"{ours}.{p}_proj.{kind}"] = whole[i * c:(i + 1) * c].flatten().tolist()
    found[f"{ours}.out_proj.weight"], found[f"{ours}.out_proj.bias"] = flat[2].flatten().tolist(), flat[3].flatten().tolist()
    return found


cases = {}

# Multi-head attention, self (causal) and cross (with padding).
for name, n, m, causal, lengths in [("self causal", 5, 5, True, None), ("cross padded", 4, 6, False, [6, 3])]:
    layer = nn.MultiheadAttention(12, 3, batch_first=True); fill_attention("mha", layer)
    x, y = made("x", 2, n, 12).requires_grad_(), made("y", 2, m, 12).requires_grad_()
    memory = x if n == m else y
    mask = torch.triu(torch.ones(n, m, dtype=torch.bool), 1) if causal else None
    pad = None if lengths is None else torch.arange(m)[None] >= torch.tensor(lengths)[:, None]
    out, _ = layer(x, memory, memory, attn_mask=mask, key_padding_mask=pad, need_weights=False)
    total = (out * made("d_out", *out.shape)).sum()
    grads = attention_grads("mha", layer, total)
    grads["x"] = torch.autograd.grad(total, x, retain_graph=True)[0].flatten().tolist()
    cases[f"attention {name}"] = {"out": out.flatten().tolist(), "grad": grads}

# A decoder layer, norms in front or behind, ReLU or GELU.
for norm_first, act in [(True, "relu"), (False, "gelu")]:
    layer = nn.TransformerDecoderLayer(12, 3, 20, 0.0, act, batch_first=True, norm_first=norm_first)
    fill_attention("b.self_attn", layer.self_attn); fill_attention("b.encoder_attn", layer.multihead_attn)
    plain = {"b.fc1.weight": layer.linear1.weight, "b.fc1.bias": layer.linear1.bias, "b.fc2.weight": layer.linear2.weight,
             "b.fc2.bias": layer.linear2.bias, "b.self_attn_layer_norm.weight": layer.norm1.weight,
             "b.self_attn_layer_norm.bias": layer.norm1.bias, "b.encoder_attn_layer_norm.weight": layer.norm2.weight,
             "b.encoder_attn_layer_norm.bias": layer.norm2.bias, "b.final_layer_norm.weight": layer.norm3.weight,
             "b.final_layer_norm.bias": layer.norm3.bias}
    fill(plain)
    x, y = made("x", 2, 5, 12).requires_grad_(), made("y", 2, 4, 12).requires_grad_()
    out = layer(x, y, tgt_mask=torch.triu(torch.full((5, 5), float("-inf")), 1))
    total = (out * made("d_out", *out.shape)).sum()
    grads = attention_grads("b.self_attn", layer.self_attn, total) | attention_grads("b.encoder_attn", layer.multihead_attn, total)
    rest = torch.autograd.grad(total, [x, y] + list(plain.values()))
    grads |= {n: g.flatten().tolist() for n, g in zip(["x", "y"] + list(plain), rest)}
    cases[f"decoder layer {'pre' if norm_first else 'post'} {act}"] = {"out": out.flatten().tolist(), "grad": grads}

# A layer of Llama, written out: RMS norm, rotary positions from 3 on, four heads over two of keys, a gate.
names = {"b.self_attn.q_proj.weight": (16, 16), "b.self_attn.k_proj.weight": (8, 16), "b.self_attn.v_proj.weight": (8, 16),
         "b.self_attn.out_proj.weight": (16, 16), "b.self_attn_layer_norm.weight": (16,), "b.fc1.weight": (20, 16),
         "b.gate.weight": (20, 16), "b.fc2.weight": (16, 20), "b.final_layer_norm.weight": (16,)}
p = {name: made(name, *shape, scale=0.3).requires_grad_() for name, shape in names.items()}
x = made("x", 2, 5, 16).requires_grad_()
angle = torch.arange(3, 8)[:, None] * 100.0 ** (-torch.arange(0, 4, 2) / 4)
cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
heads = lambda t, h: t.view(2, 5, h, 4).transpose(1, 2)
turn = lambda t: t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin
y = F.rms_norm(x, (16,), p["b.self_attn_layer_norm.weight"], 1e-6)
q, k, v = (heads(y @ p[f"b.self_attn.{n}_proj.weight"].T, h) for n, h in (("q", 4), ("k", 2), ("v", 2)))
seen = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(2, 5, 16)
z = x + seen @ p["b.self_attn.out_proj.weight"].T
y = F.rms_norm(z, (16,), p["b.final_layer_norm.weight"], 1e-6)
out = z + (F.silu(y @ p["b.gate.weight"].T) * (y @ p["b.fc1.weight"].T)) @ p["b.fc2.weight"].T
cases["llama layer"] = result(out, {"x": x}, p)

# GELU by the hyperbolic tangent.
x, w, b = made("x", 3, 6).requires_grad_(), made("l.weight", 7, 6, scale=0.3).requires_grad_(), made("l.bias", 7, scale=0.3).requires_grad_()
cases["gelu tanh"] = result(F.gelu(x @ w.T + b, approximate="tanh"), {"x": x}, {"l.weight": w, "l.bias": b})

# Gated units: two layers, both ways, sequences of different lengths.
layer = nn.GRU(5, 4, 2, batch_first=True, bidirectional=True)
fill({f"rnn.{n}": p for n, p in layer.named_parameters()})
x = made("x", 3, 6, 5).requires_grad_()
packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 1]), batch_first=True)
out, _ = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
cases["gru"] = result(out, {"x": x}, {f"rnn.{n}": p for n, p in layer.named_parameters()})

# Bahdanau's attention, written out: v · tanh(W q + U k), and Luong's general score.
q, k = made("q", 2, 1, 4).requires_grad_(), made("k", 2, 5, 6).requires_grad_()
wq, wk, v = (made("att.query.weight", 3, 4, scale=0.3).requires_grad_(), made("att.key.weight", 3, 6, scale=0.3).requires_grad_(),
             made("att.score.v", 3, scale=0.3).requires_grad_())
w = torch.softmax((torch.tanh((q @ wq.T)[:, :, None] + (k @ wk.T)[:, None]) @ v), -1)
cases["bahdanau"] = result(w @ k, {"q": q, "k": k}, {"att.query.weight": wq, "att.key.weight": wk, "att.score.v": v})
general = made("att.score.weight", 4, 6, scale=0.3).requires_grad_()
w = torch.softmax(q @ general @ k.transpose(1, 2) / 4 ** 0.0, -1)
cases["luong general"] = result(w @ k, {"q": q, "k": k}, {"att.score.weight": general})

# Cross-entropy with label smoothing and rows that do not count.
x, w = made("x", 6, 4).requires_grad_(), made("head.weight", 7, 4, scale=0.3).requires_grad_()
gold = torch.tensor([3, 0, 6, 2, 0, 1])
loss = F.cross_entropy(x @ w.T, gold, ignore_index=0, label_smoothing=0.1)
gx, gw = torch.autograd.grad(loss, [x, w])
cases["cross entropy"] = {"out": [loss.item()], "grad": {"x": gx.flatten().tolist(), "head.weight": gw.flatten().tolist()}}

# Three steps of AdamW on a matrix (which decays) and a vector (which does not, as everywhere).
m, b = nn.Parameter(made("m.weight", 3, 4, scale=0.3)), nn.Parameter(made("m.bias", 3, scale=0.3))
opt = torch.optim.AdamW([{"params": [m], "weight_decay": 0.1}, {"params": [b], "weight_decay": 0.0}], lr=0.05, betas=(0.9, 0.98), eps=1e-9)
for step in range(3):
    m.grad, b.grad = made(f"g{step}", 3, 4), made(f"h{step}", 3)
    opt.step()
cases["adamw"] = {"out": m.flatten().tolist() + b.flatten().tolist(), "grad": {}}

print(json.dumps({"torch": torch.__version__.split("+")[0], "cases": cases}))
