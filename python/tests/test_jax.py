"""`qkv.jax`: under `jit`, `grad` and `vmap`, against the formula in JAX."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed (`cargo xtask python`)")

from jax import numpy as jnp  # noqa: E402

import qkv.jax as Q  # noqa: E402
from qkv import Attention, Bias, Mask  # noqa: E402

CAUSAL = Attention.scaled_dot().mask(Mask.causal())


def x(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def plain(q, k, v, bias=0.0):
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5 + bias
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)) @ v


def test_jit_and_grad_are_those_of_the_formula():
    q, k, v = (x(2, 3, 9, 8, seed=i) for i in range(3))
    ours = jax.jit(lambda q, k, v: Q.attention(q, k, v, CAUSAL))
    np.testing.assert_allclose(ours(q, k, v), plain(q, k, v), atol=2e-6)
    loss = lambda f: lambda *t: (f(*t) ** 2).sum()
    got = jax.jit(jax.grad(loss(ours), (0, 1, 2)))(q, k, v)
    for a, b in zip(got, jax.grad(loss(plain), (0, 1, 2))(q, k, v)):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_bias_has_a_gradient_and_integers_have_none():
    q, bias = x(1, 2, 9, 8), x(2, 9, 9, seed=5)
    described = CAUSAL.bias(Bias.tensor()).mask(Mask.lengths())
    f = lambda q, bias: Q.attention(q, q, q, described, bias=bias, lengths=jnp.array([9])).sum()
    g = lambda q, bias: plain(q, q, q, bias).sum()
    for a, b in zip(jax.grad(f, (0, 1))(q, bias), jax.grad(g, (0, 1))(q, bias)):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_vmap_over_another_batch():
    q = x(4, 1, 2, 9, 8)
    got = jax.vmap(lambda q: Q.attention(q, q, q, CAUSAL))(q)
    np.testing.assert_allclose(got, jnp.stack([plain(t, t, t) for t in q]), atol=2e-6)


def test_gradients_of_the_log_sum_exp():
    q, k = x(1, 1, 4, 8), x(1, 1, 6, 8, seed=1)
    got = jax.grad(lambda q: Q.attend(q, k, k)[1].sum())(q)
    want = jax.grad(lambda q: jax.nn.logsumexp(q @ k.swapaxes(-1, -2) / 8**0.5, -1).sum())(q)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_plain_interface_takes_and_returns_jax_arrays():
    q = x(1, 2, 9, 8)
    assert isinstance(CAUSAL.forward(q, q, q).values, jax.Array)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="expected \\[batch, heads"):
        Q.attention(x(3, 8), x(3, 8), x(3, 8))
