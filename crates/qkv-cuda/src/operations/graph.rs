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

/// Work that is done again and again over the same arrays, as a step of decoding is: recorded once a run of it copied
/// nothing from the host. The first compiles what it needs and may copy weights, and those that another device holds
/// are copied in every run.
#[derive(Debug)]
pub struct RepeatedWork<R> {
    graph: Option<Graph>,
    /// Whether the last run copied nothing from the host.
    is_recordable: bool,
    result: Option<R>,
}

impl<R> Default for RepeatedWork<R> {
    fn default() -> Self {
        RepeatedWork { graph: None, is_recordable: false, result: None }
    }
}

impl<R> RepeatedWork<R> {
    /// Runs it once more. `work` puts it on the device and returns the arrays with its results, which stay the same
    /// once it is recorded.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn run<E>(&mut self, operations: &Operations, mut work: impl FnMut() -> Result<R, E>) -> Result<(), E> {
        if let Some(graph) = &self.graph {
            operations.launch_graph(graph);
            return Ok(());
        }
        if self.is_recordable
            && let Some((graph, result)) = operations.record(&mut work)
        {
            self.result = Some(result?);
            operations.launch_graph(&graph);
            self.graph = Some(graph);
            return Ok(());
        }
        let before = operations.bytes_written();
        self.result = Some(work()?);
        self.is_recordable = operations.bytes_written() == before;
        Ok(())
    }

    /// What `work` returned last.
    pub fn result(&self) -> Option<&R> {
        self.result.as_ref()
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
