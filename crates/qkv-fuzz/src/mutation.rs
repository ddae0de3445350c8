//! Mutation of valid inputs: bytes are truncated, flipped, spliced with other inputs, and given false lengths. If a
//! format has a structure, mutations also keep it intact and change its content, to reach code behind a reader's first
//! checks.

use qkv_models::draws::Draws;
use serde_json::Value;

/// The structure of a format's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Binary numbers and lengths.
    Binary,
    /// Text of words and numbers.
    Text,
    /// JSON.
    Json,
    /// The length of a JSON header, the header, then data.
    Safetensors,
    /// Chunks, each with its length, name and checksum.
    Png,
}

/// Numbers that parsers often mishandle.
const NUMBERS: [u64; 20] = [
    0,
    1,
    2,
    7,
    31,
    127,
    128,
    255,
    256,
    4096,
    65_535,
    65_536,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 48,
    1 << 63,
    u64::MAX,
];
/// The same kind of numbers as text.
const WRITTEN: [&str; 18] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "64",
    "1000",
    "65536",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "0.5",
    "-0.0",
    "1e308",
    "1e999",
    "NaN",
];

/// A mutation of an input from the pool, possibly spliced with others.
pub(crate) fn mutated(draws: &mut Draws, pool: &[Vec<u8>], words: &[&str], shape: Shape) -> Vec<u8> {
    let mut bytes = pool[draws.below(pool.len())].clone();
    let inside = match shape {
        Shape::Json if draws.below(3) > 0 => tree(draws, &bytes, words),
        Shape::Safetensors if draws.below(4) > 0 => header(draws, &bytes, words),
        Shape::Png if draws.below(4) > 0 => chunk(draws, &bytes),
        _ => None,
    };
    if let Some(inside) = inside {
        return inside;
    }
    for _ in 0..1 + draws.below(4) {
        once(draws, &mut bytes, pool, words, shape);
    }
    bytes
}

/// Applies one random change.
fn once(draws: &mut Draws, bytes: &mut Vec<u8>, pool: &[Vec<u8>], words: &[&str], shape: Shape) {
    let at = draws.below(bytes.len() + 1);
    let end = at + draws.below((bytes.len() - at).min(64) + 1);
    match draws.below(if matches!(shape, Shape::Binary | Shape::Png) { 10 } else { 12 }) {
        0 => bytes.truncate(at),
        1 if at < bytes.len() => bytes[at] ^= 1 << draws.below(8),
        2 if at < bytes.len() => bytes[at] = draws.below(256) as u8,
        3 => drop(bytes.drain(at..end)),
        4 => {
            let part = bytes[at..end].to_vec();
            let times = [1, 1, 2, 8, 64][draws.below(5)];
            (0..times).for_each(|_| drop(bytes.splice(at..at, part.iter().copied())));
        }
        5 => {
            let other = &pool[draws.below(pool.len())];
            bytes.truncate(at);
            bytes.extend(&other[draws.below(other.len() + 1)..]);
        }
        6 | 7 => {
            let number = NUMBERS[draws.below(NUMBERS.len())];
            let number = if draws.below(4) == 0 { number.wrapping_add(draws.below(64) as u64) } else { number };
            let width = [1, 2, 4, 8, 8][draws.below(5)].min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
        }
        8 if !words.is_empty() => drop(bytes.splice(at..at, draws.pick(words).bytes())),
        9 if !words.is_empty() => drop(bytes.splice(at..end, draws.pick(words).bytes())),
        _ => number(draws, bytes),
    }
}

/// Replaces a number in the text with another.
fn number(draws: &mut Draws, bytes: &mut Vec<u8>) {
    let runs: Vec<usize> = (0..bytes.len())
        .filter(|&at| bytes[at].is_ascii_digit() && (at == 0 || !bytes[at - 1].is_ascii_digit()))
        .collect();
    if runs.is_empty() {
        return;
    }
    let from = runs[draws.below(runs.len())];
    let digits = bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
    bytes.splice(from..from + digits, draws.pick(&WRITTEN).bytes());
}

