//! What is being measured now, on a line of stderr that is written over, where a person watches.

use std::io::{self, IsTerminal, Write};

/// A line that comes and goes.
pub(crate) struct Progress {
    watched: bool,
    total: usize,
}

impl Progress {
    /// Of so many cases.
    pub fn of(total: usize) -> Progress {
        Progress { watched: io::stderr().is_terminal(), total }
    }

    /// Shows it: the case, counted from 0, and what is being done.
    pub fn show(&self, at: usize, what: &str) {
        if self.watched {
            let _ = write!(io::stderr(), "\r\x1b[2K[{}/{}] {what}", at + 1, self.total);
            let _ = io::stderr().flush();
        }
    }

    /// Takes it away, before something else is said.
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
