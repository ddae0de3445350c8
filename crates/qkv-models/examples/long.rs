//! Long documents: quality, time and memory against length, with full, Longformer's and linear attention on the same texts.
//!
//! ```text
//! cargo xtask long                                                         docs/long.md, from texts that the program makes
//! cargo run --release -p qkv-models --example long -- data/movie-reviews   the table of real reviews
//! cargo run --release -p qkv-models --example long -- --jobs 8             eight trainings at a time
//! ```
//!
//! Every cell of a table is a process of its own, so that what it holds and the time it takes are counted for it alone.

use qkv_models::train::{Event, Run, Validation, Watcher};
use qkv_models::{Encoder, Recipe};
use qkv_nn::Machine;
use qkv_simd::counting::Counting;
use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const LENGTHS: [usize; 4] = [512, 1024, 2048, 4096];
/// What the kinds are called, their recipe, and what is changed in it.
const KINDS: [(&str, &str, &str); 4] = [
    ("full", include_str!("../../../recipes/long-full.toml"), ""),
    ("Longformer", include_str!("../../../recipes/long-longformer.toml"), ""),
    ("linear, relu", include_str!("../../../recipes/long-linear.toml"), ""),
    (
        "linear, elu + 1",
        include_str!("../../../recipes/long-linear.toml"),
        "model.attention={ score = { linear = 'elu' } }",
    ),
];
/// How often what decides is in a text, for the second table, and the length of its texts.
const TIMES: [usize; 3] = [1, 8, 32];
const SHORT: usize = 512;

/// What a cell is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Asked {
    kind: usize,
    length: usize,
    times: usize,
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
fn cell(asked: Asked, reviews: Option<&str>) -> Result<Cell, Box<dyn Error>> {
    let Asked { kind, length, times } = asked;
    let (_, recipe, change) = KINDS[kind];
    let mut changes = vec![format!("model.max_positions={length}")];
    changes.extend((!change.is_empty()).then(|| change.to_owned()));
    let text = match reviews {
        None => {
            changes.extend([format!("data.needles={}", length - 2), format!("data.times={times}")]);
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
fn threads(asked: Asked) -> usize {
    if asked.kind == 0 && asked.length > 2048 { 2 } else { 1 }
}

/// Asks a process of its own.
fn apart(asked: Asked, reviews: Option<&str>) -> Result<Cell, Box<dyn Error>> {
    let Asked { kind, length, times } = asked;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--cell", &kind.to_string(), &length.to_string(), &times.to_string()]).args(reviews);
    command.env("RAYON_NUM_THREADS", threads(asked).to_string()).stderr(Stdio::inherit());
    let output = command.output()?;
    let cell: Cell = serde_json::from_slice(&output.stdout)
        .map_err(|_| format!("the training of {} at {length} tokens failed", KINDS[kind].0))?;
    eprintln!("{asked:?} {cell:?}");
    Ok(cell)
}

/// All that is asked, so many at a time, the longest first.
fn measured(asked: &[Asked], reviews: Option<&str>, jobs: usize) -> Result<BTreeMap<Asked, Cell>, Box<dyn Error>> {
    let mut queue = asked.to_vec();
    // The last is taken first: by length, and the full attention of a length before the others.
    queue.sort_by_key(|asked| (asked.length, std::cmp::Reverse(asked.kind)));
    let (queue, found) = (Mutex::new(queue), Mutex::new(BTreeMap::new()));
    let work = || loop {
        let Some(next) = queue.lock().expect("nobody panics with it").pop() else { return };
        let cell = apart(next, reviews).map_err(|error| error.to_string());
        found.lock().expect("nobody panics with it").insert(next, cell);
    };
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
    let found = found.into_inner().expect("nobody panicked with it");
    Ok(found.into_iter().map(|(asked, cell)| Ok((asked, cell?))).collect::<Result<_, String>>()?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "--cell") {
        let number = |at: usize| -> Result<usize, Box<dyn Error>> { Ok(arguments.get(at).ok_or("a number")?.parse()?) };
        let asked = Asked { kind: number(1)?, length: number(2)?, times: number(3)? };
        println!("{}", serde_json::to_string(&cell(asked, arguments.get(4).map(String::as_str))?)?);
        return Ok(());
    }
    let mut jobs = 1;
    if let Some(at) = arguments.iter().position(|argument| argument == "--jobs") {
        jobs = arguments.get(at + 1).ok_or("`--jobs` needs a number")?.parse::<usize>()?.max(1);
        arguments.drain(at..at + 2);
    }
    let reviews = arguments.first().map(String::as_str);
    let kinds = 0..KINDS.len();
    let lengths = |kind| LENGTHS.map(|length| Asked { kind, length, times: 1 });
    let often = |kind| TIMES.map(|times| Asked { kind, length: SHORT, times });
    let mut asked: Vec<Asked> = kinds.clone().flat_map(lengths).collect();
    if reviews.is_none() {
        asked.extend(kinds.clone().flat_map(often).filter(|asked| asked.times > 1));
        print!("{BEFORE}");
    }
    let found = measured(&asked, reviews, jobs)?;
    println!("\n| tokens | attention | right on dev | CPU ms a step | memory in training | CPU ms to read one text |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for length in LENGTHS {
        for (kind, (name, ..)) in KINDS.iter().enumerate() {
            let Cell { quality, training, steps, memory, reading } = found[&Asked { kind, length, times: 1 }];
            let (step, memory) = (1e3 * training / steps as f64, memory as f64 / f64::from(1 << 20));
            println!("| {length} | {name} | {quality:.1} % | {step:.0} | {memory:.1} MiB | {:.1} |", 1e3 * reading);
        }
    }
    if reviews.is_none() {
        print!("{BETWEEN}");
        println!("\n| attention | {} |", TIMES.map(|times| format!("{times} of each")).join(" | "));
        println!("| --- |{}", " --- |".repeat(TIMES.len()));
        for (kind, (name, ..)) in KINDS.iter().enumerate() {
            let cells = often(kind).map(|asked| format!("{:.1} %", found[&asked].quality));
            println!("| {name} | {} |", cells.join(" | "));
        }
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
const BETWEEN: &str = include_str!("long/between.md");
const AFTER: &str = include_str!("long/after.md");
