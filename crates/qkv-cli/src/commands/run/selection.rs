//! Parses `--select`: how scores become weights. [`qkv::Select`] defines the selections themselves.

use qkv::{Choice, Select};
use std::str::FromStr;

/// A selection, before `--straight-through` is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Selection {
    #[default]
    Soft,
    Hard,
    Sample,
    TopK(usize),
    Sparsemax,
}

impl Selection {
    /// Converts it to the library's type.
    pub fn select(self, straight_through: bool) -> Select {
        match self {
            Selection::Soft => Select::Soft,
            Selection::Hard => Select::Hard(Choice { sample: false, straight_through }),
            Selection::Sample => Select::Hard(Choice { sample: true, straight_through }),
            Selection::TopK(k) => Select::TopK(k),
            Selection::Sparsemax => Select::Sparsemax,
        }
    }
}

impl FromStr for Selection {
    type Err = String;
    fn from_str(typed: &str) -> Result<Selection, String> {
        match typed {
            "soft" => Ok(Selection::Soft),
            "hard" => Ok(Selection::Hard),
            "sample" => Ok(Selection::Sample),
            "sparsemax" => Ok(Selection::Sparsemax),
            other => match other.strip_prefix("top-k:").map(str::parse) {
                Some(Ok(k)) if k > 0 => Ok(Selection::TopK(k)),
                Some(_) => Err("K must be a whole number of at least 1".into()),
                None => Err("expected `soft`, `hard`, `sample`, `top-k:K` or `sparsemax`".into()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_in_the_help_parses() {
        assert_eq!("soft".parse(), Ok(Selection::Soft));
        assert_eq!("hard".parse(), Ok(Selection::Hard));
        assert_eq!("sample".parse(), Ok(Selection::Sample));
        assert_eq!("top-k:5".parse(), Ok(Selection::TopK(5)));
        assert_eq!("sparsemax".parse(), Ok(Selection::Sparsemax));
        for bad in ["", "Hard", "top-k", "top-k:", "top-k:0", "top-k:-1", "top-k:1,2", "hard:1", "argmax"] {
            assert!(bad.parse::<Selection>().is_err(), "{bad}");
        }
    }

    #[test]
    fn only_sample_samples() {
        assert_eq!(Selection::Hard.select(true), Select::Hard(Choice { sample: false, straight_through: true }));
        let sampled = Choice { sample: true, straight_through: false };
        assert_eq!(Selection::Sample.select(false), Select::Hard(sampled));
    }
}
