"""Writes the 8 × 8 digits of scikit-learn as idx files, for recipes/digits.toml.

    pip install scikit-learn
    python recipes/digits.py data/digits

Every fifth image is for measuring, the others are to learn from.
"""

import pathlib
import struct
import sys

from sklearn.datasets import load_digits


def write(path, axes, numbers):
    """Bytes behind the header of an idx file."""
    header = struct.pack(f">HBB{len(axes)}I", 0, 8, len(axes), *axes)
    path.write_bytes(header + bytes(numbers))


folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "data/digits")
folder.mkdir(parents=True, exist_ok=True)
digits = load_digits()
images = (digits.images * 255 / 16).round().astype("uint8")  # from 0…16 to 0…255
for name, rows in [
    ("train", [at for at in range(len(images)) if at % 5]),
    ("dev", [at for at in range(len(images)) if at % 5 == 0]),
]:
    write(folder / f"{name}-images.idx", (len(rows), 8, 8), images[rows].tobytes())
    write(folder / f"{name}-labels.idx", (len(rows),), digits.target[rows].astype("uint8").tobytes())
    print(f"{folder / name}-images.idx: {len(rows)} images")
