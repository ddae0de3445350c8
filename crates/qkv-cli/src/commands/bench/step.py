"""PyTorch's side of `qkv bench --train --against torch`: whole training steps, in a process that does nothing else.

    python -c SCRIPT gpt|translate f32|bf16 THREADS SECONDS    -> {"best_ms": .., "median_ms": .., "peak_bytes": ..}

bf16 is its automatic mixed precision. What cannot be done is answered with {"error": ".."}.
"""

import json
import resource
import statistics
import sys
import time


def answer(**fields):
    print(json.dumps(fields), flush=True)


try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except Exception as error:
    answer(error=f"{type(error).__name__}: {error}", missing=True)
    sys.exit(1)

model_name, precision, threads, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(threads)
torch.manual_seed(0)
V, C, H = 8000, 256, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_feed = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.wide, self.narrow = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(b, n, 3, H, C // H).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, n, C))
        return x + self.narrow(F.gelu(self.wide(self.before_feed(x))))


class Gpt(nn.Module):
    def __init__(self, length=128, layers=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, C), nn.Embedding(length, C)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Translator(nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(V, C), nn.Dropout(dropout)
        self.both = nn.Transformer(C, H, 3, 3, 4 * C, dropout, F.relu, batch_first=True, norm_first=True)
        angle = torch.arange(512)[:, None] / 10000 ** (torch.arange(0, C, 2) / C)
        self.register_buffer("places", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))

    def embedded(self, x):
        return self.dropout(self.tokens(x) * C**0.5 + self.places[: x.shape[1]])

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        seen = self.both(self.embedded(x), self.embedded(y), tgt_mask=mask, tgt_is_causal=True)
        return seen @ self.tokens.weight.T


def numbers(batch, length, step, first):
    return ((torch.arange(batch * length) * step + first) % V).view(batch, length)


if model_name == "gpt":
    model, given = Gpt(), (numbers(16, 128, 7919, 13),)
    wanted, smoothing = numbers(16, 128, 104729, 7).flatten(), 0.0
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
else:
    model, given = Translator(), (numbers(128, 16, 7919, 13), numbers(128, 16, 104729, 7))
    wanted, smoothing = numbers(128, 16, 15485863, 5).flatten(), 0.1
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)


def step():
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = F.cross_entropy(model(*given).view(-1, V).float(), wanted, label_smoothing=smoothing)
    adam.zero_grad()
    loss.backward()
    adam.step()


for _ in range(2):
    step()
times, begin = [], time.perf_counter()
while not times or time.perf_counter() - begin < seconds:
    start = time.perf_counter()
    step()
    times.append((time.perf_counter() - start) * 1e3)
answer(
    best_ms=min(times),
    median_ms=statistics.median(times),
    peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
)
