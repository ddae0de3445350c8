//! A result that a device may still be computing.

use std::fmt;

/// A few numbers in flight from a device. Reading them waits for work submitted before the transfer, not for work
/// submitted since, so the host can prepare the next step in the meantime.
pub struct Pending<T>(State<T>);

enum State<T> {
    Known(T),
    Later(Box<dyn FnOnce() -> T + Send>),
}

impl<T> Pending<T> {
    /// A result that `read`, which may block, returns.
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
