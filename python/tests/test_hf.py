"""`qkv.hf`: small random models of many architectures against `eager`: outputs, all gradients of a step, greedy
generation."""

import copy
import os

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (`cargo xtask python`)")
tf = pytest.importorskip(
    "transformers", minversion="5", reason="transformers 5 is not installed (`cargo xtask python`)"
)

import qkv.hf  # noqa: E402

# With `QKV_TEST_DEVICE=cuda`, the whole file runs on a GPU, where float32 sums have another order.
DEVICE = os.environ.get("QKV_TEST_DEVICE", "cpu")
LOOSER = 1.0 if DEVICE == "cpu" else 10.0


@pytest.fixture(autouse=True)
def device():
    torch.set_default_device(None if DEVICE == "cpu" else DEVICE)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_default_device(None)


def drawn(make, *arguments, seed):
    return make(*arguments, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


qkv.hf.register()
tf.logging.set_verbosity_error()

SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
)
NO_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPED = dict(num_key_value_heads=2)
BART = dict(
    vocab_size=97,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=128,
    decoder_start_token_id=2,
    **NO_TOKENS,
)
VISION = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=16,
    patch_size=4,
    num_channels=3,
)

IDS = drawn(torch.randint, 3, 97, (2, 20), seed=4)
LEFT, RIGHT = (torch.ones(2, 20, dtype=torch.long, device=DEVICE) for _ in range(2))
LEFT[1, :6], RIGHT[1, 14:] = 0, 0
PIXELS = drawn(torch.randn, 2, 3, 16, 16, seed=5)
AUDIO = drawn(torch.randn, 2, 8, 60, seed=6)

# name: (model, configuration, settings)
DECODERS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, **NO_TOKENS, "sliding_window": 8}),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    ),
    "Gemma 3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    ),
    "GPT-OSS": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, **NO_TOKENS),
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "OPT": ("OPTForCausalLM", "OPTConfig", dict(ffn_dim=48, word_embed_proj_dim=32, **NO_TOKENS)),
}
ENCODERS = {
    "BERT": ("BertModel", "BertConfig", {}),
    "RoBERTa": ("RobertaModel", "RobertaConfig", dict(pad_token_id=1)),
    "ModernBERT": (
        "ModernBertModel",
        "ModernBertConfig",
        dict(local_attention=8, global_attn_every_n_layers=2, **NO_TOKENS),
    ),
}


def both(cls, config, settings, run, training=False):
    found = []
    for implementation in ("eager", "qkv"):
        torch.manual_seed(1)
        keep = {k: v for k, v in settings.items() if v is not None}
        config_of = getattr(tf, config)(**copy.deepcopy(keep))
        model = getattr(tf, cls)._from_config(config_of, attn_implementation=implementation).to(DEVICE)
        assert model.config._attn_implementation == implementation
        found.append(run(model.train() if training else model.eval()))
    return found


def close(a, b, tolerance=2e-5):
    difference = (a - b).abs().max().item()
    assert difference < LOOSER * tolerance * max(1.0, b.abs().max().item()), difference


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def settings_of(table, name):
    cls, config, more = table[name]
    return cls, config, more if name == "GPT-2" else {**SMALL, **more}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, padding):
    given = {"none": None, "left": LEFT, "right": RIGHT}[padding]
    labels = IDS if given is None else IDS.masked_fill(given == 0, -100)
    if padding == "left":
        labels = labels.clone()
        # The first real token is predicted by a query that sees nothing.
        labels[1, 6] = -100

    def run(model):
        out = model(IDS, attention_mask=given, labels=labels, use_cache=False)
        out.loss.backward()
        seen = slice(None) if given is None else given.bool()
        return out.logits.detach()[seen], gradients(model)

    (logits, grad), (our_logits, our_grad) = both(*settings_of(DECODERS, name), run)
    close(our_logits, logits)
    close(our_grad, grad)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_generation(name, cache):
    def run(model):
        options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
        return model.generate(IDS, attention_mask=LEFT, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)

    theirs, ours = both(*settings_of(DECODERS, name), run)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name):
    def run(model):
        out = model(IDS, attention_mask=RIGHT).last_hidden_state[RIGHT.bool()]
        out.square().sum().backward()
        return out.detach(), gradients(model)

    (out, grad), (our_out, our_grad) = both(*settings_of(ENCODERS, name), run)
    close(our_out, out)
    close(our_grad, grad, 5e-5)


def seq2seq(cls, config, settings, **inputs):
    labels = IDS[:, :9].clone()

    def run(model):
        out = model(**inputs, labels=labels, use_cache=False)
        out.loss.backward()
        return out.logits.detach(), gradients(model)

    (logits, grad), (our_logits, our_grad) = both(cls, config, settings, run)
    close(our_logits, logits)
    close(our_grad, grad)
    first = next(iter(inputs))
    given = {k: v for k, v in inputs.items() if k != first}
    generate = lambda model: model.generate(inputs[first], **given, max_new_tokens=8, do_sample=False)
    theirs, ours = both(cls, config, settings, generate)
    assert torch.equal(theirs, ours)


