//! A reproducible sample of test cases.
//!
//! `QKV_SAMPLE=0.1` keeps about a tenth of the cases, `QKV_SEED` chooses which. Without a seed one is taken from the
//! clock. The seed is printed, so that a failure can be repeated. Whether a case is kept depends only on the seed and
//! its name, not on the order of tests or on other cases.

use std::io::Write;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// The share of the cases that is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Between 0 and 1.
    pub fraction: f64,
    /// Chooses which cases are kept.
    pub seed: u64,
}

impl Sample {
    /// Every case.
    pub const ALL: Sample = Sample { fraction: 1.0, seed: 0 };

    /// As set by `QKV_SAMPLE` and `QKV_SEED`; every case without them. Prints the seed once.
    ///
    /// # Panics
    /// If a variable is not a number, or the fraction is not within 0 and 1.
    pub fn from_env() -> Sample {
        static SAMPLE: OnceLock<Sample> = OnceLock::new();
        *SAMPLE.get_or_init(|| {
            let Ok(fraction) = std::env::var("QKV_SAMPLE") else { return Sample::ALL };
            let parsed = fraction.parse().ok().filter(|fraction| (0.0..=1.0).contains(fraction));
            let fraction = parsed.unwrap_or_else(|| panic!("QKV_SAMPLE is {fraction:?}, not a number from 0 to 1"));
            let seed = match std::env::var("QKV_SEED") {
                Ok(seed) => seed.parse().unwrap_or_else(|_| panic!("QKV_SEED is {seed:?}, not a whole number")),
                Err(_) => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64),
            };
            // Directly to the terminal: the harness captures the output of tests that pass.
            let _ = writeln!(std::io::stderr(), "a sample of {fraction} of the cases: QKV_SEED={seed}");
            Sample { fraction, seed }
        })
    }

    /// Whether the case of this name is kept.
    pub fn keeps(self, name: &str) -> bool {
        // FNV-1a over the seed and the name, then the finalizer of SplitMix64.
        let bytes = self.seed.to_le_bytes().into_iter().chain(name.bytes());
        let mut hash =
            bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let uniform = ((hash ^ (hash >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
        uniform < self.fraction
    }

    /// The cases that are kept, and at least one.
    pub fn draw<C>(self, cases: Vec<C>, name: impl Fn(&C) -> &str) -> Vec<C> {
        let (mut kept, mut left): (Vec<C>, Vec<C>) = cases.into_iter().partition(|case| self.keeps(name(case)));
        if kept.is_empty() && !left.is_empty() {
            kept.push(left.swap_remove(self.seed as usize % left.len()));
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_reproducible_and_about_as_large_as_said() {
        let names: Vec<String> = (0..2000).map(|at| format!("case {at}")).collect();
        let draw = |seed| Sample { fraction: 0.1, seed }.draw(names.clone(), |name| name);
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!((150..250).contains(&draw(3).len()), "{}", draw(3).len());
        assert_eq!(Sample::ALL.draw(names.clone(), |name| name), names);
        assert_eq!(Sample { fraction: 0.0, seed: 5 }.draw(names.clone(), |name| name).len(), 1);
    }
}
