//! Parses `--place`, `--window` and `--local`. [`qkv::Place`] and [`qkv::Mask`] define their meaning.

use qkv::{Mask, Place};
use std::str::FromStr;

/// `--place start|end|OFFSET`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PlaceArg(pub Place);

impl FromStr for PlaceArg {
    type Err = String;
    fn from_str(typed: &str) -> Result<PlaceArg, String> {
        match typed {
            "start" => Ok(PlaceArg(Place::Start)),
            "end" => Ok(PlaceArg(Place::End)),
            offset => match offset.parse() {
                Ok(offset) => Ok(PlaceArg(Place::Offset(offset))),
                Err(_) => Err("expected `start`, `end` or a whole number".into()),
            },
        }
    }
}

/// `--window LEFT,RIGHT`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Window {
    left: usize,
    right: usize,
}

impl Window {
    pub fn mask(self) -> Mask {
        Mask::window(self.left, self.right)
    }
}

impl FromStr for Window {
    type Err = String;
    fn from_str(typed: &str) -> Result<Window, String> {
        match numbers(typed)?[..] {
            [left, right] => Ok(Window { left, right }),
            _ => Err("expected two whole numbers, `LEFT,RIGHT`".into()),
        }
    }
}

/// `--local predictive:D`: half the width of the window around a query's predicted center.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Local(pub usize);

impl FromStr for Local {
    type Err = String;
    fn from_str(typed: &str) -> Result<Local, String> {
        match typed.strip_prefix("predictive:").map(str::parse) {
            Some(Ok(half_width)) if half_width > 0 => Ok(Local(half_width)),
            Some(_) => Err("D must be a whole number of at least 1".into()),
            None => Err("expected `predictive:D`".into()),
        }
    }
}

/// Whole numbers separated by commas.
pub(crate) fn numbers(typed: &str) -> Result<Vec<usize>, String> {
    let number = |part: &str| part.trim().parse().map_err(|_| format!("`{part}` is not a whole number of 0 or more"));
    typed.split(',').map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_word_or_a_whole_number() {
        assert_eq!("end".parse(), Ok(PlaceArg(Place::End)));
        assert_eq!("-3".parse(), Ok(PlaceArg(Place::Offset(-3))));
        assert!("middle".parse::<PlaceArg>().is_err());
        assert!("1.5".parse::<PlaceArg>().is_err());
    }

    #[test]
    fn a_window_has_two_sides() {
        assert_eq!("3, 0".parse(), Ok(Window { left: 3, right: 0 }));
        for bad in ["3", "3,0,1", "-1,0", "3,", "", "99999999999999999999,0"] {
            assert!(bad.parse::<Window>().is_err(), "{bad}");
        }
    }

    #[test]
    fn local_attention_has_a_half_width() {
        assert_eq!("predictive:4".parse(), Ok(Local(4)));
        for bad in ["", "4", "predictive", "predictive:", "predictive:0", "predictive:-1", "monotonic:3"] {
            assert!(bad.parse::<Local>().is_err(), "{bad}");
        }
    }
}
