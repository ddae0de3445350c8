//! The tokenizer of a GGUF file, as the `tokenizer.json` that it was made from: GPT's byte-level BPE, or
//! SentencePiece's BPE (Kudo and Richardson 2018, arXiv:1808.06226), as in Llama and Gemma.

use crate::files::gguf::{Gguf, MetadataValue};
use crate::{Error, Result};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Types of tokens.
const UNKNOWN: f64 = 2.0;
const CONTROL: f64 = 3.0;
const ADDED: f64 = 4.0;
const BYTE: f64 = 6.0;

/// SentencePiece's mark for a space.
const SPACE: &str = "▁";

/// How Qwen2 splits text: contractions, words, single digits, punctuation, line ends, spaces.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// A `tokenizer.json`. It is serialized from this struct, as a [`Value`] would copy the hundreds of thousands of
/// entries of vocabulary and merges.
#[derive(Serialize)]
struct TokenizerFile<'a, M> {
    version: &'static str,
    added_tokens: Vec<Value>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: BpeModel<'a, M>,
}

#[derive(Serialize)]
struct BpeModel<'a, M> {
    #[serde(rename = "type")]
    kind: &'static str,
    unk_token: Option<&'a str>,
    fuse_unk: bool,
    byte_fallback: bool,
    vocab: TokenNumbers<'a>,
    merges: M,
}

/// The tokens as a map to their numbers.
struct TokenNumbers<'a>(&'a [String]);

impl Serialize for TokenNumbers<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().enumerate().map(|(id, token)| (token, id)))
    }
}

impl<M: Serialize> TokenizerFile<'_, M> {
    fn text(&self) -> String {
        serde_json::to_string(self).expect("strings and numbers")
    }
}

/// The tokens of a file with their types.
struct GgufTokens<'a> {
    file: &'a Gguf,
    tokens: &'a [String],
    /// Empty if all are of the normal type.
    kinds: &'a [f64],
    numbers: HashMap<&'a str, usize>,
}

fn wrong(file: &Gguf, name: &str, what: impl Into<String>) -> Error {
    Error::format(file.path(), format!("value `{name}`"), what)
}

/// The `tokenizer.json` of a file.
pub(super) fn json(file: &Gguf) -> Result<String> {
    let tokens = GgufTokens::of(file)?;
    let name = "tokenizer.ggml.model";
    match file.text(name)? {
        "gpt2" => tokens.bytes(),
        "llama" => tokens.sentence_pieces(),
        kind => Err(wrong(file, name, format!("it is `{kind}`, expected `gpt2` or `llama`"))),
    }
}

