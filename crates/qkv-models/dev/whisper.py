"""Compares Whisper in `qkv` with faster-whisper (CTranslate2) on the same weights and clips: words and speed.

    cargo build --release && pip install faster-whisper
    python crates/qkv-models/dev/whisper.py MODEL CLIPS [--qkv target/release/qkv] [--threads 2] [--count N] [--turn 10]
        [--beams 1,5]
    cargo run --release -p figures --bin whisper_outputs -- MODEL CLIP.wav OUT.safetensors   (log-mel, encoder, logits)

MODEL is a CTranslate2 folder; CLIPS holds `text.tsv`, with a 16 kHz file and its text per line. Both sides recognize the clips in turn,
`--turn` of them at a time, with the same settings. A line for each beam width reports on how many clips the words are the same, the word
error rate of both after the same normalization, and seconds per second of audio: wall-clock time, and CPU time on all threads, which other
programs on the machine affect less. Our time includes opening the model at every turn.
"""

import argparse
import json
import os
import re
import subprocess
import wave

import numpy as np
from faster_whisper import WhisperModel


def normal(text):
    return re.sub(r"[^\w' ]", " ", text.lower().replace("-", " ")).split()


def edits(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        new = [i]
        for j, y in enumerate(b, 1):
            new.append(min(row[j] + 1, new[-1] + 1, row[j - 1] + (x != y)))
        row = new
    return row[-1]


def samples(path):
    with wave.open(path) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


def spent():
    """Wall-clock time, and the CPU time of this program and its children."""
    times = os.times()
    return np.array([times.elapsed, times.user + times.system + times.children_user + times.children_system])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("clips")
    parser.add_argument("--qkv", default="target/release/qkv")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--count", type=int)
    parser.add_argument("--language", default="en")
    parser.add_argument("--turn", type=int, default=10)
    parser.add_argument("--beams", default="1,5")
    args = parser.parse_args()
    rows = [line.rstrip("\n").split("\t") for line in open(f"{args.clips}/text.tsv", encoding="utf8")][: args.count]
    files = [f"{args.clips}/{name}" for name, _ in rows]
    sounds = [samples(path) for path in files]
    seconds = sum(map(len, sounds)) / 16000
    anchor = WhisperModel(args.model, device="cpu", compute_type="float32", cpu_threads=args.threads)
    for beam in map(int, args.beams.split(",")):
        theirs, ours, clocks = [], [], np.zeros((2, 2))
        for first in range(0, len(files), args.turn):
            start = spent()
            for sound in sounds[first : first + args.turn]:
                found, _ = anchor.transcribe(sound, language=args.language, beam_size=beam, condition_on_previous_text=False)
                theirs.append(" ".join(segment.text.strip() for segment in found))
            between = spent()
            command = [args.qkv, "transcribe", "--model", args.model, "--language", args.language, "--beam", str(beam)]
            command += ["--no-previous", "--format", "json", "--threads", str(args.threads), *files[first : first + args.turn]]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            clocks += [between - start, spent() - between]
            ours += [" ".join(s["text"].strip() for s in json.loads(line)["segments"]) for line in out.splitlines()]
        (their_time, their_work), (our_time, our_work) = clocks / seconds
        words = sum(len(normal(text)) for _, text in rows)
        wrong = [sum(edits(normal(text), normal(h)) for (_, text), h in zip(rows, heard)) for heard in (theirs, ours)]
        same = sum(normal(a) == normal(b) for a, b in zip(theirs, ours))
        for (name, text), a, b in zip(rows, theirs, ours):
            if normal(a) != normal(b):
                print(f"  {name}\n    said   {text}\n    theirs {a}\n    ours   {b}")
        print(
            f"beam {beam}: {same} of {len(rows)} clips the same; WER {100 * wrong[0] / words:.2f} % theirs, {100 * wrong[1] / words:.2f} % ours; "
            f"real-time factor {their_time:.3f} theirs, {our_time:.3f} ours; processor time {their_work:.3f} theirs, {our_work:.3f} ours",
            flush=True,
        )


if __name__ == "__main__":
    main()
