//! Long documents: quality, time and memory against length, with full, Longformer's and linear attention on the same texts.
//!
//! ```text
//! cargo xtask long                                                      docs/long.md, from texts that the program makes
//! cargo run --release -p qkv-models --example long -- data/movie-reviews   the table of real reviews
//! ```

use qkv_models::train::{Event, Run, Validation, Watcher};
use qkv_models::{Encoder, Recipe};
use qkv_nn::Machine;
use qkv_simd::counting::Counting;
use std::error::Error;
use std::path::Path;
use std::sync::atomic::AtomicBool;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const LENGTHS: [usize; 4] = [512, 1024, 2048, 4096];
const KINDS: [&str; 3] = ["full", "longformer", "linear"];

/// What a cell holds.
struct Cell {
    /// The best share of right classes on the dev set.
    quality: f64,
    /// Seconds of CPU time of the steps alone, all threads together: another program beside this one changes it little.
    training: f64,
    steps: u64,
    /// The most bytes held in training beyond what was there before.
    memory: usize,
    /// Seconds of CPU time to class one text of full length.
    reading: f64,
}

/// Seconds of CPU time that this process has taken so far, in hundredths; 0 where the system does not tell.
fn taken() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let numbers = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    numbers.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Adds up the time of steps, without that of validation.
#[derive(Default)]
struct Clock {
    best: f64,
    seconds: f64,
    steps: u64,
    since: Option<f64>,
}

impl Watcher for Clock {
    fn step(&mut self, _: &Event) {
        if let Some(since) = self.since.replace(taken()) {
            self.seconds += taken() - since;
            self.steps += 1;
        }
    }

    fn validating(&mut self, _: u64) {
        self.since = None;
    }

    fn validated(&mut self, found: &Validation, _: bool) {
        self.best = self.best.max(found.exact);
    }
}

/// Trains a recipe with changes, and reads a text with what came of it.
fn cell(recipe: &Path, changes: &[String], text: &str) -> Result<Cell, Box<dyn Error>> {
    let folder = std::env::temp_dir().join(format!("qkv-long-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let recipe = Recipe::read(recipe, changes)?;
    let threads = rayon::current_num_threads();
    let mut run = Run::new(&recipe, &folder, threads)?;
    let mut clock = Clock::default();
    let before = ALLOCATOR.held();
    ALLOCATOR.forget_peak();
    run.train(&mut clock, &AtomicBool::new(false))?;
    let memory = ALLOCATOR.peak() - before;
    let (encoder, machine) = (Encoder::open(&folder)?, Machine::new(threads));
    encoder.classify(&[text], &machine)?;
    let (start, rounds) = (taken(), 30);
    for _ in 0..rounds {
        encoder.classify(&[text], &machine)?;
    }
    let reading = (taken() - start) / f64::from(rounds);
    std::fs::remove_dir_all(&folder)?;
    Ok(Cell { quality: clock.best, training: clock.seconds, steps: clock.steps, memory, reading })
}

fn main() -> Result<(), Box<dyn Error>> {
    let recipes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let reviews = std::env::args().nth(1);
    if reviews.is_none() {
        print!("{BEFORE}");
    }
    println!("\n| tokens | attention | right on dev | CPU ms a step | memory in training | CPU ms to read one text |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for length in LENGTHS {
        for kind in KINDS {
            let mut changes = vec![format!("model.max_positions={length}")];
            let text = match &reviews {
                None => {
                    changes.push(format!("data.needles={}", length - 2));
                    "a".repeat(length - 2)
                }
                Some(folder) => {
                    changes.push(format!("data={{ classes = '{folder}/train.tsv', dev = '{folder}/dev.tsv' }}"));
                    changes.extend(REVIEWS.map(str::to_owned));
                    "good ".repeat(length)
                }
            };
            let Cell { quality, training, steps, memory, reading } =
                cell(&recipes.join(format!("long-{kind}.toml")), &changes, &text)?;
            println!(
                "| {length} | {kind} | {quality:.1} % | {:.0} | {} MiB | {:.1} |",
                1e3 * training / steps as f64,
                memory >> 20,
                1e3 * reading
            );
            eprintln!("{length} {kind}: {quality:.1} %, {training:.0} s of training");
        }
    }
    if reviews.is_none() {
        print!("{AFTER}");
    }
    Ok(())
}

/// What changes where real reviews are read: pieces instead of characters, more noise against so few texts, longer training.
const REVIEWS: [&str; 6] = [
    "tokenizer={ kind = 'bpe', size = 8000 }",
    "model.dropout=0.3",
    "model.layers=1",
    "train.steps=400",
    "train.adam={ beta2 = 0.99, epsilon = 1e-8, decay = 0.1 }",
    "train.average=0.99",
];

const BEFORE: &str = include_str!("long/before.md");
const AFTER: &str = include_str!("long/after.md");