impl<'a> GgufTokens<'a> {
    fn of(file: &'a Gguf) -> Result<Self> {
        let tokens = file.texts("tokenizer.ggml.tokens")?;
        let kinds = numbers(file, "tokenizer.ggml.token_type", tokens.len())?.unwrap_or_default();
        let mut numbers = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if numbers.insert(token.as_str(), id).is_some() {
                return Err(wrong(file, "tokenizer.ggml.tokens", format!("`{token}` is there twice")));
            }
        }
        Ok(GgufTokens { file, tokens, kinds, numbers })
    }

    /// The first token of a type.
    fn first(&self, kind: f64) -> Option<&str> {
        self.kinds.iter().position(|&found| found == kind).map(|id| self.tokens[id].as_str())
    }

    /// Tokens that are matched before a text is split: control tokens and user-defined ones.
    fn added(&self) -> Vec<Value> {
        let added = self.tokens.iter().zip(self.kinds).enumerate();
        let added = added.filter(|(_, (_, kind))| [CONTROL, ADDED].contains(kind));
        let entry = |(id, (token, &kind)): (usize, (&String, &f64))| {
            json!({ "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind == CONTROL })
        };
        added.map(entry).collect()
    }

    /// The post-processor that puts the start token before a text, if the file asks for one.
    fn post_processor(&self) -> Result<Value> {
        if !flag(self.file, "tokenizer.ggml.add_bos_token", false)? {
            return Ok(Value::Null);
        }
        let name = "tokenizer.ggml.bos_token_id";
        let id = self.file.whole(name)?;
        let Some(start) = self.tokens.get(id) else {
            return Err(wrong(self.file, name, format!("{id} of {} tokens", self.tokens.len())));
        };
        let special = json!({ "SpecialToken": { "id": start, "type_id": 0 } });
        let text = |id: &str, kind: u32| json!({ "Sequence": { "id": id, "type_id": kind } });
        Ok(json!({ "type": "TemplateProcessing", "single": [&special, text("A", 0)],
            "pair": [&special, text("A", 0), text("B", 1)],
            "special_tokens": { start: { "id": start, "ids": [id], "tokens": [start] } } }))
    }

    /// A byte-level BPE.
    fn bytes(&self) -> Result<String> {
        let (file, name) = (self.file, "tokenizer.ggml.pre");
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        let cut = if file.values().contains_key(name) { file.text(name)? } else { "default" };
        let qwen = cut == "qwen2";
        let cutting = match cut {
            "default" | "gpt-2" => bytes.clone(),
            "smollm" => json!({ "type": "Sequence",
                "pretokenizers": [{ "type": "Digits", "individual_digits": true }, bytes] }),
            "qwen2" => json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": QWEN2 }, "behavior": "Isolated", "invert": false },
                { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false }] }),
            other => return Err(wrong(file, name, format!("text cut as `{other}` is not supported"))),
        };
        let normalizer = if qwen { json!({ "type": "NFC" }) } else { json!(null) };
        let merges = file.texts("tokenizer.ggml.merges")?;
        let vocab = TokenNumbers(self.tokens);
        let model = BpeModel { kind: "BPE", unk_token: None, fuse_unk: false, byte_fallback: false, vocab, merges };
        self.file_with(model, [normalizer, cutting, bytes])
    }

    /// SentencePiece's BPE: spaces are marked, and characters outside the vocabulary are spelled in bytes.
    fn sentence_pieces(&self) -> Result<String> {
        let prefix = flag(self.file, "tokenizer.ggml.add_space_prefix", true)?;
        let marked = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
        let normalizer = match prefix {
            true => json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": SPACE }, marked] }),
            false => marked,
        };
        // Splits nothing, as no space is left; its presence keeps lines from being tokenized one by one.
        let cutting = json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious",
            "invert": false });
        let mut decoders = vec![
            json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if prefix {
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        let name = "tokenizer.ggml.unknown_token_id";
        let unknown = match self.file.values().contains_key(name) {
            true => {
                let id = self.file.whole(name)?;
                let beyond = || wrong(self.file, name, format!("{id} of {} tokens", self.tokens.len()));
                Some(self.tokens.get(id).ok_or_else(beyond)?.as_str())
            }
            false => self.first(UNKNOWN),
        };
        let model = BpeModel {
            kind: "BPE",
            unk_token: unknown,
            fuse_unk: true,
            byte_fallback: self.first(BYTE).is_some(),
            vocab: TokenNumbers(self.tokens),
            merges: self.merges()?,
        };
        self.file_with(model, [normalizer, cutting, json!({ "type": "Sequence", "decoders": decoders })])
    }

    /// The file of a model with its normalizer, pre-tokenizer and decoder.
    fn file_with<M: Serialize>(
        &self,
        model: BpeModel<'_, M>,
        [normalizer, pre_tokenizer, decoder]: [Value; 3],
    ) -> Result<String> {
        let (added_tokens, post_processor) = (self.added(), self.post_processor()?);
        let version = "1.0";
        let file = TokenizerFile { version, added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model };
        Ok(file.text())
    }

    /// Merges in the order of their rank. SentencePiece merges the neighbors whose union has the highest score, so
    /// every split of a token into two tokens is a merge with the token's score.
    fn merges(&self) -> Result<Vec<[&str; 2]>> {
        let name = "tokenizer.ggml.scores";
        let Some(scores) = numbers(self.file, name, self.tokens.len())? else {
            return Err(wrong(self.file, name, "it is missing"));
        };
        let is_special = |id: usize| self.kinds.get(id).is_some_and(|kind| [UNKNOWN, CONTROL, BYTE].contains(kind));
        let mut merges: Vec<(f64, [&str; 2])> = Vec::new();
        for (id, token) in self.tokens.iter().enumerate().filter(|(id, _)| !is_special(*id)) {
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if self.numbers.contains_key(left) && self.numbers.contains_key(right) {
                    merges.push((scores[id], [left, right]));
                }
            }
        }
        // Among the merges of one token, the one with the longer left part comes first.
        let letters = |[left, _]: &[&str; 2]| left.chars().count();
        merges.sort_by(|(a, x), (b, y)| b.total_cmp(a).then_with(|| letters(y).cmp(&letters(x))));
        Ok(merges.into_iter().map(|(_, pair)| pair).collect())
    }
}

/// A list of numbers, one for each token; `None` if the file has no such list.
fn numbers<'a>(file: &'a Gguf, name: &str, count: usize) -> Result<Option<&'a [f64]>> {
    match file.values().get(name) {
        Some(MetadataValue::Numbers(numbers)) if numbers.len() == count => Ok(Some(numbers)),
        None => Ok(None),
        Some(_) => Err(wrong(file, name, "expected a number for each token")),
    }
}

/// A flag with a default.
fn flag(file: &Gguf, name: &str, other: bool) -> Result<bool> {
    match file.values().get(name) {
        Some(&MetadataValue::Bool(flag)) => Ok(flag),
        None => Ok(other),
        Some(_) => Err(wrong(file, name, "it is not `true` or `false`")),
    }
}
