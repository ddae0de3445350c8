"""`qkv.torch`: against PyTorch's own attention, and through its tools (gradcheck, opcheck, compile, autocast, func)."""

import copy
import gc

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (`cargo xtask python`)")

import torch.nn.functional as F  # noqa: E402

import qkv.torch as Q  # noqa: E402
from qkv import Attention, Bias, Features, Mask, Place, get_num_threads  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def r(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def same(a, b, tolerance=2e-6):
    assert a.shape == b.shape and (a - b).abs().max().item() < tolerance


def test_strided_grouped_with_bits_and_a_bias_that_has_a_gradient():
    q, k, v = r(2, 37, 4, 16), r(2, 41, 2, 16), r(2, 41, 2, 16)
    bias, bits = r(1, 4, 37, 41), torch.rand(2, 1, 37, 41) > 0.2
    t = [x.transpose(1, 2) for x in (q, k, v)]
    out = Q.attention(*t, Attention.scaled_dot().mask(Mask.bits()).bias(Bias.tensor()), bits=bits, bias=bias)
    g = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v, bias), g)
    ref = F.scaled_dot_product_attention(*t, attn_mask=bias.masked_fill(~bits, float("-inf")), enable_gqa=True)
    want = torch.autograd.grad(ref, (q, k, v, bias), g)
    same(out, ref)
    for a, b in zip(got, want):
        same(a, b, 2e-5)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (2, 2, 3, 8), (2, 2, 2, 3, 8)])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_sdpa_is_pytorchs(shape, mask):
    q, k, v = r(*shape), r(*shape[:-2], 5, 8), r(*shape[:-2], 5, 8)
    arguments = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(3, 5) > 0.1},
        "float": {"attn_mask": torch.randn(3, 5), "scale": 0.2},
    }[mask]
    got, want = Q.sdpa(q, k, v, **arguments), F.scaled_dot_product_attention(q, k, v, **arguments)
    same(got, want)
    g = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g)):
        same(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types(dtype):
    q, k, v = (r(1, 2, 64, 32, dtype=dtype) for _ in range(3))
    out = Q.sdpa(q, k, v, is_causal=True)
    assert out.dtype == dtype
    same(out.double(), F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True), 3e-2)
    out.sum().backward()
    assert q.grad.dtype == dtype and q.grad.isfinite().all()


def described():
    d = lambda *shape: r(*shape, dtype=torch.float64)
    scaled = Attention.scaled_dot()
    yield "causal", scaled.mask(Mask.causal()).place(Place.end()), {}
    yield "general", Attention.general(), {"w": d(2, 4, 4)}
    yield "additive", Attention.additive(), {"w_q": d(6, 4), "w_k": d(6, 4), "v_score": d(6)}
    yield "cosine", Attention.cosine().learned_scale(), {"scale": d(2)}
    yield "distance", Attention.distance(), {}
    yield "bias", scaled.softcap(3.0).bias(Bias.tensor()), {"bias": d(2, 3, 5)}
    yield "table", scaled.bias(Bias.relative(2)), {"table": d(2, 5)}
    yield "sinks", scaled.with_sinks(), {"sinks": d(2)}
    yield "entropy", scaled.with_entropy(), {}
    yield "linear", Attention.linear(Features.elu()), {}
    yield "top-k", scaled.top_k(2), {}
    yield "sparsemax", scaled.sparsemax(), {}
    yield "lengths", scaled.mask(Mask.lengths()), {"lengths": torch.tensor([4])}
    yield (
        "segments",
        scaled.mask(Mask.segments()),
        {"segments": (torch.tensor([[0, 0, 1]]), torch.tensor([[0, 0, 1, 1, 1]]))},
    )
    yield "dropout", scaled.dropout(0.4), {"seed": 7}


@pytest.mark.parametrize("name, attention, inputs", list(described()), ids=lambda x: x if isinstance(x, str) else "")
def test_gradcheck(name, attention, inputs):
    qkv = [r(1, 2, 3, 4, dtype=torch.float64), r(1, 2, 5, 4, dtype=torch.float64), r(1, 2, 5, 3, dtype=torch.float64)]
    learned = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    rest = {n: t for n, t in inputs.items() if n not in learned}

    def f(q, k, v, *more):
        found = Q.attend(q, k, v, attention, **dict(zip(learned, more)), **rest)
        # A threshold has no gradient.
        return [x for x in found if x is not None and (name != "sparsemax" or x is found.values)]

    assert torch.autograd.gradcheck(f, (*qkv, *learned.values()))


