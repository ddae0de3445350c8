"""`qkv.torch` on an NVIDIA GPU: against the definition in float64, PyTorch's own attention, and through its tools."""

import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (`cargo xtask python`)")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import qkv.torch as Q  # noqa: E402
from qkv import Attention, Bias, Mask, Place, _qkv  # noqa: E402
from qkv.torch import _cuda  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")

_SCALED = Attention.scaled_dot()
_EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def r(*shape, dtype=torch.bfloat16, grad=True):
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def held(found, true, tolerance, what=""):
    """The largest error is a few roundings of the largest true value."""
    assert found.shape == true.shape
    found, true = found.detach().double().cpu(), true.detach().double().cpu()
    finite = true.isfinite()
    assert (found.isfinite() == finite).all(), what
    if finite.any():
        error = (found - true)[finite].abs().max().item()
        assert error <= tolerance * max(true[finite].abs().max().item(), 1e-3), f"{what}: {error}"


def in_double(t):
    return t.detach().double().cpu().requires_grad_(t.requires_grad) if t.is_floating_point() else t.cpu()


def against_definition(description, qkv, given, tolerance=8.0, dtype=torch.bfloat16):
    """Values, log-sum-exp and every gradient, held to the CPU's in float64."""
    seed = {"seed": 99} if description.draws() else {}
    exact = [in_double(t) for t in qkv]
    exactly = {name: tuple(map(in_double, t)) if isinstance(t, tuple) else in_double(t) for name, t in given.items()}
    out = Q.attend(*qkv, description, **given, **seed)
    true = Q.attend(*exact, description, **exactly, **seed)
    epsilon = tolerance * _EPSILON[dtype]
    held(out.values, true.values, epsilon, "values")
    held(out.lse, true.lse, epsilon, "lse")
    d_out, d_lse = torch.randn_like(out.values), torch.randn_like(out.lse)
    wanted = [*qkv, *(t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad)]
    exact += [t for t in exactly.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    rows = torch.isfinite(out.lse)
    loss = (out.values * d_out).sum() + (torch.where(rows, out.lse, 0.0) * d_lse).sum()
    rows = rows.cpu()
    true_loss = (true.values * in_double(d_out)).sum() + (torch.where(rows, true.lse, 0.0) * in_double(d_lse)).sum()
    got, want = torch.autograd.grad(loss, wanted), torch.autograd.grad(true_loss, exact)
    for at, (a, b) in enumerate(zip(got, want, strict=True)):
        held(a, b, 2 * epsilon, f"gradient {at}")


def described():
    n, m = 150, 170
    yield "full", _SCALED, lambda d: {}
    yield "causal", _SCALED.mask(Mask.causal()).place(Place.end()), lambda d: {}
    yield "window", _SCALED.mask(Mask.causal() & Mask.window(40, 0)), lambda d: {}
    yield "softcap", _SCALED.mask(Mask.causal()).softcap(5.0), lambda d: {}
    yield "alibi", _SCALED.mask(Mask.causal()).bias(Bias.alibi()), lambda d: {}
    yield "bias", _SCALED.bias(Bias.tensor()), lambda d: {"bias": r(1, 4, n, m, dtype=d)}
    yield "table", _SCALED.bias(Bias.relative(9)), lambda d: {"table": r(4, 19, dtype=d)}
    yield "sinks", _SCALED.mask(Mask.causal()).with_sinks(), lambda d: {"sinks": r(4, dtype=d)}
    yield "scale", _SCALED.learned_scale(), lambda d: {"scale": r(4, dtype=d)}
    yield "lengths", _SCALED.mask(Mask.lengths()), lambda d: {"lengths": torch.tensor([m, 33], device="cuda")}
    segments = (torch.arange(n, device="cuda") // 40, torch.arange(m, device="cuda") // 45)
    both = tuple(s.expand(2, -1) for s in segments)
    yield "segments", _SCALED.mask(Mask.causal() & Mask.segments()), lambda d: {"segments": both}
    bits = torch.rand(2, 1, n, m, device="cuda") > 0.3
    yield "bits", _SCALED.mask(Mask.bits()), lambda d: {"bits": bits}
    at = torch.randint(0, m, (2, n), device="cuda")
    yield "positions", _SCALED.mask(Mask.causal()).place(Place.given()), lambda d: {"positions": at}
    yield "longformer", _SCALED.mask(Mask.longformer(32, [0, 1])), lambda d: {}
    yield "dropout", _SCALED.mask(Mask.causal()).dropout(0.2), lambda d: {}


_NAMES = "full causal window softcap alibi bias table sinks scale lengths segments bits positions longformer dropout"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", _NAMES.split())
def test_the_definition(name, dtype):
    _, description, given = next(case for case in described() if case[0] == name)
    # [B, N, H, D] in memory, grouped heads.
    qkv = [r(2, n, h, 64, dtype=dtype).transpose(1, 2) for n, h in ((150, 4), (170, 2), (170, 2))]
    against_definition(description, qkv, given(dtype), dtype=dtype)


@pytest.mark.parametrize("width", [40, 128, 256])
def test_widths(width):
    qkv = [r(1, 2, n, width, dtype=torch.float16) for n in (100, 300, 300)]
    against_definition(_SCALED.mask(Mask.causal()), qkv, {}, dtype=torch.float16)


@pytest.mark.parametrize("n", [1, 17, 64])
def test_few_queries_and_short_sequences(n):
    qkv = [r(3, 2, length, 64) for length in (n, 64, 64)]
    against_definition(_SCALED.mask(Mask.causal()).place(Place.end()), qkv, {})


def test_memory_in_any_layout():
    dense = r(2, 2, 80, 64, grad=False)
    holes = r(2, 2, 80, 128, grad=False)[..., ::2].requires_grad_()
    aside = r(2 * 2 * 80 * 64 + 1, grad=False)[1:].view(2, 2, 80, 64).requires_grad_()
    wide = r(1, 1, 80, 64).expand(2, 2, 80, 64)
    turned = dense.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    for k in (holes, aside, wide):
        against_definition(_SCALED, [r(2, 2, 80, 64), k, turned], {})


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_sdpa_is_pytorchs(mask, dtype):
    q, k, v = (r(2, 3, n, 64, dtype=dtype) for n in (96, 130, 130))
    bias = r(96, 130, dtype=dtype)
    arguments = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(96, 130, device="cuda") > 0.1},
        "float": {"attn_mask": bias, "scale": 0.2},
    }[mask]
    got = Q.sdpa(q, k, v, **arguments)
    exact = [in_double(t) for t in (q, k, v)]
    theirs = {name: in_double(t) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(*exact, **theirs)
    held(got, want, 8 * _EPSILON[dtype])
    g = torch.randn_like(got)
    wanted, exactly = [q, k, v], list(exact)
    if mask == "float":
        wanted, exactly = [*wanted, bias], [*exactly, theirs["attn_mask"]]
    gradients = torch.autograd.grad(got, wanted, g)
    for a, b in zip(gradients, torch.autograd.grad(want, exactly, in_double(g)), strict=True):
        held(a, b, 16 * _EPSILON[dtype])


def test_the_same_bits_again_and_with_autograd_or_without():
    q, k, v = (r(2, 4, 500, 64) for _ in range(3))
    first = Q.sdpa(q, k, v, is_causal=True)
    with torch.no_grad():
        assert torch.equal(Q.sdpa(q, k, v, is_causal=True), first)
    assert torch.equal(torch.ops.qkv.forward(q, k, v, [], None, "", _SCALED.mask(Mask.causal())._json)[0], first)
    g = torch.randn_like(first)
    one = torch.autograd.grad(Q.sdpa(q, k, v, is_causal=True), (q, k, v), g)
    two = torch.autograd.grad(Q.sdpa(q, k, v, is_causal=True), (q, k, v), g)
    assert all(map(torch.equal, one, two))


def test_opcheck():
    q, k, v = (r(1, 2, 40, 64, dtype=torch.float32) for _ in range(3))
    bias = r(1, 2, 40, 40, dtype=torch.float32)
    text = _SCALED.bias(Bias.tensor())._json
    torch.library.opcheck(torch.ops.qkv.forward.default, (q, k, v, [bias], None, "bias", text))
    torch.library.opcheck(torch.ops.qkv.select.default, (q, k, v, [], None, "", _SCALED.with_entropy()._json))
    with torch.no_grad():
        out, lse = torch.ops.qkv.forward(q, k, v, [bias], None, "bias", text)
    inputs = [t.detach() for t in (q, k, v)]
    arguments = (out, None, out, lse, [True] * 4, *inputs, [bias.detach()], None, "bias", text)
    torch.library.opcheck(torch.ops.qkv.backward.default, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(backend):
    description = _SCALED.mask(Mask.causal()).bias(Bias.tensor())

    def step(q, k, v, bias):
        out = Q.attention(q.sin(), k, v, description, bias=bias)
        return (out * out).sum()

    tensors = [r(2, 2, 64, 64, dtype=torch.float32) for _ in range(3)] + [r(1, 2, 64, 64, dtype=torch.float32)]
    want = torch.autograd.grad(step(*tensors), tensors)
    got = torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(*tensors), tensors)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_functional_transforms():
    q, k, v = (r(2, 2, 40, 64, dtype=torch.float32, grad=False) for _ in range(3))
    loss = lambda q: Q.sdpa(q, k, v).square().sum()  # noqa: E731
    got = torch.func.grad(loss)(q)
    again = q.clone().requires_grad_()
    loss(again).backward()
    torch.testing.assert_close(got, again.grad)
    mapped = torch.func.vmap(lambda q: Q.sdpa(q, k, v))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(mapped[1], Q.sdpa(2 * q, k, v))


def test_autocast_and_checkpointing():
    from torch.utils.checkpoint import checkpoint

    q, k, v = (r(1, 2, 80, 64, dtype=torch.float32) for _ in range(3))
    with torch.autocast("cuda", torch.bfloat16):
        out = Q.sdpa(q, k, v, is_causal=True)
    assert out.dtype == torch.bfloat16
    dropped = _SCALED.dropout(0.3)
    torch.manual_seed(5)
    plain = torch.autograd.grad(Q.attention(q, k, v, dropped).sum(), (q, k, v))
    torch.manual_seed(5)
    out = checkpoint(lambda *t: Q.attention(*t, dropped), q, k, v, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), plain, strict=True):
        assert torch.equal(a, b)


