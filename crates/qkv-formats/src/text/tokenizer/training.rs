//! Training of tokenizers, and how each kind splits text.
//!
//! **Byte-pair encoding** ([`Kind::Bpe`]), for language:
//! - Text is normalized to NFC, which does not change punctuation (NFKC would turn `？` into `?` and `…` into `...`, and
//!   a translation would differ from its reference). Control characters are removed, runs of white space become one
//!   space.
//! - Every Han character and every Chinese or Japanese punctuation mark is a word, which gains 1.5 BLEU from Chinese
//!   over letting them merge. So is every digit, and every other punctuation mark with the space before it. English
//!   contractions (`'t`, `'s`) stay whole. Merges never cross word boundaries.
//! - A word includes the space before it (`▁`), so that decoding is exact; the first word of a text has one too, unless
//!   it is Han.
//! - Characters that occur only once in the corpus, or never, are spelled in bytes (`<0xE4>`): no text is unknown, and
//!   rare characters train the byte tokens.
//!
//! **Words** ([`Kind::Words`]), for models with word embeddings: lower case, split at white space; punctuation marks,
//! Han characters and English contractions are words. Words that occur only once or do not fit into the vocabulary are
//! unknown.
//!
//! **Characters** ([`Kind::Characters`]), for the synthetic tasks: every character, spaces included, is a token;
//! characters that the texts do not contain are unknown.

use super::SPECIALS;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::{AddedToken, OffsetReferential, OffsetType, PreTokenizedString, Trainer};
use tokenizers::{NormalizedString, Normalizer, PreTokenizer};

/// Han characters, Chinese and Japanese punctuation, and full-width forms, as the inside of a character class.
const IDEOGRAPHS: &str = r"\p{Han}、-〿＀-￯";
/// Characters that occur less often are spelled in bytes.
const RARE: u64 = 2;
/// Ids for bytes.
const BYTES: usize = 256;

/// The kind of a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Kind {
    /// Byte-pair encoding.
    Bpe {
        /// Largest vocabulary size, special tokens and bytes included.
        size: usize,
    },
    /// Whole words, the most frequent ones.
    Words {
        /// Largest vocabulary size, special tokens included.
        size: usize,
    },
    /// Single characters.
    Characters,
}

/// The `tokenizer.json` of a tokenizer trained on these texts.
pub(super) fn train<S: AsRef<str>>(texts: impl IntoIterator<Item = S>, kind: Kind) -> Result<String> {
    let file = match kind {
        Kind::Bpe { size } => byte_pairs(texts, size)?,
        Kind::Words { size } => whole_words(texts, size)?,
        Kind::Characters => characters(texts)?,
    };
    Ok(file.to_string())
}

