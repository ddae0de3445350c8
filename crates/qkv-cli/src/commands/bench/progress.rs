//! Shows what is being measured, on one line of the terminal that is overwritten.

use std::io::{self, IsTerminal, Write};

/// The line.
pub(crate) struct Progress {
    watched: bool,
    total: usize,
}

impl Progress {
    /// For `total` cases.
    pub fn of(total: usize) -> Progress {
        Progress { watched: io::stderr().is_terminal(), total }
    }

    /// Shows the case, counted from 0, and what is being done.
    pub fn show(&self, at: usize, what: &str) {
        if self.watched {
            let _ = write!(io::stderr(), "\r\x1b[2K[{}/{}] {what}", at + 1, self.total);
            let _ = io::stderr().flush();
        }
    }

    /// Clears the line before something else is printed.
    pub fn clear(&self) {
        if self.watched {
            let _ = write!(io::stderr(), "\r\x1b[2K");
            let _ = io::stderr().flush();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
