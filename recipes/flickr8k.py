"""Writes Flickr8k (8,000 photographs with five captions each; for research, not to be passed on) as lists that
`qkv train` and `qkv eval` read.

    python recipes/flickr8k.py FLICKR8K data/flickr8k

FLICKR8K holds `Flicker8k_Dataset/*.jpg`, `Flickr8k.token.txt` and `Flickr_8k.{train,dev,test}Images.txt`. Captions are in
lower case, without punctuation: words of letters and digits, joined by one space.
"""

import re
import sys
from pathlib import Path

source, target = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
target.mkdir(parents=True, exist_ok=True)
photographs = {path.stem: path for path in (source / "Flicker8k_Dataset").iterdir()}
captions = {}
for line in (source / "Flickr8k.token.txt").read_text(encoding="utf-8").splitlines():
    name, _, text = line.partition("\t")
    words = re.findall(r"[a-z0-9]+", text.lower())
    if words:
        captions.setdefault(name.split(".")[0], []).append(" ".join(words))
for part in ("train", "dev", "test"):
    names = (source / f"Flickr_8k.{part}Images.txt").read_text().split()
    names = [name.split(".")[0] for name in names]
    found = [name for name in names if name in photographs]
    lines = [f"{photographs[name]}\t{text}\n" for name in found for text in captions[name]]
    (target / f"{part}.tsv").write_text("".join(lines), encoding="utf-8")
    print(f"{part}: {len(lines)} captions of {len(found)} photographs, {len(names) - len(found)} missing")
