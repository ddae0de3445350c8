//! A result that a device may still be computing.

use std::fmt;

/// A number, or a few, on their way from a device. Reading them waits for the work that came before they were asked
/// for, and not for what was submitted since: so the host can prepare the next step meanwhile.
pub struct Pending<T>(State<T>);

enum State<T> {
    Known(T),
    Later(Box<dyn FnOnce() -> T + Send>),
}

impl<T> Pending<T> {
    /// What `read` returns, which may wait.
    pub(crate) fn later(read: impl FnOnce() -> T + Send + 'static) -> Pending<T> {
        Pending(State::Later(Box::new(read)))
    }

    /// The result.
    pub fn read(self) -> T {
        match self.0 {
            State::Known(value) => value,
            State::Later(read) => read(),
        }
    }
}

impl<T> From<T> for Pending<T> {
    fn from(value: T) -> Self {
        Pending(State::Known(value))
    }
}

impl<T: fmt::Debug> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            State::Known(value) => write!(f, "Pending({value:?})"),
            State::Later(_) => write!(f, "Pending(..)"),
        }
    }
}
