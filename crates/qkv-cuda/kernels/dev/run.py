"""Checks and times the Hopper kernels on the GPU: run.py SUITE [MODULES_DIR]. Each suite is a separate process."""
import os, sys, time, json, torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
import host, reference
from host import Module, Forward, Backward

torch.backends.cuda.matmul.allow_tf32 = False
here = sys.argv[2] if len(sys.argv) > 2 else "."
_modules = {}


def module(name, backward=False):
    if name not in _modules:
        _modules[name] = Module(f"{here}/{name}.cubin", "backward_sizes" if backward else "forward_sizes")
    return _modules[name]


def rand(*shape, dtype=torch.bfloat16, turned=False):
    b, h, n, d = shape
    if turned:
        return torch.randn(b, n, h, d, device="cuda", dtype=dtype).transpose(1, 2)
    return torch.randn(b, h, n, d, device="cuda", dtype=dtype)


def in_fragments(tile):
    """The columns of each row in the order in which four threads have them: 8c + 2t + e as t, c, e."""
    rows, columns = tile.shape
    return tile.reshape(rows, columns // 8, 4, 2).transpose(1, 2).reshape(rows, columns)


PROCESSORS, LEAST = 132, 1024  # the number for which rows are split; the fewest tokens of a split


def cut(rows, heads, least, processors=PROCESSORS, split=None):
    """Rows (first entry, how many, tile) in the layout of the kernels, some of them split, as in `tile_list.rs`; then how many slots the splits take, and how
    many rows come before all others. Rows are split if they are more than twice as long as the mean, and longer than 80 % of the work of each of this
    many processors, into splits of no more than 67 % of that. `split`, for checks: split all rows of more tiles, into splits of this many."""
    total, slots, out, progress = sum(row[1] for row in rows), 0, [], []
    is_long = lambda count: count * len(rows) > 2 * total and 5 * count * processors > 4 * total * heads and count >= 2 * least
    parts = lambda count: min(-(-3 * count * processors // (2 * total * heads)), count // least, 64)
    if split is not None:
        is_long, parts = (lambda count: 0 < split < count), (lambda count: -(-count // split))
    elif sum(parts(row[1]) for row in rows if is_long(row[1])) > max(len(rows), 64):
        is_long = lambda count: False
    for first, count, tile in rows:
        if not is_long(count):
            progress.append((first, count, tile, 0))
            continue
        for x in range(parts(count)):
            a, b = x * count // parts(count), (x + 1) * count // parts(count)
            out.append((first + a, b - a, tile, slots + x | x << 16 | parts(count) << 24))
        slots += parts(count)
    out += sorted(progress, key=lambda row: -row[1])
    long = slots
    while long < len(out) and out[long][1] * len(out) > 2 * total:
        long += 1
    return out, slots, long


def plan_of(keep, M, N, turned=False, heads=1, **cuts):
    """The plan of a boolean mask [n, m] that this many heads (backward: key heads) share, with bits for partial tiles. `cuts`: arguments of `cut`."""
    n, m = keep.shape
    tn, tm = -(-n // M), -(-m // N)
    padded = torch.zeros(tn * M, tm * N, dtype=torch.bool)
    padded[:n, :m] = keep.cpu()
    tiles = padded.view(tn, M, tm, N).permute(0, 2, 1, 3)
    some = tiles.flatten(2).any(-1)
    inside = torch.zeros(tn * M, tm * N, dtype=torch.bool)
    inside[:n, :] = True
    progress = (tiles | ~inside.view(tn, M, tm, N).permute(0, 2, 1, 3)).flatten(2).all(-1)
    turn = some.cumsum(1) - some.int()
    rows, entries, bits = [0], [], []
    weights = 1 << torch.arange(32, dtype=torch.int64)
    order = [(i, [j for j in range(tm) if some[i, j]]) for i in range(tn)] if not turned else [(j, [i for i in reversed(range(tn)) if some[i, j]]) for j in range(tm)]
    for a, others in order:
        for b in others:
            i, j = (a, b) if not turned else (b, a)
            if progress[i, j]:
                entries.append((b, 0xFFFFFFFF, int(turn[i, j]), 0))
            else:
                # Which groups of 64 of the row's own queries or keys have no pair here.
                own = (tiles[i, j].T if turned else tiles[i, j]).reshape(-1, 64 * (M if turned else N)).any(-1)
                idle = sum(1 << 28 + g for g, some in enumerate(own.tolist()) if not some)
                entries.append((b | 1 << 31 | idle, len(bits), int(turn[i, j]), 0))
                bits.append((in_fragments(tiles[i, j].T if turned else tiles[i, j]).reshape(-1, 32).long() * weights).sum(-1))
        rows.append(len(entries))
    i32 = lambda x: (x & 0xFFFFFFFF).to(torch.int64).apply_(lambda y: y - (1 << 32) if y >= 1 << 31 else y).to(torch.int32) if x.numel() < 1 << 16 else torch.where((x & 0xFFFFFFFF) >= 1 << 31, (x & 0xFFFFFFFF) - (1 << 32), x & 0xFFFFFFFF).to(torch.int32)
    rows = [(a, b - a, t) for t, (a, b) in enumerate(zip(rows, rows[1:]))]
    out = [torch.tensor(entries or [(0, 0, 0, 0)], dtype=torch.int64), torch.stack(bits) if bits else torch.zeros(1, dtype=torch.int64)]
    entries, bits = (i32(x).contiguous().cuda() for x in out)
    return cut_plan(dict(list_entries=entries, list_bits=bits, _kept=sum(row[1] for row in rows), _rows=(rows, heads, LEAST // (M if turned else N))), **cuts)


def cut_plan(plan, **cuts):
    """The plan with its rows split differently."""
    rows, slots, long = cut(*plan["_rows"], **cuts)
    rows_on_card = torch.tensor(rows, dtype=torch.int64).to(torch.uint32).view(torch.int32).cuda()
    return dict(plan, list_rows=rows_on_card, list_row_count=len(rows), _long=long, _slots=slots)


def segment_room(b, n, m, turned):
    """Memory for the ranges of packed sequences, which `segment_ranges` fills."""
    rows = m if turned else n
    room = lambda *s: torch.full(s, 0x55, device="cuda", dtype=torch.int32)
    return dict(ranges=room(b * rows, 2), extents=room(b * -(-rows // 64), 4), order=room(b * -(-rows // 64)), _ranges=(-(-rows // 256) * b, 1))


def make_plan(mod, call, opts):
    if "_ranges" in opts:
        mod.launch("segment_ranges", opts["_ranges"], 256, 0, call.p)


def error(x, y):
    x, y = x.double(), y.double()
    return float("nan") if not torch.isfinite(x).all() else ((x - y).norm() / y.norm().clamp_min(1e-30)).item()


BAD = []


def report(name, **errors):
    bad = any(not (e < bound) for e, bound in errors.values())
    if bad:
        BAD.append(name)
    print(("BAD  " if bad else "ok   ") + name, " ".join(f"{k} {e:.1e}" for k, (e, _) in errors.items()), flush=True)


def lse_error(x, y):
    same = (x == y.float()) | ((x.double() - y).abs() < 1e30)
    return float("nan") if not same.all() else torch.nan_to_num((x.double() - y).abs(), nan=0.0).max().item()


def options(name, b, hq, hk, n, m, kw):
    """The parameters of the kernel and of the reference, from one description."""
    mine, theirs = {}, {}
    if "band" in kw:
        left, right = kw["band"]
        offset = kw.get("offset", 0)
        mine.update(left=min(left, 1 << 29), right=min(right, 1 << 29), offset=offset, _band=True)
        theirs.update(band=(left, right))
    mine["offset"] = theirs["offset"] = kw.get("offset", 0)
    if "lengths" in kw:
        x = torch.tensor(kw["lengths"], device="cuda", dtype=torch.int32)
        mine["lengths"], theirs["lengths"] = x, x
    if kw.get("shape"):
        alibi_slopes = torch.rand(hq, device="cuda") * 0.1
        bias = torch.randn(b, hq, n, m, device="cuda", dtype=torch.bfloat16)
        mine.update(softcap=3.0, alibi=alibi_slopes, bias=bias, bias_b=hq * n * m, bias_h=n * m, bias_i=m, bias_j=1)
        theirs.update(softcap=3.0, alibi_slopes=alibi_slopes, bias=bias)
    if kw.get("sinks"):
        sinks = torch.randn(hq, device="cuda") * 2
        mine["sinks"], theirs["sinks"] = sinks, sinks
    if kw.get("bias32"):
        bias = torch.randn(1, hq, n, m, device="cuda")
        mine.update(bias=bias, bias_b=0, bias_h=n * m, bias_i=m, bias_j=1)
        theirs.update(bias=bias)
    if "drop" in kw:
        threshold, seed = round(kw["drop"] * 65536), 0x123456789ABCDEF
        mine.update(dropout_threshold=threshold, dropout_scale=65536 / (65536 - threshold), seed=seed)
        theirs["dropout"] = (threshold, seed)
    if kw.get("segments"):
        splits = kw["segments"]
        ids = torch.repeat_interleave(torch.arange(len(splits)).roll(kw.get("turned_by", 0)), torch.tensor(splits))
        assert len(ids) == n == m
        ids = ids.to("cuda", torch.int32).expand(b, n).contiguous()
        mine.update(segments_q=ids, segments_k=ids)
        theirs["segments"] = (ids, ids)
    return mine, theirs


def mask_plan(kw, mine, theirs, n, m, M, N, heads, turned=False):
    plan = lambda bits: mine.update(plan_of(bits, M, N, turned, heads, split=kw.get("split")))
    i, j = torch.arange(n)[:, None], torch.arange(m)[None, :]
    if kw.get("bits"):
        torch.manual_seed(n * m)
        bits = (torch.rand(-(-n // 100), -(-m // 100)) < 0.4).repeat_interleave(100, 0).repeat_interleave(100, 1)[:n, :m]
        bits = bits & (torch.rand(n, m) < 0.9) | ((i // 256) == (j // 256))
        theirs["bits"] = bits.cuda()
        plan(bits)
    elif kw.get("globals"):
        at = torch.tensor(kw["globals"])
        bits = ((i - j).abs() <= 40) | torch.isin(i, at) | torch.isin(j, at)
        theirs["bits"] = bits.cuda()
        plan(bits)
        assert mine["_slots"] > 0
    elif kw.get("segments"):
        mine.update(segment_room(mine["segments_q"].shape[0], n, m, turned))


BIG = 1 << 40
PLAIN = [
    dict(shape=(2, 4, 4, 256, 256)), dict(shape=(1, 2, 2, 100, 77)), dict(shape=(2, 4, 2, 333, 519)), dict(shape=(1, 8, 1, 64, 1000)),
    dict(shape=(1, 1, 1, 1, 1)), dict(shape=(3, 5, 5, 300, 40)), dict(shape=(2, 96, 96, 512, 640)), dict(shape=(2, 6, 3, 400, 400), turned=True),
]
BANDS = [
    dict(shape=(2, 4, 4, 256, 256), band=(BIG, 0)), dict(shape=(1, 4, 2, 333, 333), band=(BIG, 0)), dict(shape=(2, 4, 4, 200, 500), band=(BIG, 0), offset=300),
    dict(shape=(2, 4, 4, 500, 200), band=(BIG, 0), offset=-300), dict(shape=(1, 2, 1, 700, 700), band=(30, 17)), dict(shape=(2, 70, 70, 800, 800), band=(200, 0)),
    dict(shape=(1, 2, 2, 1000, 1000), band=(BIG, 5), offset=-7), dict(shape=(1, 3, 3, 300, 900), band=(100, 100), offset=400),
]
# Split rows: of every length, some of them emptied by lengths; and as they occur in masks.
CUT = [dict(shape=(2, 4, 2, 1000, 1000), globals=[0, 500, 999], split=2), dict(shape=(2, 2, 2, 333, 1517), bits=True, split=1), dict(shape=(1, 4, 1, 1900, 333), globals=[9, 10], split=2)]
SPECIAL = {
    "planall": [dict(shape=(3, 4, 2, 600, 600), globals=[0, 333], split=1, lengths=[600, 77, 0], shape_=1, sinks=True, drop=0.25), dict(shape=(2, 2, 2, 200, 900), bits=True, split=1, lengths=[900, 300], shape_=1, sinks=True, drop=0.1)],
    "planhalf": [dict(x, bias32=True) for x in CUT], "plan_free": CUT, "planlen": [dict(x, lengths=y) for x, y in zip(CUT, ([999, 140], [0, 1517], [100]))],
    "len": [dict(shape=(3, 4, 2, 400, 400), lengths=[400, 77, 0], band=(BIG, BIG)), dict(shape=(2, 4, 2, 300, 500), lengths=[129, 500], band=(BIG, 0), offset=200)],
    "seg": [dict(shape=(2, 4, 2, 1000, 1000), segments=[100, 37, 263, 400, 200], band=(BIG, 0)), dict(shape=(2, 4, 2, 900, 900), segments=[300, 37, 263, 300], turned_by=1, band=(BIG, BIG)), dict(shape=(2, 4, 2, 700, 700), segments=[128, 256, 200, 116], band=(BIG, BIG))],
    "plan": [dict(shape=(2, 4, 2, 1000, 1000), bits=True, split=0), dict(shape=(1, 2, 2, 333, 517), bits=True, split=0), *CUT, dict(shape=(1, 2, 1, 5000, 5000), globals=[0, 2600]), dict(shape=(1, 2, 1, 4500, 4500), globals=[4400], turned=True)],
    "shape": [dict(shape=(2, 4, 2, 300, 300), shape_=1, sinks=True, band=(BIG, 0)), dict(shape=(1, 4, 4, 130, 333), shape_=1, sinks=True, band=(BIG, BIG))],
    "drop": [dict(shape=(2, 4, 2, 300, 333), drop=0.25, band=(BIG, BIG)), dict(shape=(2, 4, 2, 300, 300), drop=0.1, band=(BIG, 0))],
    "half": [dict(shape=(2, 4, 2, 300, 333), bias32=True)],
}
for x in SPECIAL["shape"] + SPECIAL["planall"]:
    x["shape_"] = True


def cases(name):
    """Cases of a module, by its name: cf128, cf128b, cf128seg … and the widths it is used for."""
    for special, list in SPECIAL.items():
        if name.endswith(special):
            return [dict(x) for x in list]
    return [dict(x) for x in (BANDS if "b" in name.split("_")[0][2:] else PLAIN)]


def case_inputs(kw, d, dv, dtype):
    b, hq, hk, n, m = kw["shape"]
    turned = kw.get("turned", False)
    q, k, v = rand(b, hq, n, d, dtype=dtype, turned=turned), rand(b, hk, m, d, dtype=dtype, turned=turned), rand(b, hk, m, dv, dtype=dtype, turned=turned)
    return q, k, v


def widths(name):
    full = int("".join(c for c in name.split("_")[0] if c.isdigit()))
    return {64: [(64, 64), (40, 24)], 128: [(128, 128), (72, 96)], 256: [(256, 256), (200, 136)]}[full]


def check_forward(names):
    for name in names:
        mod = module(name)
        dtype = torch.float16 if "half" in name else torch.bfloat16
        for d, dv in widths(name):
            for kw in cases(name):
                b, hq, hk, n, m = kw["shape"]
                q, k, v = case_inputs(kw, d, dv, dtype)
                flags = dict(kw, shape=kw.get("shape_"))
                mine, theirs = options(name, b, hq, hk, n, m, flags)
                mask_plan(flags, mine, theirs, n, m, mod.M, mod.N, hq)
                out, lse = torch.full((b, hq, n, dv), float("nan"), device="cuda", dtype=dtype), torch.full((b, hq, n), float("nan"), device="cuda")
                call = Forward(mod, q, k, v, out, lse, **mine)
                make_plan(mod, call, mine)
                call()
                torch.cuda.synchronize()
                first = out.clone()
                out.fill_(float("nan"))
                call()
                torch.cuda.synchronize()
                ref, ref_lse = reference.attention(q, k, v, **theirs)
                report(f"{name} d{d},{dv} {kw['shape']} {kw.get('band', '')}{kw.get('offset', '')}", out=(error(out, ref), 6e-3),
                       lse=(lse_error(lse, ref_lse), 2e-3), again=(float((out != first).sum()), 1), counts=(float(call.split_results[1].sum()), 1))


def check_backward(names):
    for name in names:
        mod = module(name, True)
        dtype = torch.float16 if "half" in name else torch.bfloat16
        for d, dv in widths(name):
            for kw in cases(name):
                b, hq, hk, n, m = kw["shape"]
                q, k, v = case_inputs(kw, d, dv, dtype)
                d_out = rand(b, hq, n, dv, dtype=dtype, turned=kw.get("turned", False))
                flags = dict(kw, shape=kw.get("shape_"))
                mine, theirs = options(name, b, hq, hk, n, m, flags)
                mask_plan(flags, mine, theirs, n, m, mod.M, mod.N, hk, turned=True)
                if kw.get("shape_"):
                    d_bias = torch.full((b, hq, n, m), float("nan"), device="cuda")
                    d_sinks = torch.full((hq,), float("nan"), device="cuda")
                    mine.update(d_bias=d_bias, d_bias_b=hq * n * m, d_bias_h=n * m, d_bias_i=m, d_bias_j=1, d_sinks=d_sinks)
                leaf = lambda x: x.detach().double().requires_grad_()
                rq, rk, rv = leaf(q), leaf(k), leaf(v)
                wanted = [rq, rk, rv]
                for extra in ("bias", "sinks"):
                    if extra in theirs and kw.get("shape_"):
                        theirs[extra] = leaf(theirs[extra])
                        wanted.append(theirs[extra])
                ref, ref_lse = reference.attention(rq, rk, rv, **theirs)
                use_lse = bool(kw.get("turned"))
                d_lse = torch.randn_like(ref_lse).float()
                total = (ref * d_out.double()).sum()
                if use_lse:
                    total = total + (ref_lse * d_lse.double()).sum()
                    mine["d_lse"] = d_lse
                grads = torch.autograd.grad(total, wanted, allow_unused=True)
                grads = [torch.nan_to_num(g) for g in grads]
                out, lse = ref.detach().to(dtype), ref_lse.detach().float()
                nan = lambda x: torch.full_like(x.contiguous(), float("nan"))
                dq, dk, dv_ = nan(q), nan(k), nan(v)
                call = Backward(mod, q, k, v, out, lse, d_out, dq, dk, dv_, **mine)
                make_plan(mod, call, mine)
                call()
                torch.cuda.synchronize()
                first = dq.clone(), dk.clone(), dv_.clone()
                for x in (dq, dk, dv_):
                    x.fill_(float("nan"))
                call()
                if kw.get("shape_"):
                    mod.launch("sink_gradient", (hq, 1), 256, 0, call.p)
                torch.cuda.synchronize()
                again = sum(float((x != y).sum()) for x, y in zip((dq, dk, dv_), first))
                tops = [g.abs().max().item() for g in grads]
                scaled = lambda x, g: error(x, g) if g.norm() > 0 else float(x.double().norm())
                errors = dict(dq=(scaled(dq, grads[0]), 1.2e-2), dk=(scaled(dk, grads[1]), 1.2e-2), dv=(scaled(dv_, grads[2]), 1.2e-2))
                if kw.get("shape_"):
                    errors.update(bias=(error(torch.nan_to_num(d_bias), grads[3]), 1.2e-2), sinks=(error(d_sinks, grads[4]), 5e-2))
                if "free" not in name:
                    errors["again"] = (again, 1)
                errors["counts"] = (float(call.split_results[1].sum()), 1)
                report(f"{name} d{d},{dv} {kw['shape']} {kw.get('band', '')}{kw.get('offset', '')}", **errors)


def grid(ds=(64, 128, 256), ns=(512, 2048, 8192, 16384)):
    for d in ds:
        for causal in (False, True):
            for n in ns:
                yield d, causal, n, max(1, 16384 // n), 2048 // d


def measure(calls, rounds=5, budget=0.02):
    """Median seconds of each call, in alternating rounds."""
    times = {name: [] for name in calls}
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    count = {}
    for name, call in calls.items():
        call(), call()
        torch.cuda.synchronize()
        start.record(), call(), stop.record()
        torch.cuda.synchronize()
        count[name] = max(2, int(budget / (start.elapsed_time(stop) / 1e3 + 1e-9)))
    import random
    for _ in range(rounds):
        # A call runs slower after one that heats the GPU, so each round has a new random order.
        for name, call in random.sample(list(calls.items()), len(calls)):
            start.record()
            for _ in range(count[name]):
                call()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop) / 1e3 / count[name])
    return {name: sorted(x)[len(x) // 2] for name, x in times.items()}


def measure_cold(calls, rounds=5, each=12):
    """Median seconds of single calls, each with a cold cache, in a new random order each round."""
    import random
    sweep = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = {name: [] for name in calls}
    for call in calls.values():
        call(), call()
    for _ in range(rounds):
        for name, call in random.sample(list(calls.items()), len(calls)):
            events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(each)]
            for start, stop in events:
                sweep.zero_()
                start.record(), call(), stop.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(stop) / 1e3 for start, stop in events]
    return {name: sorted(x)[len(x) // 2] for name, x in times.items()}


def time_forward(variants, anchors=("cudnn",), ns=(512, 2048, 8192, 16384), ds=(64, 128, 256)):
    from math import exp, log
    ratios = {}
    for d, causal, n, b, h in grid(ds, ns):
        q, k, v = (rand(b, h, n, d) for _ in range(3))
        out, lse = torch.empty_like(q), torch.empty(b, h, n, device="cuda")
        calls = {}
        for anchor in anchors:
            backend = SDPBackend.CUDNN_ATTENTION if anchor == "cudnn" else SDPBackend.FLASH_ATTENTION
            def call(backend=backend):
                with sdpa_kernel([backend]), torch.no_grad():
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            calls[anchor] = call
        prefix = f"f{d}b" if causal else f"f{d}"
        want = calls[anchors[0]]()
        for name in variants:
            if name.split("_")[0] == prefix:
                opts = dict(left=1 << 29, right=0, _band=True) if causal else {}
                calls[name] = Forward(module(name), q, k, v, out, lse, **opts)
                out.fill_(float("nan"))
                calls[name]()
                e = error(out, want)
                if not e < 1e-2:
                    print("BAD", name, n, "differs from cuDNN by", e)
                    BAD.append(name)
        flop = 4 * b * h * n * n * d / (2 if causal else 1)
        t = measure(calls)
        print(f"fwd d{d} {'causal' if causal else 'full  '} n{n:6d} ", " ".join(f"{name} {flop / s / 1e12:.0f}" for name, s in t.items()), flush=True)
        for name in t:
            ratios.setdefault(name, []).append(log(t["cudnn"] / t[name]))
    for name, x in ratios.items():
        print(f"{name}: cudnn time over its time, geometric mean {exp(sum(x) / len(x)):.3f} over {len(x)}")
    return ratios


# Kernels timed in addition to a whole backward call: the main kernel is the rest, since it cannot run twice on the same preparation.
PARTS = ("before", "measure", "prepare")


def time_backward(variants, anchors=("cudnn",), ns=(512, 2048, 8192, 16384), ds=(64, 128, 256), parts=False):
    from math import exp, log
    ratios = {}
    for d, causal, n, b, h in grid(ds, ns):
        q, k, v = (rand(b, h, n, d).requires_grad_() for _ in range(3))
        d_out = rand(b, h, n, d)
        calls = {}
        opts = dict(left=1 << 29, right=0, _band=True) if causal else {}
        out, lse = torch.empty_like(d_out), torch.empty(b, h, n, device="cuda")
        Forward(module(f"f{d}b" if causal else f"f{d}"), q.detach(), k.detach(), v.detach(), out, lse, **opts)()
        for anchor in anchors:
            backend = SDPBackend.CUDNN_ATTENTION if anchor == "cudnn" else SDPBackend.FLASH_ATTENTION
            with sdpa_kernel([backend]):
                theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            calls[anchor] = lambda theirs=theirs: torch.autograd.grad(theirs, (q, k, v), d_out, retain_graph=True)
        want = calls[anchors[0]]()
        prefix = f"b{d}b" if causal else f"b{d}"
        for name in variants:
            if name.split("_")[0] == prefix:
                dq, dk, dv = (torch.full_like(d_out, float("nan")) for _ in range(3))
                call = Backward(module(name, True), q.detach(), k.detach(), v.detach(), out, lse, d_out, dq, dk, dv, **opts)
                calls[name] = call
                call()
                e = max(error(x, y) for x, y in zip((dq, dk, dv), want))
                if not e < 2e-2:
                    print("BAD", name, n, "differs from cuDNN by", e)
                    BAD.append(name)
                if parts and name == prefix:
                    for part in PARTS:
                        calls[part] = lambda call=call, part=part: call(part)
        flop = 10 * b * h * n * n * d / (2 if causal else 1)
        t = measure(calls)
        print(f"bwd d{d} {'causal' if causal else 'full  '} n{n:6d} ", " ".join(f"{name} {flop / s / 1e12:.0f}" if name not in PARTS else f"{name} {s * 1e6:.0f}us" for name, s in t.items()), f"cudnn {t['cudnn'] * 1e6:.0f}us", flush=True)
        for name in t:
            ratios.setdefault(name, []).append(log(t["cudnn"] / t[name]))
    for name, x in ratios.items():
        print(f"{name}: cudnn time over its time, geometric mean {exp(sum(x) / len(x)):.3f} over {len(x)}")
    return ratios


def kept_tiles(keep, M, N):
    n, m = keep.shape
    return keep.view(n // M, M, m // N, N).permute(0, 2, 1, 3).flatten(2).any(-1).sum().item()


def mask_cases(n, b):
    """By name: the kind of kernel, the [n, n] booleans, the options. Drawn from SEED, separately for each width."""
    torch.manual_seed(int(os.environ.get("SEED", time.time())))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]

    def packed(count):
        cuts = torch.cat([torch.zeros(1), torch.sort(torch.randperm(n - 1)[:count - 1] + 1)[0], torch.tensor([n])]).long()
        ids = torch.repeat_interleave(torch.arange(count), cuts.diff())
        return ids[:, None] == ids[None, :], ids.to("cuda", torch.int32).expand(b, n).contiguous()

    def blocks(size, part):
        return (torch.rand(-(-n // size), -(-n // size)) < part).repeat_interleave(size, 0).repeat_interleave(size, 1)[:n, :n]

    same, ids = packed(12)
    long, long_ids = packed(4)
    return {
        "full": ("", torch.ones(n, n, dtype=torch.bool), {}),
        "causal": ("band", i >= j, dict(left=1 << 29, right=0, _band=True)),
        "window 512, 512": ("band", (i - j).abs() <= 512, dict(left=512, right=512, _band=True)),
        "window 1024, 0": ("band", (i >= j) & (i - j <= 1024), dict(left=1024, right=0, _band=True)),
        "window 128, 128": ("band", (i - j).abs() <= 128, dict(left=128, right=128, _band=True)),
        "12 segments": ("seg", same, dict(left=1 << 29, right=1 << 29, segments_q=ids, segments_k=ids)),
        "12 segments, causal": ("segb", same & (i >= j), dict(left=1 << 29, right=0, segments_q=ids, segments_k=ids)),
        "blocks of 384, a quarter": ("plan", blocks(384, 0.25), {}),
        "4 segments": ("seg", long, dict(left=1 << 29, right=1 << 29, segments_q=long_ids, segments_k=long_ids)),
        "4 segments, causal": ("segb", long & (i >= j), dict(left=1 << 29, right=0, segments_q=long_ids, segments_k=long_ids)),
        "longformer 2048, 1 global": ("plan", ((i - j).abs() <= 1024) | (i == 0) | (j == 0), {}),
        "longformer 512, 1 global": ("plan", ((i - j).abs() <= 256) | (i == 0) | (j == 0), {}),
        "blocks of 100": ("plan", blocks(100, 0.1), {}),
    }


def with_mask(kind, keep, opts, mod, b, h, n, turned):
    """The options of a call, with its list or memory for its ranges."""
    if kind == "plan":
        return dict(opts, **plan_of(keep, mod.M, mod.N, turned, h))
    return dict(opts, **segment_room(b, n, n, turned)) if kind[:3] == "seg" else dict(opts)


def time_masks(ds=(64, 128), n=6144):
    for d in ds:
        b, h = 16384 // n, 2048 // d
        q, k, v, d_out = (rand(b, h, n, d) for _ in range(4))
        out, lse = torch.empty_like(q), torch.empty(b, h, n, device="cuda")
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))
        tf, tb = 4 * b * h * d, 10 * b * h * d
        base = {}
        for name, (kind, keep, opts) in mask_cases(n, b).items():
            fm = module(f"mf{d}{kind}" if kind else f"f{d}")
            bm = module(f"mb{d}{kind}" if kind else f"b{d}", True)
            fo, bo = with_mask(kind, keep, opts, fm, b, h, n, False), with_mask(kind, keep, opts, bm, b, h, n, True)
            forward = Forward(fm, q, k, v, out, lse, **fo)
            make_plan(fm, forward, fo)
            forward()
            backward = Backward(bm, q, k, v, out, lse, d_out, dq, dk, dv, **bo)
            make_plan(bm, backward, bo)
            parts = {"f": lambda: (make_plan(fm, forward, fo), forward()), "b": lambda: (make_plan(bm, backward, bo), backward())}
            parts["before"] = lambda: (make_plan(bm, backward, bo), backward("before"))
            for part in PARTS[1:]:
                parts[part] = lambda part=part: backward(part)
            t = measure(parts, rounds=3)
            t["m"] = t["b"] - t["before"]
            rates = [tf * kept_tiles(keep, fm.M, fm.N) * fm.M * fm.N / t["f"] / 1e12, tb * kept_tiles(keep, bm.M, bm.N) * bm.M * bm.N / t["b"] / 1e12,
                     tb * kept_tiles(keep, bm.M, bm.N) * bm.M * bm.N / t["m"] / 1e12]
            base = base or rates
            small = " ".join(f"{x} {t[x] * 1e6:.0f}" for x in PARTS)
            print(f"masks d{d} {name:26s} keeps {keep.float().mean():.3f}  per kept tile: forward {rates[0]:.0f} ({rates[0] / base[0]:.2f} of full)"
                  f"  backward {rates[1]:.0f} ({rates[1] / base[1]:.2f})  its main kernel {rates[2]:.0f} ({rates[2] / base[2]:.2f})  us: forward {t['f'] * 1e6:.0f} backward {t['b'] * 1e6:.0f} {small}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("SEED", time.time())))  # the seed of the masks
    from variants import FORWARD, BACKWARD, CHECKS
    suite = sys.argv[1]
    if suite == "check_forward":
        check_forward([x for x in CHECKS if x.startswith("cf") and (len(sys.argv) < 4 or any(x.startswith(y) for y in sys.argv[3:]))])
    elif suite == "time_forward":
        time_forward([x for x in FORWARD if x.startswith("f")], anchors=("cudnn", "fa2"), ns=[int(x) for x in sys.argv[3].split(",")] if len(sys.argv) > 3 else (512, 2048, 8192, 16384))
    elif suite == "check_backward":
        check_backward([x for x in BACKWARD if x.startswith("cb") and (len(sys.argv) < 4 or any(x.startswith(y) for y in sys.argv[3:]))])
    elif suite == "time_backward":
        time_backward([x for x in BACKWARD if x.startswith("b")], anchors=("cudnn", "fa2"), ns=[int(x) for x in sys.argv[3].split(",")] if len(sys.argv) > 3 else (512, 2048, 8192, 16384), parts=True)
    elif suite == "time_masks":
        time_masks(n=int(sys.argv[3]) if len(sys.argv) > 3 else 6144)
    print("BAD:", BAD) if BAD else print(suite, "all well")
