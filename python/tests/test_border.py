"""The border: arrays of any library in and out, and bad input as clear errors, never a crash."""

import array
import gc

import numpy as np
import pytest

import qkv
from qkv import Attention, Bias, Mask, _qkv

PLAIN = Attention.scaled_dot()


def x(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


def test_buffers_without_numpy_in_and_arrays_out():
    q = memoryview(array.array("f", range(12))).cast("B").cast("f", (1, 1, 3, 4))
    out = PLAIN.forward(q, q, q)
    assert isinstance(out.values, qkv.Array) and out.values.shape == (1, 1, 3, 4) and out.values.dtype == "float32"
    expected = PLAIN.forward(*[np.array(q)] * 3).values
    assert np.array_equal(np.asarray(out.values), expected)
    assert out.values.tolist() == expected.tolist()
    assert np.array_equal(np.from_dlpack(out.values), expected)
    grad = PLAIN.backward(q, q, q, out, out.values)
    assert grad.q.shape == (1, 1, 3, 4)


def test_memory_outlives_the_objects_it_came_from():
    values = np.from_dlpack(PLAIN.forward(*[memoryview(x(1, 1, 50, 8))] * 3).values)
    other = np.asarray(PLAIN.forward(*[memoryview(x(1, 1, 50, 8))] * 3).values)
    kept = values.copy()
    gc.collect()
    [PLAIN.forward(*[x(1, 1, 50, 8) + i] * 3) for i in range(20)]
    assert np.array_equal(values, kept) and np.array_equal(other, kept)
    for _ in range(100):
        PLAIN.forward(*[memoryview(x(1, 1, 5, 8))] * 3).values.__dlpack__()  # a capsule that is never consumed
        PLAIN.forward(*[memoryview(x(1, 1, 5, 8))] * 3).values.__dlpack__(max_version=(1, 0))


class OnlyDlpack:
    def __init__(self, array, **old):
        self.array, self.old = array, old

    def __dlpack_device__(self):
        return self.old.get("device", self.array.__dlpack_device__())

    def __dlpack__(self, **keywords):
        if "versionless" in self.old and keywords:
            raise TypeError("no keywords")
        keywords.pop("stream", None)
        return self.array.__dlpack__(**keywords)


def test_capsules_of_both_forms():
    q = x(1, 2, 5, 8)
    expected = PLAIN.forward(q, q, q).values
    for old in ({}, {"versionless": True}):
        assert np.array_equal(np.asarray(PLAIN.forward(*[OnlyDlpack(q, **old)] * 3).values), expected)
    read_only = q.copy()
    read_only.flags.writeable = False
    assert np.array_equal(PLAIN.forward(*[read_only] * 3).values, expected)
    with pytest.raises(ValueError, match="`k` is on CUDA device 0; this call computes on the CPU"):
        PLAIN.forward(q, OnlyDlpack(q, device=(2, 0)), q)
    # An array that claims to be on a device, while its capsule says otherwise.
    with pytest.raises(ValueError, match="`q` is on the host, and `q` on CUDA device 0"):
        PLAIN.forward(*[OnlyDlpack(q, device=(2, 0))] * 3)
    with pytest.raises(ValueError, match="`q` is on a ROCm device"):
        PLAIN.forward(*[OnlyDlpack(q, device=(10, 0))] * 3)


def misaligned(a):
    raw = np.zeros(a.nbytes + 1, np.uint8)
    view = raw[1:].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


def field(a):
    return np.zeros(a.shape, [("a", "u1"), ("b", a.dtype)])["b"]


BAD = {
    "a list": (lambda a: [[1.0]], TypeError, "`k` is of type list"),
    "nothing": (lambda a: None, TypeError, "NoneType"),
    "integers": (lambda a: a.astype(np.int32), TypeError, "`k` has the type int32, expected float32"),
    "complex": (lambda a: a.astype(np.complex64), TypeError, "complex64"),
    "strings": (lambda a: a.astype(str), TypeError, "`k` has the type"),
    "objects": (lambda a: a.astype(object), TypeError, "`k` has the type"),
    "another type": (lambda a: a.astype(np.float64), TypeError, "float64"),
    "the other byte order": (lambda a: a.astype(">f4"), TypeError, "`k` has the type"),
    "another width": (lambda a: a[..., :4], ValueError, "`k` has shape"),
    "another batch": (lambda a: np.concatenate([a, a]), ValueError, "`k` has shape"),
    "five axes": (lambda a: a[None], ValueError, "5 axes"),
    "nine axes": (lambda a: a[(None,) * 5], ValueError, "9 axes"),
    "bytes between elements": (field, ValueError, "copy it first"),
    "misaligned": (misaligned, ValueError, "copy it first"),
    "three heads": (lambda a: np.repeat(a, 3, 1)[:, :3], ValueError, "`v` has shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_keys_are_refused_with_a_reason(name):
    change, error, words = BAD[name]
    q = x(1, 2, 5, 8)
    with pytest.raises(error, match=words):
        PLAIN.forward(q, change(q), q)


def test_bad_calls_are_refused_with_a_reason():
    q = x(1, 2, 5, 8)
    with pytest.raises(TypeError, match="int32, expected float32, float64"):
        PLAIN.forward(*[q.astype(np.int32)] * 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'color'"):
        PLAIN.forward(q, q, q, color=1)
    with pytest.raises(ValueError, match="`bias` was given, but"):
        PLAIN.forward(q, q, q, bias=q[..., :5])
    with pytest.raises(ValueError, match="`bias` is missing"):
        PLAIN.bias(Bias.tensor()).forward(q, q, q)
    with pytest.raises(ValueError, match="`lengths` is -1"):
        PLAIN.mask(Mask.lengths()).forward(q, q, q, lengths=np.array([-1]))
    with pytest.raises(ValueError, match="`lengths` is 9"):
        PLAIN.mask(Mask.lengths()).forward(q, q, q, lengths=np.array([9]))
    with pytest.raises(TypeError, match="whole numbers"):
        PLAIN.mask(Mask.lengths()).forward(q, q, q, lengths=np.array([1.5]))
    with pytest.raises(TypeError, match="bool or uint8"):
        PLAIN.mask(Mask.bits()).forward(q, q, q, bits=q)
    with pytest.raises(ValueError, match="32 bits"):
        PLAIN.mask(Mask.segments()).forward(q, q, q, segments=np.full((1, 5), 2**40))
    out = PLAIN.forward(q, q, q)
    with pytest.raises(ValueError, match="shape"):
        PLAIN.backward(q, q, q, out, q[:, :, :3])
    with pytest.raises(ValueError, match="shape"):
        PLAIN.backward(q[:, :, :3], q, q, out, q[:, :, :3])
    with pytest.raises(TypeError, match="another attention"):
        PLAIN.top_k(2).backward(q, q, q, out, q)
    with pytest.raises((OverflowError, TypeError)):
        PLAIN.dropout(0.1).forward(q, q, q, seed=-1)
    with pytest.raises(TypeError):
        Attention.scaled_dot().forward(q, q)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 2, 0, 8), (1, 2, 5, 0), (1, 0, 5, 8)])
def test_sizes_of_zero_are_answered_or_refused(shape):
    q = np.zeros(shape, np.float32)
    try:
        out = PLAIN.forward(q, q, q)
    except ValueError:
        return
    assert out.values.shape == shape
    PLAIN.backward(q, q, q, out, q)


def test_no_keys_is_zero():
    q, k = x(1, 2, 5, 8), np.zeros((1, 2, 0, 8), np.float32)
    assert not PLAIN.forward(q, k, k).values.any()


def test_a_size_beyond_memory_is_an_error():
    q = np.broadcast_to(np.float32(1), (1, 1, 1 << 20, 8))
    k = np.broadcast_to(np.float32(1), (1, 1, 4, 8))
    v = np.broadcast_to(np.float32(1), (1, 1, 4, 1 << 40))
    with pytest.raises((MemoryError, ValueError)):
        PLAIN.forward(q, k, v)


def into(q, out, lse):
    _qkv.forward_into(PLAIN.to_json(), (q, q, q), out, lse, None, None, 1)


def test_outputs_of_the_caller_are_checked():
    q, lse = x(1, 2, 5, 8), np.zeros((1, 2, 5, 1), np.float32)
    out = np.zeros_like(q)
    into(q, out, lse)
    assert np.array_equal(out, PLAIN.forward(q, q, q).values)
    heads_last = np.zeros((1, 5, 2, 8), np.float32).swapaxes(1, 2)
    into(q, heads_last, lse)
    assert np.array_equal(heads_last, out)
    frozen = out.copy()
    frozen.flags.writeable = False
    for bad, words in [
        (q, "`out` overlaps `q`"),
        (np.broadcast_to(np.zeros((1, 1, 5, 8), np.float32), q.shape), "read-only|twice"),
        (frozen, "read-only"),
        (out[:, :, :3], "`out` has shape"),
    ]:
        with pytest.raises(ValueError, match=words):
            into(q, bad, lse)
    with pytest.raises(ValueError, match="overlaps"):
        both = np.zeros(100, np.float32)
        into(q, both[:80].reshape(1, 2, 5, 8), both[75:85].reshape(1, 2, 5, 1))
    writable_twice = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (1, 2, 5, 8), (0, 0, 0, 4))
    with pytest.raises(ValueError, match="twice"):
        into(q, writable_twice, lse)
    with pytest.raises(TypeError, match="float64"):
        into(q, out.astype(np.float64), lse)
    for few in ((), (q, q), (q,) * 40):
        with pytest.raises(TypeError, match="tensors were given"):
            _qkv.forward_into(PLAIN.to_json(), few, out, lse, None, None, 1)
    with pytest.raises(ValueError):
        _qkv.forward_into("not json", (q, q, q), out, lse, None, None, 1)


def test_an_interface_that_is_nonsense_is_refused():
    class Nonsense:
        def __init__(self, **change):
            self.__array_interface__ = {**x(1, 1, 2, 2).__array_interface__, **change}

    for change in (
        {"typestr": "?"},
        {"typestr": ""},
        {"shape": (-1, 2)},
        {"strides": (4,)},
        {"data": (0, False)},
        {"shape": "ab"},
    ):
        with pytest.raises((TypeError, ValueError)):
            PLAIN.forward(*[Nonsense(**change)] * 3)