def test_opcheck():
    text = Attention.scaled_dot().mask(Mask.causal())._json
    x = [r(1, 2, 9, 8) for _ in range(3)]
    torch.library.opcheck(torch.ops.qkv.forward.default, (*x, [], None, "", text))
    biased = Attention.scaled_dot().bias(Bias.tensor()).with_sinks()._json
    torch.library.opcheck(torch.ops.qkv.forward.default, (*x, [r(9, 9), r(2)], None, "bias,sinks", biased))
    dropping = Attention.scaled_dot().dropout(0.3)._json
    torch.library.opcheck(torch.ops.qkv.forward.default, (*x, [], torch.tensor(3), "", dropping))
    entropy = Attention.scaled_dot().with_entropy()._json
    torch.library.opcheck(torch.ops.qkv.select.default, (*x, [], None, "", entropy))
    torch.library.opcheck(torch.ops.qkv.select.default, (*x, [], None, "", Attention.scaled_dot().top_k(3)._json))


LOCAL = Attention.scaled_dot().mask(Mask.causal() & Mask.window(4, 0))


def test_compile_of_the_whole_graph_gives_the_same_bits():
    x = [r(1, 2, 9, 8) for _ in range(3)]
    bias = r(9, 9)
    biased = Attention.scaled_dot().bias(Bias.tensor())

    def f(q, k, v):
        a = Q.attention(q, k, v, LOCAL)
        b = Q.attention(a, k, v, biased, bias=bias)
        return Q.sdpa(b, k, v, is_causal=True).mul(2).sum()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    a, b = compiled(*x), f(*x)
    assert torch.equal(a, b)
    assert all(torch.equal(m, n) for m, n in zip(torch.autograd.grad(a, x), torch.autograd.grad(b, x)))