/// Changes values inside JSON; `None` if the bytes are not JSON.
fn tree(draws: &mut Draws, bytes: &[u8], words: &[&str]) -> Option<Vec<u8>> {
    let mut root: Value = serde_json::from_slice(bytes).ok()?;
    for _ in 0..1 + draws.below(3) {
        let copy = nth(&mut root.clone(), draws.below(count(&root))).clone();
        let (place, all) = (draws.below(count(&root)), count(&root));
        debug_assert!(place < all);
        change(draws, nth(&mut root, place), copy, words);
    }
    serde_json::to_vec(&root).ok()
}

/// Changes the JSON header after a length, and corrects the length.
fn header(draws: &mut Draws, bytes: &[u8], words: &[&str]) -> Option<Vec<u8>> {
    let length = usize::try_from(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?)).ok()?;
    let header = bytes.get(8..length.checked_add(8)?)?;
    let header = if draws.below(3) > 0 {
        tree(draws, header, words)?
    } else {
        let mut header = header.to_vec();
        number(draws, &mut header);
        header
    };
    let data = &bytes[8 + length..];
    let data = if draws.below(4) == 0 { &data[..draws.below(data.len() + 1)] } else { data };
    Some([&(header.len() as u64).to_le_bytes()[..], &header, data].concat())
}

/// Bytes before the chunks of a PNG, and around the data of each chunk.
const BEFORE_CHUNKS: usize = 8;
const AROUND_CHUNK: usize = 12;

/// Changes, removes, duplicates or swaps a chunk and corrects its length and checksum, so that a reader's checks of
/// them pass. `None` if there are no chunks.
fn chunk(draws: &mut Draws, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut chunks: Vec<(&[u8], Vec<u8>)> = Vec::new();
    let mut rest = bytes.get(BEFORE_CHUNKS..)?;
    while let Some(length) = rest.first_chunk::<4>() {
        let end = (u32::from_be_bytes(*length) as usize).checked_add(AROUND_CHUNK)?;
        let whole = rest.get(..end)?;
        chunks.push((&whole[4..8], whole[8..end - 4].to_vec()));
        rest = &rest[end..];
    }
    let at = draws.below(chunks.len());
    match draws.below(8) {
        0 => drop(chunks.remove(at)),
        1 => chunks.insert(at, chunks[at].clone()),
        2 => {
            let other = draws.below(chunks.len());
            chunks.swap(at, other);
        }
        _ => {
            let data = &mut chunks.get_mut(at)?.1;
            if data.is_empty() {
                data.push(draws.below(256) as u8);
            }
            let place = draws.below(data.len());
            match draws.below(5) {
                0 => data[place] ^= 1 << draws.below(8),
                1 => data[place] = draws.below(256) as u8,
                2 => data.truncate(place),
                3 => data.extend_from_within(place..),
                _ => {
                    let width = 4.min(data.len() - place);
                    let number = NUMBERS[draws.below(NUMBERS.len())] as u32;
                    data[place..place + width].copy_from_slice(&number.to_be_bytes()[4 - width..]);
                }
            }
        }
    }
    let written = chunks.iter().map(|(name, data)| png_chunk(name, data));
    Some([bytes[..BEFORE_CHUNKS].to_vec(), written.collect::<Vec<_>>().concat()].concat())
}

/// A PNG chunk with its length and checksum.
pub fn png_chunk(name: &[u8], data: &[u8]) -> Vec<u8> {
    let named = [name, data].concat();
    // CRC-32 bit by bit, because chunks are short here.
    let sum = named.iter().fold(u32::MAX, |sum, &byte| {
        (0..8).fold(sum ^ u32::from(byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg()))
    });
    [&(data.len() as u32).to_be_bytes()[..], &named, &(!sum).to_be_bytes()].concat()
}

/// Number of values in a tree, including its root.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// Value number `at` of a tree in preorder; the root is 0.
fn nth(value: &mut Value, at: usize) -> &mut Value {
    if at == 0 {
        return value;
    }
    let mut left = at - 1;
    let inside: Vec<&mut Value> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(fields) => fields.values_mut().collect(),
        _ => unreachable!("a value without parts is counted once"),
    };
    for part in inside {
        match count(part) {
            all if left < all => return nth(part, left),
            all => left -= all,
        }
    }
    unreachable!("there are fewer values")
}

