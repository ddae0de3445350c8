"""Compares modules of several folders, alternating between them, on the masks of `run.py time_masks`: compare.py DIR[:PROCESSORS],DIR... [D,D] [ROUNDS] [N].
Prints whether the bits equal those of the first folder, whether they are reproducible, microseconds, and TFLOP/s per kept tile as a fraction of the same
folder's full attention. PROCESSORS: the number for which rows of lists are split; 0 splits none, for modules without support for it. MASKS: only masks
whose names contain one of these words, and `full`."""
import os, sys, torch

dirs = sys.argv[1].split(",")
words = os.environ.get("MASKS", "").split(",")
widths = [int(x) for x in (sys.argv[2] if len(sys.argv) > 2 else "64,128").split(",")]
rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 7
n = int(sys.argv[4]) if len(sys.argv) > 4 else 6144
sys.argv[1:] = ["compare", "."]
from host import Module, Forward, Backward
from run import PROCESSORS, cut_plan, error, kept_tiles, make_plan, mask_cases, measure, rand, with_mask

b, modules = 16384 // n, {}


def module(dir, name, backward):
    path = f"{dir.split(':')[0]}/{name}.cubin"
    if path not in modules:
        modules[path] = Module(path, "backward_sizes" if backward else "forward_sizes")
    return modules[path]


for d in widths:
    h, full = 2048 // d, {}
    q, k, v, d_out = (rand(b, h, n, d) for _ in range(4))
    empty = lambda: torch.full_like(q, float("nan"))
    for name, (kind, keep, opts) in mask_cases(n, b).items():
        if name != "full" and not any(word in name for word in words):
            continue
        calls, results, flops, note, lists = {}, {}, {}, "", {}
        for dir in dirs:
            for side in ("forward", "backward"):
                backward = side == "backward"
                mod = module(dir, f"m{side[0]}{d}{kind}" if kind else f"{side[0]}{d}", backward)
                if (side, mod.M, mod.N) not in lists:
                    lists[side, mod.M, mod.N] = with_mask(kind, keep, opts, mod, b, h, n, backward)
                o = lists[side, mod.M, mod.N]
                if kind == "plan":
                    o = cut_plan(o, processors=int(dir.split(":")[1] if ":" in dir else PROCESSORS))
                if backward:
                    # What all are given is the first folder's.
                    results[side, dir] = [empty(), empty(), empty()]
                    call = Backward(mod, q, k, v, *results["forward", dirs[0]], d_out, *results[side, dir], **o)
                else:
                    results[side, dir] = [empty(), torch.full((b, h, n), float("nan"), device="cuda")]
                    call = Forward(mod, q, k, v, *results[side, dir], **o)
                calls[side, dir] = lambda mod=mod, call=call, o=o: (make_plan(mod, call, o), call())
                calls[side, dir]()
                flops[side] = (10 if backward else 4) * b * h * d * kept_tiles(keep, mod.M, mod.N) * mod.M * mod.N
                torch.cuda.synchronize()
        for (side, dir), got in results.items():
            want, kept = results[side, dirs[0]], [x.clone() for x in got]
            if not all(torch.equal(x, y) for x, y in zip(got, want)):
                note += f" [{side} of {dir} differs by {max(error(x, y) for x, y in zip(got, want)):.1e}]"
            calls[side, dir]()
            torch.cuda.synchronize()
            if not all(torch.equal(x, y) for x, y in zip(got, kept)):
                note += f" [{side} of {dir} does not come again]"
        line = f"d{d} {name:26s}"
        times = measure(calls, rounds=rounds, budget=0.012)
        for side in flops:
            line += f" | {side}"
            for dir in dirs:
                rate = flops[side] / times[side, dir] / 1e12
                full.setdefault((side, dir), rate)
                line += f" {dir} {times[side, dir] * 1e6:.0f} ({rate / full[side, dir]:.2f})"
        print(line + note, flush=True)
