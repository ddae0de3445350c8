//! The built-in example of `qkv run`: one word in two sentences, and how its neighbors change its meaning. The word
//! vectors are written by hand; the attention is computed like any other.

use super::compute::RunOutput;
use super::tensors::{Array, InputTensors};
use qkv::Tensor;
use std::fmt::Write;

const SENTENCES: [[&str; WORDS]; 2] =
    [["she", "sat", "on", "the", "river", "bank"], ["she", "put", "cash", "in", "the", "bank"]];
const WORDS: usize = 6;

/// The features of a word vector.
const MEANINGS: [&str; WIDTH] = ["money", "water", "people", "grammar"];
const WIDTH: usize = 4;

/// The word that ends both sentences, and the words that disambiguate it.
const WORD: &str = "bank";
const NEIGHBORS: [&str; 2] = ["river", "cash"];

/// The vector of a word. On its own, `bank` is as much about money as about water.
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

/// The two sentences as a batch for self-attention: q = k = v.
pub(crate) fn tensors<T: qkv_simd::Element>() -> InputTensors<T> {
    let words = SENTENCES.iter().flatten().flat_map(|word| vector(word));
    let x = Array { shape: SHAPE.to_vec(), data: words.map(T::of_f64).collect() };
    InputTensors::new(x.clone(), x.clone(), x)
}

/// The weights of each sentence as a table, and the word before and after attention.
pub(crate) fn drawing<T: qkv_simd::Element>(output: &RunOutput<T>) -> String {
    let mut drawn = String::new();
    if let Some(weights) = &output.weights {
        drawn += "Attention weights: a row for each query, a column for each key; `·` is zero.\n";
        for (b, words) in SENTENCES.iter().enumerate() {
            table(&mut drawn, weights, b, words).expect("writing to a string cannot fail");
        }
    }
    becomes(&mut drawn, &output.out.values).expect("writing to a string cannot fail");
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

/// The word's own vector, and its attention output in each sentence.
fn becomes<T: qkv_simd::Element>(to: &mut String, values: &Tensor<T, 4>) -> std::fmt::Result {
    writeln!(
        to,
        "\nThe vector of `{WORD}` before attention and after it. Word vectors are written by hand; context does the rest.\n"
    )?;
    write!(to, "{:12}", "")?;
    MEANINGS.iter().try_for_each(|meaning| write!(to, "{meaning:>9}"))?;
    let mut row = |name: String, vector: [f64; WIDTH]| {
        write!(to, "\n{name:>12}")?;
        vector.iter().try_for_each(|x| write!(to, "{x:>9.2}"))
    };
    row("alone".into(), vector(WORD))?;
    for (b, neighbor) in NEIGHBORS.iter().enumerate() {
        row(format!("near {neighbor}"), std::array::from_fn(|x| values[[b, 0, WORDS - 1, x]].to_f64()))?;
    }
    writeln!(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::run::args::Engine;
    use crate::commands::run::compute::{CallOptions, compute};
    use crate::commands::run::over_ranks::Division;

    #[test]
    fn context_changes_what_the_word_means() {
        let division = &Division { ranks: qkv_ranks::Ranks::alone(), way: None };
        let options = CallOptions { engine: Engine::Exact, seed: 0, with_weights: true, path: None, division };
        let output = compute(&qkv::Attention::scaled_dot(), None, &tensors::<f32>(), &options).unwrap().unwrap();
        let [money, water] = [0, 1].map(|x| [0, 1].map(|b| output.out.values[[b, 0, WORDS - 1, x]]));
        assert!(water[0] > 2.0 * money[0], "near the river it is about water");
        assert!(money[1] > 2.0 * water[1], "near cash it is about money");
    }

    #[test]
    fn both_sentences_end_with_the_word_and_have_its_disambiguating_neighbor() {
        for (sentence, neighbor) in SENTENCES.iter().zip(NEIGHBORS) {
            assert_eq!(sentence[WORDS - 1], WORD);
            assert!(sentence.contains(&neighbor));
        }
    }
}
