//! Long documents: quality, time and memory against length, with full, Longformer's and linear attention on the same
//! texts.
//!
//! ```text
//! cargo xtask long                                                  docs/long.md, from texts that the program makes
//! cargo run --release -p figures --bin long -- data/movie-reviews   the table of real reviews
//! cargo run --release -p figures --bin long -- --jobs 8             eight trainings at a time
//! cargo run --release -p figures --bin long -- --keep cells.jsonl   what is measured is kept there
//! ```
//!
//! Every cell of a table is a process of its own, so that what it holds and the time it takes are counted for it alone.

use qkv_models::train::{Event, Run, Validation, Watcher};
use qkv_models::{Encoder, Recipe};
use qkv_nn::Machine;
use qkv_simd::counting::Counting;
use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const LENGTHS: [usize; 4] = [512, 1024, 2048, 4096];
/// What the kinds are called, their recipe, and what is changed in it.
const KINDS: [(&str, &str, &str); 4] = [
    ("full", include_str!("../../../../recipes/long-full.toml"), ""),
    ("Longformer", include_str!("../../../../recipes/long-longformer.toml"), ""),
    ("linear, relu", include_str!("../../../../recipes/long-linear.toml"), ""),
    (
        "linear, elu + 1",
        include_str!("../../../../recipes/long-linear.toml"),
        "model.attention={ score = { linear = 'elu' } }",
    ),
];
/// Where what decides is there often: once in so many letters, which takes so many steps.
const EVERY: usize = 16;
const OFTEN_STEPS: usize = 150;

/// What a cell is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
struct Experiment {
    kind: usize,
    length: usize,
    /// Whether what decides is there often, or once.
    often: bool,
}

/// What it holds.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
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

