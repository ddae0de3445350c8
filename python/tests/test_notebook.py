"""The code of the notebook and of `docs/python.md` runs."""

import json
import pathlib
import re

import numpy as np
import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_every_cell_of_the_notebook_runs():
    cells = json.loads((DOCS / "python.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {"display": repr}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)


def test_the_five_minutes_run():
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    code = re.search(r"## Five minutes.*?```python\n(.*?)```", page, re.S).group(1)
    names = {"d_out": np.ones((2, 8, 512, 64), np.float32)}
    exec(code, names)
    line = next(line for line in code.splitlines() if line.startswith("repr(attention)"))
    assert repr(names["attention"]) == line.split("#", 1)[1].strip()
    assert eval(repr(names["attention"]), names) == names["attention"]


def test_the_pytorch_page_runs():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (`cargo xtask python`)")
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    code = re.search(r"## PyTorch.*?```python\n(.*?)```", page, re.S).group(1)
    q, k, v = (torch.randn(1, 4, 16, 8, requires_grad=True) for _ in range(3))
    exec(code, {"q": q, "k": k, "v": v, "bias": torch.randn(16, 16, requires_grad=True)})
