"""Times decoding with weights in quantized blocks, and with the same weights in bf16.

    cargo build --release
    pip install numpy
    python crates/qkv-models/dev/quantized.py [--qkv target/release/qkv] [--size 3b] [--format q4_k] [--device cuda] [--blocks-only]

It writes a GGUF file of a Llama with random blocks and a tokenizer with as many tokens as the model, and lets `qkv convert` write the
same weights in bf16 beside it. Then `qkv generate` greedily continues one text and eight texts with each. Reported are milliseconds per
step after the first token, seconds from the start of the program to the first token, and how many tokens of the first text are the same.
With `q4_k`, half of the value projections and of the down projections, and the token embedding, are in Q6_K, as in such files.
`--size tiny` and `--device cpu` show within seconds that the script works.
"""

import argparse
import json
import pathlib
import shutil
import struct
import subprocess
import tempfile
import time

import numpy as np

# Layers, model width, inner width of feed-forward layers, query heads, key heads, vocabulary size.
SIZES = {
    "tiny": (2, 256, 512, 4, 2, 1000),
    "small": (30, 576, 1536, 9, 3, 49152),
    "3b": (28, 3072, 8192, 24, 8, 128256),
    "8b": (32, 4096, 14336, 32, 8, 128256),
}
TEXT, LIST, WHOLE, FLOAT, INTEGER = 8, 9, 4, 6, 5
F32, Q4_0, Q8_0, Q4_K, Q6_K = 0, 2, 8, 12, 14
# Values per block and bytes per block.
BLOCKS = {Q4_0: (32, 18), Q8_0: (32, 34), Q4_K: (256, 144), Q6_K: (256, 210)}
# Number of random blocks; every matrix is filled from them, each starting at another offset.
DRAWN = 1 << 17
DEVIATION = 0.02
TEXTS = ["The ferry leaves the harbour at noon", "Whoever is late", "An old bridge", "A grey heron waits", "Two roads meet",
         "It was raining", "Nobody knew", "In the year 1987"]


def text(x):
    x = x.encode()
    return struct.pack("<Q", len(x)) + x


def value(name, kind, x):
    return text(name) + struct.pack("<I", kind) + x


