//! Promises of a tokenizer: text survives the round trip, Han characters stay single, training is a function of its
//! texts, and a file that is not a tokenizer is refused by name.

use proptest::prelude::*;
use qkv_formats::text::tokenizer::{Kind, Tokenizer};
use std::sync::LazyLock;

/// A little of everything found in a corpus.
const TEXTS: [&str; 12] = [
    "好久不见，你好吗？",
    "我很好，谢谢你。今天是2026年11月15日。",
    "你买了iPhone手机吗？",
    "Long time no see. How are you?",
    "I'm fine, thank you. I don't know what you're talking about.",
    "It costs $12.50, or 11 euros, doesn't it?",
    "She said, \"We'll be there at 7:30.\"",
    "Wir haben uns lange nicht gesehen; schöne Grüße an alle Ärzte.",
    "The quick brown fox jumps over the lazy dog.",
    "The dog is lazy, the fox is quick, and the long day is long.",
    "谢谢你的帮助，你的朋友很好。",
    "“Where are you?” — he asked… twice!",
];

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| train(600));

fn train(size: usize) -> Tokenizer {
    Tokenizer::train(TEXTS.iter().chain(&TEXTS), Kind::Bpe { size }).expect("it trains")
}

fn words(text: &str) -> Vec<String> {
    TOKENIZER.pieces(&TOKENIZER.encode(text)).into_iter().map(|piece| piece.text).collect()
}

#[test]
fn text_of_the_corpus_comes_back() {
    for text in TEXTS {
        assert_eq!(TOKENIZER.decode(&TOKENIZER.encode(text)), text);
    }
}

#[test]
fn every_han_character_and_its_punctuation_is_a_piece() {
    assert_eq!(words("你好吗？谢谢你。"), ["你", "好", "吗", "？", "谢", "谢", "你", "。"]);
    assert_eq!(TOKENIZER.encode("你")[..], TOKENIZER.encode("我你")[1..], "it is the same piece first and later");
}

#[test]
fn a_contraction_and_the_digits_of_a_number_are_pieces() {
    let pieces = TOKENIZER.pieces(&TOKENIZER.encode("don't, 2026"));
    let shown: String = pieces.iter().map(|p| format!("{}{}", if p.begins_word { "|" } else { "·" }, p.text)).collect();
    assert!(shown.ends_with("·'t|,|·2·0·2·6") || shown.ends_with("·'t|,|2·0·2·6"), "{shown}");
}

#[test]
fn the_same_texts_give_the_same_file() {
    let files: Vec<String> = (0..4).map(|_| train(600).to_json()).collect();
    assert!(files.windows(2).all(|two| two[0] == two[1]));
    let again = Tokenizer::from_bytes(files[0].as_bytes(), "t.json").expect("it reads");
    assert_eq!(again.to_json(), files[0]);
}

#[test]
fn special_tokens_have_the_first_numbers_and_are_text_in_text() {
    let t = &*TOKENIZER;
    assert_eq!([t.pad(), t.bos(), t.eos(), t.unk().expect("it has one")], [0, 1, 2, 3]);
    let ids = t.encode("a </s> b <pad>");
    assert!(ids.iter().all(|&id| id > 3));
    assert_eq!(t.decode(&ids), "a </s> b <pad>");
    assert_eq!(t.decode(&[1, ids[0], 2, 0, 0]), "a");
}

#[test]
fn a_vocabulary_is_no_larger_than_asked_and_has_no_gaps() {
    for size in [270, 300, 400] {
        let t = train(size);
        assert!(t.len() <= size, "{} of {size}", t.len());
        assert_eq!(t.decode(&t.encode(TEXTS[1])), TEXTS[1], "what has no piece is spelled in bytes");
        assert!((0..t.len() as u32).all(|id| !t.pieces(&[id]).is_empty()));
    }
    let error = Tokenizer::train(TEXTS, Kind::Bpe { size: 100 }).expect_err("too small");
    assert_eq!(error.hint().as_deref(), Some("use at least `261`, some thousands for a language"));
}

#[test]
fn characters_are_pieces_and_others_are_unknown() {
    let t = Tokenizer::train(["3 1 2", "一"], Kind::Characters).expect("it trains");
    assert_eq!(t.len(), 4 + 5);
    let ids = t.encode("1 一 3");
    assert_eq!((ids.len(), t.decode(&ids).as_str()), (5, "1 一 3"));
    assert_eq!(t.encode("x"), [t.unk().expect("it has one")]);
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused_by_name() {
    let refused = |json: &str| Tokenizer::from_bytes(json.as_bytes(), "t.json").expect_err(json).to_string();
    assert!(refused("").starts_with("`t.json`: tokenizer: not valid: EOF"));
    assert_eq!(refused("{\"version\":\"1.0\"}"), "`t.json`: field `model`: it is missing");
    let model = |model: &str| format!("{{\"version\":\"1.0\",\"model\":{model}}}");
    // Unchecked, each of these makes the library that reads the file panic, or worse.
    let merges = model(r#"{"type":"BPE","vocab":{"abc":0},"merges":[["abc","abc"]]}"#);
    assert_eq!(refused(&merges), "`t.json`: field `model.merges[0]`: `abcabc` is not in the vocabulary");
    let prefix = model(r#"{"type":"BPE","continuing_subword_prefix":"@@@@","vocab":{"a":0,"b":1},"merges":["a b"]}"#);
    assert_eq!(refused(&prefix), "`t.json`: field `model.merges[0]`: `b` does not begin with `@@@@`");
    let far = model(r#"{"type":"BPE","vocab":{"</s>":0,"a":4294967295},"merges":[]}"#);
    assert_eq!(refused(&far), "`t.json`: tokenizer: a token has number 4294967295, expected less than 1048576");
    let endless = model(r#"{"type":"BPE","vocab":{"a":0},"merges":[]}"#);
    assert_eq!(refused(&endless), "`t.json`: tokenizer: it has no token that ends a sentence");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_comes_back_in_its_normal_form(text in "\\PC{0,40}") {
        let normal = TOKENIZER.normalise(&text);
        prop_assert_eq!(TOKENIZER.decode(&TOKENIZER.encode(&text)), normal.clone());
        prop_assert_eq!(TOKENIZER.normalise(&normal), normal);
    }

    #[test]
    fn any_numbers_decode_without_a_panic(ids in proptest::collection::vec(0u32..700, 0..20)) {
        TOKENIZER.decode(&ids);
        prop_assert_eq!(TOKENIZER.pieces(&ids).len(), ids.len());
    }

    #[test]
    fn a_file_with_other_bytes_in_it_is_read_or_refused(
        at in any::<prop::sample::Index>(), bytes in prop::collection::vec(any::<u8>(), 0..4), cut in any::<bool>(),
    ) {
        let mut file = SMALL.clone().into_bytes();
        let at = at.index(file.len());
        if cut { file.truncate(at) }
        let end = (at + bytes.len()).min(file.len());
        file.splice(at.min(end)..end, bytes);
        if let Ok(t) = Tokenizer::from_bytes(&file, "t.json") {
            t.decode(&t.encode("a dog, 你好"));
        }
    }
}

/// A file small enough to corrupt at every position.
static SMALL: LazyLock<String> = LazyLock::new(|| train(270).to_json());