def test_a_captured_graph_computes_on_new_inputs():
    q, k, v = (r(2, 2, 256, 64) for _ in range(3))
    description = _SCALED.mask(Mask.longformer(64, [0]))
    g = torch.randn_like(q)

    def step():
        out = Q.attention(q, k, v, description)
        return (out, *torch.autograd.grad(out, (q, k, v), g))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    _qkv.cuda_forget()
    assert _qkv.cuda_plans()[0] >= 2, "plans of a graph stay"
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(results, step(), strict=True):
        assert torch.equal(a, b)


def test_a_capture_without_a_plan_is_refused_and_does_no_harm():
    q = r(1, 1, 77, 64, grad=False)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="none can be made while a CUDA graph is captured; compute it once"):
        with torch.cuda.graph(graph):
            Q.sdpa(q, q, q)
    torch.cuda.synchronize()
    assert Q.sdpa(q, q, q).isfinite().all()


def test_streams_and_the_current_device():
    q, k, v = (r(4, 8, 1024, 64, grad=False) for _ in range(3))
    want = Q.sdpa(q, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = q + 0
        got = Q.sdpa(late, k, v)
    # A call on another stream would have read `late` before it was written.
    side.synchronize()
    assert torch.equal(got, want)
    assert torch.cuda.current_device() == 0 and torch.cuda.current_stream() == torch.cuda.default_stream()


def test_threads_at_once():
    q, k, v = (r(2, 4, 300, 64, grad=False) for _ in range(3))
    want, found = Q.sdpa(q, k, v, is_causal=True), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for n in range(200, 220):
                Q.sdpa(q[:, :, :n], k, v, is_causal=True)
            found.append(Q.sdpa(q, k, v, is_causal=True))
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(found) == 4 and all(torch.equal(f, want) for f in found)


def memory_in_use():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_two_shapes_a_thousand_times_and_a_thousand_shapes():
    description = _SCALED.mask(Mask.longformer(64, [0])).bias(Bias.alibi())
    shapes = [r(1, 2, n, 64) for n in (300, 500)]
    step = lambda x: torch.autograd.grad(Q.attention(x, x, x, description).sum(), x)  # noqa: E731
    for x in shapes:
        step(x)
    start, (plans, _) = memory_in_use(), _qkv.cuda_plans()
    for _ in range(1000):
        for x in shapes:
            step(x)
    assert _qkv.cuda_plans()[0] == plans and memory_in_use() - start <= 8 << 20
    for n in range(128, 1128):
        x = r(1, 2, n, 64, grad=False)
        Q.attention(x, x, x, description)
    plans, size = _qkv.cuda_plans()
    assert plans <= 256 and size <= 256 << 20
    assert memory_in_use() - start <= size + (128 << 20)


def test_dropout_is_the_cpus_and_is_repeated_by_the_seed():
    q, k, v = (r(2, 2, 100, 64, dtype=torch.float32, grad=False) for _ in range(3))
    dropped = _SCALED.dropout(0.5)
    got = Q.attention(q, k, v, dropped, seed=7)
    torch.testing.assert_close(got.cpu(), Q.attention(q.cpu(), k.cpu(), v.cpu(), dropped, seed=7), rtol=0, atol=1e-5)
    torch.manual_seed(3)
    one = Q.attention(q, k, v, dropped)
    torch.manual_seed(3)
    assert torch.equal(Q.attention(q, k, v, dropped), one) and not torch.equal(Q.attention(q, k, v, dropped), one)


def test_entropy():
    q, k, v = (r(1, 2, 60, 64, dtype=torch.float32) for _ in range(3))
    got = Q.attend(q, k, v, _SCALED.with_entropy())
    true = Q.attend(*(in_double(t) for t in (q, k, v)), _SCALED.with_entropy())
    held(got.extra, true.extra, 1e-5)
    got.extra.sum().backward()
    assert q.grad.isfinite().all()


def test_nothing_where_nothing_is_seen():
    q, k = r(1, 2, 5, 64), r(1, 2, 0, 64)
    out = Q.attend(q, k, k)
    assert not out.values.any() and (out.lse == -float("inf")).all()
    out.values.sum().backward()
    assert not q.grad.any()
    assert Q.sdpa(r(0, 2, 5, 64), r(0, 2, 7, 64), r(0, 2, 7, 64)).shape == (0, 2, 5, 64)
    bits = torch.zeros(1, 1, 5, 6, device="cuda", dtype=torch.bool)
    x = r(1, 2, 6, 64)
    assert not Q.sdpa(q, x, x, attn_mask=bits).any()


def test_what_is_refused():
    q = r(1, 1, 5, 64, grad=False)
    with pytest.raises(NotImplementedError, match="the score `additive` runs only on the CPU"):
        more = {"w_q": r(8, 64), "w_k": r(8, 64), "v_score": r(8)}
        Q.attention(q, q, q, Attention.additive(), **more)
    with pytest.raises(NotImplementedError, match="runs only on the CPU"):
        Q.attention(q, q, q, _SCALED.top_k(2))
    with pytest.raises(NotImplementedError, match="float64"):
        Q.sdpa(q.double(), q.double(), q.double())
    with pytest.raises(ValueError, match="`k` is on the host"):
        Q.sdpa(q, q.cpu(), q)
    with pytest.raises(ValueError, match="shapes"):
        Q.attend(q[0], q[0], q[0])
    with pytest.raises(TypeError, match="expected bfloat16, as `q` has"):
        Q.sdpa(q, q.half(), q)


def test_weights_are_computed_where_the_tensors_are():
    q, k, v = (r(2, 2, 20, 32) for _ in range(3))
    causal = _SCALED.mask(Mask.causal())
    want = torch.softmax(
        (q.double() @ k.double().mT / 32**0.5).masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril().cuda(), -torch.inf),
        -1,
    )
    found = Q.weights(q, k, v, causal).all()
    assert found.is_cuda and found.dtype == torch.float32
    held(found, want, 4 * _EPSILON[torch.bfloat16])
    # Weights that only the CPU can compute come from copies on the CPU.
    found = Q.weights(q, k, v, Attention.cosine())
    assert found.all().is_cpu


