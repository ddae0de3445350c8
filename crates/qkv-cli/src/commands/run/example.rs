//! What `qkv run` shows without a file: one word in two sentences, and how its neighbours change what it means. The
//! word vectors are made by hand; the attention is computed like any other.

use crate::computation::Computed;
use crate::given::{Array, Given};
use qkv::Tensor;
use std::fmt::Write;

const SENTENCES: [[&str; WORDS]; 2] =
    [["she", "sat", "on", "the", "river", "bank"], ["she", "put", "cash", "in", "the", "bank"]];
const WORDS: usize = 6;

/// What a word is about.
const MEANINGS: [&str; WIDTH] = ["money", "water", "people", "grammar"];
const WIDTH: usize = 4;

/// The word that both sentences end with, and the word that makes the difference.
const WORD: &str = "bank";
const NEIGHBOURS: [&str; 2] = ["river", "cash"];

/// How much each word is about each meaning. `bank` alone is as much about money as about water.
fn vector(word: &str) -> [f64; WIDTH] {
    match word {
        "bank" => [1.5, 1.5, 0.0, 0.0],
        "river" => [0.0, 3.0, 0.0, 0.0],
        "cash" => [3.0, 0.0, 0.0, 0.0],
        "she" => [0.0, 0.0, 2.0, 0.0],
        "sat" | "put" => [0.0, 0.0, 1.5, 0.5],
        _ => [0.0, 0.0, 0.0, 1.0],
    }
}

/// The shape of queries, keys and values.
pub(crate) const SHAPE: [usize; 4] = [SENTENCES.len(), 1, WORDS, WIDTH];

/// The two sentences as a batch, each word looking at the words of its own sentence: q = k = v.
pub(crate) fn given<T: qkv_simd::Element>() -> Given<T> {
    let words = SENTENCES.iter().flatten().flat_map(|word| vector(word));
    let x = Array { shape: SHAPE.to_vec(), data: words.map(T::of_f64).collect() };
    Given::new(x.clone(), x.clone(), x)
}

/// The weights as a table for each sentence, and what became of the word.
pub(crate) fn drawing<T: qkv_simd::Element>(computed: &Computed<T>) -> String {
    let mut drawn = String::new();
    if let Some(weights) = &computed.weights {
        drawn += "Where each word looks: a row holds its weights, and `·` is none.\n";
        for (b, words) in SENTENCES.iter().enumerate() {
            table(&mut drawn, weights, b, words).expect("a string takes anything");
        }
    }
    becomes(&mut drawn, &computed.out.values).expect("a string takes anything");
    drawn
}

fn table<T: qkv_simd::Element>(
    to: &mut String,
    weights: &Tensor<T, 4>,
    b: usize,
    words: &[&str; WORDS],
) -> std::fmt::Result {
    write!(to, "\n{:12}", "")?;
    words.iter().try_for_each(|word| write!(to, "{word:>7}"))?;
    for (i, word) in words.iter().enumerate() {
        write!(to, "\n{word:>12}")?;
        for j in 0..WORDS {
            match weights[[b, 0, i, j]].to_f64() {
                0.0 => write!(to, "{:>7}", "·")?,
                weight => write!(to, "{weight:>7.2}")?,
            }
        }
    }
    writeln!(to)
}

/// The word's vector alone, and after it has looked around in each sentence.
fn becomes<T: qkv_simd::Element>(to: &mut String, values: &Tensor<T, 4>) -> std::fmt::Result {
    writeln!(to, "\nWhat `{WORD}` is about, before and after. The vectors are made by hand; context does the rest.\n")?;
    write!(to, "{:12}", "")?;
    MEANINGS.iter().try_for_each(|meaning| write!(to, "{meaning:>9}"))?;
    let mut row = |name: String, vector: [f64; WIDTH]| {
        write!(to, "\n{name:>12}")?;
        vector.iter().try_for_each(|x| write!(to, "{x:>9.2}"))
    };
    row("alone".into(), vector(WORD))?;
    for (b, neighbour) in NEIGHBOURS.iter().enumerate() {
        row(format!("near {neighbour}"), std::array::from_fn(|x| values[[b, 0, WORDS - 1, x]].to_f64()))?;
    }
    writeln!(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Engine;
    use crate::computation::compute;

    #[test]
    fn context_changes_what_the_word_means() {
        let computed =
            compute(Engine::Exact, &qkv::Attention::scaled_dot(), None, &given::<f32>(), 0, true, None).unwrap();
        let [money, water] = [0, 1].map(|x| [0, 1].map(|b| computed.out.values[[b, 0, WORDS - 1, x]]));
        assert!(water[0] > 2.0 * money[0], "near the river it is about water");
        assert!(money[1] > 2.0 * water[1], "near cash it is about money");
    }

    #[test]
    fn both_sentences_end_with_the_word_and_hold_what_makes_the_difference() {
        for (sentence, neighbour) in SENTENCES.iter().zip(NEIGHBOURS) {
            assert_eq!(sentence[WORDS - 1], WORD);
            assert!(sentence.contains(&neighbour));
        }
    }
}
