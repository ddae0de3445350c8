"""Makes `blocks.json`: two blocks of each type of GGUF that has blocks, and what the `gguf` package widens them to.

    python blocks.py        (needs the packages gguf and numpy; writes the file beside this script)

Bytes are drawn at random, but for the scales, which are ordinary numbers. `Q8_K` the package does not widen: its scale times
its numbers, as the format defines it, is computed here.
"""

import json
import pathlib

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES

# Where the half-precision scales of a block stand.
SCALES = {
    Kind.Q4_0: [0], Kind.Q4_1: [0, 2], Kind.Q5_0: [0], Kind.Q5_1: [0, 2], Kind.Q8_0: [0], Kind.Q2_K: [80, 82],
    Kind.Q3_K: [108], Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q6_K: [208], Kind.Q8_K: [],
}

draw = np.random.default_rng(7)
found = []
for kind, places in SCALES.items():
    _, size = GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (2, size), dtype=np.uint8)
    for place in places:
        blocks[:, place : place + 2] = draw.uniform(-0.2, 0.2, (2, 1)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q8_K:
        blocks[:, :4] = draw.uniform(-0.2, 0.2, (2, 1)).astype(np.float32).view(np.uint8)
        scale = blocks[:, :4].copy().view(np.float32)
        wide = scale * blocks[:, 4:260].view(np.int8).astype(np.float32)
    else:
        wide = quants.dequantize(blocks.reshape(-1), kind)
    found.append([int(kind), blocks.reshape(-1).tolist(), [float(x) for x in np.asarray(wide, np.float32).reshape(-1)]])
path = pathlib.Path(__file__).with_name("blocks.json")
path.write_text(json.dumps(found, separators=(",", ":")) + "\n")
