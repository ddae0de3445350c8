//! What is known of the terminal: whether there is one, how wide it is, whether it wants colour.

use console::Term;
use qkv_explore::draw::Colours;
use std::env;
use std::io::{self, IsTerminal};

/// How wide a drawing may be where nobody says.
const WIDTH: usize = 100;

/// How something may be drawn on stdout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Paper {
    /// Columns.
    pub width: usize,
    pub colour: bool,
}

impl Paper {
    /// As stdout has it: the width of the terminal, or else of `COLUMNS`; colour only on a terminal and not with `NO_COLOR`.
    pub fn of_stdout() -> Paper {
        let found = Term::stdout().size_checked().map(|(_, columns)| usize::from(columns));
        let asked = || env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let wide = |&columns: &usize| columns > 0;
        let width = found.filter(wide).or_else(asked).filter(wide).unwrap_or(WIDTH);
        let plain = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || env::var_os("TERM").is_some_and(|name| name == "dumb");
        Paper { width, colour: io::stdout().is_terminal() && !plain }
    }

    /// How many colours there are, as `COLORTERM` and `TERM` say.
    pub fn colours(self) -> Colours {
        let said = |name| env::var(name).unwrap_or_default();
        let (depth, term) = (said("COLORTERM"), said("TERM"));
        match self.colour {
            false => Colours::None,
            true if depth == "truecolor" || depth == "24bit" => Colours::All,
            true if !depth.is_empty() || term.contains("256color") => Colours::Cube,
            true => Colours::Few,
        }
    }
}
