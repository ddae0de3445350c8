//! Synthetic tasks: data generated from a seed, so that training works on any machine without a download. Each source
//! has one right target, so the metric is exact match, and each is solved by attending to the right place, so
//! alignments are readable. For encoders there are texts with a class ([`needles()`]) and with questions
//! ([`stories()`]); for models that look at images, pictures of shapes ([`scenes()`]); for voices, sung letters
//! ([`tones()`]).

mod dates;
mod needles;
mod shapes;
mod stories;
mod tones;

pub(crate) use needles::SHORTEST as SHORTEST_NEEDLES;
pub use needles::needles;
pub use shapes::{KINDS, SIDE, Scene, Shape, ShapesTask, scenes};
pub use stories::stories;
pub use tones::{LETTERS, SungText, sing, tones};

use crate::draws::Draws;
use crate::text::corpus::Pair;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// Purposes of random draws.
const TRAIN: u32 = 2;
const DEV: u32 = 3;
/// Symbols of sequences, in order.
const SYMBOLS: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyz";
/// Symbols per sequence.
const SHORTEST: usize = 4;
const LONGEST: usize = 16;

/// A synthetic task.
///
/// ```
/// use qkv_models::tasks::Task;
///
/// let pairs = Task::Sort.pairs(1, 3);
/// for pair in &pairs {
///     let mut symbols: Vec<char> = pair.source.chars().collect();
///     symbols.sort();
///     assert_eq!(pair.target, symbols.into_iter().collect::<String>());
/// }
/// assert_eq!(Task::Sort.pairs(1, 2), pairs[..2]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// A date in English or Chinese becomes `2026-11-15`.
    Dates,
    /// Distinct letters and digits are sorted.
    Sort,
    /// Letters and digits are copied.
    Copy,
    /// A short story becomes its title.
    Titles,
}

impl Task {
    /// The first pairs of a seed.
    pub fn pairs(self, seed: u64, count: usize) -> Vec<Pair> {
        (0..count as u64).map(|at| self.pair(seed, TRAIN, at)).collect()
    }

    /// Training and validation pairs: validation sources are distinct, and none of them occurs in training.
    ///
    /// ```
    /// let (train, dev) = qkv_models::tasks::Task::Dates.split(7, 1000, 100);
    /// assert_eq!((train.len(), dev.len()), (1000, 100));
    /// assert!(dev.iter().all(|pair| !train.contains(pair)));
    /// ```
    pub fn split(self, seed: u64, train: usize, dev: usize) -> (Vec<Pair>, Vec<Pair>) {
        let mut apart = HashSet::new();
        let kept = (0u64..).map(|at| self.pair(seed, DEV, at)).filter(|pair| apart.insert(pair.source.clone()));
        let dev: Vec<Pair> = kept.take(dev).collect();
        let others = (0u64..).map(|at| self.pair(seed, TRAIN, at)).filter(|pair| !apart.contains(&pair.source));
        (others.take(train).collect(), dev)
    }

    fn pair(self, seed: u64, purpose: u32, at: u64) -> Pair {
        let mut draws = Draws::new(seed, [purpose, at as u32, (at >> 32) as u32]);
        match self {
            Task::Dates => dates::pair(&mut draws),
            Task::Sort => {
                let mut symbols = SYMBOLS.to_vec();
                draws.shuffle(&mut symbols);
                symbols.truncate(SHORTEST + draws.below(LONGEST - SHORTEST + 1));
                let source = symbols.iter().map(|&s| s as char).collect::<String>();
                symbols.sort();
                Pair::new(source, symbols.iter().map(|&s| s as char).collect::<String>())
            }
            Task::Copy => {
                let length = SHORTEST + draws.below(LONGEST - SHORTEST + 1);
                let text: String = (0..length).map(|_| SYMBOLS[draws.below(SYMBOLS.len())] as char).collect();
                Pair::new(text.clone(), text)
            }
            Task::Titles => stories::pair(&mut draws),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Task; 4] = [Task::Dates, Task::Sort, Task::Copy, Task::Titles];

    #[test]
    fn a_seed_gives_its_pairs_and_another_seed_others() {
        for task in ALL {
            assert_eq!(task.pairs(1, 50), task.pairs(1, 50));
            let (one, two) = (task.pairs(1, 50), task.pairs(2, 50));
            assert!(one.iter().zip(&two).all(|(a, b)| a != b));
        }
    }

    #[test]
    fn what_is_validated_was_not_trained_on() {
        for task in ALL {
            let (train, dev) = task.split(3, 20_000, 500);
            let train: HashSet<&str> = train.iter().map(|pair| pair.source.as_str()).collect();
            let dev: HashSet<&str> = dev.iter().map(|pair| pair.source.as_str()).collect();
            assert_eq!((dev.len(), train.intersection(&dev).count()), (500, 0));
        }
    }

    #[test]
    fn a_source_has_one_target() {
        for task in [Task::Dates, Task::Titles] {
            let mut targets = std::collections::HashMap::new();
            for pair in task.pairs(5, 50_000) {
                let before = targets.insert(pair.source.clone(), pair.target.clone());
                assert!(before.is_none_or(|before| before == pair.target), "{}", pair.source);
            }
        }
    }

    #[test]
    fn a_task_has_its_name_in_a_recipe() {
        assert_eq!(serde_json::to_string(&ALL).expect("names"), r#"["dates","sort","copy","titles"]"#);
    }
}
