//! What a `tokenizer.json` is refused for before the library that reads it sees it: sizes without bound, and lists that do
//! not fit together, which that library would meet with a panic.

use crate::{Error, Result};
use serde::Deserialize;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// More numbers than any tokenizer has: each is a row of an embedding.
pub(super) const MOST_TOKENS: usize = 1 << 22;
/// The largest file: the largest known ones are below 40 MB.
const LARGEST_FILE: u64 = 256 << 20;

/// The bytes of a file, unless there are far too many.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(|e| Error::file("open", path, e))?;
    let mut bytes = Vec::new();
    file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(|e| Error::file("read", path, e))?;
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(Error::format(path, "tokenizer", format!("the file is larger than {LARGEST_FILE} bytes")));
    }
    Ok(bytes)
}

#[derive(Deserialize)]
struct FileOutline {
    model: Option<ModelOutline>,
}

#[derive(Deserialize)]
struct ModelOutline {
    #[serde(rename = "type")]
    kind: Option<String>,
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    vocab: serde_json::Value,
    merges: Option<Vec<Merge>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Line(String),
}

/// Refuses bytes that are no tokenizer, or whose merges lead out of their vocabulary.
pub(super) fn check(bytes: &[u8], path: &Path) -> Result<()> {
    let wrong = |field: &str, what: String| Error::format(path, format!("field `{field}`"), what);
    let outline: FileOutline =
        serde_json::from_slice(bytes).map_err(|e| Error::format(path, "tokenizer", format!("not valid: {e}")))?;
    let Some(model) = outline.model else { return Err(wrong("model", "it is missing".into())) };
    let Some(merges) = model.merges else { return Ok(()) };
    if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
        return Ok(());
    }
    let vocabulary: HashMap<String, u32> =
        serde_json::from_value(model.vocab).map_err(|e| wrong("model.vocab", e.to_string()))?;
    let prefix = model.continuing_subword_prefix.unwrap_or_default();
    let mut merged = String::new();
    for (at, merge) in merges.iter().enumerate() {
        let wrong = |what: String| wrong(&format!("model.merges[{at}]"), what);
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left.as_str(), right.as_str()),
            Merge::Line(line) if line.starts_with("#version") => continue,
            Merge::Line(line) => line.split_once(' ').ok_or_else(|| wrong("it is not two pieces".into()))?,
        };
        let Some(rest) = right.strip_prefix(&*prefix) else {
            return Err(wrong(format!("`{right}` does not begin with `{prefix}`")));
        };
        merged.clear();
        merged.extend([left, rest]);
        for piece in [left, right, &merged] {
            if !vocabulary.contains_key(piece) {
                return Err(wrong(format!("`{piece}` is not in the vocabulary")));
            }
        }
    }
    Ok(())
}
