"""Writes DAQUAR (questions about photographs of rooms, Malinowski and Fritz 2014) as lists that `qkv train` reads, by its
official split.

    python recipes/daquar.py QUESTIONS IMAGES data/daquar

QUESTIONS holds `qa.894.raw.train.txt` and `qa.894.raw.test.txt`, IMAGES the photographs `image1` to `image1449`. As in
arXiv:1511.02274 the lists have the questions whose answer is one thing; `test-all.tsv` has all test questions. Every
twelfth photograph of the training part is kept for `dev.tsv`.
"""

import re
import sys
from pathlib import Path

questions, images, target = Path(sys.argv[1]), Path(sys.argv[2]).resolve(), Path(sys.argv[3])
target.mkdir(parents=True, exist_ok=True)
photographs = {path.stem: path for path in images.iterdir()}
for part in ("train", "test"):
    lines = [line.strip() for line in (questions / f"qa.894.raw.{part}.txt").read_text().splitlines() if line.strip()]
    rows = []
    for question, answer in zip(lines[::2], lines[1::2]):
        image = re.search(r"\bimage\s*(\d+)\b", question)
        words = re.sub(r"\b(in|of|on|from)?\s*(the|this)?\s*\bimage\s*\d+\b|[?,.]", " ", question).split()
        photograph = photographs.get(f"image{image[1]}") if image else None
        if photograph and words:
            rows.append((photograph, " ".join(words), answer))
    one = [row for row in rows if "," not in row[2]]
    held = set(sorted({row[0] for row in one})[11::12])
    lists = {
        "train": {"train": [row for row in one if row[0] not in held], "dev": [row for row in one if row[0] in held]},
        "test": {"test": one, "test-all": rows},
    }
    for name, chosen in lists[part].items():
        (target / f"{name}.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in chosen))
        print(f"{name}: {len(chosen)} of {len(lines) // 2} questions")
