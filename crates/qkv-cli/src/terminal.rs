//! The terminal behind stdout: its width and its colors.

use console::Term;
use qkv_explore::draw::Colors;
use std::env;
use std::io::{self, IsTerminal};

/// The width of drawings if no width is known.
const WIDTH: usize = 100;

/// How drawings look on stdout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TerminalStyle {
    /// In columns.
    pub width: usize,
    pub color: bool,
}

impl TerminalStyle {
    /// The terminal's width, or else `COLUMNS`; color only on a terminal, and not with `NO_COLOR`.
    pub fn of_stdout() -> TerminalStyle {
        let terminal = Term::stdout().size_checked().map(|(_, columns)| usize::from(columns));
        let variable = || env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let positive = |&columns: &usize| columns > 0;
        let width = terminal.filter(positive).or_else(variable).filter(positive).unwrap_or(WIDTH);
        let plain = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || env::var_os("TERM").is_some_and(|name| name == "dumb");
        TerminalStyle { width, color: io::stdout().is_terminal() && !plain }
    }

    /// The color depth, from `COLORTERM` and `TERM`.
    pub fn colors(self) -> Colors {
        let variable = |name| env::var(name).unwrap_or_default();
        let (depth, term) = (variable("COLORTERM"), variable("TERM"));
        match self.color {
            false => Colors::None,
            true if depth == "truecolor" || depth == "24bit" => Colors::All,
            true if !depth.is_empty() || term.contains("256color") => Colors::Cube,
            true => Colors::Few,
        }
    }
}
