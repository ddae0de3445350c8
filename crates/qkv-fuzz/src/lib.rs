//! Fuzzing of every format that qkv reads, on a stable compiler.
//!
//! A target has valid files as seeds, the structure and keywords of its format, and a body that parses bytes and
//! returns the outcome as text. Inputs are a function of the target's name, the seed and their index, so that a failure
//! is reproducible on any machine. A body must not panic, allocate more than [`MAX_BYTES`] or take longer than
//! [`MAX_TIME`]. An input with a new outcome joins the seeds, which reaches deeper into a parser than random mutation
//! alone.
//!
//! | variable | effect |
//! | --- | --- |
//! | `QKV_FUZZ_SECONDS` | runs each target for this long, instead of [`CASES`] inputs |
//! | `QKV_FUZZ_SEED` | draws other inputs |
//! | `QKV_FUZZ_INPUT` | runs one saved input |
//!
//! `cargo xtask fuzz [TARGET] [--seconds N]` sets them. The same [`bodies`] are `cargo-fuzz` targets in `fuzz/`, for
//! those with a nightly compiler: `cd crates/qkv-fuzz && cargo +nightly fuzz run safetensors`.

pub mod bodies;
mod mutation;

pub use mutation::{Shape, png_chunk};

use qkv_models::draws::Draws;
use qkv_simd::counting::Counting;
use std::collections::HashSet;
use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Inputs per target in an ordinary test run, which take a few seconds.
pub const CASES: u64 = 1500;
/// Bytes that an input may have allocated at a time. Seeds are kilobytes long.
pub const MAX_BYTES: usize = 64 << 20;
/// Time that an input may take, even on a busy machine.
pub const MAX_TIME: Duration = Duration::from_secs(20);
/// Maximum seeds of a target.
const MAX_SEEDS: usize = 400;
/// Maximum length of an input.
const MAX_INPUT: usize = 1 << 16;

/// Counts allocations. Targets run one at a time, so that the count belongs to the running one.
#[global_allocator]
static ALLOCATOR: Counting = Counting::new();
static TURN: Mutex<()> = Mutex::new(());
/// Executions of all targets of this process.
static EXECUTIONS: AtomicU64 = AtomicU64::new(0);

/// A format to fuzz.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// The structure of its bytes.
    pub shape: Shape,
    /// Valid files.
    pub seeds: Vec<Vec<u8>>,
    /// Its keywords.
    pub words: &'static [&'static str],
}

/// Runs a target. The body returns the outcome of an input as text; an outcome is new if it differs from earlier ones
/// in more than numbers and quoted parts.
///
/// # Panics
/// If an input breaks a rule; the message says where the input was saved.
pub fn fuzz(target: &Target, body: impl Fn(&[u8]) -> String) {
    run(target, CASES, MAX_BYTES, body);
}

/// [`fuzz`] with another number of inputs in an ordinary run, for a slow body.
///
/// # Panics
/// As [`fuzz`].
pub fn fuzz_few(target: &Target, count: u64, body: impl Fn(&[u8]) -> String) {
    run(target, count, MAX_BYTES, body);
}

/// [`fuzz`] with another allocation limit, for a format in which a few bytes can declare a large size.
///
/// # Panics
/// As [`fuzz`].
pub fn fuzz_large(target: &Target, most: usize, body: impl Fn(&[u8]) -> String) {
    run(target, CASES, most, body);
}

fn run(target: &Target, count: u64, most: usize, body: impl Fn(&[u8]) -> String) {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(path) = env::var_os("QKV_FUZZ_INPUT") {
        let bytes = std::fs::read(&path).expect("QKV_FUZZ_INPUT names a file");
        println!("{}: {}", target.name, body(&bytes));
        return;
    }
    let number = |name| env::var(name).ok().and_then(|text: String| text.parse::<u64>().ok());
    let seconds = number("QKV_FUZZ_SECONDS").map(Duration::from_secs);
    let seed = number("QKV_FUZZ_SEED").unwrap_or(1);
    let purpose = target.name.bytes().fold(0u32, |sum, b| sum.wrapping_mul(31).wrapping_add(u32::from(b)));
    let (start, mut pool, mut seen) = (Instant::now(), target.seeds.clone(), HashSet::new());
    for seed in &target.seeds {
        seen.insert(kind(&checked(target, seed, most, &body)));
    }
    let mut cases = 0;
    while seconds.map_or(cases < count, |most| start.elapsed() < most) {
        let mut draws = Draws::new(seed, [purpose, cases as u32, (cases >> 32) as u32]);
        let mut input = mutation::mutated(&mut draws, &pool, target.words, target.shape);
        input.truncate(MAX_INPUT);
        let outcome = kind(&checked(target, &input, most, &body));
        if seen.insert(outcome) && pool.len() < MAX_SEEDS {
            pool.push(input);
        }
        cases += 1;
    }
    let executions = cases + target.seeds.len() as u64;
    let total = EXECUTIONS.fetch_add(executions, Ordering::Relaxed) + executions;
    let (outcomes, elapsed) = (seen.len(), start.elapsed().as_secs_f64());
    println!(
        "{}: {executions} executions, {outcomes} outcomes, {elapsed:.1} s; {total} executions so far",
        target.name
    );
}

/// Runs one input and checks the rules.
fn checked(target: &Target, input: &[u8], most: usize, body: impl Fn(&[u8]) -> String) -> String {
    // Save the input first, so that an aborted process leaves it behind.
    let path = env::temp_dir().join(format!("qkv-fuzz-{}-{}", target.name, std::process::id()));
    std::fs::write(&path, input).expect("a folder for temporary files");
    let start = Instant::now();
    let (outcome, held) = ALLOCATOR.beyond(|| catch_unwind(AssertUnwindSafe(|| body(input))));
    let what = match outcome {
        Err(panic) => {
            let message = panic.downcast_ref::<String>().cloned();
            let message = message.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            format!("panicked: {}", message.unwrap_or_default())
        }
        Ok(_) if held > most => format!("allocated {held} bytes"),
        Ok(_) if start.elapsed() > MAX_TIME => format!("took {:?}", start.elapsed()),
        Ok(outcome) => {
            let _ = std::fs::remove_file(path);
            return outcome;
        }
    };
    panic!("{} {what}\nthe input is saved in {}; `QKV_FUZZ_INPUT` runs it again", target.name, path.display());
}

/// An outcome without numbers and quoted parts.
fn kind(outcome: &str) -> String {
    let mut quoted = false;
    let letters = outcome.chars().filter(|&c| {
        quoted ^= matches!(c, '`' | '"');
        !quoted && !c.is_ascii_digit()
    });
    letters.take(300).collect()
}
