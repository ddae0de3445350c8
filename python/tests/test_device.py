"""`Attention.forward`, `decode`, `backward` and `weights` over arrays of a CUDA device, without a GPU: kernels emulated
on the CPU, and arrays that say they are on a device."""

import pytest

np = pytest.importorskip("numpy")

import shutil  # noqa: E402
import sys  # noqa: E402
import types  # noqa: E402

from qkv import Array, Attention, Bias, Mask, Place, _qkv, lsh_buckets, sdpa  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler for the emulated GPU")

# The number of the emulated device.
EMULATED = -1


class OnDevice:
    """An array of a library without a name, on the emulated device. It notes the streams that it was asked for."""

    def __init__(self, array):
        self.array, self.streams = array, []
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self):
        return 2, EMULATED

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.streams.append(stream)
        return self.array.__dlpack__(max_version=max_version)


_RANDOM = np.random.default_rng(1)


def r(*shape, dtype=np.float32):
    return _RANDOM.normal(size=shape).astype(dtype)


def held(got, want, tolerance=3e-5):
    got = np.from_dlpack(got)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (np.isfinite(got) == np.isfinite(want)).all()
    finite = np.isfinite(want)
    if finite.any():
        largest = max(1.0, np.abs(want[finite]).max())
        assert np.abs(got[finite].astype(np.float64) - want[finite]).max() < tolerance * largest


