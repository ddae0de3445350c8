"""`python -m qkv.bench`: attention of this library beside PyTorch's, both from Python, in one run.

Each figure is the best of several runs, the two sides taking turns, so that a busy machine does not favor one of them.
`--overhead` measures what a call costs beside the computation: one query, one key, width 16. `--models` measures
training steps of Hugging Face models. On a GPU (`--device cuda`) the table is made with the device's clock.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

# batch, heads, key heads, queries, width, mask
_SHAPES = [
    (8, 12, 12, 128, 64, "full"),
    (2, 12, 12, 512, 64, "causal"),
    (1, 12, 12, 2048, 64, "full"),
    (1, 12, 12, 2048, 64, "causal"),
    (1, 16, 4, 2048, 128, "causal"),
]

# The same on a GPU.
_CUDA_SHAPES = [
    (64, 12, 12, 64, 64, "causal"),
    (16, 16, 16, 1024, 64, "causal"),
    (4, 16, 16, 4096, 64, "full"),
    (4, 16, 16, 4096, 128, "full"),
    (4, 16, 16, 4096, 128, "causal"),
    (4, 32, 8, 4096, 128, "causal"),
    (1, 16, 16, 16384, 128, "causal"),
]

# Calls per timing, of the forward pass and with the backward pass: few, so that some turns are not interrupted on a
# busy machine.
_CALLS, _CALLS_OF_BOTH = 20, 4


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _turns(sides: list[Callable[[], Any]], seconds: float, at_least: int = 5) -> list[float]:
    """The best time of each side in seconds; the sides take turns."""
    best = [float("inf")] * len(sides)
    for side in sides:
        side()
    end, turns = time.perf_counter() + seconds, 0
    while turns < at_least or time.perf_counter() < end:
        for at, side in enumerate(sides):
            start = time.perf_counter()
            side()
            best[at] = min(best[at], time.perf_counter() - start)
        turns += 1
    return best


def _device_turns(sides: list[Callable[[], Any]], seconds: float, calls: int = 10) -> list[float]:
    """The same on a GPU, measured with its clock over `calls` calls."""
    import torch

    def timed(side: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device sleeps while the host submits the calls to the stream.
        torch.cuda._sleep(8_000_000)
        start.record()
        for _ in range(calls):
            side()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    best = [float("inf")] * len(sides)
    for side in sides:
        timed(side)
    end, turns = time.perf_counter() + seconds, 0
    while turns < 3 or time.perf_counter() < end:
        for at, side in enumerate(sides):
            best[at] = min(best[at], timed(side))
        turns += 1
    return best


def _table(dtypes: list[str], seconds: float, device: str) -> list[dict[str, Any]]:
    import torch
    from torch.nn import functional as F

    from . import torch as ours

    rows: list[dict[str, Any]] = []
    shapes, turns = (_CUDA_SHAPES, _device_turns) if device == "cuda" else (_SHAPES, _turns)
    for dtype in dtypes:
        for b, h, hk, n, d, mask in shapes:
            like: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device, "requires_grad": True}
            q = torch.randn(b, h, n, d, **like)
            k, v = (torch.randn(b, hk, n, d, **like) for _ in range(2))
            g = torch.randn_like(q)
            causal, grouped = mask == "causal", hk != h

            def forward(f: Callable[..., Any]) -> Any:
                with torch.no_grad():
                    return f(q, k, v, is_causal=causal, enable_gqa=grouped)

            def both(f: Callable[..., Any]) -> Any:
                return torch.autograd.grad(f(q, k, v, is_causal=causal, enable_gqa=grouped), (q, k, v), g)

            for name, run in (("forward", forward), ("forward and backward", both)):
                theirs, mine = turns(
                    [lambda: run(F.scaled_dot_product_attention), lambda: run(ours.sdpa)],
                    seconds,  # noqa: B023
                )
                shape = f"[{b}, {h if h == hk else f'{h}/{hk}'}, {n}, {d}]"
                rows.append(
                    {
                        "type": dtype,
                        "shape": shape,
                        "mask": mask,
                        "pass": name,
                        "torch_ms": 1e3 * theirs,
                        "qkv_ms": 1e3 * mine,
                    }
                )
                if sys.stderr.isatty():
                    print(f"{len(rows)} of {2 * len(shapes) * len(dtypes)}", end="\r", file=sys.stderr)
    return rows


def _overhead(seconds: float, device: str) -> list[dict[str, Any]]:
    import torch
    from torch.nn import functional as F

    from . import torch as ours

    cuda = device == "cuda"
    # On a GPU, the float32 kernels of the two sides are not equally quick to launch.
    dtype = torch.bfloat16 if cuda else torch.float32
    x = [torch.randn(1, 1, 1, 16, device=device, dtype=dtype) for _ in range(3)]
    y = [t.clone().requires_grad_() for t in x]
    sides = [F.scaled_dot_product_attention, ours.sdpa]

    g = torch.ones_like(x[0])

    def both(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: torch.autograd.grad(f(*tensors), tensors, g)

    def many(f: Callable[..., Any], tensors: list[Any], calls: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                f(*tensors)

        def run_alone() -> None:
            run()
            torch.cuda.synchronize()

        return run_alone if cuda else run

    rows = []
    modes = (
        ("no_grad", x, sides, _CALLS),
        ("autograd", y, sides, _CALLS),
        ("autograd, forward and backward", y, [both(f) for f in sides], _CALLS_OF_BOTH),
    )
    for name, tensors, functions, calls in modes:
        theirs, mine = _turns([many(f, tensors, calls) for f in functions], seconds)
        rows.append({"mode": name, "torch_us": theirs * 1e6 / calls, "qkv_us": mine * 1e6 / calls})
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m qkv.bench", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where both sides compute")
    parser.add_argument("--types", help="element types, joined by commas: float32,bfloat16, or bfloat16 on a GPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each figure is measured")
    parser.add_argument("--threads", type=int, help="threads of both sides; PyTorch's number by default")
    parser.add_argument("--overhead", action="store_true", help="measure the cost of a call instead")
    parser.add_argument("--models", action="store_true", help="measure training steps of Hugging Face models instead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("error: PyTorch is not installed\nhint: `pip install torch`")
    from . import __version__

    if given.threads is not None:
        torch.set_num_threads(given.threads)
    about = {
        "qkv": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **({"gpu": torch.cuda.get_device_name()} if given.device == "cuda" else {}),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
    }
    types = given.types or ("bfloat16" if given.device == "cuda" else "float32,bfloat16")
    if given.models:
        from ._bench_models import steps

        rows = steps(given.device, given.seconds)
        if given.json:
            rows = list(rows)
    elif given.overhead:
        rows = _overhead(given.seconds, given.device)
    else:
        rows = _table(types.split(","), given.seconds, given.device)
    if given.json:
        print(json.dumps({**about, "rows": rows}))
        return
    print(", ".join(f"{name} {value}" for name, value in about.items()), "\n", flush=True)
    if given.models:
        print("| model | attention | step, ms | memory, GB | loss |\n| --- | --- | --- | --- | --- |")
        for row in rows:
            what = f"| {row['model']} | {row['attention']} "
            print(f"{what}| {row['ms']:.1f} | {row['memory_gb']:.2f} | {row['loss']:.4f} |" if "ms" in row
                  else f"{what}| {row['why']} | | |", flush=True)  # fmt: skip
        return
    if given.overhead:
        print("| a call of [1, 1, 1, 16] | torch, µs | qkv, µs | more, µs |\n| --- | --- | --- | --- |")
        for row in rows:
            mine, theirs = row["qkv_us"], row["torch_us"]
            print(f"| {row['mode']} | {theirs:.1f} | {mine:.1f} | {mine - theirs:.1f} |")
        return
    columns = ("type", "[B, H, N, D]", "mask", "pass", "torch, ms", "qkv, ms", "torch / qkv")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for row in rows:
        ratio = row["torch_ms"] / row["qkv_ms"]
        what = f"| {row['type']} | {row['shape']} | {row['mask']} | {row['pass']} "
        print(f"{what}| {row['torch_ms']:.2f} | {row['qkv_ms']:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