def test_t5_with_the_gradient_of_its_position_bias():
    settings = dict(
        vocab_size=97,
        d_model=32,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        d_kv=8,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    seq2seq("T5ForConditionalGeneration", "T5Config", settings, input_ids=IDS, attention_mask=RIGHT)


def test_bart():
    seq2seq("BartForConditionalGeneration", "BartConfig", BART, input_ids=IDS, attention_mask=RIGHT)


def test_whisper():
    settings = {
        **BART,
        "num_mel_bins": 8,
        "max_source_positions": 30,
        "max_target_positions": 64,
        "suppress_tokens": None,
    }
    settings |= dict(begin_suppress_tokens=None)
    settings.pop("max_position_embeddings")
    seq2seq("WhisperForConditionalGeneration", "WhisperConfig", settings, input_features=AUDIO)


@pytest.mark.parametrize("cls, config", [("ViTModel", "ViTConfig"), ("Dinov2Model", "Dinov2Config")])
def test_vision(cls, config):
    def run(model):
        out = model(PIXELS).last_hidden_state
        out.square().sum().backward()
        return out.detach(), gradients(model)

    (out, grad), (our_out, our_grad) = both(cls, config, VISION, run)
    close(our_out, out)
    close(our_grad, grad, 5e-5)


def test_clip():
    text = {**SMALL, **NO_TOKENS}
    settings = dict(text_config=text, vision_config=VISION, projection_dim=16)

    def run(model):
        out = model(input_ids=IDS, attention_mask=RIGHT, pixel_values=PIXELS, return_loss=True)
        out.loss.backward()
        return out.logits_per_image.detach(), gradients(model)

    (logits, grad), (our_logits, our_grad) = both("CLIPModel", "CLIPConfig", settings, run)
    close(our_logits, logits)
    close(our_grad, grad)


def test_packed_sequences_by_positions_and_by_cumulative_lengths():
    settings = settings_of(DECODERS, "Llama")
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    cumulative = torch.tensor([0, 12, 20], dtype=torch.int32)
    apart = lambda model: torch.cat([model(IDS[:1, :12]).logits, model(IDS[:1, 12:]).logits], 1).detach()
    packed = lambda model: model(IDS[:1], position_ids=positions, use_cache=False).logits.detach()
    listed = lambda model: model(
        IDS[:1], position_ids=positions, use_cache=False, cu_seq_lens_q=cumulative, cu_seq_lens_k=cumulative
    ).logits.detach()
    want, ours = both(*settings, apart)
    close(ours, want)
    close(both(*settings, packed)[1], want)
    close(both(*settings, listed)[1], want)


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS", "BERT"])
def test_weights_are_those_of_eager(name):
    table = DECODERS if name in DECODERS else ENCODERS
    theirs, ours = both(*settings_of(table, name), lambda model: model(IDS, output_attentions=True).attentions)
    assert len(theirs) == len(ours) == 2
    for a, b in zip(theirs, ours):
        close(b, a[..., : b.shape[-1]])


def test_windows_and_padding_stay_linear_in_the_sequence():
    from transformers import masking_utils

    config = tf.MistralConfig(**SMALL, sliding_window=8)
    config._attn_implementation = "qkv"
    embeds = torch.zeros(2, 20, 32)
    made = lambda make, given: make(config, embeds, given, past_key_values=None)
    assert made(masking_utils.create_causal_mask, None) is None
    assert made(masking_utils.create_causal_mask, torch.ones_like(LEFT)) is None
    assert made(masking_utils.create_causal_mask, LEFT).shape == (2, 1, 1, 20)
    assert made(masking_utils.create_sliding_window_causal_mask, LEFT).shape == (2, 1, 1, 20)
    config.attention_chunk_size = 8
    assert made(masking_utils.create_chunked_causal_mask, LEFT).shape == (2, 1, 20, 20)


def test_a_window_that_a_copy_lost_is_an_error_and_not_a_wrong_answer():
    x = torch.randn(1, 2, 9, 8)
    lost = qkv.hf.mask(1, 9, 9, mask_function=None, attention_mask=None, local_size=None)
    assert lost is None
    from transformers.masking_utils import sliding_window_causal_mask_function as sliding

    made = qkv.hf.mask(1, 9, 9, mask_function=sliding(4), local_size=4)
    whole = qkv.hf.attention(torch.nn.Identity(), x, x, x, made)[0]
    copied = qkv.hf.attention(torch.nn.Identity(), x, x, x, made[:, :, :, :9], sliding_window=4)[0]
    assert torch.equal(whole, copied)
    with pytest.raises(ValueError, match="sliding window"):
        qkv.hf.attention(torch.nn.Identity(), x, x, x, made[:, :, :, :9])


def test_compiled_models_give_the_same():
    settings = settings_of(DECODERS, "Mistral")

    def run(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=False)
        return compiled(IDS, attention_mask=LEFT, use_cache=False).logits.detach()[LEFT.bool()]

    theirs, ours = both(*settings, run)
    close(ours, theirs)


def test_observers_see_every_layer():
    seen = []
    with qkv.hf.observe(
        lambda module, q, k, v, description, inputs, lse: seen.append((module.layer_idx, q.shape, lse.shape))
    ):
        both(*settings_of(DECODERS, "Llama"), lambda model: model(IDS, attention_mask=LEFT))
    assert [at for at, _, _ in seen] == [0, 1] and seen[0][1] == (2, 4, 20, 8) and seen[0][2] == (2, 4, 20)