_SCALED = Attention.scaled_dot()
_SEGMENTS = (np.arange(19, dtype=np.int32)[None].repeat(2, 0) // 6, np.arange(23, dtype=np.int32)[None].repeat(2, 0) // 7)
_LSH = Mask.lsh(buckets=4, rounds=2, seed=7)
CASES = {
    "full": (_SCALED, {}),
    "causal at the end": (_SCALED.mask(Mask.causal()).place(Place.end()), {}),
    "window, soft-cap, ALiBi": (_SCALED.mask(Mask.window(5, 1)).softcap(3.0).bias(Bias.alibi()), {}),
    "bias": (_SCALED.bias(Bias.tensor()), {"bias": r(1, 4, 19, 23)}),
    "table": (_SCALED.bias(Bias.relative(6)), {"table": r(4, 13)}),
    "sinks": (_SCALED.with_sinks(), {"sinks": r(4)}),
    "learned scale": (_SCALED.learned_scale(), {"scale": r(4)}),
    "lengths": (_SCALED.mask(Mask.lengths()), {"lengths": np.array([23, 9], np.int32)}),
    "segments": (_SCALED.mask(Mask.segments()), {"segments": _SEGMENTS}),
    "bits": (_SCALED.mask(Mask.bits()), {"bits": _RANDOM.random((2, 1, 19, 23)) > 0.3}),
    "positions": (
        _SCALED.mask(Mask.causal()).place(Place.given()),
        {"positions": _RANDOM.integers(0, 23, (2, 19), dtype=np.int64)},
    ),
    "entropy": (_SCALED.with_entropy(), {}),
    "dropout": (_SCALED.dropout(0.4), {"seed": 2**62 + 5}),
}


def moved(inputs):
    def one(given):
        if isinstance(given, tuple):
            return tuple(one(part) for part in given)
        return OnDevice(given) if isinstance(given, np.ndarray) else given

    return {name: one(given) for name, given in inputs.items()}


@pytest.mark.parametrize("name", CASES)
def test_everything_is_what_the_cpu_computes(name):
    description, inputs = CASES[name]
    # [B, N, H, D] in memory, as a projection leaves it.
    q, k, v = (r(2, n, h, 32).transpose(0, 2, 1, 3) for n, h in ((19, 4), (23, 2), (23, 2)))
    want = description.forward(q, k, v, **inputs)
    there, given = [OnDevice(t) for t in (q, k, v)], moved(inputs)
    out = description.forward(*there, **given)
    assert isinstance(out.values, Array) and repr(out) == repr(want)
    held(out.values, want.values)
    held(out.lse, want.lse)
    assert (out.entropy is None) == (want.entropy is None)
    upstream = {"d_lse": r(*want.lse.shape)}
    if want.entropy is not None:
        held(out.entropy, want.entropy)
        upstream["d_entropy"] = r(*want.lse.shape)
    d_out = r(*want.values.shape)
    grad = description.backward(*there, out, OnDevice(d_out), **moved(upstream), **given)
    wanted = description.backward(q, k, v, want, d_out, **upstream, **inputs)
    assert repr(grad) == repr(wanted)
    for tensor in ("q", "k", "v", "bias", "table", "scale", "sinks"):
        if getattr(wanted, tensor) is not None:
            held(getattr(grad, tensor), getattr(wanted, tensor), 1e-4)
    weights, wanted = description.weights(*there, out, **given), description.weights(q, k, v, want, **inputs)
    assert weights.shape == (2, 4, 19, 23)
    held(weights.all(), wanted.all())
    held(weights.rows(1, 3, 4, 9), wanted.rows(1, 3, 4, 9))
    held(weights.rectangle(0, 2, (3, 8), (5, 23)), wanted.rectangle(0, 2, (3, 8), (5, 23)))
    for pool in ("max", "mean"):
        held(weights.pooled(5, 7, head=1, pool=pool), wanted.pooled(5, 7, head=1, pool=pool))


def test_decoding_stands_at_the_end():
    q, k, v = r(2, 4, 1, 32), r(2, 2, 37, 32), r(2, 2, 37, 32)
    local = _SCALED.mask(Mask.causal() & Mask.window(9, 0))
    there = [OnDevice(t) for t in (q, k, v)]
    out, want = local.decode(*there), local.decode(q, k, v)
    held(out.values, want.values)
    held(local.weights(*there, out).all(), local.weights(q, k, v, want).all())
    with pytest.raises(NotImplementedError, match="bits of a full pass runs only on the CPU: leave `exact` out"):
        local.decode(*there, exact=True)


@pytest.mark.parametrize("axes", [2, 3])
def test_axes_that_are_missing_count_as_one(axes):
    q, k = (r(*(2, n, 16)[-axes:]) for n in (5, 7))
    out, want = _SCALED.forward(OnDevice(q), OnDevice(k), OnDevice(k)), _SCALED.forward(q, k, k)
    held(out.values, want.values)
    held(out.lse, want.lse)
    d_out = r(*q.shape)
    grad = _SCALED.backward(OnDevice(q), OnDevice(k), OnDevice(k), out, OnDevice(d_out))
    held(grad.k, _SCALED.backward(q, k, k, want, d_out).k)


def test_half_precision_and_sdpa():
    q, k, v = (r(1, 2, 40, 64, dtype=np.float16) for _ in range(3))
    held(sdpa(*(OnDevice(t) for t in (q, k, v)), is_causal=True), sdpa(q, k, v, is_causal=True), 1e-2)


def test_nothing_to_compute():
    q, k, none = r(1, 2, 3, 16), r(1, 2, 5, 16), r(1, 2, 0, 16)
    out = _SCALED.forward(OnDevice(none), OnDevice(k), OnDevice(k))
    assert out.values.shape == (1, 2, 0, 16)
    out = _SCALED.forward(OnDevice(q), OnDevice(none), OnDevice(none))
    assert not np.from_dlpack(out.values).any() and (np.from_dlpack(out.lse) == -np.inf).all()
    grad = _SCALED.backward(OnDevice(q), OnDevice(none), OnDevice(none), out, OnDevice(q))
    assert not np.from_dlpack(grad.q).any() and grad.k.shape == (1, 2, 0, 16)


def test_producers_are_asked_for_the_stream_of_the_call():
    # In DLPack, 1 is CUDA's default stream.
    q, k, v = (OnDevice(r(1, 1, 4, 16)) for _ in range(3))
    _SCALED.forward(q, k, v)
    assert q.streams == k.streams == v.streams == [1]


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy: arrays of its module, its current stream, and its way to take memory over."""
    module, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    stream = types.SimpleNamespace(ptr=77)
    cuda.get_current_stream = lambda device: stream
    taken = []

    class ndarray(OnDevice):
        def astype(self, dtype):
            return ndarray(self.array.astype(dtype))

        def copy(self):
            return ndarray(self.array.copy())

    ndarray.__module__ = "cupy"

    def from_dlpack(array):
        taken.append(array)
        return ndarray(np.from_dlpack(array))

    module.ndarray, module.cuda, module.from_dlpack, module.taken = ndarray, cuda, from_dlpack, taken
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return module


def test_results_are_arrays_of_the_callers_library_on_its_stream(cupy):
    q, k, v = (cupy.ndarray(r(2, 2, 6, 16)) for _ in range(3))
    out = _SCALED.forward(q, k, v)
    assert type(out.values) is type(out.lse) is cupy.ndarray and len(cupy.taken) == 2
    assert q.streams == [77]
    grad = _SCALED.backward(q, k, v, out, q)
    assert type(grad.v) is cupy.ndarray and out.values.streams[-1] == 77
    assert type(_SCALED.weights(q, k, v, out).all()) is cupy.ndarray


def test_whole_numbers_are_converted_by_their_library(cupy):
    q = cupy.ndarray(r(2, 2, 6, 16))
    lengths = np.array([[6, 0], [3, 0]])[:, 0]
    padded = _SCALED.mask(Mask.lengths())
    out = padded.forward(q, q, q, lengths=cupy.ndarray(lengths))
    held(out.values.array, padded.forward(q.array, q.array, q.array, lengths=lengths).values)
    x = OnDevice(q.array)
    with pytest.raises(TypeError, match="`lengths` has the type int64, expected int32"):
        padded.forward(x, x, x, lengths=OnDevice(lengths))


def test_hash_buckets():
    q, v = r(1, 2, 40, 16), r(1, 2, 40, 16)
    hashed, buckets = _SCALED.mask(_LSH), lsh_buckets(_LSH, q)
    out = hashed.forward(OnDevice(q), OnDevice(q), OnDevice(v), buckets=OnDevice(buckets))
    held(out.values, hashed.forward(q, q, v, buckets=buckets).values)


@pytest.mark.parametrize(
    ("description", "words"),
    [
        (Attention.additive(), "the score `additive` runs only on the CPU"),
        (Attention.cosine(), "the score `cosine` runs only on the CPU"),
        (_SCALED.top_k(3), "runs only on the CPU"),
        (_SCALED.sparsemax(), "runs only on the CPU"),
        (_SCALED.local(2), "predictive local attention runs only on the CPU"),
    ],
)
def test_what_only_the_cpu_computes_says_so(description, words):
    x = OnDevice(r(1, 1, 3, 16))
    with pytest.raises(NotImplementedError, match=words):
        description.forward(x, x, x)


def test_wrong_input_is_refused():
    host, x = r(1, 2, 3, 16), OnDevice(r(1, 2, 3, 16))
    with pytest.raises(NotImplementedError, match="the type `float64` runs only on the CPU"):
        _SCALED.forward(*[OnDevice(r(1, 2, 3, 16, dtype=np.float64))] * 3)
    with pytest.raises(TypeError, match="`k` has the type float16, expected float32"):
        _SCALED.forward(x, OnDevice(r(1, 2, 3, 16, dtype=np.float16)), x)
    with pytest.raises(ValueError, match="`k`"):
        _SCALED.forward(x, OnDevice(r(1, 2, 5, 8)), x)
    with pytest.raises(ValueError, match="`bias`"):
        _SCALED.bias(Bias.tensor()).forward(x, x, x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'color'"):
        _SCALED.forward(x, x, x, color=x)
    with pytest.raises(ValueError, match="`k` is on CUDA device .*; this call computes on the CPU"):
        _SCALED.forward(host, x, host)
    out = _SCALED.forward(x, x, x)
    for rows in ((0, 9), (2, 1)):
        with pytest.raises(ValueError, match="`rows`|rows"):
            _SCALED.weights(x, x, x, out).rectangle(0, 0, rows)
    with pytest.raises(ValueError, match="head"):
        _SCALED.weights(x, x, x, out).rectangle(0, 2)
    with pytest.raises(ValueError, match="the seed of the forward pass"):
        drawn = _SCALED.dropout(0.5)
        drawn.backward(x, x, x, drawn.forward(x, x, x, seed=1), x, seed=2)


def test_arrays_of_a_device():
    x = OnDevice(r(1, 2, 3, 16))
    values = _SCALED.forward(x, x, x).values
    assert not hasattr(values, "__array_interface__") and values.dtype == "float32"
    with pytest.raises(ValueError, match="on a device"):
        values.tolist()
    with pytest.raises(BufferError, match="where it is"):
        values.__dlpack__(copy=True)
    # Consumers on another stream than ours make the call wait; −1 does not.
    for stream in (None, 1, 2, 99, -1):
        values.__dlpack__(stream=stream)


def test_plans_are_kept():
    _qkv.cuda_forget()
    x = OnDevice(r(1, 2, 3, 16))
    for _ in range(3):
        out = _SCALED.forward(x, x, x)
        _SCALED.weights(x, x, x, out).rectangle()
    assert _qkv.cuda_plans()[0] == 2


def test_pytorch_tensors_on_the_host_still_compute_there():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (`cargo xtask python`)")
    x = torch.randn(1, 2, 3, 16)
    assert type(_SCALED.forward(x, x, x).values) is torch.Tensor
