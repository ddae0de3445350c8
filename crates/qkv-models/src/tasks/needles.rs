//! Classification by two characters that are far apart: a long string of lower-case letters with a digit in its first
//! quarter and a capital in its last, each once or several times. The class is the pair. Accuracy over length measures
//! how far a model attends; accuracy with one of each among thousands, how sharply.

use crate::draws::Draws;
use crate::labelled::LabelledText;

/// Purposes of random draws.
const TRAIN: u32 = 6;
const DEV: u32 = 7;
/// The deciding characters of the first quarter and of the last.
const FIRST: &[u8] = b"0123";
const LAST: &[u8] = b"ABCD";
/// The shortest text: a letter per quarter.
pub(crate) const SHORTEST: usize = 4;

/// Training and validation texts of `length` letters, with each character placed `times` times.
///
/// ```
/// let (train, dev) = qkv_models::tasks::needles(7, 40, 1, 3, 2);
/// assert_eq!((train.len(), dev.len(), train[0].text.len()), (3, 2, 40));
/// assert!(train[0].text[..10].contains(&train[0].label[..1]) && train[0].text[30..].contains(&train[0].label[1..]));
/// ```
pub fn needles(
    seed: u64,
    length: usize,
    times: usize,
    train: usize,
    dev: usize,
) -> (Vec<LabelledText>, Vec<LabelledText>) {
    let length = length.max(SHORTEST);
    let some = |purpose, count| (0..count as u64).map(|at| text(seed, length, times, purpose, at)).collect();
    (some(TRAIN, train), some(DEV, dev))
}

fn text(seed: u64, length: usize, times: usize, purpose: u32, at: u64) -> LabelledText {
    let mut draws = Draws::new(seed, [purpose, at as u32, (at >> 32) as u32]);
    let mut letters: Vec<u8> = (0..length).map(|_| b'a' + draws.below(26) as u8).collect();
    let (first, last) = (FIRST[draws.below(FIRST.len())], LAST[draws.below(LAST.len())]);
    for _ in 0..times.max(1) {
        letters[draws.below(length / 4)] = first;
        letters[length - 1 - draws.below(length / 4)] = last;
    }
    let label = [first, last].map(char::from).iter().collect();
    LabelledText { label, text: letters.into_iter().map(char::from).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_decides_lies_half_the_text_apart() {
        let (train, dev) = needles(3, 101, 1, 200, 50);
        for text in train.iter().chain(&dev) {
            let first = text.text.find(|c: char| c.is_ascii_digit()).unwrap();
            let last = text.text.find(|c: char| c.is_ascii_uppercase()).unwrap();
            assert!(first < 26 && last >= 75, "{} {first} {last}", text.text);
            assert_eq!(text.label, format!("{}{}", &text.text[first..=first], &text.text[last..=last]));
        }
        let labels: std::collections::HashSet<&str> = train.iter().map(|text| text.label.as_str()).collect();
        assert_eq!(labels.len(), 16);
        assert!(dev.iter().all(|text| !train.contains(text)));
        assert_eq!(needles(3, 101, 1, 2, 0).0[..], train[..2]);
        let (often, _) = needles(3, 101, 9, 200, 0);
        for text in &often {
            let digits = text.text.bytes().filter(u8::is_ascii_digit).count();
            let capitals = text.text.bytes().filter(u8::is_ascii_uppercase).count();
            assert!((2..=9).contains(&digits) && (2..=9).contains(&capitals), "{}", text.text);
            let (first, last) = (&text.label[..1], &text.label[1..]);
            assert_eq!((text.text.matches(first).count(), text.text.matches(last).count()), (digits, capitals));
        }
    }
}
