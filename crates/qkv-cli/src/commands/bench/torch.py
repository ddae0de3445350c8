"""PyTorch's side of `qkv bench --against torch`.

Started with the number of threads and the device, `cpu` or `cuda`; then one JSON object a line comes in, and one goes out for each. It sleeps while it
waits, and ends when its input does.

    {"do": "prepare", "how": "sdpa" | "formula", "b": .., "hq": .., "hk": .., "n": .., "m": .., "d": ..,
     "dtype": "f32", "causal": false, "direction": "forward"}     -> {"done": true}
    {"do": "measure", "seconds": 1.2}                             -> {"best_ms": .., "median_ms": ..}
    {"do": "memory", the rest as for "prepare"}                   -> {"beyond_bytes": ..}

What cannot be done is answered with {"error": ".."}.
"""

DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
TYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


def without_gradients(call):
    def quiet():
        with torch.no_grad():
            return call()

    return quiet


def call_of(case):
    """The call that is timed, with its data."""
    b, hq, hk, n, m, d = (case[axis] for axis in ("b", "hq", "hk", "n", "m", "d"))
    causal, direction = case["causal"], case["direction"]

    def noise(*shape):
        return torch.randn(*shape, dtype=TYPES[case["dtype"]], device=DEVICE)

    q, k, v = noise(b, hq, n, d), noise(b, hk, m, d), noise(b, hk, m, d)
    if case["how"] == "formula":
        return without_gradients(lambda: torch.softmax(q @ k.transpose(-2, -1) * d**-0.5, dim=-1) @ v)
    if direction == "decode" and n == 1 and DEVICE == "cpu":
        # The query heads of a group as rows, so that each key is read once for all of them.
        rows = q.view(b, hk, hq // hk, d)
        return without_gradients(lambda: scaled_dot_product_attention(rows, k, v))
    options = {"enable_gqa": True} if hq != hk else {}
    if causal and direction == "decode":
        # `is_causal` would put the first query at the first key.
        options["attn_mask"] = torch.ones(n, m, dtype=torch.bool, device=DEVICE).tril(m - n)
    else:
        options["is_causal"] = causal
    if direction != "backward":
        return without_gradients(lambda: scaled_dot_product_attention(q, k, v, **options))
    for leaf in (q, k, v):
        leaf.requires_grad_(True)
    out, d_out = scaled_dot_product_attention(q, k, v, **options), noise(b, hq, n, d)
    # The gradients themselves: `backward()` would also add them to those of the leaves.
    return lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)


def by_cudnn(call):
    """On a GPU, by cuDNN's kernels where it has some for the call, and the best that PyTorch finds otherwise."""
    if DEVICE == "cpu":
        return call
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def chosen():
        with sdpa_kernel(order, set_priority=True):
            return call()

    return chosen


def measure_on_gpu(call, seconds):
    """By the GPU's clock, call by call, with a cache that holds nothing of the call's."""
    for _ in range(5):
        call()
    cache = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE)
    times = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        cache.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return {"best_ms": min(times), "median_ms": statistics.median(times)}


def measure(call, seconds):
    """Two calls that do not count, then calls for so many seconds, at least one."""
    call()
    call()
    times = []
    begin = time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return {"best_ms": 1e3 * min(times), "median_ms": 1e3 * statistics.median(times)}


def resident(field):
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field + ":"))


def memory(case):
    """The most that a call takes beyond its inputs: the peak of what is resident, counted anew from just before. Null
    where the system does not tell."""
    call_of({**case, "b": 1, "hq": 1, "hk": 1, "n": 64, "m": 64})()  # threads and buffers that any call has
    call = call_of(case)
    try:
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
        before = resident("VmRSS")
        call()
        return {"beyond_bytes": max(0, resident("VmHWM") - before)}
    except OSError:
        return {"beyond_bytes": None}


def main():
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    answer(ready=True, version=torch.__version__)
    call = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                call = None  # the data of the last case goes first
                call = by_cudnn(lambda: call_of(request))()
                answer(done=True)
            elif request["do"] == "measure":
                timed = by_cudnn(call)
                answer(**(measure if DEVICE == "cpu" else measure_on_gpu)(timed, request["seconds"]))
            elif request["do"] == "memory":
                answer(**memory(request))
            else:
                answer(error=f"unknown request {request['do']!r}")
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")


main()