def test_compiled_dropout_draws_anew():
    x = [r(1, 2, 9, 8) for _ in range(3)]
    compiled = torch.compile(lambda *t: Q.sdpa(*t, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    first, second = compiled(*x), compiled(*x)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    a = Q.sdpa(*x, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(a, Q.sdpa(*x, dropout_p=0.5))


def test_dropout_inside_a_checkpoint_is_drawn_again_the_same():
    from torch.utils.checkpoint import checkpoint

    x = [r(1, 2, 9, 8) for _ in range(3)]
    f = lambda *t: Q.sdpa(*t, dropout_p=0.5).square().sum()
    torch.manual_seed(3)
    plain = torch.autograd.grad(f(*x), x)
    torch.manual_seed(3)
    again = torch.autograd.grad(checkpoint(f, *x, use_reentrant=False), x)
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def test_autocast_computes_in_its_type():
    x = [r(1, 2, 9, 8) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = Q.sdpa(*x)
        biased = Q.attention(*x, Attention.scaled_dot().bias(Bias.tensor()), bias=torch.randn(9, 9))
    assert out.dtype == biased.dtype == torch.bfloat16
    out.sum().backward()
    assert x[0].grad.dtype == torch.float32


def test_func_grad():
    x = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    f = lambda q, k, v: Q.sdpa(q, k, v, is_causal=True).square().sum()
    got = torch.func.grad(f, argnums=(0, 1, 2))(*x)
    y = [t.clone().requires_grad_() for t in x]
    assert all(torch.equal(a, b) for a, b in zip(got, torch.autograd.grad(f(*y), y)))


def test_vmap_over_another_batch_and_over_a_bias():
    x = [torch.randn(3, 2, 2, 9, 8) for _ in range(3)]
    got = torch.vmap(lambda q, k, v: Q.sdpa(q, k, v, is_causal=True))(*x)
    want = torch.stack([Q.sdpa(*(t[i] for t in x), is_causal=True) for i in range(3)])
    assert torch.equal(got, want)
    q, k, v = (t[0] for t in x)
    bias = torch.randn(3, 9, 9)
    got = torch.vmap(lambda b: Q.sdpa(q, k, v, attn_mask=b))(bias)
    assert torch.equal(got, torch.stack([Q.sdpa(q, k, v, attn_mask=b) for b in bias]))
    per_sample = torch.vmap(torch.func.grad(lambda q, k, v: Q.sdpa(q, k, v).square().sum()), (0, None, None))(
        x[0], k, v
    )
    assert per_sample.shape == x[0].shape


def test_gradients_of_the_log_sum_exp_alone():
    x = [r(1, 2, 5, 8) for _ in range(3)]
    Q.attend(*x).lse.sum().backward()
    want = torch.autograd.grad(torch.logsumexp(x[0] @ x[1].mT / 8**0.5, -1).sum(), x[:2])
    same(x[0].grad, want[0])
    same(x[1].grad, want[1])
    assert not x[2].grad.any()


def test_hard_attention_learns_by_reinforce():
    q, k, v = r(1, 1, 4, 8), r(1, 1, 6, 8), r(1, 1, 6, 3)
    out = Q.attend(q, k, v, Attention.scaled_dot().sample(), seed=3)
    out.extra.sum().backward()
    assert q.grad.abs().max() > 0


def test_installed_it_is_behind_pytorchs_function_and_then_not():
    x = [r(1, 2, 50, 16) for _ in range(3)]
    f = lambda **mask: F.scaled_dot_product_attention(*x, **mask)
    masks = [{}, {"is_causal": True}, {"attn_mask": torch.rand(50, 50) > 0.3}, {"attn_mask": torch.randn(1, 1, 50, 50)}]
    want = [(f(**m), torch.autograd.grad(f(**m).square().sum(), x)) for m in masks]
    Q.install()
    try:
        Q.install()
        for mask, (values, gradients) in zip(masks, want):
            got = f(**mask)
            same(got, values)
            for a, b in zip(torch.autograd.grad(got.square().sum(), x), gradients):
                same(a, b, 1e-5)
        ours = f(is_causal=True)
        assert torch.equal(ours, Q.sdpa(*x, is_causal=True))
        layer, s = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 10, 32)
        assert layer(s, s, s, need_weights=False)[0].shape == s.shape
    finally:
        Q.uninstall()
        Q.uninstall()
    gc.collect()
    assert torch.equal(f(is_causal=True), want[1][0])


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"kdim": 12, "vdim": 20}, {"add_bias_kv": True, "add_zero_attn": True}]
)
@pytest.mark.parametrize("masked", ["none", "bool", "float", "padding", "3-d"])
def test_multihead_attention_is_pytorchs_with_its_state_dict(options, masked):
    theirs = torch.nn.MultiheadAttention(16, 4, **options)
    ours = Q.MultiheadAttention(16, 4, **options)
    ours.load_state_dict(theirs.state_dict())
    flip = (lambda t: t) if options.get("batch_first") else (lambda t: t.transpose(0, 1))
    q = flip(torch.randn(2, 5, 16))
    k, v = flip(torch.randn(2, 7, options.get("kdim", 16))), flip(torch.randn(2, 7, options.get("vdim", 16)))
    hidden = torch.rand(5, 7) < 0.3
    hidden[:, 0] = False
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    masks = {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.randn(5, 7)},
        "padding": {"key_padding_mask": padding, "attn_mask": hidden},
        "3-d": {"attn_mask": torch.rand(8, 5, 7) < 0.3},
    }[masked]
    for average in (True, False):
        want, weights = theirs(q, k, v, average_attn_weights=average, **masks)
        got, found = ours(q, k, v, average_attn_weights=average, **masks)
        same(got, want)
        same(found, weights)
    g = torch.randn_like(want)
    want = torch.autograd.grad(theirs(q, k, v, need_weights=False, **masks)[0], list(theirs.parameters()), g)
    got = torch.autograd.grad(ours(q, k, v, need_weights=False, **masks)[0], list(ours.parameters()), g)
    for a, b in zip(got, want):
        same(a, b, 1e-5)


def test_multihead_attention_with_a_description_and_one_sequence():
    layer = Q.MultiheadAttention(16, 4, description=LOCAL)
    x = torch.randn(9, 16)
    out, weights = layer(x, x, x)
    assert out.shape == (9, 16) and weights.shape == (9, 9) and not weights.triu(1).any() and not weights.tril(-5).any()
    assert copy.deepcopy(layer).description == LOCAL


