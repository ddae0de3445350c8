"""`qkv.show` and `qkv.explore`."""

import json
import struct
import xml.etree.ElementTree as xml

import numpy as np
import pytest

import qkv
from qkv import Attention, Mask

CAUSAL = Attention.scaled_dot().mask(Mask.causal())


def weights(n):
    x = np.random.default_rng(1).normal(size=(1, 2, n, 8)).astype(np.float32)
    return CAUSAL.weights(x, x, x, CAUSAL.forward(x, x, x))


def test_a_picture_is_svg_with_the_names_of_tokens():
    words = ["the", "cat", "<sat>", "&", "here"]
    picture = qkv.show(weights(5), head=1, queries=words)
    assert xml.fromstring(picture._repr_svg_()).tag.endswith("svg")
    assert "&lt;sat&gt;" in picture.svg and np.array_equal(picture.cells, weights(5).rectangle(0, 1))


def test_large_weights_are_pooled_the_same_from_weights_and_arrays(tmp_path):
    large = weights(1000)
    assert large.shape == (1, 2, 1000, 1000)
    one, other = qkv.show(large), qkv.show(large.all())
    assert one.cells.shape == (128, 128)
    assert np.array_equal(one.cells, other.cells)
    one.save(str(tmp_path / "a.svg"))
    xml.parse(tmp_path / "a.svg")
    with pytest.raises(ValueError, match="axes"):
        qkv.show(np.zeros(3))


def test_a_recording_of_a_hugging_face_model(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (`cargo xtask python`)")
    tf = pytest.importorskip(
        "transformers", minversion="5", reason="transformers 5 is not installed (`cargo xtask python`)"
    )
    config = tf.MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    model = tf.MistralForCausalLM._from_config(config, attn_implementation="sdpa")
    ids = torch.randint(3, 97, (1, 20))
    path = tmp_path / "recording.safetensors"
    recording = qkv.explore(model, input_ids=ids, path=str(path))
    assert model.config._attn_implementation == "sdpa" and len(recording.layers) == 2
    model.set_attn_implementation("eager")
    for layer, eager in enumerate(model(ids, output_attentions=True).attentions):
        np.testing.assert_allclose(recording.weights(layer).all(), eager.detach().numpy(), atol=2e-6)
    assert qkv.show(recording, layer=1, head=3).cells.shape == (20, 20)
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    inside = json.loads(header["__metadata__"]["recording"])
    assert [layer["name"] for layer in inside["layers"]] == ["layer 0", "layer 1"]
    assert header["layers.1.lse"]["shape"] == [1, 4, 20]
    with pytest.raises(ValueError, match="tokenizer"):
        qkv.explore(model, "text")
