"""`Attention.forward`, `decode`, `backward` and `weights` over CUDA tensors, of PyTorch and of a library without a name."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (`cargo xtask python`)")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

import qkv  # noqa: E402
from qkv import Attention, Bias, Mask, Place  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")

_SCALED = Attention.scaled_dot()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def r(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def held(found, true, tolerance):
    found = found if isinstance(found, torch.Tensor) else torch.from_dlpack(found)
    assert found.is_cuda and found.shape == true.shape
    found, true = found.double().cpu(), true.double().cpu()
    finite = true.isfinite()
    assert (found.isfinite() == finite).all()
    assert not finite.any() or ((found - true)[finite].abs().max() <= tolerance * true[finite].abs().max().clamp(1e-3))


class Foreign:
    """A tensor of a library that only exports DLPack."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.streams = tensor, tuple(tensor.shape), []

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.streams.append(stream)
        return self.tensor.__dlpack__(stream=stream)


CASES = {
    "causal": (_SCALED.mask(Mask.causal()).place(Place.end()), lambda: {}),
    "soft-cap, window": (_SCALED.mask(Mask.causal() & Mask.window(40, 0)).softcap(5.0), lambda: {}),
    "bias": (_SCALED.bias(Bias.tensor()), lambda: {"bias": r(1, 4, 150, 170)}),
    "table, sinks": (_SCALED.bias(Bias.relative(9)).with_sinks(), lambda: {"table": r(4, 19), "sinks": r(4)}),
    "lengths of 64 bits": (_SCALED.mask(Mask.lengths()), lambda: {"lengths": torch.tensor([170, 33], device="cuda")}),
    "entropy": (_SCALED.with_entropy(), lambda: {}),
    "dropout": (_SCALED.dropout(0.3), lambda: {"seed": 11}),
}


def on_host(given):
    return {name: t.double().cpu() if isinstance(t, torch.Tensor) and t.is_floating_point() else
            t.cpu() if isinstance(t, torch.Tensor) else t for name, t in given.items()}  # fmt: skip


