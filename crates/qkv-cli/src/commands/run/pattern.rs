//! Parses `--pattern`: sparse patterns. [`qkv::Mask`] defines the masks themselves.

use super::place::numbers;
use crate::failure::Failure;
use qkv::{BigBird, Lsh, Mask};
use std::str::FromStr;

/// A bucket is a 32-bit integer.
const MOST_BUCKETS: usize = i32::MAX as usize;

/// A sparse pattern, checked as far as possible without the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pattern {
    Dilated { window: usize, step: usize },
    Strided { stride: usize },
    Fixed { stride: usize, summary: usize },
    Longformer { window: usize, globals: usize },
    BigBird(BigBird),
    Lsh(Lsh),
}

impl Pattern {
    /// Converts it to a mask; `longest` is the larger of N and M.
    pub fn mask(self, longest: usize) -> Result<Mask, Failure> {
        match self {
            Pattern::Dilated { window, step } => Ok(Mask::dilated(window, step)),
            Pattern::Strided { stride } => Ok(Mask::strided(stride)),
            Pattern::Fixed { stride, summary } => Ok(Mask::fixed(stride, summary)),
            // Checked before the positions are listed: the list would be as long as the typed number, however large.
            Pattern::Longformer { globals, .. } if globals > longest => Err(Failure::new(format!(
                "`--pattern longformer` has {globals} global positions, expected at most {longest}, the number of \
                 queries or keys"
            ))),
            Pattern::Longformer { window, globals } => Ok(Mask::longformer(window, 0..globals)),
            Pattern::BigBird(bigbird) => Ok(Mask::bigbird(bigbird)),
            Pattern::Lsh(lsh) => Ok(Mask::lsh(lsh)),
        }
    }

    /// The hash of queries and keys, for LSH buckets.
    pub fn hash(self) -> Option<Lsh> {
        match self {
            Pattern::Lsh(lsh) => Some(lsh),
            _ => None,
        }
    }
}

impl FromStr for Pattern {
    type Err = String;
    fn from_str(typed: &str) -> Result<Pattern, String> {
        const FORMS: &str = "expected `dilated:W,STEP`, `strided:S`, `fixed:S,C`, `longformer:W,G`, \
                             `bigbird:B,W,G,R,SEED` or `lsh:BUCKETS,ROUNDS,SEED`";
        let (name, rest) = typed.split_once(':').ok_or(FORMS)?;
        if !["dilated", "strided", "fixed", "longformer", "bigbird", "lsh"].contains(&name) {
            return Err(FORMS.into());
        }
        match (name, &numbers(rest)?[..]) {
            ("dilated", &[window, step]) if step > 0 => Ok(Pattern::Dilated { window, step }),
            ("dilated", [_, _]) => Err("the step must be at least 1".into()),
            ("strided", &[stride]) if stride > 0 => Ok(Pattern::Strided { stride }),
            ("strided", [_]) => Err("the stride must be at least 1".into()),
            ("fixed", &[stride, summary]) if (1..=stride).contains(&summary) => Ok(Pattern::Fixed { stride, summary }),
            ("fixed", [_, _]) => Err("C must be at least 1 and at most S".into()),
            ("longformer", &[window, globals]) => Ok(Pattern::Longformer { window, globals }),
            ("bigbird", &[block, window, globals, random, seed]) if block > 0 => {
                Ok(Pattern::BigBird(BigBird { block, window, globals, random, seed: seed as u64 }))
            }
            ("bigbird", [_, _, _, _, _]) => Err("a block must have at least 1 token".into()),
            ("lsh", [_, 0, _]) => Err("there must be at least 1 round".into()),
            ("lsh", &[buckets, rounds, seed]) if (2..=MOST_BUCKETS).contains(&buckets) && buckets % 2 == 0 => {
                Ok(Pattern::Lsh(Lsh { buckets, rounds, seed: seed as u64 }))
            }
            ("lsh", [_, _, _]) => Err("the buckets must be an even number of at least 2, within 32 bits".into()),
            _ => Err(FORMS.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_in_the_help_parses() {
        assert_eq!("dilated:8,2".parse(), Ok(Pattern::Dilated { window: 8, step: 2 }));
        assert_eq!("strided:8".parse(), Ok(Pattern::Strided { stride: 8 }));
        assert_eq!("fixed:8,2".parse(), Ok(Pattern::Fixed { stride: 8, summary: 2 }));
        assert_eq!("longformer:8,2".parse(), Ok(Pattern::Longformer { window: 8, globals: 2 }));
        let bigbird = BigBird { block: 4, window: 3, globals: 1, random: 2, seed: 7 };
        assert_eq!("bigbird:4,3,1,2,7".parse(), Ok(Pattern::BigBird(bigbird)));
        assert_eq!("lsh:8,2,7".parse(), Ok(Pattern::Lsh(Lsh { buckets: 8, rounds: 2, seed: 7 })));
    }

    #[test]
    fn malformed_patterns_are_refused() {
        for bad in [
            "",
            "strided",
            "strided:",
            "strided:0",
            "strided:1,2",
            "strided:-1",
            "fixed:8",
            "fixed:8,0",
            "fixed:8,9",
            "longformer:8",
            "longformer:8,x",
            "bigbird:0,3,1,2,7",
            "bigbird:4,3,1,2",
            "lsh:8",
            "lsh:8,2",
            "lsh:0,2,7",
            "lsh:7,2,7",
            "lsh:8,0,7",
            "lsh:4294967296,1,0",
            "dilated:3",
            "dilated:8,0",
            "star:3",
        ] {
            assert!(bad.parse::<Pattern>().is_err(), "{bad}");
        }
    }

    #[test]
    fn more_global_positions_than_positions_are_refused_before_they_are_listed() {
        let endless = Pattern::Longformer { window: 2, globals: usize::MAX };
        assert!(endless.mask(12).is_err());
        assert!(Pattern::Longformer { window: 2, globals: 12 }.mask(12).is_ok());
    }
}
