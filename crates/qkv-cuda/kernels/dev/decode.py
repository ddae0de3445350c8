"""Checks and times the decoding kernel on a GPU beside cuDNN: decode.py DIR [NAME ...]. DIR has what `build.py` made: d*.cubin."""
import ctypes as C, glob, os, sys, torch, torch.nn.functional as F
from math import exp, log
from torch.nn.attention import SDPBackend, sdpa_kernel
import host, reference
from host import Attribute, Config, check, cuda
from run import error, measure_cold

SPLIT_KEYS = 512


class Tensor(C.Structure):
    _fields_ = [("at", C.c_uint64), ("strides", C.c_int64 * 4)]


class Op(C.Structure):
    _fields_ = [("code", C.c_int), ("size", C.c_int), ("x", C.c_int64), ("y", C.c_int64), ("data", C.c_uint64), ("count", C.c_int64)]


class GeneralParams(C.Structure):
    _fields_ = (
        [(x, Tensor) for x in "q k v out d_out d_q d_k d_v bias d_bias".split()]
        + [(x, C.c_uint64) for x in ("learned_scale table sinks d_learned d_table d_sinks alibi_slopes positions lengths segments_q segments_k bits "
            "buckets_q buckets_k extents_q extents_k lse entropy d_lse d_entropy delta_rows scale_rows sink_rows split_out split_lse "
            "split_entropy table_parts picture columns recompute_any recompute_tiles").split()]
        + [("bits_strides", C.c_int64 * 4)]
        + [(x, C.c_int64) for x in "offset reach table_row table_col seed".split()]
        + [(x, C.c_int) for x in "batch heads key_heads group n m d dv learned_scale_count table_rows".split()]
        + [(x, C.c_float) for x in "scale inverse_temperature cap kept_scale".split()]
        + [(x, C.c_int) for x in "threshold splits split_tiles".split()]
        + [("bias_shape", C.c_int * 4)]
        + [(x, C.c_int) for x in "at_batch at_head first_row rows first_col cols height width pool down across parts vectors ops plain".split()]
        + [("mask", Op * 32)]
    )


assert C.sizeof(GeneralParams) == 864 + 32 * 40


def tensor(x):
    return Tensor(x.data_ptr(), (C.c_int64 * 4)(*x.stride()))


