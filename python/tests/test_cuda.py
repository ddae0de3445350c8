"""The CUDA operators without a GPU: kernels emulated on the CPU, over PyTorch's memory; plans; errors."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (`cargo xtask python`)")

import shutil  # noqa: E402

from qkv import Attention, Bias, Mask, Place, _qkv, lsh_buckets  # noqa: E402
from qkv.torch import _cpu, _cuda  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler for the emulated GPU")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Memory at multiples of 256 bytes, as CUDA's allocators give it."""

    def allocator(q):
        def allocate(size):
            memory = torch.full((size + 256,), 255, dtype=torch.uint8)
            start = -memory.data_ptr() % 256
            return memory[start : start + size]

        return allocate

    monkeypatch.setattr(_cuda, "_allocator", allocator)
    torch.manual_seed(0)
    _qkv.cuda_forget()


def seen(*shape):
    return torch.rand(*shape) > 0.3


def r(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


_SCALED = Attention.scaled_dot()
_LSH = Mask.lsh(buckets=4, rounds=2, seed=7)
CASES = {
    "full": (_SCALED, {}),
    "causal at the end": (_SCALED.mask(Mask.causal()).place(Place.end()), {}),
    "window, soft-cap, ALiBi": (_SCALED.mask(Mask.window(5, 1)).softcap(3.0).bias(Bias.alibi()), {}),
    "bias": (_SCALED.bias(Bias.tensor()), {"bias": r(1, 4, 19, 23)}),
    "bias for all heads": (_SCALED.bias(Bias.tensor()), {"bias": r(1, 1, 19, 23)}),
    "table": (_SCALED.bias(Bias.relative(6)), {"table": r(4, 13)}),
    "sinks": (_SCALED.with_sinks(), {"sinks": r(4)}),
    "learned scale": (_SCALED.learned_scale(), {"scale": r(4)}),
    "lengths": (_SCALED.mask(Mask.lengths()), {"lengths": torch.tensor([23, 9])}),
    "segments": (
        _SCALED.mask(Mask.segments()),
        {"segments_q": torch.arange(19).expand(2, 19) // 6, "segments_k": torch.arange(23).expand(2, 23) // 7},
    ),
    "bits": (_SCALED.mask(Mask.bits()), {"bits": seen(2, 1, 19, 23)}),
    "positions": (
        _SCALED.mask(Mask.causal()).place(Place.given()),
        {"positions": torch.randint(0, 23, (2, 19), dtype=torch.int32)},
    ),
}


def held(a, b, tolerance=2e-5):
    """Within `tolerance` of the largest number, or of 1."""
    assert a.shape == b.shape and a.dtype == b.dtype
    finite = b.isfinite()
    assert (a.isfinite() == finite).all()
    if finite.any():
        assert (a[finite] - b[finite]).abs().max().item() < tolerance * max(1.0, b[finite].abs().max().item())


@pytest.mark.parametrize("name", CASES)
def test_forward_and_all_gradients_are_those_of_the_cpu(name):
    description, given = CASES[name]
    # [B, N, H, D] in memory, as a projection leaves it.
    q, k, v = (r(2, n, h, 32).transpose(1, 2) for n, h in ((19, 4), (23, 2), (23, 2)))
    more, names = list(given.values()), ",".join(given)
    call = (q, k, v, more, None, names, description._json)
    (out, lse), (want, want_lse) = _cuda.forward(*call), _cpu.forward(*call)
    held(out, want)
    held(lse, want_lse)
    assert out.stride() == want.stride()
    d_out, d_lse, needs = r(*out.shape), r(*lse.shape), [True] * (3 + len(more))
    got = _cuda.backward(d_out, d_lse, out, lse, needs, *call)
    for a, b in zip(got, _cpu.backward(d_out, d_lse, want, want_lse, needs, *call), strict=True):
        held(a, b, 1e-4)


def test_dropout_drops_what_the_cpu_drops():
    q, k, v = (r(1, 2, 33, 16) for _ in range(3))
    seed, text = torch.tensor(2**62 + 5), _SCALED.dropout(0.4)._json
    call = (q, k, v, [], seed, "", text)
    (out, lse), (want, _) = _cuda.forward(*call), _cpu.forward(*call)
    held(out, want)
    d_out = r(*out.shape)
    for a, b in zip(
        _cuda.backward(d_out, None, out, lse, [True] * 3, *call),
        _cpu.backward(d_out, None, out, lse, [True] * 3, *call),
        strict=True,
    ):
        held(a, b)


def test_hash_buckets():
    q, k, v = r(1, 2, 40, 16), r(1, 2, 40, 16), r(1, 2, 40, 16)
    buckets = lsh_buckets(_LSH, k)
    call = (q, k, v, [buckets, buckets], None, "buckets_q,buckets_k", _SCALED.mask(_LSH)._json)
    held(_cuda.forward(*call)[0], _cpu.forward(*call)[0])


def test_entropy_and_its_gradient():
    q, k, v = (r(1, 2, 21, 16) for _ in range(3))
    call = (q, k, v, [], None, "", _SCALED.with_entropy()._json)
    got, want = _cuda.select(*call), _cpu.select(*call)
    for a, b in zip(got, want, strict=True):
        held(a, b)
    up = (r(*got[0].shape), None, r(*got[2].shape), [True] * 3)
    for a, b in zip(_cuda.select_backward(*up, *call), _cpu.select_backward(*up, *call), strict=True):
        held(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    q, k, v = (r(1, 2, 40, 64, dtype=dtype) for _ in range(3))
    call = (q, k, v, [], None, "", _SCALED.mask(Mask.causal())._json)
    out, lse = _cuda.forward(*call)
    held(out.float(), _cpu.forward(*call)[0].float(), 2e-2)
    for a, b in zip(
        _cuda.backward(out, None, out, lse, [True] * 3, *call),
        _cpu.backward(out, None, out, lse, [True] * 3, *call),
        strict=True,
    ):
        held(a.float(), b.float(), 3e-2)


@pytest.mark.parametrize("shape", [(0, 2, 3, 16), (1, 2, 0, 16)])
def test_no_queries(shape):
    q, k = r(*shape), r(shape[0], 2, 5, 16)
    call = (q, k, k, [], None, "", _SCALED._json)
    out, lse = _cuda.forward(*call)
    assert out.shape == shape and lse.shape == shape[:3]
    d_q, d_k, d_v = _cuda.backward(out, None, out, lse, [True] * 3, *call)
    assert d_q.shape == shape and not d_k.any() and not d_v.any()


def test_no_keys():
    q, k = r(1, 2, 3, 16), r(1, 2, 0, 16)
    call = (q, k, k, [], None, "", _SCALED._json)
    out, lse = _cuda.forward(*call)
    assert not out.any() and (lse == -float("inf")).all()
    assert not _cuda.backward(out, None, out, lse, [True] * 3, *call)[0].any()


@pytest.mark.parametrize(
    ("description", "given", "words"),
    [
        (Attention.additive(), ["w_q", "w_k", "v_score"], "the score `additive` runs only on the CPU"),
        (Attention.cosine(), [], "the score `cosine` runs only on the CPU"),
        (_SCALED.top_k(3), [], "runs only on the CPU"),
        (_SCALED.local(2), ["center"], "predictive local attention runs only on the CPU"),
    ],
)
def test_what_only_the_cpu_computes_says_so(description, given, words):
    q, inputs = r(1, 1, 3, 16), [r(4, 16) for _ in given]
    with pytest.raises(NotImplementedError, match=words):
        _cuda.forward(q, q, q, inputs, None, ",".join(given), description._json)


def test_wrong_inputs_are_refused_in_the_librarys_words():
    q, text = r(1, 2, 3, 16), _SCALED._json
    with pytest.raises(NotImplementedError, match="the type `float64` runs only on the CPU"):
        _cuda.forward(*[q.double()] * 3, [], None, "", text)
    with pytest.raises(NotImplementedError, match="a head width of 264"):
        _cuda.forward(*[r(1, 1, 3, 264)] * 3, [], None, "", text)
    with pytest.raises(TypeError, match="`k` has the type float16, expected float32"):
        _cuda.forward(q, q.half(), q, [], None, "", text)
    with pytest.raises(TypeError, match="`q` has the type int32"):
        _cuda.forward(*[q.int()] * 3, [], None, "", text)
    with pytest.raises(ValueError, match="`k`"):
        _cuda.forward(q, r(1, 2, 5, 8), r(1, 2, 5, 16), [], None, "", text)
    with pytest.raises(ValueError, match="`bias`"):
        _cuda.forward(q, q, q, [], None, "", _SCALED.bias(Bias.tensor())._json)
    with pytest.raises(ValueError, match="`w`"):
        _cuda.forward(q, q, q, [r(16, 16)], None, "w", text)
    with pytest.raises(ValueError, match="`out` overlaps `q`"):
        _qkv.cuda_forward_into(text, (q, q, q), (q, r(1, 2, 3), None), None, -1, 0, None)
    with pytest.raises(ValueError, match="`q` is on the host, and `q` on CUDA device 0|`q` is on the host"):
        _qkv.cuda_forward_into(text, (q, q, q), (r(1, 2, 3, 16), r(1, 2, 3), None), None, 0, 0, None)


def test_plans_are_kept_and_bounded():
    text = _SCALED.bias(Bias.alibi())._json
    q = r(1, 1, 3, 16)
    for _ in range(3):
        _cuda.forward(q, q, q, [], None, "", text)
    assert _qkv.cuda_plans()[0] == 1
    for n in range(1, 301):
        q, k = r(1, 1, 1, 16), r(1, 1, n, 16)
        _cuda.forward(q, k, k, [], None, "", text)
    plans, size = _qkv.cuda_plans()
    assert plans == 256 and size < 1 << 20
    # The newest plans are kept, so no new plan is made for them.
    _cuda.forward(q, k, k, [], None, "", text)
    assert _qkv.cuda_plans() == (plans, size)
    _qkv.cuda_forget()
    assert _qkv.cuda_plans() == (0, 0)


def test_kernels_have_names():
    q = r(1, 2, 40, 64)
    forward, backward = _cuda.kernels(q, q, q, _SCALED._json)
    assert forward.startswith("general") and backward.startswith("general")


def test_rows_with_gaps_have_gradients_without():
    turned = r(1, 2, 16, 30).transpose(2, 3)
    call = (turned, turned, turned, [], None, "", _SCALED._json)
    out, lse = _cuda.forward(*call)
    got = _cuda.backward(out, None, out, lse, [True] * 3, *call)
    alone = _cuda.values_backward(out, out, lse, turned, turned, turned, _SCALED._json)
    for a, b, c in zip(got, _cpu.backward(out, None, out, lse, [True] * 3, *call), alone, strict=True):
        held(a, b)
        assert torch.equal(a, c) and a.stride(3) == 1