def test_seq2seq_modules():
    queries, keys = torch.randn(2, 3, 5), torch.randn(2, 7, 6)
    lengths = torch.tensor([7, 4])
    hidden = torch.arange(7) >= lengths[:, None, None]
    additive = Q.BahdanauAttention(5, 6, 8)
    context, lse = additive(queries, keys, lengths=lengths)
    scores = torch.tanh((queries @ additive.w_q.T)[:, :, None] + (keys @ additive.w_k.T)[:, None]) @ additive.v_score
    same(context, scores.masked_fill(hidden, -torch.inf).softmax(-1) @ keys)
    context.sum().backward()
    assert all(p.grad is not None for p in additive.parameters()) and lse.shape == (2, 3)
    general = Q.LuongAttention(5, 6)
    context, _ = general(queries, keys, lengths=lengths)
    same(context, (queries @ general.w @ keys.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ keys)
    with pytest.raises(ValueError, match="score"):
        Q.LuongAttention(5, 6, "cosine")
    torch.nn.Sequential(additive, general).load_state_dict(torch.nn.Sequential(additive, general).state_dict())


def test_bad_input_is_refused_with_a_reason():
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="`k` has shape"):
        Q.attention(x, x[..., :6], x)
    with pytest.raises(ValueError, match="expected \\[batch, heads, length, width\\]"):
        Q.attention(x[0], x[0], x[0])
    with pytest.raises(TypeError, match="expected float32"):
        Q.attention(x, x.double(), x)
    with pytest.raises(TypeError, match="int64"):
        Q.attention(*[x.long()] * 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'color'"):
        Q.attention(x, x, x, color=x)
    with pytest.raises(ValueError, match="`bias` was given"):
        Q.attention(x, x, x, bias=x[..., :4])
    with pytest.raises(ValueError, match="is_causal"):
        Q.sdpa(x, x, x, attn_mask=torch.ones(4, 4), is_causal=True)
    with pytest.raises(ValueError, match="requires a gradient"):
        Attention.scaled_dot().forward(x.clone().requires_grad_(), x, x)
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        Attention.scaled_dot().forward(*[x.to("meta")] * 3)
    with pytest.raises(ValueError, match="cpu and on meta"):
        Q.attention(x, x.to("meta"), x)
    with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError, BufferError)):
        Attention.scaled_dot().forward(x, x, x.to_sparse())
    q = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(Q.sdpa(q, x, x).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="qkv::backward|twice"):
        g.sum().backward()


def test_the_plain_interface_takes_and_returns_tensors():
    x = torch.randn(1, 2, 9, 8)
    causal = Attention.scaled_dot().mask(Mask.causal())
    out = causal.forward(x, x, x)
    assert isinstance(out.values, torch.Tensor) and torch.equal(out.values, Q.sdpa(x, x, x, is_causal=True))
    grad = causal.backward(x, x, x, out, x)
    assert isinstance(grad.k, torch.Tensor)
    assert torch.equal(Q.weights(x, x, x, causal).all().tril(), Q.weights(x, x, x, causal).all())


def test_empty_tensors_and_expanded_ones():
    empty = torch.zeros(0, 2, 5, 8)
    assert Q.sdpa(empty, empty, empty).shape == (0, 2, 5, 8)
    x = r(1, 1, 5, 8)
    wide = x.expand(3, 4, 5, 8)
    Q.sdpa(wide, wide, wide).sum().backward()
    y = x.detach().clone().requires_grad_()
    F.scaled_dot_product_attention(*[y.expand(3, 4, 5, 8)] * 3).sum().backward()
    same(x.grad, y.grad, 2e-5)


def test_values_alone_are_those_of_attend_and_so_are_their_gradients():
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    attended = Q.attend(q, k, v, Attention.scaled_dot().mask(Mask.causal())).values
    both = [
        (values, torch.autograd.grad(values.square().sum(), (q, k, v)))
        for values in (Q.sdpa(q, k, v, is_causal=True), attended)
    ]
    with torch.no_grad():
        assert torch.equal(Q.sdpa(q, k, v, is_causal=True), both[0][0])
    assert torch.equal(both[0][0], both[1][0])
    assert all(torch.equal(a, b) for a, b in zip(both[0][1], both[1][1], strict=True))


def test_the_number_of_threads_is_pytorchs():
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
