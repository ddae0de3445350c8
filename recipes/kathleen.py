"""Writes Kathleen's voice (rhasspy/dataset-voice-kathleen, CC0: read English sentences of 48 kHz) for training.

    pip install numpy soundfile
    python recipes/kathleen.py dataset-voice-kathleen data/kathleen
    qkv train recipes/kathleen.toml --device cuda

`dataset-voice-kathleen` is a checkout of that repository, with pairs `data/NAME.wav` and `data/NAME.txt`. Recordings
are written as FLAC of 16 kHz, a sixth of the bytes; `qkv train` would resample them itself. Fifty sentences, with every
recording of each, are measured on and never learned from.
"""

import sys
import zlib
from pathlib import Path

import numpy as np
import soundfile

source, target = Path(sys.argv[1]), Path(sys.argv[2])
target.mkdir(parents=True, exist_ok=True)
sentences = {}
for text in sorted((source / "data").glob("*.txt")):
    said = " ".join(text.read_text(encoding="utf-8").split())
    sentences.setdefault(said, []).append(text.with_suffix(".wav"))
# The order of sentences by a checksum: the same everywhere, and no pattern of the list.
order = sorted(sentences, key=lambda said: zlib.crc32(said.encode()))
rate, lists = 16000, {"train": [], "dev": []}
for at, said in enumerate(order):
    for path in sentences[said] if at >= 50 else sentences[said][:1]:
        samples, found = soundfile.read(path, dtype="float32", always_2d=True)
        samples = samples.mean(axis=1)
        if found != rate:
            step, rest = divmod(found, rate)
            assert rest == 0, f"{path} has {found} samples a second"
            # A windowed sinc that cuts at half the new rate.
            places = np.arange(-32 * step, 32 * step + 1)
            kernel = np.sinc(places / step * 0.95) * np.hanning(len(places))
            samples = np.convolve(samples, kernel / kernel.sum(), mode="same")[::step]
        name = path.with_suffix(".flac").name
        soundfile.write(target / name, samples, rate, subtype="PCM_16")
        lists["train" if at >= 50 else "dev"].append(f"{name}\t{said}\n")
for name, lines in lists.items():
    (target / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    print(f"{name}: {len(lines)} recordings")