@pytest.mark.parametrize("foreign", [False, True], ids=["torch", "another library"])
@pytest.mark.parametrize("name", CASES)
def test_everything_is_what_the_cpu_computes(name, foreign):
    description, inputs = CASES[name][0], CASES[name][1]()
    tensors = [r(2, n, h, 64).transpose(1, 2) for n, h in ((150, 4), (170, 2), (170, 2))]
    exact, exactly = [t.double().cpu() for t in tensors], on_host(inputs)
    wrap = Foreign if foreign else lambda t: t
    there = [wrap(t) for t in tensors]
    if foreign:
        # Arrays of an unknown library are not converted.
        inputs = {name: t.int() if name == "lengths" else t for name, t in inputs.items()}
    given = {name: wrap(t) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
    out, want = description.forward(*there, **given), description.forward(*exact, **exactly)
    assert type(out.values) is (qkv.Array if foreign else torch.Tensor)
    held(out.values, want.values, 0.03)
    held(out.lse, want.lse, 0.03)
    d_out = r(*want.values.shape)
    grad = description.backward(*there, out, wrap(d_out), **given)
    wanted = description.backward(*exact, want, d_out.double().cpu(), **exactly)
    for tensor in ("q", "k", "v", "bias", "table", "sinks"):
        assert (getattr(grad, tensor) is None) == (getattr(wanted, tensor) is None)
        if getattr(wanted, tensor) is not None:
            held(getattr(grad, tensor), getattr(wanted, tensor), 0.06)
    weights, wanted = description.weights(*there, out, **given), description.weights(*exact, want, **exactly)
    held(weights.all(), wanted.all(), 0.03)
    held(weights.rectangle(1, 3, (4, 90), (5, 170)), wanted.rectangle(1, 3, (4, 90), (5, 170)), 0.03)
    held(weights.pooled(16, 24, head=2, pool="mean"), wanted.pooled(16, 24, head=2, pool="mean"), 0.03)


def test_decoding():
    q, k, v = r(2, 8, 1, 128), r(2, 2, 700, 128), r(2, 2, 700, 128)
    local = _SCALED.mask(Mask.causal() & Mask.window(99, 0))
    held(local.decode(q, k, v).values, local.decode(*(t.double().cpu() for t in (q, k, v))).values, 0.03)


def test_streams_wait_for_one_another():
    description, busy = _SCALED.mask(Mask.causal()), torch.cuda.Stream()
    x = r(4, 8, 2048, 64)
    want = description.forward(x, x, x).values.clone()
    torch.cuda.synchronize()
    # The call uses PyTorch's current stream.
    with torch.cuda.stream(busy):
        y = torch.zeros_like(x)
        torch.cuda._sleep(20_000_000)
        y.copy_(x)
        found = description.forward(y, y, y).values
    busy.synchronize()
    assert torch.equal(found, want)
    # A producer makes the default stream wait for its own stream, and our array makes its consumer wait.
    with torch.cuda.stream(busy):
        y = torch.zeros_like(x)
        torch.cuda._sleep(20_000_000)
        y.copy_(x)
        other = Foreign(y)
        found = description.forward(other, other, other).values
        assert set(other.streams) == {1}
        assert torch.equal(torch.from_dlpack(found), want)


def test_nothing_is_copied_and_memory_is_pytorchs():
    # 64 MB each, as a projection leaves them: [B, N, H, D].
    q, k, v = (r(4, 4096, 16, 128).transpose(1, 2) for _ in range(3))
    call = lambda: _SCALED.mask(Mask.causal()).forward(q, k, v)  # noqa: E731
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        out = call()
        torch.cuda.synchronize()
    names = [event.key for event in recorded.key_averages() if event.self_device_time_total > 0]
    assert names and not any("copy" in name.lower() or "convert" in name for name in names), names
    torch.cuda.reset_peak_memory_stats()
    before, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    out = call()
    torch.cuda.synchronize()
    # Values, log-sum-exp, and a workspace that may include room for copies.
    assert 0 < torch.cuda.max_memory_allocated() - before < 4.5 * out.values.numel() * 2
    assert free - torch.cuda.mem_get_info()[0] <= torch.cuda.memory_reserved()


def test_memory_is_given_back():
    x = Foreign(r(8, 8, 1024, 64))
    torch.cuda.synchronize()
    _SCALED.forward(x, x, x)
    free, _ = torch.cuda.mem_get_info()
    for _ in range(50):
        out = _SCALED.forward(x, x, x)
        _SCALED.backward(x, x, x, out, x)
    del out
    torch.cuda.synchronize()
    assert abs(free - torch.cuda.mem_get_info()[0]) < 100e6


def test_what_is_refused():
    x = r(1, 2, 8, 64)
    with pytest.raises(ValueError, match="requires a gradient"):
        _SCALED.forward(x.clone().requires_grad_(), x, x)
    with pytest.raises(ValueError, match="`k` is on the host, and `q` on CUDA device 0: expected one device"):
        _SCALED.forward(x, x.cpu(), x)
    with pytest.raises(ValueError, match="`k` is on CUDA device 0; this call computes on the CPU"):
        _SCALED.forward(x.cpu(), x, x.cpu())
    with pytest.raises(NotImplementedError, match="runs only on the CPU"):
        Attention.cosine().forward(x, x, x)
    with pytest.raises(NotImplementedError, match="float64"):
        _SCALED.forward(*[x.double()] * 3)
    with pytest.raises(NotImplementedError, match="leave `exact` out"):
        _SCALED.decode(x[:, :, :1], x, x, exact=True)
    out = _SCALED.forward(*[x.cpu().float()] * 3)
    with pytest.raises(ValueError, match="`out` is on the host"):
        _SCALED.backward(x, x, x, out, x)


def test_hugging_face_weights_stay_on_the_device():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import qkv.hf

    qkv.hf.register()
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    ids, found = torch.randint(3, 99, (2, 17), device="cuda"), {}
    for name in ("eager", "qkv"):
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).cuda().eval()
        with torch.no_grad():
            found[name] = model(ids, output_attentions=True).attentions
    for ours, theirs in zip(found["qkv"], found["eager"], strict=True):
        held(ours, theirs, 1e-4)