/// A `tokenizer.json` with its normalizer, pre-tokenizer and decoder.
fn file(normaliser: Value, cutting: Value, decoder: Value, model: Value) -> Value {
    let specials: Vec<Value> = SPECIALS
        .iter()
        .enumerate()
        .map(|(id, name)| {
            json!({ "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        })
        .collect();
    json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": specials, "normalizer": normaliser,
            "pre_tokenizer": cutting, "post_processor": null, "decoder": decoder, "model": model })
}

fn replace(pattern: &str, by: &str) -> Value {
    json!({ "type": "Replace", "pattern": { "Regex": pattern }, "content": by })
}

fn byte_pairs<S: AsRef<str>>(texts: impl IntoIterator<Item = S>, size: usize) -> Result<Value> {
    let least = SPECIALS.len() + BYTES + 1;
    if size < least {
        return Err(Error::invalid(format!(
            "a vocabulary of {size} pieces has no room beside special tokens and bytes"
        ))
        .with_hint(format!("use at least `{least}`, some thousands for a language")));
    }
    let normaliser = json!({ "type": "Sequence", "normalizers": [
        replace(r"[\s▁]+", " "),
        replace(r"[\p{Cc}\x{200B}\x{FEFF}]", ""),
        { "type": "NFC" },
        { "type": "Strip", "strip_left": true, "strip_right": true },
        { "type": "Prepend", "prepend": " " },
        replace(&format!("^ (?=[{IDEOGRAPHS}])"), ""),
    ] });
    let signs = format!(r"['’](?:s|t|re|ve|m|ll|d)\b|[{IDEOGRAPHS}]| ?[\p{{P}}\p{{S}}\p{{N}}&&[^{IDEOGRAPHS}]]");
    let cutting = json!({ "type": "Sequence", "pretokenizers": [
        { "type": "Split", "pattern": { "Regex": signs }, "behavior": "Isolated", "invert": false },
        { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true },
    ] });
    let decoder = json!({ "type": "Sequence", "decoders": [
        { "type": "ByteFallback" },
        { "type": "Fuse" },
        { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
        { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
    ] });
    let mut file = file(normaliser, cutting, decoder, json!({ "type": "BPE", "vocab": {}, "merges": [] }));
    let words = words(&file, texts)?;

    let mut letters: BTreeMap<char, u64> = BTreeMap::new();
    for (word, count) in &words {
        word.chars().for_each(|c| *letters.entry(c).or_default() += count);
    }
    let mut letters: Vec<(char, u64)> = letters.into_iter().filter(|&(_, count)| count >= RARE).collect();
    letters.sort_by_key(|&(c, count)| (std::cmp::Reverse(count), c));
    letters.truncate(size - least);
    let letters: HashSet<char> = letters.into_iter().map(|(c, _)| c).collect();

    // A word is split at characters spelled in bytes, so that their neighbors do not merge.
    let mut known: BTreeMap<&str, u64> = BTreeMap::new();
    for (word, count) in &words {
        for part in word.split(|c| !letters.contains(&c)).filter(|part| !part.is_empty()) {
            *known.entry(part).or_default() += count;
        }
    }
    file["model"] = merged(&known, letters, size)?;
    Ok(file)
}

/// The pre-tokenized words of the texts with their counts.
fn words<S: AsRef<str>>(file: &Value, texts: impl IntoIterator<Item = S>) -> Result<BTreeMap<String, u64>> {
    let broken = |e: Box<dyn std::error::Error + Send + Sync>| Error::invalid(format!("the text cannot be cut: {e}"));
    let empty = file.to_string().parse::<tokenizers::Tokenizer>().map_err(broken)?;
    let mut words: BTreeMap<String, u64> = BTreeMap::new();
    for text in texts {
        let mut normalised = NormalizedString::from(text.as_ref());
        empty.get_normalizer().map_or(Ok(()), |n| n.normalize(&mut normalised)).map_err(broken)?;
        let mut cut = PreTokenizedString::from(normalised);
        empty.get_pre_tokenizer().map_or(Ok(()), |p| p.pre_tokenize(&mut cut)).map_err(broken)?;
        for (word, _, _) in cut.get_splits(OffsetReferential::Normalized, OffsetType::Byte) {
            match words.get_mut(word) {
                Some(count) => *count += 1,
                None => drop(words.insert(word.to_owned(), 1)),
            }
        }
    }
    Ok(words)
}

/// The BPE model: special tokens, bytes, characters, then merges up to `size` tokens.
fn merged(words: &BTreeMap<&str, u64>, letters: HashSet<char>, size: usize) -> Result<Value> {
    let broken = |e: Box<dyn std::error::Error + Send + Sync>| Error::invalid(format!("no vocabulary was found: {e}"));
    let first = SPECIALS.iter().map(|name| name.to_string()).chain((0..BYTES).map(|b| format!("<{b:#04X}>")));
    let mut trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(size)
        .min_frequency(2)
        .limit_alphabet(letters.len())
        .initial_alphabet(letters)
        .special_tokens(first.map(|name| AddedToken::from(name, true)).collect())
        .build();
    // The trainer counts words itself, so each is fed as often as it occurs.
    let often = words.iter().flat_map(|(word, &count)| std::iter::repeat_n(*word, count as usize));
    trainer.feed(often, |word| Ok(vec![word.to_owned()])).map_err(broken)?;
    let mut model = BPE::builder().unk_token(SPECIALS[3].into()).byte_fallback(true).build().map_err(broken)?;
    trainer.train(&mut model).map_err(broken)?;
    serde_json::to_value(&model).map_err(|e| Error::invalid(format!("the vocabulary cannot be written: {e}")))
}

fn whole_words<S: AsRef<str>>(texts: impl IntoIterator<Item = S>, size: usize) -> Result<Value> {
    if size <= SPECIALS.len() {
        return Err(Error::invalid(format!("a vocabulary of {size} words has no room beside special tokens"))
            .with_hint("use some thousands"));
    }
    let normaliser = json!({ "type": "Sequence", "normalizers": [
        replace(r"[\p{Cc}\x{200B}\x{FEFF}&&[^\s]]", ""),
        { "type": "NFC" },
        { "type": "Lowercase" },
    ] });
    let signs = format!(r"['’](?:s|t|re|ve|m|ll|d)\b|[{IDEOGRAPHS}]|[\p{{P}}\p{{S}}&&[^{IDEOGRAPHS}]]");
    let cutting = json!({ "type": "Sequence", "pretokenizers": [
        { "type": "WhitespaceSplit" },
        { "type": "Split", "pattern": { "Regex": signs }, "behavior": "Isolated", "invert": false },
    ] });
    let model = |vocabulary: &serde_json::Map<String, Value>| json!({ "type": "WordLevel", "vocab": vocabulary, "unk_token": SPECIALS[3] });
    let mut vocabulary: serde_json::Map<String, Value> =
        SPECIALS.iter().enumerate().map(|(id, name)| (name.to_string(), json!(id))).collect();
    let mut file = file(normaliser, cutting, Value::Null, model(&vocabulary));
    let mut words: Vec<(String, u64)> = words(&file, texts)?.into_iter().filter(|&(_, count)| count >= RARE).collect();
    words.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    words.truncate(size - SPECIALS.len());
    for (word, _) in words {
        let id = vocabulary.len();
        vocabulary.entry(word).or_insert(json!(id));
    }
    file["model"] = model(&vocabulary);
    Ok(file)
}

fn characters<S: AsRef<str>>(texts: impl IntoIterator<Item = S>) -> Result<Value> {
    let mut letters = std::collections::BTreeSet::new();
    for text in texts {
        let mut text = NormalizedString::from(text.as_ref());
        letters.extend(text.nfc().get().chars());
    }
    let names = SPECIALS.iter().map(|name| name.to_string()).chain(letters.iter().map(|c| c.to_string()));
    let vocabulary: serde_json::Map<String, Value> = names.enumerate().map(|(id, name)| (name, json!(id))).collect();
    let model = json!({ "type": "BPE", "unk_token": SPECIALS[3], "vocab": vocabulary, "merges": [] });
    Ok(file(json!({ "type": "NFC" }), Value::Null, json!({ "type": "Fuse" }), model))
}
