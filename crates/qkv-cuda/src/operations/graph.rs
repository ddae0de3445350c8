//! Work that is recorded once and then runs as one launch: a CUDA graph.

use super::Operations;
use super::array::RecordedMemory;
use std::sync::atomic::Ordering;

/// Recorded work, with the memory that it uses. What it reads from arrays that outlive it may change between runs.
#[derive(Debug)]
pub struct Graph {
    operations: Operations,
    handle: usize,
    /// Given back after the graph is freed.
    _memory: RecordedMemory,
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.operations.driver().free_graph(self.handle);
    }
}

impl Operations {
    /// Records what `work` puts on the device, without running it, and returns it with what `work` returns. `work`
    /// copies nothing to the host or from it, waits for nothing, and has run before, so that what it needs is compiled.
    /// `None`, and `work` is not called, where nothing can be recorded: in the emulation, and after a failure.
    pub fn record<R>(&self, work: impl FnOnce() -> R) -> Option<(Graph, R)> {
        let stream = self.shared.stream;
        if self.failed().is_some() {
            return None;
        }
        match self.driver().begin_capture(stream) {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => {
                self.remember(Err(error));
                return None;
            }
        }
        self.shared.memory.begin_recording();
        self.shared.recording.store(true, Ordering::Relaxed);
        let result = work();
        self.shared.recording.store(false, Ordering::Relaxed);
        let _memory = self.shared.memory.end_recording();
        match self.driver().end_capture(stream) {
            Ok(handle) => Some((Graph { operations: self.clone(), handle, _memory }, result)),
            Err(error) => {
                self.remember(Err(error));
                None
            }
        }
    }

    /// Runs recorded work.
    ///
    /// # Panics
    /// Where it was recorded by other operations.
    pub fn launch_graph(&self, graph: &Graph) {
        assert!(self.is(&graph.operations), "a graph of other operations");
        if self.failed().is_none() {
            self.remember(self.driver().launch_graph(graph.handle, self.shared.stream));
        }
    }
}
