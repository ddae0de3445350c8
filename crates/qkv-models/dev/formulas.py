"""The formulas recipe compared with the same model and the same training loop in PyTorch: exact match and edit
similarity on the dev list with greedy search, both scored here.

    qkv train recipes/formulas.toml --out RUN --device cuda --set train.shift=0 --set train.zoom=0 --set train.color=0
    qkv describe --model RUN --greedy --json $(the images of the dev list) > said.jsonl
    pip install torch tokenizers pillow numpy
    python formulas.py RUN data/formulas STEPS SEED [said.jsonl]

With STEPS = 0 it only scores the output of qkv.

Images are cropped to their ink, resized and padded as with `fit = "ink"`. The tokenizer is that of the run. Random
augmentation is left out on both sides, since it would differ.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch import nn

run, data, steps, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
said = sys.argv[5] if len(sys.argv) > 5 else None
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(seed)
config = json.loads((run / "config.json").read_text())
sizes = config["architecture"]
image = sizes["image"]
tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
vocabulary, (pad, bos, eos) = config["vocab_size"], [config[f"{name}_token_id"] for name in ("pad", "bos", "eos")]
width, high, wide = sizes["d_model"], image["height"], image["width"]
PEAK, WARMUP, DECAY, AVERAGE, SMOOTHING, EACH = 7e-4, max(steps // 20, 1), 0.05, 0.999, 0.1, 32


def prepared(path):
    picture = Image.open(path).convert("RGBA")
    page = Image.new("RGBA", picture.size, (255,) * 4)
    page.alpha_composite(picture)
    points = np.asarray(page.convert("L"))
    rows, columns = np.where(points < 200)
    if len(rows):
        top, left = max(rows.min() - 4, 0), max(columns.min() - 4, 0)
        points = points[top : rows.max() + 5, left : columns.max() + 5]
    scale = min(wide / points.shape[1], high / points.shape[0], 1.0)
    size = [max(round(n * scale), 1) for n in (points.shape[1], points.shape[0])]
    small = np.asarray(Image.fromarray(points).resize(size, Image.BILINEAR))
    out = np.full((high, wide), 255, np.uint8)
    at = (high - small.shape[0]) // 2
    out[at : at + small.shape[0], : small.shape[1]] = small
    return out


def lines(name):
    for line in (data / name).read_text().splitlines():
        file, _, text = line.partition("\t")
        if text.strip():
            yield data / file, text.replace("\t", " ").strip()


class Block(nn.Module):
    """Self-attention (and attention to the image) and a feed-forward layer, with a norm before each."""

    def __init__(self, cross):
        super().__init__()
        heads, drop = sizes["heads"], sizes["dropout"]
        self.own = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True) if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if cross else 2))
        self.one, self.two = nn.Linear(width, sizes["ffn_dim"]), nn.Linear(sizes["ffn_dim"], width)
        self.drop = nn.Dropout(drop)

    def forward(self, x, memory=None, mask=None):
        y = self.norms[0](x)
        x = x + self.drop(self.own(y, y, y, attn_mask=mask, need_weights=False)[0])
        if self.cross is not None:
            x = x + self.drop(self.cross(self.norms[1](x), memory, memory, need_weights=False)[0])
        return x + self.drop(self.two(F.gelu(self.one(self.norms[-1](x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, inputs, channels = nn.ModuleList(), 1, image["stem_channels"]
        halvings = int(math.log2(image["patch_size"]))
        blocks = (image["stem_blocks"] + [0] * 9)[1 : halvings + 1]
        for count in blocks:
            outputs = min(channels, width)
            conv = lambda i, o, s: nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.GroupNorm(o // 16, o))
            residual = nn.ModuleList(
                nn.Sequential(conv(outputs, outputs, 1), nn.ReLU(), conv(outputs, outputs, 1)) for _ in range(count)
            )
            self.stem.append(nn.ModuleList([conv(inputs, outputs, 2), residual]))
            inputs, channels = outputs, 2 * channels
        self.patches = nn.Conv2d(inputs, width, 1)
        places = high // image["patch_size"] * (wide // image["patch_size"])
        self.places = nn.Parameter(torch.randn(places, width) * 0.02)
        self.encoder = nn.ModuleList(Block(False) for _ in range(image["layers"]))
        self.decoder = nn.ModuleList(Block(True) for _ in range(sizes["decoder_layers"]))
        self.seen, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Parameter(torch.randn(vocabulary, width) * width**-0.5)
        at = torch.arange(sizes["max_positions"])[:, None] / 1e4 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.stack([at.sin(), at.cos()], -1).flatten(1))
        self.drop = nn.Dropout(sizes["dropout"])
        for name, p in self.named_parameters():
            if p.dim() > 1 and name not in ("places", "tokens"):
                rows = p.shape[0] // (3 if "in_proj" in name else 1)
                bound = math.sqrt(6 / (rows + p[0].numel()))
                nn.init.uniform_(p, -bound, bound)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def look(self, pixels):
        x = pixels
        for first, residual in self.stem:
            x = F.relu(first(x))
            for block in residual:
                x = F.relu(x + block(x))
        x = self.drop(self.patches(x).flatten(2).transpose(1, 2) + self.places)
        for block in self.encoder:
            x = block(x)
        return self.seen(x)

    def write(self, memory, ids):
        n = ids.shape[1]
        x = self.drop(self.tokens[ids] * math.sqrt(width) + self.positions[:n])
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool, device=ids.device), 1)
        for block in self.decoder:
            x = block(x, memory, mask)
        return self.last(x) @ self.tokens.T


def pixels(images):
    return (torch.tensor(np.stack(images), device=device)[:, None].float() / 255 - 0.5) / 0.5


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        before, row[0] = row[0], i + 1
        for j, y in enumerate(b):
            before, row[j + 1] = row[j + 1], min(before + (x != y), row[j] + 1, row[j + 1] + 1)
    return row[-1]


def report(who, texts, references):
    share = lambda a, b: 1 - distance(a, b) / max(len(a), len(b), 1)
    pairs = [(" ".join(a.split()), " ".join(b.split())) for a, b in zip(texts, references)]
    exact = sum(a == b for a, b in pairs) / len(pairs)
    letters, words = (sum(share(a, b) for a, b in [(cut(x), cut(y)) for x, y in pairs]) / len(pairs) for cut in (list, str.split))
    print(f"{who}: exact match {100 * exact:.2f} %, edit similarity {100 * letters:.2f} % in characters, {100 * words:.2f} % in words; {len(set(texts))} texts", flush=True)


train = [(prepared(path), tokenizer.encode(text, add_special_tokens=False).ids[: sizes["max_positions"] - 1]) for path, text in lines("train.tsv")]
dev = [(prepared(path), text) for path, text in lines("validate.tsv")]
if said:
    report("qkv", [json.loads(line)["text"] for line in open(said)], [text for _, text in dev])
if steps == 0:
    sys.exit()
model = Model().to(device)
average = [p.detach().clone() for p in model.parameters()]
matrices = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98), eps=1e-9)
order, step = [], 0
while step < steps:
    if len(order) < EACH:
        order = torch.randperm(len(train)).tolist()
    now, order, step = order[:EACH], order[EACH:], step + 1
    rate = step / WARMUP if step < WARMUP else 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1)))
    for group in optimizer.param_groups:
        group["lr"] = PEAK * rate
    longest = max(len(train[at][1]) for at in now) + 1
    rows = lambda parts, fill: torch.tensor([part + [fill] * (longest - len(part)) for part in parts], device=device)
    texts = [train[at][1] for at in now]
    inputs, targets = rows([[bos] + text for text in texts], pad), rows([text + [eos] for text in texts], -100)
    with torch.autocast(device, torch.bfloat16):
        scores = model.write(model.look(pixels([train[at][0] for at in now])), inputs)
    loss = F.cross_entropy(scores.float().flatten(0, 1), targets.flatten(), label_smoothing=SMOOTHING, ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    keep = min(AVERAGE, (1 + step) / (10 + step))
    with torch.no_grad():
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 1 - keep)
    if step % max(steps // 8, 1) == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
model.eval()
with torch.no_grad():
    for p, mean in zip(model.parameters(), average):
        p.copy_(mean)
    found = []
    for at in range(0, len(dev), 50):
        memory = model.look(pixels([picture for picture, _ in dev[at : at + 50]]))
        ids = torch.full((memory.shape[0], 1), bos, device=device)
        done = torch.zeros(len(ids), dtype=torch.bool, device=device)
        while ids.shape[1] < sizes["max_positions"] and not done.all():
            best = model.write(memory, ids)[:, -1].argmax(-1)
            ids, done = torch.cat([ids, best[:, None]], 1), done | (best == eos)
        for row in ids.tolist():
            row = row[1:]
            found.append(tokenizer.decode(row[: row.index(eos)] if eos in row else row))
report("PyTorch", found, [text for _, text in dev])
