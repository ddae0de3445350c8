"""Launches the Hopper kernels on torch tensors through the driver's C interface: modules, tensor maps, the parameter block."""
import ctypes as C, os, torch

cuda = C.CDLL("libcuda.so.1")


def check(code, what=""):
    if code != 0:
        text = C.c_char_p()
        cuda.cuGetErrorString(code, C.byref(text))
        raise RuntimeError(f"{what}: {code} {text.value}")


class HopperParams(C.Structure):
    _fields_ = (
        [(x, C.c_int) for x in "batch heads_q heads_k n m d dv offset left right section ordered".split()]
        + [(x, C.c_float) for x in "scale softcap dropout_scale".split()]
        + [("dropout_threshold", C.c_uint), ("seed", C.c_uint64)]
        + [(x, C.c_int64) for x in "out out_b out_h out_i lse lengths segments_q segments_k list_rows list_entries list_bits".split()]
        + [("list_stride_b", C.c_int), ("list_stride_h", C.c_int)]
        + [(x, C.c_int64) for x in (
            "bias bias_b bias_h bias_i bias_j alibi sinks scheduler_counter d_out d_out_b d_out_h d_out_i d_lse dq dq_b dq_h dq_i "
            "dk dk_b dk_h dk_j dv_out dv_b dv_h dv_j delta lse_log2 dq_sum dq_scale d_bias d_bias_b d_bias_h d_bias_i d_bias_j d_sinks absmax k k_b k_h k_j v v_b v_h v_j recompute_any recompute_q recompute_k ranges extents order tickets progress").split()]
        + [("tma_stores", C.c_uint), ("list_row_count", C.c_int)]
        + [(x, C.c_int64) for x in "split_results split_arrivals".split()]
        + [("first", C.c_int), ("pad", C.c_int)]
    )


assert C.sizeof(HopperParams) == 616
SMS = None


class Attribute(C.Structure):
    _fields_ = [("id", C.c_int), ("pad", C.c_int), ("value", C.c_int), ("rest", C.c_char * 60)]


class Config(C.Structure):
    _fields_ = [(x, C.c_uint) for x in "gx gy gz bx by bz shared".split()] + [("stream", C.c_void_p), ("attributes", C.c_void_p), ("count", C.c_uint)]


class Module:
    def __init__(self, path, sizes):
        global SMS
        torch.zeros(1, device="cuda")
        SMS = torch.cuda.get_device_properties(0).multi_processor_count
        self.module = C.c_void_p()
        data = open(path, "rb").read()
        check(cuda.cuModuleLoadData(C.byref(self.module), data), path)
        at, size, got = C.c_uint64(), C.c_size_t(), (C.c_int * 7)()
        check(cuda.cuModuleGetGlobal_v2(C.byref(at), C.byref(size), self.module, sizes.encode()), sizes)
        check(cuda.cuMemcpyDtoH_v2(got, at, size), "sizes")
        self.M, self.N, self.threads, self.shared, self.ordered, *self.late = got
        self.functions = {}

    def has(self, name):
        return cuda.cuModuleGetFunction(C.byref(C.c_void_p()), self.module, name.encode()) == 0

    def function(self, name, shared=0):
        if name not in self.functions:
            f = C.c_void_p()
            check(cuda.cuModuleGetFunction(C.byref(f), self.module, name.encode()), name)
            if shared:
                check(cuda.cuFuncSetAttribute(f, 8, shared), "shared memory")
            self.functions[name] = f
        return self.functions[name]

    def launch(self, name, grid, block, shared, *params, early=False):
        """`early`: may start while the preceding launch still runs; the kernel itself waits for it."""
        f = self.function(name, shared)
        pointers = (C.c_void_p * len(params))(*[p if isinstance(p, int) else C.addressof(p) for p in params])
        attribute = Attribute(id=6, value=1)  # programmatic stream serialization
        config = Config(grid[0], grid[1], 1, block, 1, 1, shared, torch.cuda.current_stream().cuda_stream, C.addressof(attribute), int(early))
        check(cuda.cuLaunchKernelEx(C.byref(config), f, pointers, None), name)


_KEEP = []


def tensor_map(x, rows):
    """x: [batch, head, row, column], any strides of the first three."""
    buffer = (C.c_uint8 * 256)()
    at = (C.addressof(buffer) + 63) & ~63
    b, h, n, d = x.shape
    dims = (C.c_uint64 * 4)(d, n, h, b)
    stride = lambda axis: x.stride(axis) * x.element_size() if x.shape[axis] > 1 else 16
    strides = (C.c_uint64 * 3)(stride(2), stride(1), stride(0))
    box = (C.c_uint32 * 4)(64, rows, 1, 1)
    ones = (C.c_uint32 * 4)(1, 1, 1, 1)
    kind = 9 if x.dtype == torch.bfloat16 else 6
    check(cuda.cuTensorMapEncodeTiled(C.c_void_p(at), kind, 4, C.c_void_p(x.data_ptr()), dims, strides, box, ones, 0, 3, 3, 0), "tensor map")
    return at, buffer


