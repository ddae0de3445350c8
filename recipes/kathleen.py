"""Writes Kathleen's voice (rhasspy/dataset-voice-kathleen, CC0: read English sentences of 48 kHz) for training.

    pip install numpy soundfile phonemizer-fork espeakng-loader
    python recipes/kathleen.py dataset-voice-kathleen data/kathleen [ASIDE]
    python recipes/letter_times.py data/kathleen
    qkv train recipes/kathleen.toml --device cuda

`dataset-voice-kathleen` is a checkout of that repository, with pairs `data/NAME.wav` and `data/NAME.txt`. Recordings
are written as FLAC of 16 kHz, a sixth of the bytes; `qkv train` would resample them itself.

Each is learned from twice, with its text in letters and in phonemes (espeak-ng's, in IPA): the voice reads either.
Eighty sentences are kept aside with every recording of each, or those of ASIDE, a list `recording⇥text`: fifty for
`test.tsv` and its phonemes `test-phonemes.tsv`, the rest for validation.
"""

import sys
import zlib
from pathlib import Path

import espeakng_loader
import numpy as np
import soundfile
from phonemizer.backend import EspeakBackend
from phonemizer.backend.espeak.wrapper import EspeakWrapper

RATE, ASIDE, TEST = 16000, 80, 50


def read(path):
    """The samples of a recording at the new rate."""
    samples, found = soundfile.read(path, dtype="float32", always_2d=True)
    samples = samples.mean(axis=1)
    if found == RATE:
        return samples
    step, rest = divmod(found, RATE)
    assert rest == 0, f"{path} has {found} samples a second"
    # A windowed sinc that cuts at half the new rate.
    places = np.arange(-32 * step, 32 * step + 1)
    kernel = np.sinc(places / step * 0.95) * np.hanning(len(places))
    return np.convolve(samples, kernel / kernel.sum(), mode="same")[::step]


def phonemes_of(texts):
    """Texts in phonemes, with the punctuation of the text."""
    EspeakWrapper.set_library(espeakng_loader.get_library_path())
    EspeakWrapper.set_data_path(espeakng_loader.get_data_path())
    espeak = EspeakBackend("en-us", preserve_punctuation=True, with_stress=True)
    return dict(zip(texts, espeak.phonemize(texts, strip=True)))


source, target = Path(sys.argv[1]), Path(sys.argv[2])
target.mkdir(parents=True, exist_ok=True)
sentences = {}
for text in sorted((source / "data").glob("*.txt")):
    said = " ".join(text.read_text(encoding="utf-8").split())
    sentences.setdefault(said, []).append(text.with_suffix(".wav"))
# The order of sentences by a checksum: the same everywhere, and no pattern of the list.
order = sorted(sentences, key=lambda said: zlib.crc32(said.encode()))
phonemes = phonemes_of(order)
if len(sys.argv) > 3:
    lines = Path(sys.argv[3]).read_text(encoding="utf-8").splitlines()
    listed = {line.split("\t")[1].strip() for line in lines}
    assert listed <= set(order), f"no recordings of {listed - set(order)}"
    order = [said for said in order if said in listed] + [said for said in order if said not in listed]
    ASIDE = len(listed)
lists = {"train": [], "dev": [], "test": [], "test-phonemes": []}
for at, said in enumerate(order):
    learned = at >= ASIDE
    for path in sentences[said] if learned else sentences[said][:1]:
        name = path.with_suffix(".flac").name
        soundfile.write(target / name, read(path), RATE, subtype="PCM_16")
        letters, sounds = f"{name}\t{said}\n", f"{name}\t{phonemes[said]}\n"
        if at < TEST:
            lists["test"].append(letters)
            lists["test-phonemes"].append(sounds)
        else:
            lists["train" if learned else "dev"] += [letters, sounds]
for name, lines in lists.items():
    (target / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    print(f"{name}: {len(lines)} lines")