def test_modules():
    ours = Q.MultiheadAttention(64, 4, batch_first=True, device="cuda")
    theirs = torch.nn.MultiheadAttention(64, 4, batch_first=True, device="cuda")
    theirs.load_state_dict(ours.state_dict())
    x = r(2, 30, 64, dtype=torch.float32)
    padding = torch.zeros(2, 30, dtype=torch.bool, device="cuda")
    padding[1, 20:] = True
    for mine, other in zip(ours(x, x, x, padding), theirs(x, x, x, padding), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@pytest.fixture
def installed():
    Q.install()
    yield
    Q.uninstall()


_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize("backend", _BACKENDS)
def test_installed_behind_pytorchs_function(installed, backend):
    q, k, v = (r(2, 4, 200, 64) for _ in range(3))
    g = torch.randn_like(q)
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        got = torch.autograd.grad(out, (q, k, v), g)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        torch.autograd.grad(dropped, (q, k, v), g)
    mine = Q.sdpa(q, k, v, is_causal=True)
    assert torch.equal(out, mine)
    for a, b in zip(got, torch.autograd.grad(mine, (q, k, v), g), strict=True):
        assert torch.equal(a, b)


def test_installed_with_a_mask_that_has_a_gradient(installed):
    q, k, v, bias = r(2, 4, 100, 64), r(2, 4, 120, 64), r(2, 4, 120, 64), r(1, 4, 100, 120)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    got = torch.autograd.grad(out.float().square().sum(), (q, k, v, bias))
    mine = Q.sdpa(q, k, v, attn_mask=bias)
    for a, b in zip(got, torch.autograd.grad(mine.float().square().sum(), (q, k, v, bias)), strict=True):
        held(a, b, 2**-6)


def test_installed_and_compiled(installed):
    q, k, v = (r(2, 4, 128, 64) for _ in range(3))
    step = lambda *t: F.scaled_dot_product_attention(*t, is_causal=True).float().square().sum()  # noqa: E731
    want = torch.autograd.grad(step(q, k, v), (q, k, v))
    got = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))
    assert all(map(torch.equal, got, want))


def test_uninstalled_is_pytorchs_again():
    q, k, v = (r(1, 2, 100, 64, grad=False) for _ in range(3))
    before = F.scaled_dot_product_attention(q, k, v)
    Q.install()
    Q.uninstall()
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), before)


def test_kernels_of_a_call():
    q = r(1, 2, 512, 64, grad=False)
    forward, backward = _cuda.kernels(q, q, q, _SCALED.mask(Mask.causal())._json)
    if torch.cuda.get_device_capability() == (9, 0):
        assert forward.startswith("hopper bf16") and backward.startswith("hopper bf16")
