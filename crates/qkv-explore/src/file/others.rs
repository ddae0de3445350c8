//! Files of other programs: queries and keys, or weights, found by their names.

use super::header::File;
use super::{OpenOptions, with_lse};
use crate::layer::{AttentionCall, Layer, WeightSource};
use crate::recording::{Recording, Side};
use qkv::{Attention, OwnedInputs, Tensor};
use qkv_models::{Error, Result};

pub(super) fn read(file: &mut File, options: &OpenOptions) -> Result<Recording> {
    let mut prefixes: Vec<String> = file
        .names()
        .filter_map(|name| name.strip_suffix("weights").or_else(|| name.strip_suffix('q')))
        .filter(|prefix| prefix.is_empty() || prefix.ends_with(['.', '/']))
        .map(str::to_owned)
        .collect();
    prefixes.sort_by_key(|prefix| natural(prefix));
    prefixes.dedup();
    if prefixes.is_empty() {
        let names: Vec<&str> = file.names().take(8).collect();
        return Err(file.wrong("header", format!("it has neither `q` and `k` nor `weights`, only {names:?}")));
    }
    let attention = attention(file, options)?;
    let mut sides: Vec<Side> = Vec::new();
    let mut layers = Vec::new();
    for prefix in prefixes {
        let weights = match file.has(&format!("{prefix}weights")) {
            true => WeightSource::Stored(file.three(&format!("{prefix}weights"), options.sequence)?),
            false => WeightSource::Call(Box::new(call(file, &prefix, attention.clone(), options)?)),
        };
        let name = prefix.trim_end_matches(['.', '/']);
        let name = if name.is_empty() { "attention".to_owned() } else { name.to_owned() };
        let mut layer = Layer { name, group: "layers".into(), queries: 0, keys: 0, weights, importance: None };
        let [n, m] = layer.size();
        layer.queries = side(file, options, &mut sides, "query_tokens", n)?;
        layer.keys = side(file, options, &mut sides, "key_tokens", m)?;
        layers.push(layer);
    }
    Ok(Recording { text: String::new(), output: None, sides, layers, steps: Vec::new(), form: None })
}

fn attention(file: &File, options: &OpenOptions) -> Result<Attention> {
    match (&options.attention, file.metadata("attention")) {
        (_, Some(json)) => serde_json::from_str(&json).map_err(|e| file.wrong("metadata `attention`", e.to_string())),
        (Some(attention), None) => Ok(attention.clone()),
        (None, None) => Ok(Attention::scaled_dot()),
    }
}

fn call(file: &mut File, prefix: &str, attention: Attention, options: &OpenOptions) -> Result<AttentionCall> {
    let name = |part: &str| format!("{prefix}{part}");
    let q = file.four(&name("q"), options.sequence)?;
    let k = file.four(&name("k"), options.sequence)?;
    let v = match file.has(&name("v")) {
        true => file.four(&name("v"), options.sequence)?,
        false => {
            let [b, heads, m, _] = k.shape();
            Tensor::new(Vec::new(), [b, heads, m, 0])?
        }
    };
    let lse = match file.has(&name("lse")) {
        true => Some(file.rows(&name("lse"), options.sequence)?),
        false => None,
    };
    with_lse(file, prefix, attention, OwnedInputs::new(q, k, v), lse)
}

/// The index of the side with these tokens, added if it is new.
fn side(file: &File, options: &OpenOptions, sides: &mut Vec<Side>, key: &str, count: usize) -> Result<usize> {
    let listed = |json: String| -> Result<Vec<String>> {
        serde_json::from_str(&json).map_err(|e| file.wrong(&format!("metadata `{key}`"), e.to_string()))
    };
    let tokens = match (&options.tokens, file.metadata(key).or_else(|| file.metadata("tokens"))) {
        (Some(tokens), _) => Some(tokens.clone()),
        (None, Some(json)) => Some(listed(json)?),
        (None, None) => None,
    };
    let found = match tokens {
        Some(tokens) if tokens.len() == count => Side::of_words("tokens", tokens),
        Some(tokens) => {
            let what = format!("there are {} tokens for {count} positions", tokens.len());
            return Err(Error::invalid(what).with_hint("give one token per position"));
        }
        None => Side::numbered("tokens", count),
    };
    Ok(sides.iter().position(|side| *side == found).unwrap_or_else(|| {
        sides.push(found);
        sides.len() - 1
    }))
}

/// A sort key that compares numbers in a name as numbers.
fn natural(name: &str) -> Vec<(u64, String)> {
    let mut parts = Vec::new();
    for part in name.split(['.', '/', '_']) {
        parts.push(match part.parse() {
            Ok(number) => (number, String::new()),
            Err(_) => (0, part.to_owned()),
        });
    }
    parts
}
