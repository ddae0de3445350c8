//! What communication costs: bytes sent, and the time that computation waited for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Counts what one rank sends and how long it waits. Signs of life of MPI ranks are not counted.
#[derive(Debug, Default)]
pub struct Traffic {
    sent: AtomicU64,
    messages: AtomicU64,
    waited: AtomicU64,
}

/// A reading of [`Traffic`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCount {
    /// Bytes sent to other ranks.
    pub sent: u64,
    /// Messages sent to other ranks.
    pub messages: u64,
    /// Time spent waiting for messages: communication not hidden by computation.
    pub waited: Duration,
}

impl Traffic {
    /// The counts so far.
    pub fn count(&self) -> TrafficCount {
        TrafficCount {
            sent: self.sent.load(Ordering::Relaxed),
            messages: self.messages.load(Ordering::Relaxed),
            waited: Duration::from_nanos(self.waited.load(Ordering::Relaxed)),
        }
    }

    pub(crate) fn sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        self.messages.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn waited(&self, since: Instant) {
        let nanos = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited.fetch_add(nanos, Ordering::Relaxed);
    }
}

impl std::ops::Sub for TrafficCount {
    type Output = TrafficCount;

    fn sub(self, before: TrafficCount) -> TrafficCount {
        TrafficCount {
            sent: self.sent - before.sent,
            messages: self.messages - before.messages,
            waited: self.waited.saturating_sub(before.waited),
        }
    }
}
