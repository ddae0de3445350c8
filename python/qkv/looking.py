"""Looking at attention: `show` draws weights in a notebook, `explore` records what a Hugging Face model attends to.

A recording keeps queries, keys and log-sum-exp of every layer, not the weights: these are recomputed, exactly, for what
is looked at. It is a `.safetensors` file that `qkv explore --recording FILE` opens as a page.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from ._qkv import Weights

__all__ = ["Picture", "Recording", "explore", "show"]

# Maximum number of cells per axis of a picture; beyond that, each cell shows the maximum of the weights it covers.
_CELLS = 128
# Maximum number of tokens that are labeled.
_LABELS = 48


class Picture:
    """Weights as a picture: draws itself in a notebook, `save` writes an SVG file."""

    def __init__(self, cells: Any, rows: Sequence[str], cols: Sequence[str], title: str) -> None:
        self.cells = np.asarray(cells, dtype=np.float64)
        self.svg = _svg(self.cells, rows, cols, title)

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str) -> None:
        """Writes the picture as SVG."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)

    def __repr__(self) -> str:
        return f"<qkv.Picture {self.cells.shape[0]} × {self.cells.shape[1]}>"


def _svg(cells: np.ndarray, rows: Sequence[str], cols: Sequence[str], title: str) -> str:
    height, width = cells.shape
    size = max(4, min(24, 640 // max(height, width, 1)))
    longest = lambda names: 7 * max((min(len(name), 16) for name in names), default=0)  # noqa: E731
    left, top = 8 + longest(rows), 28 + longest(cols)
    text = 'font-family="sans-serif" font-size="11" fill="currentColor"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width * size + 8}" '
        f'height="{top + height * size + 8}">',
        f'<text x="8" y="16" {text}>{escape(title)}</text>',
        f'<rect x="{left}" y="{top}" width="{width * size}" height="{height * size}" fill="none" stroke="#8888"/>',
    ]
    most = max(float(cells.max(initial=0.0)), 1e-30)
    for y, x in zip(*np.nonzero(cells > most / 512), strict=True):
        shade = f'fill="#2563eb" fill-opacity="{cells[y, x] / most:.3f}"'
        place = f'x="{left + int(x) * size}" y="{top + int(y) * size}"'
        names = f"{rows[y]} → {cols[x]}: " if rows and cols else ""
        weight = f"<title>{escape(names)}{cells[y, x]:.4g}</title>"
        parts.append(f'<rect {place} width="{size}" height="{size}" {shade}>{weight}</rect>')
    for y, name in enumerate(rows):
        at = f'x="{left - 4}" y="{top + y * size + size // 2 + 4}" text-anchor="end"'
        parts.append(f"<text {at} {text}>{escape(name[:16])}</text>")
    for x, name in enumerate(cols):
        at = f'transform="translate({left + x * size + size // 2 + 4} {top - 4}) rotate(-90)"'
        parts.append(f"<text {at} {text}>{escape(name[:16])}</text>")
    return "".join([*parts, "</svg>"])


def show(
    weights: Any,
    *,
    sequence: int = 0,
    head: int = 0,
    layer: int = 0,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
) -> Picture:
    """Draws the weights of one head: from `Attention.weights`, from an array `[N, M]`, `[H, N, M]` or `[B, H, N, M]`,
    or from a layer of a `Recording`. Large matrices are pooled to the largest weight of each cell.
    """
    if isinstance(weights, Recording):
        found = weights.layers[layer]
        names = title or f"{found['name']}, head {head}"
        sides = [[token["text"] for token in weights.sides[found[side]]["tokens"]] for side in ("queries", "keys")]
        return show(weights.weights(layer), head=head, queries=sides[0], keys=sides[1], title=names)
    if isinstance(weights, Weights):
        n, m = weights.shape[2:]
        if max(n, m) > _CELLS:
            cells = weights.pooled(min(n, _CELLS), min(m, _CELLS), sequence=sequence, head=head)
        else:
            cells = weights.rectangle(sequence, head)
    else:
        cells = np.asarray(weights)
        cells = cells[sequence] if cells.ndim == 4 else cells
        cells = cells[head] if cells.ndim == 3 else cells
        if cells.ndim != 2:
            raise ValueError(f"the weights have {cells.ndim} axes, expected 2, 3 or 4")
        n, m = cells.shape
        cells = _pooled(_pooled(cells, 0), 1)
    cells = np.asarray(cells)
    whole = cells.shape == (n, m) and max(n, m) <= _LABELS
    rows, cols = (list(queries or ()), list(keys or queries or ())) if whole else ([], [])
    rows, cols = rows if len(rows) == n else [], cols if len(cols) == m else []
    return Picture(cells, rows, cols, title or f"head {head}, {n} queries × {m} keys")


def _pooled(cells: np.ndarray, axis: int) -> np.ndarray:
    length = cells.shape[axis]
    if length <= _CELLS:
        return cells
    return np.maximum.reduceat(cells, np.arange(_CELLS) * length // _CELLS, axis)


class Recording:
    """What a model attended to: for every layer the tensors from which its weights are recomputed."""

    def __init__(self, text: str, sides: list[dict[str, Any]], layers: list[dict[str, Any]]) -> None:
        self.text, self.sides, self.layers = text, sides, layers

    def weights(self, layer: int) -> Weights:
        """The weights of a layer, on demand."""
        found = self.layers[layer]
        attention, inputs = found["attention"], found["inputs"]
        tensors = [found["tensors"][name] for name in "qkv"]
        return attention.weights(*tensors, attention.forward(*tensors, **inputs), **inputs)

    def save(self, path: str) -> None:
        """Writes the recording; `qkv explore --recording FILE` opens it."""
        tensors: dict[str, np.ndarray] = {}
        for at, layer in enumerate(self.layers):
            for name, tensor in layer["tensors"].items():
                tensors[f"layers.{at}.{name}"] = np.ascontiguousarray(tensor, np.float32)
            for name, tensor in layer["inputs"].items():
                if name == "segments":
                    pair = tensor if isinstance(tensor, tuple) else (tensor, tensor)
                    for side, of_side in zip("qk", pair, strict=True):
                        tensors[f"layers.{at}.{side}_segments"] = np.ascontiguousarray(of_side, np.int64).reshape(-1)
                elif name == "bits":
                    bits = np.asarray(tensor)
                    tensors[f"layers.{at}.mask"] = bits.reshape((1,) * (4 - bits.ndim) + bits.shape).astype(np.int64)
                elif name == "bias":
                    bias = np.asarray(tensor)
                    full = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
                    tensors[f"layers.{at}.bias"] = np.ascontiguousarray(full, np.float32)
                else:
                    tensors[f"layers.{at}.{name}"] = np.ascontiguousarray(tensor, np.float32)
        listed = ("name", "group", "queries", "keys")
        layers = [
            {**{n: layer[n] for n in listed}, "attention": json.loads(layer["attention"].to_json()), "importance": None}
            for layer in self.layers
        ]
        header = {"text": self.text, "output": None, "sides": self.sides, "steps": [], "layers": layers}
        _write_safetensors(path, tensors, {"recording": json.dumps(header)})

    def __repr__(self) -> str:
        return f"<qkv.Recording of {len(self.layers)} layers, {len(self.sides[0]['tokens'])} tokens>"


def _write_safetensors(path: str, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        kind = "I64" if tensor.dtype == np.int64 else "F32"
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def explore(
    model: Any,
    text: str | None = None,
    tokenizer: Any = None,
    *,
    path: str | None = None,
    open: bool = False,
    **inputs: Any,
) -> Recording:
    """Runs a Hugging Face model once on `text` (with its tokenizer) or on `inputs`, and records every attention layer
    of the first sequence. With `path` the recording is written there; with `open`, `qkv explore` opens it.
    """
    import torch

    from . import hf

    if text is not None:
        if tokenizer is None:
            raise ValueError("`tokenizer` is missing: `text` needs it")
        inputs = {**tokenizer(text, return_tensors="pt"), **inputs}
    if not inputs:
        raise ValueError("give `text` with a `tokenizer`, or the inputs of the model")
    hf.register()
    before = model.config._attn_implementation
    calls: list[tuple[Any, ...]] = []
    training = model.training
    model.eval()
    try:
        model.set_attn_implementation("qkv")
        with torch.no_grad(), hf.observe(lambda *call: calls.append(call)):
            model(**inputs)
    finally:
        model.set_attn_implementation(before)
        model.train(training)
    if not calls:
        raise ValueError("the model computed no attention through Hugging Face's interface")
    ids = inputs.get("input_ids")
    recording = _recorded(text or "", _tokens(ids, tokenizer), calls)
    if path is not None or open:
        path = path or "recording.safetensors"
        recording.save(path)
    if open:
        program = shutil.which("qkv")
        if program is None:
            raise FileNotFoundError(f"the program `qkv` is not on the path; the recording is in {path}")
        subprocess.Popen([program, "explore", "--open", "--recording", str(path)])
    return recording


def _tokens(ids: Any, tokenizer: Any) -> list[dict[str, Any]]:
    if ids is None:
        return []
    numbers = [int(number) for number in ids[0]]
    special = set(getattr(tokenizer, "all_special_ids", ()) or ())
    decode = (lambda number: tokenizer.decode([number])) if tokenizer is not None else str
    return [
        {"text": decode(number), "word": None if number in special else at, "special": number in special, "id": number}
        for at, number in enumerate(numbers)
    ]


def _recorded(text: str, tokens: list[dict[str, Any]], calls: list[tuple[Any, ...]]) -> Recording:
    sides: list[dict[str, Any]] = [{"name": "tokens", "tokens": tokens}] if tokens else []

    def side(length: int) -> int:
        for at, found in enumerate(sides):
            if len(found["tokens"]) == length:
                return at
        made = [{"text": str(at), "word": at, "special": False} for at in range(length)]
        sides.append({"name": f"positions ({length})", "tokens": made})
        return len(sides) - 1

    layers: list[dict[str, Any]] = []
    for at, (module, q, k, v, attention, inputs, lse) in enumerate(calls):
        one = lambda t: t[:1].detach().float().numpy()  # noqa: E731
        first = lambda t: t[:1] if t.dim() == 4 else t  # noqa: E731
        kept: dict[str, Any] = {}
        for name, tensor in inputs.items():
            if name == "segments":
                kept[name] = tuple(part.numpy() for part in tensor)
            elif name == "bits":
                kept[name] = first(tensor).numpy()
            else:
                kept[name] = first(tensor).detach().float().numpy()
        index = getattr(module, "layer_idx", None)
        name = f"layer {at if index is None else index}"
        # Values are not recorded, because weights need only queries and keys.
        tensors = {"q": one(q), "k": one(k), "v": one(v)[..., :0], "lse": one(lse)}
        layers.append(
            {
                "name": name if name not in (found["name"] for found in layers) else f"{name} ({at})",
                "group": type(module).__name__,
                "queries": side(q.shape[2]),
                "keys": side(k.shape[2]),
                "attention": attention,
                "inputs": kept,
                "tensors": tensors,
            }
        )
    return Recording(text, sides, layers)
