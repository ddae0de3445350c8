//! Texts to be classed by two characters that lie far apart: a long row of small letters with a digit somewhere in its first
//! quarter and a capital somewhere in its last. The class is both. Whoever reads only what is near, or the mean of everything,
//! finds one at most; so how well a model does against length says how far it sees.

use crate::draws::Draws;
use crate::labelled::Labelled;

/// What the draws are for.
const TRAIN: u32 = 6;
const DEV: u32 = 7;
/// What lies in the first quarter, and in the last.
const FIRST: &[u8] = b"0123";
const LAST: &[u8] = b"ABCD";
/// The shortest text: its quarters have a letter each.
pub(crate) const SHORTEST: usize = 4;

/// Texts of `length` letters to train on, and others to measure on: a function of the seed.
///
/// ```
/// let (train, dev) = qkv_models::tasks::needles(7, 40, 3, 2);
/// assert_eq!((train.len(), dev.len(), train[0].text.len()), (3, 2, 40));
/// assert!(train[0].text[..10].contains(&train[0].label[..1]) && train[0].text[30..].contains(&train[0].label[1..]));
/// ```
pub fn needles(seed: u64, length: usize, train: usize, dev: usize) -> (Vec<Labelled>, Vec<Labelled>) {
    let some = |purpose, count| (0..count as u64).map(|at| text(seed, length.max(SHORTEST), purpose, at)).collect();
    (some(TRAIN, train), some(DEV, dev))
}

fn text(seed: u64, length: usize, purpose: u32, at: u64) -> Labelled {
    let mut draws = Draws::new(seed, [purpose, at as u32, (at >> 32) as u32]);
    let mut letters: Vec<u8> = (0..length).map(|_| b'a' + draws.below(26) as u8).collect();
    let (first, last) = (FIRST[draws.below(FIRST.len())], LAST[draws.below(LAST.len())]);
    letters[draws.below(length / 4)] = first;
    letters[length - 1 - draws.below(length / 4)] = last;
    let label = [first, last].map(char::from).iter().collect();
    Labelled { label, text: letters.into_iter().map(char::from).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_decides_lies_half_the_text_apart() {
        let (train, dev) = needles(3, 101, 200, 50);
        for text in train.iter().chain(&dev) {
            let first = text.text.find(|c: char| c.is_ascii_digit()).unwrap();
            let last = text.text.find(|c: char| c.is_ascii_uppercase()).unwrap();
            assert!(first < 26 && last >= 75, "{} {first} {last}", text.text);
            assert_eq!(text.label, format!("{}{}", &text.text[first..=first], &text.text[last..=last]));
        }
        let labels: std::collections::HashSet<&str> = train.iter().map(|text| text.label.as_str()).collect();
        assert_eq!(labels.len(), 16);
        assert!(dev.iter().all(|text| !train.contains(text)));
        assert_eq!(needles(3, 101, 2, 0).0[..], train[..2]);
    }
}