/// Replaces a value, or removes, renames or repeats one of its parts.
fn change(draws: &mut Draws, value: &mut Value, copy: Value, words: &[&str]) {
    let word = if words.is_empty() { "x" } else { draws.pick(words) };
    match (draws.below(14), &mut *value) {
        (0 | 1, Value::Object(fields)) if !fields.is_empty() => {
            let name = fields.keys().nth(draws.below(fields.len())).cloned().unwrap_or_default();
            let part = fields.remove(&name);
            if draws.below(2) == 0 {
                fields.insert(word.to_owned(), part.unwrap_or_default());
            }
        }
        (0 | 1, Value::Array(items)) if !items.is_empty() => drop(items.remove(draws.below(items.len()))),
        (2, Value::Array(items)) if !items.is_empty() => {
            let item = items[draws.below(items.len())].clone();
            items.extend(std::iter::repeat_n(item, [1, 3, 200][draws.below(3)]));
        }
        (2, Value::Object(fields)) => drop(fields.insert(word.to_owned(), copy)),
        (3, Value::Number(number)) => {
            let near = number.as_i64().unwrap_or(0).wrapping_add(draws.below(5) as i64 - 2);
            *value = Value::from(near);
        }
        (3 | 4, _) => *value = copy,
        (5, _) => *value = Value::Null,
        (6, _) => *value = Value::Bool(draws.below(2) == 0),
        (7 | 8, _) => *value = Value::from(NUMBERS[draws.below(NUMBERS.len())]),
        (9, _) => *value = [-1.0, 0.5, 1e308, -1e-320][draws.below(4)].into(),
        (10, _) => {
            *value = ["".to_owned(), word.repeat(100), "\u{0}\u{feff}好".to_owned()][draws.below(3)].clone().into()
        }
        (11, _) => *value = word.into(),
        (12, _) => {
            for _ in 0..[1, 20, 120][draws.below(3)] {
                *value = Value::Array(vec![value.take()]);
            }
        }
        (_, _) => *value = [Value::Array(Vec::new()), Value::Object(Default::default())][draws.below(2)].clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_a_function_of_its_number_and_differs_from_others() {
        let pool = vec![br#"{"a": [1, 2, {"b": "c"}], "d": 4}"#.to_vec()];
        let case = |at| mutated(&mut Draws::new(1, [2, at, 0]), &pool, &["word"], Shape::Json);
        let all: std::collections::HashSet<Vec<u8>> = (0..200).map(case).collect();
        assert!(all.len() > 100, "{}", all.len());
        assert_eq!(case(7), case(7));
    }

    #[test]
    fn a_chunk_that_is_changed_has_its_length_and_checksum() {
        assert_eq!(png_chunk(b"IEND", &[]), [0, 0, 0, 0, 73, 69, 78, 68, 0xae, 0x42, 0x60, 0x82]);
        let file = [&[0; BEFORE_CHUNKS][..], &png_chunk(b"IHDR", &[1, 2, 3]), &png_chunk(b"IEND", &[])].concat();
        for at in 0..100 {
            let changed = chunk(&mut Draws::new(1, [4, at, 0]), &file).unwrap();
            let mut rest = &changed[BEFORE_CHUNKS..];
            while !rest.is_empty() {
                let end = u32::from_be_bytes(rest[..4].try_into().unwrap()) as usize + AROUND_CHUNK;
                assert_eq!(png_chunk(&rest[4..8], &rest[8..end - 4]), rest[..end]);
                rest = &rest[end..];
            }
        }
    }

    #[test]
    fn a_header_that_is_changed_has_its_length() {
        let header = br#"{"a":{"shape":[1]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, &[1, 2, 3, 4]].concat();
        for at in 0..100 {
            let changed = super::header(&mut Draws::new(1, [3, at, 0]), &file, &[]).unwrap();
            let length = u64::from_le_bytes(changed[..8].try_into().unwrap()) as usize;
            assert!(length + 8 <= changed.len());
        }
    }
}
