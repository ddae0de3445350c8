"""Times inference on a GPU with `--batch-invariant` and without it, and shows what the option changes.

    cargo build --release
    pip install numpy
    python crates/qkv-models/dev/batch_invariant.py --data DEV.tsv [--qkv target/release/qkv] [--size small] [--device cuda] [--lines 4000]

A Llama with random weights in bf16 and in blocks of 4 bits (see `quantized.py`) continues 1, 8 and 64 texts greedily: milliseconds per
step. The embedded model translates the first `--lines` sources of DEV.tsv, greedily and with a beam of 5: seconds of the whole command
less those of one line. Reported beside each: how many of the texts or scores differ from those that each input gets alone, of some
that are tried.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
import time

from quantized import SIZES, TEXTS, write


def run(qkv, *words, lines):
    """The answers of a command to these lines, one JSON object each, and its seconds."""
    start = time.time()
    ran = subprocess.run([str(word) for word in (qkv, *words)], input="\n".join(lines), capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {ran.stderr}")
    return [json.loads(line) for line in ran.stdout.splitlines()], time.time() - start


def sample(lines, count):
    """Up to `count` of the lines, evenly spread, by their numbers."""
    return range(0, len(lines), max(1, len(lines) // count))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qkv", default="target/release/qkv")
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lines", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--alone", type=int, default=12, help="sources that are tried alone")
    arguments = parser.parse_args()
    qkv, device = arguments.qkv, ("--device", arguments.device)
    options = {"": (), "batch-invariant": ("--batch-invariant",)}

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write(folder / "m.gguf", arguments.size, "q4_0")
        command = [qkv, "convert", folder / "m.gguf", "--out", folder / "bf16", "--storage", "bf16"]
        subprocess.run(command, check=True, capture_output=True)
        models = {"bf16": folder / "bf16", "blocks": folder / "m.gguf"}
        for (kind, model), (name, option) in ((m, o) for m in models.items() for o in options.items()):
            words = ("generate", "--model", model, *device, "--greedy", "--max-tokens", arguments.tokens, "--json", *option)
            run(qkv, *words, lines=TEXTS[:1])
            for count in (1, 8, 64):
                texts = [f"{TEXTS[at % 8]}{' and so on' * (at // 8)}" for at in range(count)]
                together = () if count == 1 else ("--each-line",)
                found, _ = run(qkv, *words, *together, lines=texts)
                steps = max(len(one["tokens"]) for one in found) - 1
                each = 1e3 * max(one["seconds"] for one in found) / max(steps, 1)
                tried = [at for at in sample(texts, 4) if count > 1]
                differ = sum(run(qkv, *words, lines=[texts[at]])[0][0]["tokens"] != found[at]["tokens"] for at in tried)
                print(f"{kind}, {count} texts, {name or 'default'}: {each:.3f} ms a step; {differ} of {len(tried)} differ alone", flush=True)

    sources = [line.split("\t")[0] for line in arguments.data.read_text().splitlines()]
    lines = (sources * -(-arguments.lines // len(sources)))[:arguments.lines]
    for beam in (1, 5):
        for name, option in options.items():
            words = ("translate", *device, "--beam", beam, "--json", *option)
            _, start = min((run(qkv, *words, lines=lines[:1]) for _ in range(2)), key=lambda ran: ran[1])
            found, took = min((run(qkv, *words, lines=lines) for _ in range(2)), key=lambda ran: ran[1])
            tried = list(sample(lines, arguments.alone))
            alone = [run(qkv, *words, lines=[lines[at]])[0][0] for at in tried]
            differ = sum(one | {"line": at + 1} != found[at] for one, at in zip(alone, tried))
            print(f"translation, beam {beam}, {name or 'default'}: {len(lines) / (took - start):.0f} sentences/s;"
                  f" {differ} of {len(tried)} differ alone", flush=True)


if __name__ == "__main__":
    main()
