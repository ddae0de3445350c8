//! Long documents: quality, time and memory by length, with full, Longformer and linear attention on the same texts.
//!
//! ```text
//! cargo xtask long                                                  docs/long.md, from texts that the program makes
//! cargo run --release -p figures --bin long -- data/movie-reviews   the table of real reviews
//! cargo run --release -p figures --bin long -- --jobs 8             eight trainings at a time
//! cargo run --release -p figures --bin long -- --keep cells.jsonl   what is measured is kept there
//! ```
//!
//! Every cell of a table is measured in a separate process, so that its memory and time are not mixed with those of
//! others.

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
/// The name of each kind of attention, its recipe, and the changes to it.
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
/// In the task with many deciding letters, they occur once in this many letters, and training takes `OFTEN_STEPS`
/// steps.
const EVERY: usize = 16;
const OFTEN_STEPS: usize = 150;

/// The experiment of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
struct Experiment {
    kind: usize,
    length: usize,
    /// Whether the deciding letters occur often, or once.
    often: bool,
}

/// The measurements of a cell.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
struct Cell {
    /// The best accuracy on the dev set, in percent.
    quality: f64,
    /// Seconds of CPU time of the training steps only, summed over all threads; other programs on the machine affect it
    /// little.
    training: f64,
    steps: u64,
    /// Peak number of bytes allocated in training, beyond those allocated before.
    memory: usize,
    /// Seconds of CPU time to classify one text of full length.
    reading: f64,
}

/// Seconds of CPU time of this process so far, at a resolution of 1/100 s; 0 if the system does not report it.
fn taken() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let numbers = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    numbers.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Sums the time of steps, excluding validation.
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

/// Trains a recipe, and classifies a text with the trained model.
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

/// Threads of a cell. The slowest get two, so that they are not the only ones running at the end.
fn threads(asked: Experiment) -> usize {
    if asked.kind == 0 && asked.length > 2048 { 2 } else { 1 }
}

/// Measures a cell in a separate process.
fn apart(asked: Experiment, reviews: Option<&str>) -> Result<Cell, Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--cell", &serde_json::to_string(&asked)?]).args(reviews);
    command.env("RAYON_NUM_THREADS", threads(asked).to_string()).stderr(Stdio::inherit());
    let output = command.output()?;
    Ok(serde_json::from_slice(&output.stdout).map_err(|_| format!("the training of {asked:?} failed"))?)
}

/// Cells that were measured before, one per line: the experiment and its results.
fn kept(file: Option<&str>) -> Result<BTreeMap<Experiment, Cell>, Box<dyn Error>> {
    let text = file.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    Ok(text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// Measures all cells, `jobs` at a time, the longest first, and saves each result as soon as it is known.
fn measured(
    asked: &[Experiment],
    reviews: Option<&str>,
    jobs: usize,
    keep: Option<&str>,
) -> Result<BTreeMap<Experiment, Cell>, Box<dyn Error>> {
    let before = kept(keep)?;
    let mut queue: Vec<Experiment> = asked.iter().copied().filter(|asked| !before.contains_key(asked)).collect();
    // The last is taken first: longest first, and within a length full attention before the others.
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

/// Removes an option and its value from the arguments.
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

/// Changes for real reviews: subword tokens instead of characters, more dropout because there are few texts, and longer
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