def result_map(p, bit, x):
    """The map with which each warp stores its 16 rows of a result; an empty one if TMA cannot, and the kernel then stores element by element."""
    good = x.data_ptr() % 16 == 0 and x.shape[-1] % 8 == 0 and all(x.stride(a) % 8 == 0 or x.shape[a] == 1 for a in range(3)) and not PLAIN_STORES
    p.tma_stores |= bit if good else 0
    return tensor_map(x, 16) if good else (C.addressof(_NO_MAP), _NO_MAP)


PLAIN_STORES = "PLAIN_STORES" in os.environ  # for checks: as if no result had a map
_NO_MAP = (C.c_uint8 * 128)()


def width(p):
    return next(x for x in (64, 128, 256) if max(p.d, p.dv) <= x)


def pow2floor(x):
    return 1 << max(0, int(x).bit_length() - 1)


COUNTER = None


def problem(q, k, v, **more):
    global COUNTER
    if COUNTER is None:
        COUNTER = torch.zeros(2, device="cuda", dtype=torch.int32)
    b, hq, n, d = q.shape
    _, hk, m, dv = v.shape
    p = HopperParams(batch=b, heads_q=hq, heads_k=hk, n=n, m=m, d=d, dv=dv, left=1 << 29, right=1 << 29, section=1, scale=d ** -0.5)
    p.scheduler_counter = COUNTER.data_ptr()
    tiles = b * hq * -(-n // 64), b * hk * -(-m // 64)
    p._zeros = torch.zeros(1 + sum(tiles), device="cuda", dtype=torch.int32)
    p.recompute_any = p._zeros.data_ptr()
    p.recompute_q, p.recompute_k = p.recompute_any + 4, p.recompute_any + 4 + 4 * tiles[0]
    for name, x in more.items():
        if name.startswith("_"):
            continue
        setattr(p, name, x.data_ptr() if isinstance(x, torch.Tensor) else x)
    return p


def split_results(p, heads, floats, slots):
    """Memory for split rows, and counts of their arrived split_results, which the kernels reset to zero."""
    room = torch.full((slots * heads * floats,), float("nan"), device="cuda"), torch.zeros(slots * heads * 12, device="cuda", dtype=torch.int32)
    p.split_results, p.split_arrivals = (x.data_ptr() for x in room)
    return room


def strided(p, prefix, x, names):
    setattr(p, prefix[0], x.data_ptr())
    for axis, name in enumerate(names):
        setattr(p, prefix[1] + name, x.stride(axis))


class Forward:
    """One forward call, ready to be launched many times."""

    def __init__(self, module, q, k, v, out, lse, **more):
        self.module, self.held = module, (q, k, v, out, lse, more)
        p = self.p = problem(q, k, v, **more)
        strided(p, ("out", "out_"), out, "bhi")
        p.lse = lse.data_ptr()
        if more.get("_band") or "list_rows" in more:
            p.ordered = 1 if more.get("_band") else more.get("_long", 0)
            group = p.heads_q // p.heads_k
            p.section = min(max(1, pow2floor((32 << 20) // (p.m * (p.d + p.dv) * 2)) * group), p.batch * p.heads_q)
        if "segments_q" in more:
            p.ordered, p.section = 0, min(p.heads_q, max(16, p.heads_q // p.heads_k))
        if "section" in more:
            p.section = more["section"]
        self.maps = [tensor_map(q, module.M), tensor_map(k, module.N), tensor_map(v, module.N), result_map(p, 1, out)]
        self.work = p.batch * p.heads_q * (p.list_row_count or -(-p.n // module.M))
        self.split_results = split_results(p, p.batch * p.heads_q, module.M * (width(p) + 8), more.get("_slots", 0))

    def __call__(self):
        m = self.module
        m.launch("attention_forward", (min(SMS, self.work), 1), m.threads, m.shared, self.p, *[a for a, _ in self.maps])


FIRST = int(os.environ.get("FIRST", 0))  # for checks: prepare this many heads before the main kernel, however small the problem


PREP_BLOCKS = 6  # blocks of the kernel beside the main one


def prepared_heads(p, works, kept):
    """How many key heads are prepared before the main kernel, as in `overlapped_prep.rs`; the others are prepared beside it. `kept`: pairs in the tiles of a list."""
    heads = p.batch * p.heads_k
    if FIRST:
        return min(FIRST, heads)
    moved = 2 * p.batch * (p.heads_k * p.m * (p.d + p.dv) + 2 * p.heads_q * p.n * p.dv)
    first = -(-(-(-SMS // works) + heads // 16) // p.section) * p.section
    window = p.left + p.right + 1
    by_heads = not p.ranges and (not p.ordered if p.list_rows else 2 * window < p.m)
    pairs = kept or p.n * window
    ahead = p.heads_q * pairs >= 500 * (p.heads_k * p.m + p.heads_q * p.n)
    return first if by_heads and ahead and moved >= 64 << 20 and p.m >= 4096 and 2 * first <= heads else heads


class Backward:
    def __init__(self, module, q, k, v, out, lse, d_out, dq, dk, dv, **more):
        self.module, self.held = module, (q, k, v, out, lse, d_out, dq, dk, dv, more)
        p = self.p = problem(q, k, v, **more)
        strided(p, ("out", "out_"), out, "bhi")
        strided(p, ("d_out", "d_out_"), d_out, "bhi")
        strided(p, ("dq", "dq_"), dq, "bhi")
        strided(p, ("dk", "dk_"), dk, "bhj")
        strided(p, ("dv_out", "dv_"), dv, "bhj")
        p.lse = lse.data_ptr()
        heads, pad, tiles = p.batch * p.heads_q, -(-p.n // 128) * 128, -(-p.n // module.M)
        wide = width(p)
        f32 = dict(device="cuda", dtype=torch.float32)
        nan = float("nan")
        self.work_space = [torch.full((heads * pad,), nan, **f32), torch.full((heads * pad,), nan, **f32),
                           torch.full((heads * tiles * module.M * wide,), nan, **f32),
                           torch.full((heads * pad,), nan, **f32), torch.full((p.batch * p.heads_k * -(-p.m // 128) * 2,), nan, **f32), torch.full((heads * tiles,), nan, **f32), torch.full((3 * p.batch * p.heads_k + 6,), nan, **f32)]
        strided(p, ("k", "k_"), k, "bhj")
        strided(p, ("v", "v_"), v, "bhj")
        p.lse_log2, p.delta, p.dq_sum, p.dq_scale, p.absmax, p.tickets, p.progress = (x.data_ptr() for x in self.work_space)
        self.maps = [tensor_map(q, module.M), tensor_map(k, module.N), tensor_map(v, module.N), tensor_map(d_out, module.M), result_map(p, 8, dq), result_map(p, 2, dk), result_map(p, 4, dv)]
        self.work = p.batch * p.heads_k * (p.list_row_count or -(-p.m // module.N))
        self.split_results = split_results(p, p.batch * p.heads_k, 2 * module.N * wide, more.get("_slots", 0))
        self.heads, self.ranges = heads, "_ranges" in more  # found by the preceding launch
        if "list_rows" in more:
            p.section = min(max(1, pow2floor((32 << 20) // (p.n * (p.d + p.dv) * 2))), p.batch * p.heads_k)
            p.ordered = more.get("_long", 0)
        if "segments_q" in more:
            p.section, p.ordered = min(p.heads_k, 8), more.get("ordered", p.batch * -(-p.m // module.N) // 4)
        if "section" in more:
            p.section = more["section"]
        # Modules before step 25 prepare all heads first.
        p.first = prepared_heads(p, self.work // (p.batch * p.heads_k), more.get("_kept", 0) * module.M * module.N) if module.has("attention_backward_overlapped_prep") else p.batch * p.heads_k
        self.late_maps = [tensor_map(x, 2048 // wide) for x in (k, v, out, d_out)] + [self.maps[4]]

    def __call__(self, only=None):
        """Launches all kernels; or `only` those before the main kernel, or one of them by name."""
        m, progress, group = self.module, only in (None, "before"), self.p.heads_q // self.p.heads_k
        if (progress or only == "measure") and m.ordered:
            m.launch("attention_backward_absmax", (-(-self.p.m // 128) * self.p.first, 1), 256, 0, self.p, early=progress and self.ranges)
        if progress or only == "prepare":
            m.launch("attention_backward_preprocess", (-(-self.p.n // 128) * self.p.first * group, 1), 256, 0, self.p, early=progress and bool(m.ordered))
        if progress and self.p.first < self.p.batch * self.p.heads_k:
            m.launch("attention_backward_overlapped_prep", (PREP_BLOCKS, 1), *m.late, self.p, *[a for a, _ in self.late_maps], early=True)
        if only is None:
            m.launch("attention_backward", (min(SMS, self.work), 1), m.threads, m.shared, self.p, *[a for a, _ in self.maps], early=True)