def letters():
    """Every byte as a character, as in the tokenizers of GPT."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in seen]
    return [chr(256 + hidden.index(b)) if b in hidden else chr(b) for b in range(256)]


def drawn(kind, rng):
    """Random blocks of weights with mean 0 and a standard deviation of about DEVIATION, `[DRAWN, bytes]`."""
    blocks = rng.integers(0, 256, (DRAWN, BLOCKS[kind][1]), dtype=np.uint8)

    def halves(at, scale):
        x = (scale * rng.uniform(0.8, 1.2, DRAWN)).astype("<f2")
        blocks[:, at:at + 2] = x[:, None].view(np.uint8)
        return x

    if kind == Q4_0:
        halves(0, DEVIATION / 4.6)
    elif kind == Q8_0:
        halves(0, DEVIATION / 74)
    elif kind == Q4_K:
        # Scale and minimum of a sub-block have the same six bits, so a factor of 7.5 on the minimum makes the mean 0.
        d = halves(0, DEVIATION / (4.6 * 48))
        blocks[:, 2:4] = (d * np.float16(7.5)).astype("<f2")[:, None].view(np.uint8)
        parts = rng.integers(32, 64, (DRAWN, 8), dtype=np.uint8)
        low = parts[:, :4] | (parts[:, 4:] >> 4) << 6
        blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16] = low, low, (parts[:, 4:] & 15) * 17
    else:
        parts = rng.integers(32, 64, (DRAWN, 16)) * rng.choice([-1, 1], (DRAWN, 16))
        blocks[:, 192:208] = parts.astype(np.int8).view(np.uint8)
        halves(208, DEVIATION / (18.5 * 48))
    return blocks.reshape(-1)


def write(path, size, format):
    layers, width, inner, heads, key_heads, vocabulary = SIZES[size]
    few, many = {"q4_0": (Q4_0, Q4_0), "q8_0": (Q8_0, Q8_0), "q4_k": (Q4_K, Q6_K)}[format]
    keys = width // heads * key_heads
    tensors = [("token_embd.weight", (width, vocabulary), many)]
    for at in range(layers):
        more = many if at % 2 else few
        tensors += [(f"blk.{at}.{name}.weight", shape, kind) for name, shape, kind in (
            ("attn_norm", (width,), F32), ("attn_q", (width, width), few), ("attn_k", (width, keys), few), ("attn_v", (width, keys), more),
            ("attn_output", (width, width), few), ("ffn_norm", (width,), F32), ("ffn_gate", (width, inner), few),
            ("ffn_up", (width, inner), few), ("ffn_down", (inner, width), more))]
    tensors.append(("output_norm.weight", (width,), F32))
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters()]
    tokens += [f"token{at}" for at in range(vocabulary - len(tokens))]
    whole = lambda x: struct.pack("<I", x)
    of = lambda kind, items: struct.pack("<IQ", kind, len(items)) + b"".join(items)
    values = [
        value("general.architecture", TEXT, text("llama")),
        *(value(f"llama.{name}", WHOLE, whole(x)) for name, x in (
            ("block_count", layers), ("context_length", 2048), ("embedding_length", width), ("feed_forward_length", inner),
            ("attention.head_count", heads), ("attention.head_count_kv", key_heads))),
        value("llama.attention.layer_norm_rms_epsilon", FLOAT, struct.pack("<f", 1e-5)),
        value("llama.rope.freq_base", FLOAT, struct.pack("<f", 500000.0)),
        value("tokenizer.ggml.model", TEXT, text("gpt2")),
        value("tokenizer.ggml.pre", TEXT, text("smollm")),
        value("tokenizer.ggml.tokens", LIST, of(TEXT, [text(token) for token in tokens])),
        value("tokenizer.ggml.token_type", LIST, of(INTEGER, [whole(3 if at < 3 else 1) for at in range(len(tokens))])),
        value("tokenizer.ggml.merges", LIST, of(TEXT, [])),
        value("tokenizer.ggml.bos_token_id", WHOLE, whole(1)),
        value("tokenizer.ggml.eos_token_id", WHOLE, whole(2)),
    ]
    rng = np.random.default_rng(5)
    pools = {kind: drawn(kind, rng) for kind in {few, many}}
    head, at = b"", 0
    sizes = []
    for name, shape, kind in tensors:
        count = int(np.prod(shape))
        bytes = 4 * count if kind == F32 else count // BLOCKS[kind][0] * BLOCKS[kind][1]
        head += text(name) + whole(len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape, kind, at)
        sizes.append((count, bytes))
        at += (bytes + 31) // 32 * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values) + head
    with open(path, "wb") as file:
        file.write(head + padding(len(head)))
        for (_, _, kind), (count, size) in zip(tensors, sizes):
            if kind == F32:
                file.write(np.ones(count, "<f4").tobytes())
            else:
                each, left = BLOCKS[kind][1], size
                start = int(rng.integers(0, DRAWN)) * each
                while left:
                    part = pools[kind][start:start + left]
                    file.write(part)
                    left, start = left - len(part), 0
            file.write(padding(size))
    return sum(count for count, _ in sizes), at


def padding(count):
    return b"\0" * (-count % 32)


def generate(qkv, model, texts, tokens, device):
    """Milliseconds per step, seconds until the first token, and the tokens of the first text."""
    command = [qkv, "generate", "--model", model, "--device", device, "--greedy", "--max-tokens", tokens, "--json"]
    command += ["--each-line"] if len(texts) > 1 else []
    start = time.time()
    ran = subprocess.run([str(x) for x in command], input="\n".join(texts), capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {ran.stderr}")
    took = time.time() - start
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    steps = max(len(one["tokens"]) for one in found) - 1
    seconds = max(one["seconds"] for one in found)
    return 1e3 * seconds / max(steps, 1), took - seconds, found[0]["tokens"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qkv", default="target/release/qkv")
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--format", choices=["q4_0", "q4_k", "q8_0"], default="q4_k")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--blocks-only", action="store_true", help="do not compare with bf16")
    parser.add_argument("--folder", type=pathlib.Path, help="where models are written; a temporary folder by default")
    arguments = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="quantized-", dir=arguments.folder))
    try:
        start = time.time()
        parameters, size = write(folder / "m.gguf", arguments.size, arguments.format)
        print(f"{parameters / 1e9:.2f} billion parameters, {size / 1e9:.2f} GB in blocks, {2 * parameters / 1e9:.2f} in bf16;"
              f" written in {time.time() - start:.0f} s", flush=True)
        models = {"blocks": folder / "m.gguf"}
        if not arguments.blocks_only:
            start = time.time()
            command = [arguments.qkv, "convert", folder / "m.gguf", "--out", folder / "bf16", "--storage", "bf16"]
            subprocess.run(command, check=True, capture_output=True)
            models["bf16"] = folder / "bf16"
            print(f"converted in {time.time() - start:.0f} s", flush=True)
        # A warm-up run, so that kernels are compiled.
        generate(arguments.qkv, models["blocks"], TEXTS, 4, arguments.device)
        for texts in (TEXTS[:1], TEXTS):
            steps, alone = {}, {}
            for name, model in models.items():
                steps[name], first, alone[name] = generate(arguments.qkv, model, texts, arguments.tokens, arguments.device)
                print(f"{len(texts)} texts, {name}: {steps[name]:.3f} ms a step, {first:.1f} s without them", flush=True)
            if len(models) > 1:
                same = sum(a == b for a, b in zip(alone["blocks"], alone["bf16"]))
                print(f"{len(texts)} texts: {steps['bf16'] / steps['blocks']:.2f} times as fast in blocks;"
                      f" {same} of {len(alone['bf16'])} tokens of the first text are the same", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
