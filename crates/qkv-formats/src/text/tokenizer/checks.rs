//! Checks of a `tokenizer.json` before the library parses it: the number of tokens, how much rules may lengthen a text,
//! and merges of tokens outside the vocabulary, on which the library panics.

use crate::files::input;
use crate::{Error, Result};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::borrow::{Borrow, Cow};
use std::collections::HashMap;
use std::path::Path;

/// The largest number of tokens. The largest known vocabularies have 900,000; each token is a row of an embedding.
pub(super) const MAX_TOKENS: usize = 1 << 20;
/// The largest number of merges or added tokens.
const MAX_ENTRIES: usize = 1 << 21;
/// The largest factor by which the normalizer or decoder may lengthen a text. Known tokenizers stay below 128.
const MAX_GROWTH: u64 = 256;

/// The bytes of a file, if its size is plausible.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    input::read(path, input::TOKENIZER_MAX)
}

#[derive(Deserialize)]
struct FileOutline {
    model: Option<ModelOutline>,
    #[serde(default)]
    added_tokens: Count,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
}

#[derive(Deserialize)]
struct ModelOutline {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    vocab: Count,
    #[serde(default)]
    merges: Option<Count>,
}

/// The merges of a model, parsed after its sizes have been found plausible.
#[derive(Deserialize)]
struct MergesFile<'a> {
    #[serde(borrow)]
    model: Merges<'a>,
}

#[derive(Deserialize)]
struct Merges<'a> {
    continuing_subword_prefix: Option<String>,
    #[serde(borrow, default)]
    vocab: HashMap<Piece<'a>, u32>,
    #[serde(borrow, default)]
    merges: Vec<Merge<'a>>,
}

/// A piece of text, borrowed from the file unless it contains escapes, as there are hundreds of thousands.
#[derive(Deserialize, PartialEq, Eq, Hash)]
#[serde(transparent)]
struct Piece<'a>(#[serde(borrow)] Cow<'a, str>);

impl Borrow<str> for Piece<'_> {
    fn borrow(&self) -> &str {
        &self.0
    }
}

enum Merge<'a> {
    Pair(Piece<'a>, Piece<'a>),
    Line(Cow<'a, str>),
}

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MergeVisitor;

        impl<'de> Visitor<'de> for MergeVisitor {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a line or two pieces")
            }

            fn visit_borrowed_str<E>(self, line: &'de str) -> Result<Merge<'de>, E> {
                Ok(Merge::Line(line.into()))
            }

            fn visit_str<E>(self, line: &str) -> Result<Merge<'de>, E> {
                Ok(Merge::Line(line.to_owned().into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merge<'de>, A::Error> {
                let both = (list.next_element()?, list.next_element()?, list.next_element::<IgnoredAny>()?);
                match both {
                    (Some(left), Some(right), None) => Ok(Merge::Pair(left, right)),
                    _ => Err(serde::de::Error::custom("a merge has two pieces")),
                }
            }
        }

        deserializer.deserialize_any(MergeVisitor)
    }
}

/// Number of entries of a list or an object; the entries are not stored.
#[derive(Default)]
struct Count(usize);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CountVisitor;

        impl<'de> Visitor<'de> for CountVisitor {
            type Value = Count;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list or an object")
            }

            fn visit_unit<E>(self) -> Result<Count, E> {
                Ok(Count(0))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Count, A::Error> {
                let mut count = 0;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Count(count))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Count, A::Error> {
                let mut count = 0;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Count(count))
            }
        }

        deserializer.deserialize_any(CountVisitor)
    }
}

/// Checks the bytes of a file. Returns the factor by which its normalizer may lengthen a text.
///
/// # Errors
/// Names the field that is missing, too large or inconsistent.
pub(super) fn check(bytes: &[u8], path: &Path) -> Result<u64> {
    let wrong = |field: &str, what: String| Error::format(path, format!("field `{field}`"), what);
    let invalid = |e: serde_json::Error| Error::format(path, "tokenizer", format!("not valid: {e}"));
    let outline: FileOutline = serde_json::from_slice(bytes).map_err(invalid)?;
    let Some(model) = outline.model else { return Err(wrong("model", "it is missing".into())) };
    let merges = model.merges.as_ref().map_or(0, |merges| merges.0);
    for (field, found, max) in [
        ("model.vocab", model.vocab.0, MAX_TOKENS),
        ("model.merges", merges, MAX_ENTRIES),
        ("added_tokens", outline.added_tokens.0, MAX_TOKENS),
    ] {
        if found > max {
            return Err(wrong(field, format!("it has {found} entries, expected at most {max}")));
        }
    }
    let growth = growth(&outline.normalizer);
    for (field, growth) in [("normalizer", growth), ("decoder", self::growth(&outline.decoder))] {
        if growth > MAX_GROWTH {
            let what = format!("its rules may lengthen a text {growth}-fold, expected at most {MAX_GROWTH}-fold");
            return Err(wrong(field, what));
        }
    }
    if merges > 0 && model.kind.as_deref().is_none_or(|kind| kind == "BPE") {
        check_merges(bytes, path)?;
    }
    Ok(growth)
}

