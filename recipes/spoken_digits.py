"""Writes lists of one person's spoken digits (soerenab/AudioMNIST, MIT) for a voice.

    python recipes/spoken_digits.py AudioMNIST data/spoken-digits [PERSON]
    qkv train recipes/spoken-digits.toml

`AudioMNIST` is a checkout of that repository, with recordings `data/PERSON/DIGIT_PERSON_NUMBER.wav`; PERSON is `12`
where none is named. The last five recordings of each digit are measured on.
"""

import sys
from pathlib import Path

source, target = Path(sys.argv[1]), Path(sys.argv[2])
person = sys.argv[3] if len(sys.argv) > 3 else "12"
words = "zero one two three four five six seven eight nine".split()
target.mkdir(parents=True, exist_ok=True)
lists = {"train": [], "dev": []}
for path in sorted((source / "data" / person).glob("*.wav")):
    digit, _, number = path.stem.split("_")
    lists["dev" if int(number) >= 45 else "train"].append(f"{path.resolve()}\t{words[int(digit)]}\n")
for name, lines in lists.items():
    (target / f"{name}.tsv").write_text("".join(lines))
    print(f"{name}: {len(lines)} recordings")
