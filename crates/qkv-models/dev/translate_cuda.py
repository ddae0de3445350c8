"""Times translation on a GPU: the embedded model in `qkv`, and as an M2M100 in Python's `transformers`, eager and compiled.

    cargo build --release
    pip install torch transformers safetensors numpy
    python crates/qkv-models/dev/translate_cuda.py --data DEV.tsv [--qkv target/release/qkv] [--model crates/qkv-cli/model]
        [--device cuda] [--batches 1000,500,128] [--deadline 60] [--lines 1000] [--repeat 24]

Each line of DEV.tsv has a source and its translation. `transformers` translates the first `--lines` sources, already tokenized and sorted
by length, in batches, greedily and with a beam of 5: the best of three runs after a first one, which compiles. A configuration that exceeds
its deadline, in seconds from its start, is ended with the runs it has. In the compiled modes `torch.compile` compiles the forward pass, with
caches of fixed size; sources are padded to multiples of 16, so that it compiles for few shapes. `qkv` gets the sources `--repeat` times over
as lines, and answers each block before it gets the next; the first block is not counted. The first lines of both are compared. `qkv`
is timed again for every batch size and beam.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time

BLOCK = 1024


def weights(folder):
    """The weights of the embedded model, widened to f32: 8-bit rows have a scale each."""
    import numpy as np
    from safetensors.numpy import load_file

    stored = load_file(folder / "model.safetensors")
    wide = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(name + ".scale")
        wide[name] = tensor.astype(np.float32) * (1 if scale is None else scale[:, None])
    return wide


def m2m100(folder, device):
    import numpy as np
    import torch
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    config = json.loads((folder / "config.json").read_text())
    sizes = config["architecture"]
    model = M2M100ForConditionalGeneration(M2M100Config(
        vocab_size=config["vocab_size"], d_model=sizes["d_model"], max_position_embeddings=sizes["max_positions"],
        encoder_layers=sizes["encoder_layers"], decoder_layers=sizes["decoder_layers"], encoder_ffn_dim=sizes["ffn_dim"],
        decoder_ffn_dim=sizes["ffn_dim"], encoder_attention_heads=sizes["heads"], decoder_attention_heads=sizes["heads"],
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, pad_token_id=config["pad_token_id"], bos_token_id=config["bos_token_id"],
        eos_token_id=config["eos_token_id"], decoder_start_token_id=config["bos_token_id"],
    ))
    found = {"model." + name: torch.from_numpy(tensor) for name, tensor in weights(folder).items()}
    missing, unknown = model.load_state_dict(found, strict=False)
    missing = [name for name in missing if "embed_tokens" not in name and name != "lm_head.weight" and "embed_positions" not in name]
    if missing or unknown:
        sys.exit(f"tensors that differ: {missing} {unknown}")
    model.tie_weights()
    # Alternating sines and cosines, from position 0: in this table that is the row after the one for padding.
    for part in (model.model.encoder, model.model.decoder):
        table = part.embed_positions.weights
        rows, width = table.shape
        at = np.arange(width)
        angles = np.arange(-1, rows - 1)[:, None] / 1e4 ** (at // 2 * 2 / width)
        fixed = np.where(at % 2 == 0, np.sin(angles), np.cos(angles))
        fixed[0] = 0
        table.copy_(torch.from_numpy(fixed.astype(np.float32)))
    return model.eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def positions(self, input_ids=None, inputs_embeds=None, past_key_values_length=0):
    ids = self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_key_values_length)
    return self.weights[ids]


def theirs(arguments, sources, beam, batch, mode, out):
    """One configuration, in its own process: puts ("time", seconds) for each run over all sources, and the translations."""
    import torch
    from tokenizers import Tokenizer

    folder = pathlib.Path(arguments.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = m2m100(folder, arguments.device)
    config = model.config
    rows = [tokenizer.encode(source, add_special_tokens=False).ids + [config.eos_token_id] for source in sources]
    order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
    more = {}
    if mode != "eager":
        # Their check that there are enough positions synchronizes with the device and breaks the compiled graph.
        for part in (model.model.encoder, model.model.decoder):
            part.embed_positions.forward = positions.__get__(part.embed_positions)
        model.model.encoder.forward = torch.compile(model.model.encoder.forward, dynamic=False)
        model.forward = torch.compile(model.forward, mode=mode, dynamic=False)
        # With a static cache, `generate` would compile by itself, with its own settings.
        more = {"cache_implementation": "static", "disable_compile": True}
    batches = []
    for start in range(0, len(order), batch):
        of = [rows[at] for at in order[start:start + batch]]
        width = max(map(len, of))
        if mode != "eager":
            width = -(-width // 16) * 16
            of += [of[-1]] * (batch - len(of))
        ids = torch.full((len(of), width), config.pad_token_id)
        for at, row in enumerate(of):
            ids[at, :len(row)] = torch.tensor(row)
        longest = 2 * (width - 1) + 10
        # One cache size for all batches of a width, and no larger than the number of positions.
        batches.append((order[start:start + batch], ids.to(arguments.device), min(longest, config.max_position_embeddings - 2)))
    def run():
        texts = [""] * len(rows)
        for places, ids, longest in batches:
            with torch.inference_mode():
                made = model.generate(
                    input_ids=ids, attention_mask=(ids != config.pad_token_id).long(), num_beams=beam, do_sample=False,
                    max_new_tokens=longest, length_penalty=1.0, early_stopping=False, **more,
                )
            for at, row in zip(places, made.tolist()):
                texts[at] = tokenizer.decode(row, skip_special_tokens=True)
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        return texts
    for _ in range(4):
        start = time.perf_counter()
        texts = run()
        out.put(("time", time.perf_counter() - start))
        out.put(("texts", texts))
    out.put(("done", None))


def guarded(*all):
    try:
        theirs(*all)
    except BaseException as error:
        all[-1].put(("error", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"))


def timed(arguments, sources, beam, batch, mode):
    context = multiprocessing.get_context("spawn")
    out, times, texts, ended = context.Queue(), [], None, ""
    worker = context.Process(target=guarded, args=(arguments, sources, beam, batch, mode, out), daemon=True)
    start = time.monotonic()
    worker.start()
    while True:
        try:
            what, of = out.get(timeout=max(0.1, start + arguments.deadline - time.monotonic()))
        except queue.Empty:
            ended = "its time is up"
            break
        if what == "time":
            times.append(of)
        elif what == "texts":
            texts = of
        else:
            ended = of or ""
            break
    if worker.is_alive():
        worker.terminate()
    worker.join()
    # The first run compiles.
    best = min(times[1:], default=None)
    speed = f"{len(sources) / best:9.0f} sentences/s" if best else " " * 12 + "none"
    first = f"first run {times[0]:.1f} s" if times else "no run ended"
    print(f"transformers {mode:16} beam {beam}, batches of {batch:4}: {speed}, {first}, {len(times[1:])} more  {ended}", flush=True)
    return texts


def ours(arguments, sources, beam):
    """Lines in, lines out, block by block; the first block is not counted."""
    command = [arguments.qkv, "translate", "--device", arguments.device, "--beam", str(beam)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    lines = (sources * arguments.repeat)[:max(len(sources) * arguments.repeat // BLOCK, 1) * BLOCK]
    blocks = [lines[at:at + BLOCK] for at in range(0, len(lines), BLOCK)]
    if len(blocks) > 1 and len(blocks[-1]) < BLOCK:
        blocks.pop()
    def write(block):
        process.stdin.write("".join(line + "\n" for line in block))
        process.stdin.flush()
        # A partial block is read only at the end of the input.
        if block is blocks[-1]:
            process.stdin.close()
    found, start, first = [], None, 0.0
    for block in blocks:
        writer = threading.Thread(target=write, args=(block,))
        writer.start()
        for _ in block:
            found.append(process.stdout.readline().rstrip("\n"))
        writer.join()
        if start is None:
            start = time.perf_counter()
            first = start - began
    took = time.perf_counter() - start
    if process.wait() != 0:
        sys.exit(f"{' '.join(command)} failed")
    count = len(found) - len(blocks[0])
    speed = f"{count / took:9.0f} sentences/s" if count else " " * 12 + "none"
    print(f"qkv                           beam {beam}, blocks of {len(blocks[0]):5}: {speed}, first block {first:.1f} s, {count} lines", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--qkv", default="target/release/qkv")
    parser.add_argument("--model", default="crates/qkv-cli/model")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batches", default="1000,500,128")
    parser.add_argument("--modes", default="eager,reduce-overhead", help="of torch.compile; eager is not compiled")
    parser.add_argument("--beams", default="1,5")
    parser.add_argument("--deadline", type=float, default=60.0)
    parser.add_argument("--total", type=float, default=290.0, help="seconds after which nothing more is begun")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=24)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sources = [line.split("\t")[0] for line in pathlib.Path(arguments.data).read_text(encoding="utf-8").splitlines()][:arguments.lines]
    start = time.monotonic()
    # Compiled modes take longest and come last for each batch size and beam; the largest batches come first.
    for batch in map(int, arguments.batches.split(",")):
        for beam in map(int, arguments.beams.split(",")):
            found = ours(arguments, sources, beam)
            for mode in arguments.modes.split(","):
                if time.monotonic() - start > arguments.total:
                    print(f"transformers {mode:16} beam {beam}, batches of {batch:4}: not begun, {arguments.total:.0f} s are over", flush=True)
                    continue
                texts = timed(arguments, sources, beam, batch, mode)
                if texts is None and mode == "reduce-overhead":
                    texts = timed(arguments, sources, beam, batch, "default")
                if texts:
                    same = sum(a == b.strip() for a, b in zip(found, texts))
                    print(f"    {same} of {min(len(texts), len(found))} translations are the same", flush=True)


if __name__ == "__main__":
    main()
