"""One launch of one forward and one backward kernel, for a profiler: one_launch.py MODULES_DIR."""
import sys, torch
from host import Module, Forward, Backward
here = sys.argv[1]
b, h, n, d = 4, 16, 4096, 128
q, k, v, o, do, dq, dk, dv = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(8))
lse = torch.empty(b, h, n, device="cuda")
for _ in range(2):
    Forward(Module(here + "/f128.cubin", "forward_sizes"), q, k, v, o, lse)()
    Backward(Module(here + "/b128.cubin", "backward_sizes"), q, k, v, o, lse, do, dq, dk, dv)()
torch.cuda.synchronize()
