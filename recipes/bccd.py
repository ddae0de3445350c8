"""Writes BCCD (Shenggan/BCCD_Dataset, MIT: photographs of blood, boxes around cells of three kinds) as COCO's JSON.

    python recipes/bccd.py BCCD data/bccd
    qkv train recipes/bccd.toml

`BCCD` has the folders `images` and `boxes` (VOC's XML) and the lists `train.txt` and `val.txt` of names.
"""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

source, target = Path(sys.argv[1]), Path(sys.argv[2])
target.mkdir(parents=True, exist_ok=True)
names = ["Platelets", "RBC", "WBC"]
for part in ("train", "val"):
    images, annotations = [], []
    for at, name in enumerate((source / f"{part}.txt").read_text().split()):
        root = ET.parse(source / "boxes" / f"{name}.xml").getroot()
        width, height = (int(root.find(f"size/{side}").text) for side in ("width", "height"))
        path = (source / "images" / f"{name}.jpg").resolve()
        images.append({"id": at + 1, "file_name": str(path), "width": width, "height": height})
        for one in root.iter("object"):
            left, top, right, bottom = (float(one.find(f"bndbox/{edge}").text) for edge in ("xmin", "ymin", "xmax", "ymax"))
            if right > left and bottom > top:
                box = [left, top, right - left, bottom - top]
                category = names.index(one.find("name").text) + 1
                annotations.append({"id": len(annotations) + 1, "image_id": at + 1, "category_id": category,
                                    "bbox": box, "area": box[2] * box[3], "iscrowd": 0})
    categories = [{"id": at + 1, "name": name} for at, name in enumerate(names)]
    whole = {"images": images, "annotations": annotations, "categories": categories}
    (target / f"{part}.json").write_text(json.dumps(whole))
    print(f"{part}: {len(annotations)} boxes in {len(images)} images")