/// Trains a recipe, and reads a text with what came of it.
fn cell(asked: Experiment, reviews: Option<&str>) -> Result<Cell, Box<dyn Error>> {
    let Experiment { kind, length, often } = asked;
    let (_, recipe, change) = KINDS[kind];
    let mut changes = vec![format!("model.max_positions={length}")];
    changes.extend((!change.is_empty()).then(|| change.to_owned()));
    let text = match reviews {
        None => {
            changes.push(format!("data.needles={}", length - 2));
            if often {
                changes.push(format!("data.times={}", length / EVERY));
                changes.extend(["steps", "validate", "save"].map(|name| format!("train.{name}={OFTEN_STEPS}")));
            }
            "a".repeat(length - 2)
        }
        Some(folder) => {
            changes.push(format!("data={{ classes = '{folder}/train.tsv', dev = '{folder}/dev.tsv' }}"));
            changes.extend(REVIEWS.map(str::to_owned));
            "good ".repeat(length)
        }
    };
    let folder = std::env::temp_dir().join(format!("qkv-long-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let recipe = Recipe::parse(recipe, Path::new("long.toml"), &changes)?;
    let threads = rayon::current_num_threads();
    let mut run = Run::new(&recipe, &folder, threads)?;
    let mut clock = Clock::default();
    let before = ALLOCATOR.held();
    ALLOCATOR.forget_peak();
    run.train(&mut clock, &AtomicBool::new(false))?;
    let memory = ALLOCATOR.peak() - before;
    let (encoder, machine) = (Encoder::open(&folder)?, Machine::new(threads));
    encoder.classify(&[&text], &machine)?;
    let (start, rounds) = (taken(), 100);
    for _ in 0..rounds {
        encoder.classify(&[&text], &machine)?;
    }
    let reading = (taken() - start) / f64::from(rounds);
    std::fs::remove_dir_all(&folder)?;
    Ok(Cell { quality: clock.best, training: clock.seconds, steps: clock.steps, memory, reading })
}

/// Threads of a cell: the slowest have two, so that they are not alone at the end.
fn threads(asked: Experiment) -> usize {
    if asked.kind == 0 && asked.length > 2048 { 2 } else { 1 }
}

/// Asks a process of its own.
fn apart(asked: Experiment, reviews: Option<&str>) -> Result<Cell, Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--cell", &serde_json::to_string(&asked)?]).args(reviews);
    command.env("RAYON_NUM_THREADS", threads(asked).to_string()).stderr(Stdio::inherit());
    let output = command.output()?;
    Ok(serde_json::from_slice(&output.stdout).map_err(|_| format!("the training of {asked:?} failed"))?)
}

/// Cells that were measured before, a line each: what was asked, and what was found.
fn kept(file: Option<&str>) -> Result<BTreeMap<Experiment, Cell>, Box<dyn Error>> {
    let text = file.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    Ok(text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// All that is asked, so many at a time, the longest first; what is found is kept at once.
fn measured(
    asked: &[Experiment],
    reviews: Option<&str>,
    jobs: usize,
    keep: Option<&str>,
) -> Result<BTreeMap<Experiment, Cell>, Box<dyn Error>> {
    let before = kept(keep)?;
    let mut queue: Vec<Experiment> = asked.iter().copied().filter(|asked| !before.contains_key(asked)).collect();
    // The last is taken first: by length, and the full attention of a length before the others.
    queue.sort_by_key(|asked| (asked.length, std::cmp::Reverse(asked.kind)));
    let (queue, found) = (Mutex::new(queue), Mutex::new(Ok(before)));
    let work = || {
        loop {
            let Some(next) = queue.lock().expect("nobody panics with it").pop() else { return };
            let cell = apart(next, reviews).map_err(|error| error.to_string());
            let mut found = found.lock().expect("nobody panics with it");
            match (&mut *found, cell) {
                (Ok(all), Ok(cell)) => {
                    let line = serde_json::to_string(&(next, cell)).expect("plain values");
                    eprintln!("{line}");
                    if let Some(file) = keep {
                        let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
                        let _ = file.and_then(|mut file| writeln!(file, "{line}"));
                    }
                    all.insert(next, cell);
                }
                (_, Err(error)) => *found = Err(error),
                (Err(_), _) => return,
            }
        }
    };
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
    Ok(found.into_inner().expect("nobody panicked with it")?)
}

/// Takes a choice and its value out of the arguments.
fn choice(arguments: &mut Vec<String>, name: &str) -> Result<Option<String>, Box<dyn Error>> {
    let Some(at) = arguments.iter().position(|argument| argument == name) else { return Ok(None) };
    arguments.remove(at);
    if at == arguments.len() {
        return Err(format!("`{name}` needs a value").into());
    }
    Ok(Some(arguments.remove(at)))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(asked) = choice(&mut arguments, "--cell")? {
        let found = cell(serde_json::from_str(&asked)?, arguments.first().map(String::as_str))?;
        println!("{}", serde_json::to_string(&found)?);
        return Ok(());
    }
    let jobs = choice(&mut arguments, "--jobs")?.map_or(Ok(1), |jobs| jobs.parse::<usize>())?.max(1);
    let keep = choice(&mut arguments, "--keep")?;
    let reviews = arguments.first().map(String::as_str);
    let how = if reviews.is_some() { &[false][..] } else { &[false, true] };
    let lengths = |kind| {
        LENGTHS.into_iter().flat_map(move |length| how.iter().map(move |&often| Experiment { kind, length, often }))
    };
    let asked: Vec<Experiment> = (0..KINDS.len()).flat_map(lengths).collect();
    let found = measured(&asked, reviews, jobs, keep.as_deref())?;
    let (quality, line) =
        if reviews.is_some() { ("right on dev", " --- |") } else { ("one of each | many of each", " --- | --- |") };
    if reviews.is_none() {
        print!("{BEFORE}");
    }
    println!("\n| tokens | attention | {quality} | CPU ms a step | memory in training | CPU ms to read one text |");
    println!("| --- | --- |{line} --- | --- | --- |");
    for length in LENGTHS {
        for (kind, (name, ..)) in KINDS.iter().enumerate() {
            let cell = |often| found[&Experiment { kind, length, often }];
            let right =
                how.iter().map(|&often| format!("{:.1} %", cell(often).quality)).collect::<Vec<_>>().join(" | ");
            let Cell { training, steps, memory, reading, .. } = cell(false);
            let (step, memory) = (1e3 * training / steps as f64, memory as f64 / f64::from(1 << 20));
            println!("| {length} | {name} | {right} | {step:.0} | {memory:.0} MiB | {:.1} |", 1e3 * reading);
        }
    }
    if reviews.is_none() {
        print!("{AFTER}");
    }
    Ok(())
}

/// What changes where real reviews are read: pieces instead of characters, more noise against so few texts, longer
/// training.
const REVIEWS: [&str; 6] = [
    "tokenizer={ kind = 'bpe', size = 8000 }",
    "model.dropout=0.3",
    "model.layers=1",
    "train.steps=400",
    "train.adam={ beta2 = 0.99, epsilon = 1e-8, decay = 0.1 }",
    "train.average=0.99",
];

const BEFORE: &str = include_str!("../long/before.md");
const AFTER: &str = include_str!("../long/after.md");
