//! Which thread records, and where. What it puts on the device goes to a stream of its own until it is done, so that
//! the work of other threads is neither recorded nor waits. Threads record in turns.

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

/// The number of the thread that calls; no other has it, nor will.
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

/// Who records.
#[derive(Debug)]
pub(super) struct Recorder {
    /// What is recorded is put here; nothing ever runs on it.
    pub stream: Stream,
    turn: Mutex<()>,
    /// The number of the thread that records; 0 for none.
    thread: AtomicU64,
    /// Constants that the recorded work reads.
    constants: Mutex<Vec<Array>>,
}

impl Recorder {
    pub fn new(stream: Stream) -> Recorder {
        Recorder { stream, turn: Mutex::default(), thread: AtomicU64::new(0), constants: Mutex::default() }
    }

    /// Whether the thread that calls records.
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

    /// It does no more: the constants that were read.
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
