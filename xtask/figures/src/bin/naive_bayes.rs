//! Naive Bayes over the words, or pairs of neighboring words, of a text: the baseline for any model of long texts.
//!
//! `cargo run --release -p figures --bin naive_bayes -- data/movie-reviews/train.tsv data/movie-reviews/dev.tsv`
//!
//! Lines are `label ⇥ text`, split at spaces, and into sentences at `<s>`. A feature counts once per text, with add-one
//! (Laplace) smoothing.

use qkv_models::labelled::{LabelledText, classes};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The features of a text.
type Features = fn(&str) -> HashSet<String>;

fn words(text: &str) -> HashSet<String> {
    text.split_whitespace().filter(|word| *word != "<s>").map(str::to_lowercase).collect()
}

fn pairs(text: &str) -> HashSet<String> {
    let pairs = text.split("<s>").flat_map(|sentence| {
        let words: Vec<String> = sentence.split_whitespace().map(str::to_lowercase).collect();
        words.windows(2).map(|two| two.join(" ")).collect::<Vec<_>>()
    });
    pairs.collect()
}

/// The accuracy in percent on the dev texts of a classifier fitted to the training texts.
fn accuracy(train: &[LabelledText], dev: &[LabelledText], features: Features) -> f64 {
    let mut counts: BTreeMap<&str, (usize, HashMap<String, usize>)> = BTreeMap::new();
    let mut known = HashSet::new();
    for text in train {
        let (texts, features_of) = counts.entry(&text.label).or_default();
        *texts += 1;
        for feature in features(&text.text) {
            known.insert(feature.clone());
            *features_of.entry(feature).or_default() += 1;
        }
    }
    let score = |found: &HashSet<String>, (texts, counts): &(usize, HashMap<String, usize>)| -> f64 {
        let all = (counts.values().sum::<usize>() + known.len()) as f64;
        let share = |feature: &String| ((counts.get(feature).copied().unwrap_or(0) + 1) as f64 / all).ln();
        (*texts as f64).ln() + found.iter().filter(|feature| known.contains(*feature)).map(share).sum::<f64>()
    };
    let right = dev.iter().filter(|text| {
        let found = features(&text.text);
        let best = counts.iter().map(|(label, of)| (score(&found, of), *label)).max_by(|a, b| a.0.total_cmp(&b.0));
        best.is_some_and(|(_, label)| label == text.label)
    });
    100.0 * right.count() as f64 / dev.len().max(1) as f64
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [train, dev] = &paths[..] else { return Err("give two files of lines `label ⇥ text`".into()) };
    let (train, dev) = (classes(train.as_ref())?, classes(dev.as_ref())?);
    println!("{} texts to learn from, {} to measure on", train.len(), dev.len());
    println!("words  {:.1} %", accuracy(&train, &dev, words));
    println!("pairs  {:.1} %", accuracy(&train, &dev, pairs));
    Ok(())
}