class Decode:
    """One decoding call over dense tensors, ready to be launched many times."""

    def __init__(self, path, q, k, v, out, lse, stages, early=True, piece=SPLIT_KEYS, blocks=2):
        self.module = C.c_void_p()
        check(cuda.cuModuleLoadData(C.byref(self.module), open(path, "rb").read()), path)
        self.functions = {}
        for name in ("decode", "merge"):
            f = C.c_void_p()
            check(cuda.cuModuleGetFunction(C.byref(f), self.module, name.encode()), name)
            self.functions[name] = f
        b, hq, n, d = q.shape
        hk, m = k.shape[1:3]
        kind = os.path.basename(path)[0]
        self.hopper = kind in "hp"
        self.shared = max(4 * stages * (d // 8) * 512, 3 * 64 * 4 + 64 * (d + 4) * 4)
        if self.hopper:
            self.shared = stages * 256 * d + 16 * (d + 4) * 4 + 3 * 64 * 4 + 16 * stages + 1024
        if kind == "p":
            self.shared = stages * 256 * d + 8 * (d + 4) * 4 + 2 * 32 * 4 + 16 * stages + 1024
        check(cuda.cuFuncSetAttribute(self.functions["decode"], 8, self.shared), "shared memory")
        splits, rows = -(-m // piece), b * hq * n
        f32 = dict(device="cuda", dtype=torch.float32)
        self.held = (q, k, v, out, lse, torch.full((splits * rows * d,), float("nan"), **f32), torch.full((splits * rows,), float("nan"), **f32))
        j = self.params = GeneralParams(batch=b, heads=hq, key_heads=hk, group=hq // hk, n=n, m=m, d=d, dv=d, learned_scale_count=1, table_rows=1,
                           scale=d ** -0.5, inverse_temperature=1.0, kept_scale=1.0, splits=splits, vectors=7, plain=1, offset=m - n)
        j.q, j.k, j.v, j.out = tensor(q), tensor(k), tensor(v), tensor(out)
        j.lse, j.split_out, j.split_lse = lse.data_ptr(), self.held[5].data_ptr(), self.held[6].data_ptr()
        self.grid, self.rows, self.splits, self.early = b * hk * -(-(hq // hk * n) // 16), rows, splits, early
        self.parameters = (C.c_void_p * 3)(C.addressof(j))
        self.threads = 128
        if self.hopper:
            self.maps = [host.tensor_map(k, 64), host.tensor_map(v, 64)]
            self.parameters[1], self.parameters[2] = self.maps[0][0], self.maps[1][0]
            self.launched = (min(self.grid * splits, blocks * torch.cuda.get_device_properties(0).multi_processor_count), 1)
            self.threads = 160
        else:
            self.launched = (self.grid, splits)
        self.attribute = Attribute(id=6, value=1)  # programmatic stream serialization

    def __call__(self):
        stream = torch.cuda.current_stream().cuda_stream
        check(cuda.cuLaunchKernel(self.functions["decode"], *self.launched, 1, self.threads, 1, 1, self.shared, C.c_void_p(stream), self.parameters, None), "decode")
        if self.splits > 1:
            config = Config(self.rows, 1, 1, 256, 1, 1, 8 * 64 * 16 + 264 * 4, stream, C.addressof(self.attribute), 1 if self.early else 0)
            check(cuda.cuLaunchKernelEx(C.byref(config), self.functions["merge"], self.parameters, None), "merge")


CASES = ((1, 32, 32, 8192), (1, 32, 8, 8192), (8, 32, 8, 8192), (32, 32, 8, 8192), (64, 32, 8, 16384), (1, 32, 8, 131072))

if __name__ == "__main__":
    here = sys.argv[1]
    # Names: d any GPU's, h Hopper's, p plain; _s3: 3 stages; _b2: 2 blocks per multiprocessor; _p256: splits of 256 keys.
    names = sys.argv[2:] or sorted(os.path.basename(x)[:-6] for x in glob.glob(here + "/[dhp]128*.cubin"))
    rand = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    part = lambda name, letter, usual: next((int(x[1:]) for x in name.split("_")[1:] if x[0] == letter and x[1:].isdigit()), usual)
    ratios = {}
    for b, hq, hk, n in CASES:
        q, k, v = rand(b, hq, 1, 128), rand(b, hk, n, 128), rand(b, hk, n, 128)
        out, lse = torch.empty_like(q), torch.empty(b, hq, 1, device="cuda")

        def cudnn():
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]), torch.no_grad():
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=hq != hk)

        calls, want = {"cudnn": cudnn}, cudnn()
        for name in names:
            call = Decode(f"{here}/{name}.cubin", q, k, v, out, lse, part(name, "s", 3), piece=part(name, "p", SPLIT_KEYS), blocks=part(name, "b", 2))
            outs = []
            for _ in range(4):
                out.fill_(float("nan"))
                call()
                torch.cuda.synchronize()
                outs.append(out.clone())
            e = error(out, want) if all((x == out).all() for x in outs) else float("nan")
            print("BAD" if not e < 8e-3 else "ok ", name, (b, hq, hk, n), f"{e:.1e}", flush=True)
            calls[name] = call
        t = measure_cold(calls)
        print(f"decode {b, hq, hk, n}", " ".join(f"{name} {s * 1e6:.1f}us {4 * k.numel() / s / 1e9:.0f}GB/s" for name, s in t.items()), flush=True)
        for name in t:
            ratios.setdefault(name, []).append(log(t["cudnn"] / t[name]))
        del q, k, v, calls
    for name, x in ratios.items():
        print(f"{name}: cudnn time over its time, geometric mean {exp(sum(x) / len(x)):.3f}:", " ".join(f"{exp(y):.2f}" for y in x))
