"""PyTorch's side of `qkv bench --train --against torch`: whole training steps, in a process that does nothing else.

    python -c SCRIPT MODEL f32|bf16 THREADS SECONDS cpu|cuda    -> {"best_ms": .., "median_ms": .., "peak_bytes": ..}

bf16 is its automatic mixed precision. On a GPU it is the fastest of three ways: eager, compiled, and compiled with CUDA
graphs; the step clips gradients to a norm of 1, as ours does. What cannot be done is answered with {"error": ".."}.
"""

import resource

model_name, precision, threads, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
device = sys.argv[5]
on_cuda = device == "cuda"
torch.set_num_threads(threads)
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
# Vocabulary, width, layers, heads, batch and length.
SIZES = {
    "gpt": (8000, 256, 4, 4, 16, 128),
    "gpt2": (50304, 768, 12, 12, 32, 1024),
    "gpt2-medium": (50304, 1024, 24, 16, 16, 1024),
    "long": (50304, 768, 12, 12, 2, 16384),
    "small": (8000, 256, 4, 4, 256, 128),
    "translate": (8000, 256, 3, 4, 512 if on_cuda else 128, 16),
}
V, C, L, H, B, N = SIZES[model_name]


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
        gelu = F.gelu(self.wide(self.before_feed(x)), approximate="tanh" if on_cuda else "none")
        return x + self.narrow(gelu)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, C), nn.Embedding(N, C)
        self.layers = nn.ModuleList(Layer() for _ in range(L))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        if on_cuda:
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
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
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        seen = self.both(self.embedded(x), self.embedded(y), tgt_mask=mask, tgt_is_causal=True)
        return seen @ self.tokens.weight.T


def numbers(step, first):
    return ((torch.arange(B * N) * step + first) % V).view(B, N).to(device)


if model_name == "translate":
    model, given = Translator(), (numbers(7919, 13), numbers(104729, 7))
    wanted, smoothing = numbers(15485863, 5).flatten(), 0.1
    adam = torch.optim.Adam(model.to(device).parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)
else:
    model, given = Gpt(), (numbers(7919, 13),)
    wanted, smoothing = numbers(104729, 7).flatten(), 0.0
    settings = dict(betas=(0.9, 0.95), weight_decay=0.1) if on_cuda else {}
    adam = torch.optim.AdamW(model.to(device).parameters(), lr=1e-3, fused=True, **settings)


def loss_of(*given):
    return F.cross_entropy(model(*given).view(-1, V).float(), wanted, label_smoothing=smoothing)


def step(loss_of):
    with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = loss_of(*given)
    adam.zero_grad()
    loss.backward()
    if on_cuda:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()


GROUP = 10 if on_cuda else 1  # steps timed together, from idle to idle


def measured(loss_of):
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()  # before the warm-up: memory of CUDA graphs is taken when they are recorded
    for _ in range(8 if on_cuda else 2):
        step(loss_of)
    if on_cuda:
        torch.cuda.synchronize()
    times, begin = [], time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        for _ in range(GROUP):
            step(loss_of)
        if on_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / GROUP)
    peak = torch.cuda.max_memory_allocated() if on_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return dict(best_ms=min(times), median_ms=statistics.median(times), peak_bytes=peak)


ways = [lambda: loss_of]
if on_cuda:
    ways += [lambda: torch.compile(loss_of), lambda: torch.compile(loss_of, mode="reduce-overhead")]
found = []
for way in ways:
    try:
        found.append(measured(way()))
    except Exception as error:  # a way that this release does not have
        print(f"{type(error).__name__}: {error}"[:200], file=sys.stderr)
answer(**min(found, key=lambda one: one["best_ms"]))