/// Rejects merges that involve tokens outside the vocabulary.
fn check_merges(bytes: &[u8], path: &Path) -> Result<()> {
    let wrong = |field: &str, what: String| Error::format(path, format!("field `{field}`"), what);
    let file: MergesFile<'_> = serde_json::from_slice(bytes).map_err(|e| wrong("model.vocab", e.to_string()))?;
    let Merges { continuing_subword_prefix, vocab, merges } = file.model;
    let prefix = continuing_subword_prefix.unwrap_or_default();
    let mut merged = String::new();
    for (at, merge) in merges.iter().enumerate() {
        let wrong = |what: String| wrong(&format!("model.merges[{at}]"), what);
        let (left, right) = match merge {
            Merge::Pair(left, right) => (&*left.0, &*right.0),
            Merge::Line(line) if line.starts_with("#version") => continue,
            Merge::Line(line) => line.split_once(' ').ok_or_else(|| wrong("it is not two pieces".into()))?,
        };
        let Some(rest) = right.strip_prefix(&*prefix) else {
            return Err(wrong(format!("`{right}` does not begin with `{prefix}`")));
        };
        merged.clear();
        merged.extend([left, rest]);
        for piece in [left, right, merged.as_str()] {
            if !vocab.contains_key(piece) {
                return Err(wrong(format!("`{piece}` is not in the vocabulary")));
            }
        }
    }
    Ok(())
}

/// An upper bound on the factor by which a normalizer or decoder lengthens a text in bytes; the factors of a sequence
/// multiply.
fn growth(rule: &Value) -> u64 {
    let text = |name: &str| rule.get(name).and_then(Value::as_str).unwrap_or_default().len() as u64;
    match rule.get("type").and_then(Value::as_str).unwrap_or_default() {
        "Sequence" => {
            let rules = ["normalizers", "decoders"].iter().find_map(|name| rule.get(name)?.as_array());
            rules.into_iter().flatten().map(growth).fold(1, u64::saturating_mul)
        }
        "Replace" => {
            let content = text("content");
            match rule.pointer("/pattern/String").and_then(Value::as_str).map_or(0, str::len) as u64 {
                // A regular expression may match every byte and also between any two.
                0 => content.saturating_mul(2).max(1),
                pattern => content.div_ceil(pattern).max(1),
            }
        }
        // Decomposition: U+FDFA has 3 bytes, and 33 when decomposed.
        "NFKC" | "NFKD" => 11,
        "NFC" | "NFD" | "Lowercase" | "BertNormalizer" => 3,
        "Precompiled" => 11,
        "ByteLevel" => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str) -> String {
        check(json.as_bytes(), Path::new("t.json")).unwrap_err().to_string()
    }

    #[test]
    fn rules_that_lengthen_a_text_beyond_measure_are_refused() {
        let a = "a".repeat(1000);
        let rule = format!(r#"{{"type":"Replace","pattern":{{"String":"a"}},"content":"{a}"}}"#);
        let nested = [rule.as_str(); 5].join(",");
        let file = |field: &str, list: &str, rules: &str| {
            format!(r#"{{"model":{{"vocab":{{}}}},"{field}":{{"type":"Sequence","{list}":[{rules}]}}}}"#)
        };
        for (field, list) in [("normalizer", "normalizers"), ("decoder", "decoders")] {
            let what = refused(&file(field, list, &nested));
            assert!(what.starts_with(&format!("`t.json`: field `{field}`: its rules may lengthen a text")), "{what}");
        }
        let regex = r#"{"type":"Replace","pattern":{"Regex":"x*"},"content":"yyyyyyyyyyyyyyyyyyyy"}"#;
        assert!(refused(&file("normalizer", "normalizers", &[regex; 2].join(","))).contains("1600-fold"));
        // From Llama, T5 and XLM-R.
        let space = r#"{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}"#;
        let runs = r#"{"type":"Precompiled"},{"type":"Replace","pattern":{"Regex":" {2,}"},"content":"▁"}"#;
        for known in [space, runs, r#"{"type":"NFKC"},{"type":"Lowercase"}"#] {
            assert!(check(file("normalizer", "normalizers", known).as_bytes(), Path::new("t.json")).is_ok(), "{known}");
        }
    }

    #[test]
    fn a_vocabulary_of_millions_is_refused_before_it_is_built() {
        let entries: Vec<String> = (0..1_500_000).map(|at| format!("\"t{at}\":{at}")).collect();
        let start = std::time::Instant::now();
        let what = refused(&format!(r#"{{"model":{{"type":"WordLevel","vocab":{{{}}}}}}}"#, entries.join(",")));
        assert_eq!(what, "`t.json`: field `model.vocab`: it has 1500000 entries, expected at most 1048576");
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    }
}
