"""Average precision of random boxes by `pycocotools`, compared with ours.

    pip install pycocotools numpy
    cargo build --release --example average_precision
    python detection.py target/release/examples/average_precision
"""

import contextlib
import io
import json
import random
import subprocess
import sys
import tempfile

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

program, worst = sys.argv[1], 0.0
for seed in range(40):
    draw = random.Random(seed)
    images, classes = draw.randint(1, 12), draw.randint(1, 4)
    there, found = [[] for _ in range(images)], [[] for _ in range(images)]
    for image in range(images):
        for _ in range(draw.randint(0, 12)):
            left, top = draw.uniform(0, 400), draw.uniform(0, 300)
            wide, high = draw.uniform(5, 120), draw.uniform(5, 120)
            kind = draw.randrange(classes)
            there[image].append([kind, 1.0, left, top, left + wide, top + high])
            for _ in range(draw.choice([0, 1, 1, 2])):
                shake = lambda: draw.gauss(0, draw.choice([0.5, 4, 15]))
                score = round(draw.random(), draw.choice([1, 8]))  # some are equal
                box = [left + shake(), top + shake(), left + wide + shake(), top + high + shake()]
                if box[2] > box[0] and box[3] > box[1]:
                    found[image].append([kind if draw.random() < 0.9 else draw.randrange(classes), score, *box])
        for _ in range(draw.randint(0, 150 if seed % 5 == 0 else 5)):
            left, top = draw.uniform(0, 500), draw.uniform(0, 400)
            found[image].append([draw.randrange(classes), draw.random(), left, top, left + 40, top + 30])
    if not any(there) or not any(found):
        continue
    annotations = [
        {"id": n + 1, "image_id": image + 1, "category_id": box[0] + 1, "iscrowd": 0, "area": (box[4] - box[2]) * (box[5] - box[3]),
         "bbox": [box[2], box[3], box[4] - box[2], box[5] - box[3]]}
        for n, (image, box) in enumerate((image, box) for image in range(images) for box in there[image])
    ]
    results = [
        {"image_id": image + 1, "category_id": box[0] + 1, "score": box[1], "bbox": [box[2], box[3], box[4] - box[2], box[5] - box[3]]}
        for image in range(images) for box in found[image]
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {"images": [{"id": image + 1} for image in range(images)], "annotations": annotations,
                         "categories": [{"id": kind + 1, "name": str(kind)} for kind in range(classes)]}
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"found": found, "there": there}, file)
        file.flush()
        at_half, mean = map(float, subprocess.run([program, file.name], capture_output=True, text=True, check=True).stdout.split())
    worst = max(worst, abs(at_half / 100 - evaluation.stats[1]), abs(mean / 100 - evaluation.stats[0]))
print(f"40 sets of boxes: AP and AP50 differ by at most {worst:.1e}")
