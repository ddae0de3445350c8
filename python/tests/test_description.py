"""Descriptions: operators, `repr` that evaluates, JSON both ways, equality, pickling."""

import copy
import json
import pickle

import pytest

import qkv
from qkv import Attention, Bias, Features, Mask, Place, Score, Select  # noqa: F401 (for eval)

WORDS = [
    Mask.causal() & Mask.window(256, 0),
    (Mask.causal() | Mask.lengths()) & ~(Mask.bits() & Mask.segments()),
    Mask.causal() & (Mask.strided(3) & Mask.full()) & Mask.fixed(8, 2),
    Mask.causal() | (Mask.dilated(4, 2) | Mask.longformer(8, [3, 1, 3])),
    Mask.bigbird(block=2, window=3, globals=1, random=2, seed=2**63 + 1),
    Mask.blocks(16, [[True, False], [False, True]]),
    Mask.lsh(buckets=8, rounds=2, seed=1),
    Bias.none(),
    Bias.alibi() + Bias.tensor() + Bias.relative(7),
    Score.scaled_dot(),
    Score.linear(Features.favor(64, 9)),
    Features.elu(),
    Select.soft(),
    Select.hard(sample=True, straight_through=True),
    Select.top_k(4),
    Select.sparsemax(),
    Place.start(),
    Place.end(),
    Place.offset(-3),
    Place.given(),
    Attention(),
    Attention(Score.cosine()).learned_scale(),
    Attention.scaled_dot().scale(0.1).temperature(1e-3).softcap(50.0).mask(Mask.causal()).bias(Bias.alibi()),
    Attention.additive().place(Place.end()).local(3).dropout(0.25).with_sinks().with_entropy(),
    Attention.general().sample().straight_through(),
    Attention.distance().top_k(3),
    Attention.linear(Features.relu()).mask(Mask.causal()),
]


@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_a_word_survives_repr_json_pickle_and_copy(word):
    assert eval(repr(word)) == word
    assert type(word).from_json(word.to_json()) == word
    assert pickle.loads(pickle.dumps(word)) == word and copy.deepcopy(word) == word
    assert hash(eval(repr(word))) == hash(word)
    json.loads(word.to_json())


def test_words_differ_and_are_not_equal_to_other_things():
    assert len({repr(word) for word in WORDS}) == len({hash(word) for word in WORDS}) == len(WORDS)
    assert Mask.causal() != Mask.full() and Mask.causal() != "causal"


def test_builders_leave_their_attention_alone():
    plain = Attention.scaled_dot()
    assert plain.mask(Mask.causal()) != plain and plain == Attention.scaled_dot()
    assert plain.mask(Mask.causal()).mask(Mask.window(4, 0)) == plain.mask(Mask.causal() & Mask.window(4, 0))
    assert plain.dropout(0.5).draws() and not plain.dropout(0.5).for_evaluation().draws()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Attention.scaled_dot().scale(float("nan")), "`scale` is NaN"),
        (lambda: Attention.scaled_dot().softcap(float("inf")), "`softcap` is inf"),
        (lambda: Attention.scaled_dot().straight_through(), "straight-through"),
        (lambda: Bias.relative(1) + Bias.relative(2), "one `table`"),
        (lambda: Attention.dot().bias(Bias.relative(1)).bias(Bias.relative(2)), "one `table`"),
        (lambda: Attention.from_json("{"), "EOF"),
        (lambda: Attention.from_json('{"color": 1}'), "unknown field"),
        (lambda: Mask.from_json('"purple"'), "unknown variant"),
    ],
)
def test_what_makes_no_sense_is_a_value_error(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_wrong_kinds_are_type_errors():
    for make in (
        lambda: Mask.causal() & 3,
        lambda: Attention.scaled_dot().mask("causal"),
        lambda: Mask.window(-1, 0) or 1,
    ):
        with pytest.raises((TypeError, OverflowError)):
            make()


def test_a_mask_is_not_nested_without_end():
    mask = Mask.causal()
    with pytest.raises(ValueError, match="nested"):
        for _ in range(10_000):
            mask = ~(mask & Mask.window(1, 1))
    deep = Mask.causal()
    for _ in range(56):
        deep = deep | Mask.window(1, 1)
    assert Attention.from_json(Attention.scaled_dot().mask(deep).to_json()) == Attention.scaled_dot().mask(deep)
    assert eval(repr(deep)) == deep


def test_small_functions():
    assert qkv.alibi_slopes(8)[:2] == (0.5, 0.25)
    assert qkv.segments_of([0, 2, 2, 5]).tolist() == [0, 0, 2, 2, 2]
    before = qkv.get_num_threads()
    qkv.set_num_threads(3)
    assert qkv.get_num_threads() == 3
    qkv.set_num_threads(0)
    assert qkv.get_num_threads() == before
