//! Which thread records, and on which stream. Its work goes to a separate stream until it is done, so that the work of
//! other threads is neither recorded nor delayed. Threads take turns to record.

use super::Array;
use crate::device::Stream;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

thread_local! {
    /// The number of this thread, from 1.
    static NUMBER: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
    /// Bytes that this thread has copied from the host.
    static WRITTEN: Cell<u64> = const { Cell::new(0) };
}

/// The number of the calling thread, which no other thread ever has.
pub(super) fn this_thread() -> u64 {
    NUMBER.with(|number| *number)
}

/// Counts bytes that this thread copies from the host.
pub(super) fn count_written(bytes: usize) {
    WRITTEN.with(|written| written.set(written.get() + bytes as u64));
}

/// Bytes that this thread has copied from the host so far.
pub(super) fn written() -> u64 {
    WRITTEN.with(Cell::get)
}

/// The state of recording.
#[derive(Debug)]
pub(super) struct Recorder {
    /// Recorded work is enqueued here; nothing ever runs on it.
    pub stream: Stream,
    turn: Mutex<()>,
    /// The number of the recording thread; 0 for none.
    thread: AtomicU64,
    /// Constants that the recorded work reads.
    constants: Mutex<Vec<Array>>,
}

impl Recorder {
    pub fn new(stream: Stream) -> Recorder {
        Recorder { stream, turn: Mutex::default(), thread: AtomicU64::new(0), constants: Mutex::default() }
    }

    /// Whether the calling thread records.
    pub fn is_this_thread(&self) -> bool {
        // Only this thread stores its number, so the order of other stores does not matter.
        self.thread.load(Ordering::Relaxed) == this_thread()
    }

    /// Waits until no other thread records.
    pub fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this thread, whose turn it is, records.
    pub fn begin(&self) {
        self.thread.store(this_thread(), Ordering::Relaxed);
    }

    /// Ends the recording; returns the constants that it read.
    pub fn end(&self) -> Vec<Array> {
        self.thread.store(0, Ordering::Relaxed);
        std::mem::take(&mut *self.constants())
    }

    /// Keeps a constant for as long as the graph, if this thread records.
    pub fn keep(&self, constant: &Array) {
        if self.is_this_thread() {
            self.constants().push(constant.clone());
        }
    }

    fn constants(&self) -> MutexGuard<'_, Vec<Array>> {
        self.constants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
