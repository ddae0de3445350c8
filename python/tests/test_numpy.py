"""Attention over NumPy arrays, against the formula written out in f64, and gradients against finite differences."""

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest

import qkv
from qkv import Attention, Bias, Features, Mask, Place

RNG = np.random.default_rng(1)


def randn(*shape, dtype=np.float64):
    return RNG.normal(size=shape).astype(dtype)


def softmax(scores):
    top = scores.max(-1, keepdims=True)
    e = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def plain(q, k, v, seen=None, bias=0.0, scale=None):
    """softmax(q kᵀ · scale + bias) v, with heads of keys shared by groups of query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    return softmax(scores) @ v


def test_forward_is_the_formula_with_grouped_heads():
    q, k, v = randn(2, 4, 7, 8), randn(2, 2, 9, 8), randn(2, 2, 9, 5)
    out = Attention.scaled_dot().forward(q, k, v)
    np.testing.assert_allclose(out.values, plain(q, k, v), rtol=1e-12, atol=1e-12)
    assert out.lse.shape == (2, 4, 7) and out.entropy is None


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_every_type_comes_back_as_it_went_in(name):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)
    q, k, v = (randn(1, 2, 9, 16).astype(dtype) for _ in range(3))
    out = Attention.scaled_dot().forward(q, k, v)
    assert out.values.dtype == dtype and out.lse.dtype == (np.float64 if name == "float64" else np.float32)
    expected = plain(*(x.astype(np.float64) for x in (q, k, v)))
    tolerance = {"float32": 1e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 2e-2}[name]
    assert np.abs(out.values.astype(np.float64) - expected).max() < tolerance
    grad = Attention.scaled_dot().backward(q, k, v, out, v)
    assert grad.q.dtype == dtype


def strided(x, how):
    if how == "heads last":
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if how == "reversed":
        return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]
    if how == "every other":
        wide = np.zeros(x.shape[:3] + (2 * x.shape[3],), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    return np.asfortranarray(x)


@pytest.mark.parametrize("how", ["heads last", "reversed", "every other", "fortran"])
def test_any_strides_give_the_same_bits(how):
    q, k, v, d = (randn(2, 3, 6, 8, dtype=np.float32) for _ in range(4))
    causal = Attention.scaled_dot().mask(Mask.causal())
    out = causal.forward(q, k, v)
    other = causal.forward(*(strided(x, how) for x in (q, k, v)))
    assert np.array_equal(out.values, other.values) and np.array_equal(out.lse, other.lse)
    a, b = causal.backward(q, k, v, out, d), causal.backward(q, k, v, out, strided(d, how))
    assert all(np.array_equal(getattr(a, x), getattr(b, x)) for x in "qkv")


def test_fewer_axes_count_as_one():
    q, k, v = randn(6, 8), randn(9, 8), randn(9, 4)
    out = Attention.scaled_dot().forward(q, k, v)
    assert out.values.shape == (6, 4) and out.lse.shape == (6,)
    np.testing.assert_allclose(out.values, plain(q[None, None], k[None, None], v[None, None])[0, 0], rtol=1e-12)
    assert Attention.scaled_dot().backward(q, k, v, out, out.values).k.shape == (9, 8)


MASKS = {
    "causal": (Mask.causal(), {}),
    "window": (Mask.window(2, 1), {}),
    "causal window": (Mask.causal() & Mask.window(3, 0), {}),
    "either": (Mask.window(1, 0) | Mask.longformer(0, [0, 4]), {}),
    "not": (~Mask.window(1, 1), {}),
    "dilated": (Mask.dilated(4, 2), {}),
    "strided": (Mask.strided(3), {}),
    "fixed": (Mask.fixed(4, 1), {}),
    "bigbird": (Mask.bigbird(block=2, window=1, globals=1, random=1, seed=7), {}),
    "blocks": (Mask.blocks(4, [[True, False, True], [True, True, False], [False, True, True]]), {}),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_what_their_matrix_says(name):
    mask, inputs = MASKS[name]
    x = randn(1, 2, 9, 4)
    seen = mask.matrix(9, 9)
    assert seen.dtype == bool
    out = Attention.scaled_dot().mask(mask).forward(x, x, x, **inputs)
    np.testing.assert_allclose(out.values, plain(x, x, x, seen), rtol=1e-10, atol=1e-12)


def test_masks_with_data():
    q, k, v = randn(2, 2, 5, 4), randn(2, 2, 7, 4), randn(2, 2, 7, 3)
    keys = np.arange(7)
    padded = Attention.scaled_dot().mask(Mask.lengths()).forward(q, k, v, lengths=np.array([7, 3]))
    np.testing.assert_allclose(padded.values, plain(q, k, v, keys < np.array([7, 3])[:, None, None, None]), rtol=1e-11)
    for bits in (RNG.random((5, 7)) < 0.6, RNG.random((2, 1, 1, 7)) < 0.6):
        bits[..., 0] = True
        got = Attention.scaled_dot().mask(Mask.bits()).forward(q, k, v, bits=bits)
        np.testing.assert_allclose(got.values, plain(q, k, v, bits), rtol=1e-11, atol=1e-12)
    sq, sk = np.array([[0, 0, 1, 1, 1]] * 2), np.array([[0, 0, 0, 1, 1, 1, 2]] * 2)
    packed = Attention.scaled_dot().mask(Mask.segments()).forward(q, k, v, segments=(sq, sk))
    np.testing.assert_allclose(packed.values, plain(q, k, v, (sq[:, :, None] == sk[:, None])[:, None]), rtol=1e-11)
    given = Attention.scaled_dot().mask(Mask.causal()).place(Place.given())
    positions = np.array([[0, 2, 4, 6, 6], [1, 1, 3, 5, 6]])
    got = given.forward(q, k, v, positions=positions)
    np.testing.assert_allclose(got.values, plain(q, k, v, (keys <= positions[:, :, None])[:, None]), rtol=1e-11)
    lsh = Mask.lsh(buckets=4, rounds=2, seed=3)
    hashed = qkv.lsh_buckets(lsh, q)
    got = Attention.scaled_dot().mask(lsh).forward(q, q, q, buckets=hashed)
    seen = (hashed[:, :, :, None] == hashed[:, :, None]).any(-1)
    np.testing.assert_allclose(got.values, plain(q, q, q, seen), rtol=1e-10, atol=1e-12)


# Every score, and every optional input with a gradient, checked by finite differences in f64.
def described():
    x = lambda *shape: randn(*shape)
    q, k, v = x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 3)
    scaled = Attention.scaled_dot()
    yield "dot", Attention.dot(), {}
    yield "causal", scaled.mask(Mask.causal()).place(Place.end()), {}
    yield "general", Attention.general(), {"w": x(2, 4, 4)}
    yield "additive", Attention.additive(), {"w_q": x(6, 4), "w_k": x(6, 4), "v_score": x(6)}
    yield "cosine", Attention.cosine().learned_scale(), {"scale": x(2)}
    yield "distance", Attention.distance().temperature(1.5), {}
    yield "softcap", scaled.softcap(2.0).scale(0.7), {}
    yield "bias", scaled.bias(Bias.tensor() + Bias.alibi()), {"bias": x(2, 3, 5)}
    yield "table", scaled.bias(Bias.relative(2)), {"table": x(2, 5)}
    yield "sinks", scaled.with_sinks(), {"sinks": x(2)}
    yield "center", Attention.dot().local(2), {"center": np.array([[[0.5, 2.2, 3.1], [1.4, 3.3, 2.6]]])}
    yield "dropout", scaled.dropout(0.3), {"seed": 5}
    yield "entropy", scaled.with_entropy(), {}
    yield "elu", Attention.linear(Features.elu()).mask(Mask.causal()), {}
    yield "favor", Attention.linear(Features.favor(8, 3)), {}
    yield "top-k", scaled.top_k(2), {}
    yield "sparsemax", scaled.sparsemax(), {}


@pytest.mark.parametrize("name, attention, inputs", list(described()), ids=lambda x: x if isinstance(x, str) else "")
def test_gradients_are_those_of_finite_differences(name, attention, inputs):
    rng = np.random.default_rng(3)
    tensors = {
        "q": rng.normal(size=(1, 2, 3, 4)),
        "k": rng.normal(size=(1, 2, 5, 4)),
        "v": rng.normal(size=(1, 2, 5, 3)),
    }
    tensors |= {n: x for n, x in inputs.items() if n != "seed"}
    rest = {n: x for n, x in inputs.items() if n == "seed"}
    d_out, d_lse = rng.normal(size=(1, 2, 3, 3)), rng.normal(size=(1, 2, 3))
    upstream = {"d_lse": d_lse} if name in ("dot", "bias", "sinks") else {}
    upstream |= {"d_entropy": d_lse} if name == "entropy" else {}

    def loss():
        out = attention.forward(**tensors, **rest)
        total = (out.values * d_out).sum()
        total += (out.lse * d_lse).sum() if "d_lse" in upstream else 0
        return total + ((out.entropy * d_lse).sum() if "d_entropy" in upstream else 0)

    out = attention.forward(**tensors, **rest)
    grad = attention.backward(**tensors, out=out, d_out=d_out, **upstream, **rest)
    for n, x in tensors.items():
        got, step = getattr(grad, n), 1e-6
        assert got.shape == x.shape, n
        for at in itertools.islice(np.ndindex(x.shape), 0, None, max(1, x.size // 12)):
            kept = x[at]
            x[at] = kept + step
            above = loss()
            x[at] = kept - step
            below = loss()
            x[at] = kept
            assert abs((above - below) / (2 * step) - got[at]) < 1e-6 * max(1, np.abs(got).max()), (n, at)


def test_hard_attention_returns_its_choice_and_a_reinforce_gradient():
    q, k, v = randn(1, 1, 4, 8), randn(1, 1, 6, 8), randn(1, 1, 6, 3)
    out = Attention.scaled_dot().hard().forward(q, k, v)
    best = (q @ k.swapaxes(-1, -2)).argmax(-1)
    assert np.array_equal(out.chosen[..., 0], best)
    np.testing.assert_allclose(out.values[0, 0], v[0, 0][best[0, 0]])
    sampled = Attention.scaled_dot().sample()
    drawn = sampled.forward(q, k, v, seed=3)
    grad = sampled.backward(q, k, v, drawn, np.zeros((1, 1, 4, 3)), d_log_prob=np.ones((1, 1, 4)))
    assert np.abs(grad.q).max() > 0
    with pytest.raises(ValueError, match="seed of the forward pass"):
        sampled.backward(q, k, v, drawn, np.zeros((1, 1, 4, 3)), seed=4)


def test_weights_are_exact_and_pooled():
    x = randn(2, 2, 40, 8)
    causal = Attention.scaled_dot().mask(Mask.causal())
    out = causal.forward(x, x, x)
    weights = causal.weights(x, x, x, out)
    everything = weights.all()
    expected = softmax(np.where(np.tril(np.ones((40, 40), bool)), x @ x.swapaxes(-1, -2) / 8**0.5, -np.inf))
    np.testing.assert_allclose(everything, expected, rtol=1e-10, atol=1e-14)
    assert np.array_equal(weights.rows(1, 1, 5, 8), everything[1, 1, 5:8])
    assert np.array_equal(weights.rectangle(0, 1, (3, 9), (1, 4)), everything[0, 1, 3:9, 1:4])
    picture = weights.pooled(4, 4, sequence=1, head=0)
    assert picture.shape == (4, 4) and picture[0, 3] == 0
    assert picture[3, 3] == everything[1, 0, 30:, 30:].max()
    with pytest.raises(ValueError, match="head"):
        weights.rows(0, 9, 0, 1)


def test_decoding_equals_the_full_pass_bit_for_bit_on_request():
    q, k, v = (randn(1, 2, 33, 16, dtype=np.float32) for _ in range(3))
    causal = Attention.scaled_dot().mask(Mask.causal())
    full = causal.forward(q, k, v).values
    for at in (0, 7, 32):
        new = causal.decode(q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1], exact=True)
        assert np.array_equal(new.values[:, :, 0], full[:, :, at])


def test_sdpa_has_the_arguments_of_pytorch():
    q, k, v = randn(1, 4, 6, 8), randn(1, 2, 6, 8), randn(1, 2, 6, 8)
    np.testing.assert_allclose(qkv.sdpa(q, k, v, enable_gqa=True), plain(q, k, v), rtol=1e-11)
    np.testing.assert_allclose(
        qkv.sdpa(q, k, v, is_causal=True, scale=0.3, enable_gqa=True),
        plain(q, k, v, np.tril(np.ones((6, 6), bool)), scale=0.3),
        rtol=1e-11,
    )
    bias = randn(6, 6)
    np.testing.assert_allclose(qkv.sdpa(q, q, q, attn_mask=bias), plain(q, q, q, bias=bias), rtol=1e-11)
    bits = bias > 0
    np.testing.assert_allclose(qkv.sdpa(q, q, q, bits), plain(q, q, q, bits), rtol=1e-11)
    assert not np.array_equal(qkv.sdpa(q, q, q, dropout_p=0.5, seed=1), qkv.sdpa(q, q, q, dropout_p=0.5, seed=2))
    with pytest.raises(ValueError, match="enable_gqa"):
        qkv.sdpa(q, k, v)
    with pytest.raises(ValueError, match="seed"):
        qkv.sdpa(q, q, q, dropout_p=0.5)


def test_a_query_that_sees_nothing_gets_zero():
    x = randn(1, 1, 3, 4)
    x[0, 0, 1] = np.nan
    out = (
        Attention.scaled_dot()
        .mask(Mask.bits())
        .forward(randn(1, 1, 2, 4), x, x, bits=np.array([[1, 0, 1], [0, 0, 0]], bool))
    )
    assert (
        np.isfinite(out.values).all()
        and np.array_equal(out.values[0, 0, 1], np.zeros(4))
        and out.lse[0, 0, 1] == -np.inf
    )


def test_the_number_of_threads_changes_no_bit():
    q, k, v = (randn(2, 4, 200, 32, dtype=np.float32) for _ in range(3))
    attention = Attention.scaled_dot().mask(Mask.causal())
    results = []
    for threads in (1, 2, 3):
        out = attention.forward(q, k, v, threads=threads)
        grad = attention.backward(q, k, v, out, v, threads=threads)
        results.append((out.values, grad.q, grad.k, grad.v))
    assert all(np.array_equal(a, b) for one in results[1:] for a, b in zip(results[0], one))


def test_threads_compute_at_the_same_time_and_the_same():
    q, k, v = (randn(2, 4, 200, 32, dtype=np.float32) for _ in range(3))
    expected, found = qkv.sdpa(q, k, v), []
    workers = [threading.Thread(target=lambda: found.append(qkv.sdpa(q, k, v, threads=2))) for _ in range(4)]
    [w.start() for w in workers]
    [w.join(60) for w in workers]
    assert len(found) == 4 and all(np.array_equal(expected, x) for x in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_after_first_use_computes():
    q, k, v = (randn(2, 4, 200, 32, dtype=np.float32) for _ in range(3))
    expected = qkv.sdpa(q, k, v, threads=2)
    child = os.fork()
    if child == 0:
        same = np.array_equal(expected, qkv.sdpa(q, k, v, threads=2))
        os._exit(0 if same else 1)
    # The timer kills the child if it hangs.
    watch = threading.Timer(60, lambda: os.kill(child, 9))
    watch.start()
    status = os.waitpid(child, 0)[1]
    watch.cancel()
    assert status == 0
    assert np.array_equal(expected, qkv.sdpa(q, k, v, threads=2))


@pytest.mark.skipif(os.name == "nt", reason="no signals to oneself on this system")
def test_an_interrupt_arrives_between_calls():
    x = np.random.default_rng(0).standard_normal((1, 2, 256, 32)).astype(np.float32)
    # A program that a shell starts in the background ignores interrupts by default.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    end = time.monotonic() + 60
    try:
        with pytest.raises(KeyboardInterrupt):
            while time.monotonic() < end:
                Attention.scaled_dot().forward(x, x, x)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() < end
