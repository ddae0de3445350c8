"""A small launch of each Hopper kernel with each kind of mask, for compute-sanitizer: races.py MODULES_DIR [NAME-PREFIX ...].
Build the modules with FLAGS=-lineinfo, and give the tool --kernel-regex kns=attention."""
import sys, torch
sys.argv.insert(1, "races")
from host import Forward, Backward
from run import module, plan_of, segment_room, make_plan, rand

n, b = 400, 2
i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
ids = (torch.arange(n) // 90).to("cuda", torch.int32).expand(b, n).contiguous()
kinds = {
    "": {}, "band": dict(left=100, right=20, _band=True),
    "seg": dict(left=1 << 29, right=1 << 29, segments_q=ids, segments_k=ids),
    "plan": dict(keep=((i - j).abs() < 50) | (i == 0) | (j == 7), split=0),
    "plan, cut": dict(keep=((i - j).abs() < 50) | (i == 0) | (j == 7), split=1),
}
for d in (64, 128):
    for kind, opts in kinds.items():
        kind = kind.split(",")[0]
        names = (f"mf{d}{kind}", f"mb{d}{kind}") if kind else (f"f{d}", f"b{d}")
        if len(sys.argv) > 3 and not any(names[0].startswith(x) or names[1].startswith(x) for x in sys.argv[3:]):
            continue
        q, k, v, d_out = (rand(b, 2, n, d) for _ in range(4))
        out, lse = torch.empty_like(q), torch.empty(b, 2, n, device="cuda")
        for backward in (False, True):
            mod = module(names[backward], backward)
            o = {x: y for x, y in opts.items() if x not in ("keep", "split")}
            if kind == "plan":
                o.update(plan_of(opts["keep"], mod.M, mod.N, backward, split=opts["split"]))
            elif kind == "seg":
                o.update(segment_room(b, n, n, backward))
            if backward:
                call = Backward(mod, q, k, v, out, lse, d_out, *(torch.empty_like(q) for _ in range(3)), **o)
            else:
                call = Forward(mod, q, k, v, out, lse, **o)
            make_plan(mod, call, o)
            call()
            torch.cuda.synchronize()
        print(names, "ran", flush=True)
