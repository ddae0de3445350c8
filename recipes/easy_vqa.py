"""Writes easy-VQA (PyPI `easy-vqa`, MIT: 48,000 questions about 5,000 pictures) as lists that `qkv train` reads.

    pip download --no-deps easy-vqa==1.0 && unzip easy_vqa-1.0-py3-none-any.whl -d easy-vqa
    python recipes/easy_vqa.py easy-vqa data/easy-vqa
    qkv train recipes/easy-vqa.toml
"""

import json
import sys
from pathlib import Path

source, target = Path(sys.argv[1]) / "easy_vqa" / "data", Path(sys.argv[2])
target.mkdir(parents=True, exist_ok=True)
for part in ("train", "test"):
    questions = json.loads((source / part / "questions.json").read_text())
    images = (source / part / "images").resolve()
    lines = [f"{images / f'{image}.png'}\t{question}\t{answer}\n" for question, answer, image in questions]
    (target / f"{part}.tsv").write_text("".join(lines))
    print(f"{part}: {len(lines)} questions about {len(list(images.glob('*.png')))} pictures")
