//! BPE-dropout (Provilkov et al. 2020, arXiv:1910.13267): texts are tokenized again with merges skipped at random, so
//! that a model trained on little text sees its words in many segmentations.

use super::Tokenizer;
use crate::draws::Draws;
use serde_json::Value;
use std::collections::HashMap;

/// The merges of a BPE tokenizer, by token ids.
#[derive(Clone, Debug)]
pub struct Merges {
    /// The rank of a merge and the token that it makes.
    made: HashMap<(u32, u32), (usize, u32)>,
    /// The two parts that a token is merged from.
    parts: HashMap<u32, (u32, u32)>,
    /// Whether a token begins a word, with the space before it.
    starts: Vec<bool>,
}

impl Merges {
    /// The merges of a tokenizer; `None` if it has none.
    pub fn of(tokenizer: &Tokenizer) -> Option<Merges> {
        let file: Value = serde_json::from_str(&tokenizer.to_json()).ok()?;
        let id = |name: &str| tokenizer.inner.token_to_id(name);
        let (mut made, mut parts) = (HashMap::new(), HashMap::new());
        for (order, merge) in file["model"]["merges"].as_array()?.iter().enumerate() {
            let (left, right) = match merge {
                Value::Array(both) => (both.first()?.as_str()?, both.get(1)?.as_str()?),
                one => one.as_str()?.split_once(' ')?,
            };
            let (Some(a), Some(b), Some(whole)) = (id(left), id(right), id(&format!("{left}{right}"))) else {
                continue;
            };
            made.entry((a, b)).or_insert((order, whole));
            parts.entry(whole).or_insert((a, b));
        }
        let starts = |id| tokenizer.name(id).is_some_and(|name| name.starts_with(['▁', 'Ġ']));
        let starts = (0..tokenizer.len() as u32).map(starts).collect();
        (!made.is_empty()).then_some(Merges { made, parts, starts })
    }

    /// The same text in other tokens: merged again from characters, with each possible merge skipped with probability
    /// `share` every time.
    pub fn dropout(&self, ids: &[u32], share: f64, draws: &mut Draws) -> Vec<u32> {
        let mut characters = Vec::with_capacity(4 * ids.len());
        ids.iter().for_each(|&id| self.split(id, &mut characters));
        let mut found = Vec::with_capacity(characters.len());
        // No merge joins two words, and the time is quadratic in a word's length.
        for word in characters.chunk_by(|_, &next| !self.starts.get(next as usize).is_some_and(|&starts| starts)) {
            let from = found.len();
            found.extend_from_slice(word);
            while let Some((at, whole)) = self.first(&found[from..], share, draws) {
                found[from + at] = whole;
                found.remove(from + at + 1);
            }
        }
        found
    }

    /// The place of the first merge, by rank, that is not skipped, and the token that it makes.
    fn first(&self, word: &[u32], share: f64, draws: &mut Draws) -> Option<(usize, u32)> {
        let possible = word.windows(2).enumerate().filter_map(|(at, pair)| {
            let &(order, whole) = self.made.get(&(pair[0], pair[1]))?;
            (draws.unit() >= share).then_some((order, at, whole))
        });
        possible.min().map(|(_, at, whole)| (at, whole))
    }

    /// Appends the characters of a token: the parts that no merge made.
    fn split(&self, id: u32, characters: &mut Vec<u32>) {
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            match self.parts.get(&id) {
                Some(&(left, right)) => rest.extend([right, left]),
                None => characters.push(id),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::Kind;

    const TEXTS: [&str; 4] = [
        "the longest of the long roads is the lonely road",
        "好久不见, it's been a long time, longer than the other times",
        "o'clock o'clock other others another",
        "the roads, the times and the others are lonely",
    ];

    #[test]
    fn without_dropout_the_tokens_are_those_of_the_tokenizer() {
        let tokenizer = Tokenizer::train(TEXTS, Kind::Bpe { size: 360 }).unwrap();
        let merges = Merges::of(&tokenizer).unwrap();
        for text in TEXTS.iter().chain(&["lonelier o'clocks; the 12 longest times 不好", "", "x"]) {
            let ids = tokenizer.encode(text);
            assert_eq!(merges.dropout(&ids, 0.0, &mut Draws::new(1, [1, 2, 3])), ids, "{text}");
        }
    }

    #[test]
    fn the_text_stays_and_its_pieces_differ() {
        let tokenizer = Tokenizer::train(TEXTS, Kind::Bpe { size: 360 }).unwrap();
        let merges = Merges::of(&tokenizer).unwrap();
        let ids = tokenizer.encode(TEXTS[0]);
        let (mut draws, mut longer) = (Draws::new(1, [1, 2, 3]), 0);
        for _ in 0..100 {
            let cut = merges.dropout(&ids, 0.3, &mut draws);
            assert_eq!(tokenizer.decode(&cut), TEXTS[0]);
            longer += usize::from(cut.len() > ids.len());
        }
        assert!(longer > 90, "{longer}");
        let characters = merges.dropout(&ids, 1.0, &mut draws);
        assert!(characters.iter().all(|id| !merges.parts.contains_key(id)));
    }

    #[test]
    fn a_merge_is_left_out_as_often_as_asked() {
        let tokenizer = Tokenizer::train(["ab ab ab"; 4], Kind::Bpe { size: 263 }).unwrap();
        let merges = Merges::of(&tokenizer).unwrap();
        let pair = *merges.made.keys().next().unwrap();
        let mut draws = Draws::new(4, [1, 2, 3]);
        let left_out = (0..10_000).filter(|_| merges.first(&[pair.0, pair.1], 0.25, &mut draws).is_none()).count();
        assert!((2_350..2_650).contains(&left_out), "{left_out}");
    }

    #[test]
    fn characters_and_words_have_no_merges() {
        for kind in [Kind::Characters, Kind::Words { size: 100 }] {
            assert!(Merges::of(&Tokenizer::train(TEXTS, kind).unwrap()).is_none());
        }
    }
}
