//! Hostile bytes for every format that qkv reads. A target is some files that are right, what the format is made of, and a body
//! that reads bytes and says what came of it. Cases are a function of the target's name, the seed and their number, so what
//! fails once fails again, on any machine and on a stable compiler.
//!
//! What is asked of a body: no panic, no more than [`MOST`] bytes held at a time, an end within [`LONGEST`]. A case whose outcome
//! was not seen before becomes a seed for later ones, which leads deeper into a reader than chance alone.
//!
//! | variable | what it does |
//! | --- | --- |
//! | `QKV_FUZZ_SECONDS` | goes on for so long, instead of [`CASES`] cases |
//! | `QKV_FUZZ_SEED` | draws others |
//! | `QKV_FUZZ_INPUT` | reads this file alone: an input that was kept when it failed |
//!
//! `cargo xtask fuzz [TARGET] [--seconds N]` sets them.

mod mutation;

pub use mutation::{Shape, png_chunk};

use qkv_models::draws::Draws;
use qkv_simd::counting::Counting;
use std::collections::HashSet;
use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Cases of a target in an ordinary run of the tests: some seconds.
pub const CASES: u64 = 1500;
/// Bytes that a case may hold beyond what was there before. Seeds have kilobytes.
pub const MOST: usize = 64 << 20;
/// How long a case may take, on a busy machine too.
pub const LONGEST: Duration = Duration::from_secs(20);
/// Seeds that a target keeps.
const POOL: usize = 400;
/// The longest input: mutations that double it end here.
const WIDEST: usize = 1 << 16;

/// What the process holds. Targets run one after the other, so that what is counted is theirs.
#[global_allocator]
static ALLOCATOR: Counting = Counting::new();
static TURN: Mutex<()> = Mutex::new(());

/// A format.
#[derive(Clone, Debug)]
pub struct Target {
    /// What it is called.
    pub name: &'static str,
    /// How its bytes hang together.
    pub shape: Shape,
    /// Files that are right.
    pub seeds: Vec<Vec<u8>>,
    /// Words that mean something in it.
    pub words: &'static [&'static str],
}

/// Runs a target. The body says what came of an input, in words: what differs in more than numbers and quoted parts counts as new.
///
/// # Panics
/// Where a case does what none may; the message says where its input was kept.
pub fn fuzz(target: &Target, body: impl Fn(&[u8]) -> String) {
    run(target, CASES, MOST, body);
}

/// The same with another number of cases in an ordinary run, for a body that takes its time.
///
/// # Panics
/// As [`fuzz`].
pub fn fuzz_few(target: &Target, count: u64, body: impl Fn(&[u8]) -> String) {
    run(target, count, MOST, body);
}

/// The same with another number of bytes that may be held, for a format that says in a few bytes how large it is.
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
        input.truncate(WIDEST);
        let outcome = kind(&checked(target, &input, most, &body));
        if seen.insert(outcome) && pool.len() < POOL {
            pool.push(input);
        }
        cases += 1;
    }
    println!("{}: {cases} cases, {} outcomes, {:.1} s", target.name, seen.len(), start.elapsed().as_secs_f64());
}

/// Runs one case, and holds it to what is asked.
fn checked(target: &Target, input: &[u8], most: usize, body: impl Fn(&[u8]) -> String) -> String {
    // Before the case: memory that the system refuses ends the process, and leaves the input.
    let path = env::temp_dir().join(format!("qkv-fuzz-{}-{}", target.name, std::process::id()));
    std::fs::write(&path, input).expect("a folder for temporary files");
    let start = Instant::now();
    let (outcome, held) = ALLOCATOR.beyond(|| catch_unwind(AssertUnwindSafe(|| body(input))));
    let what = match outcome {
        Err(panic) => {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            format!("panicked: {}", said.unwrap_or_default())
        }
        Ok(_) if held > most => format!("held {held} bytes"),
        Ok(_) if start.elapsed() > LONGEST => format!("took {:?}", start.elapsed()),
        Ok(outcome) => {
            let _ = std::fs::remove_file(path);
            return outcome;
        }
    };
    panic!("{} {what}\nthe input is kept in {}; `QKV_FUZZ_INPUT` reads it again", target.name, path.display());
}

/// An outcome without its numbers and without what it quotes.
fn kind(outcome: &str) -> String {
    let mut quoted = false;
    let letters = outcome.chars().filter(|&c| {
        quoted ^= matches!(c, '`' | '"');
        !quoted && !c.is_ascii_digit()
    });
    letters.take(300).collect()
}
