//! Work that is recorded once and then runs as one launch: a CUDA graph.

use super::array::{Array, RecordedMemory};
use super::{Operations, recorder};
use crate::error::Result as DeviceResult;
use std::sync::MutexGuard;

/// Recorded work, with the memory that it uses. The contents of arrays that outlive it may change between runs.
#[derive(Debug)]
pub struct Graph {
    operations: Operations,
    handle: usize,
    /// Returned after the graph is freed.
    _memory: RecordedMemory,
    /// The shared constants that it reads.
    _constants: Vec<Array>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.operations.driver().free_graph(self.handle);
    }
}

/// Work that is repeated over the same arrays, such as a decoding step: recorded as soon as a run has copied nothing
/// from the host. The first run compiles what it needs and may copy weights; weights held by another device are copied
/// in every run.
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
    /// Runs it once more. `work` enqueues it and returns the arrays with its results, which stay the same once it is
    /// recorded.
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
        let before = recorder::written();
        self.result = Some(work()?);
        self.is_recordable = recorder::written() == before;
        Ok(())
    }

    /// What `work` returned last.
    pub fn result(&self) -> Option<&R> {
        self.result.as_ref()
    }
}

/// A recording in progress; it ends even if the work panics.
struct Recording<'a> {
    operations: &'a Operations,
    has_ended: bool,
    _turn: MutexGuard<'a, ()>,
}

impl<'a> Recording<'a> {
    /// `None` if nothing can be recorded, or the device reports an error.
    fn begin(operations: &'a Operations) -> Option<Recording<'a>> {
        let recorder = &operations.shared.recorder;
        // Recordings do not nest.
        if operations.failed().is_some() || recorder.is_this_thread() {
            return None;
        }
        let turn = recorder.turn();
        match operations.driver().begin_capture(recorder.stream) {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => {
                operations.remember(Err(error));
                return None;
            }
        }
        operations.shared.memory.begin_recording();
        recorder.begin();
        Some(Recording { operations, has_ended: false, _turn: turn })
    }

    /// Ends the recording: the driver's graph, and the memory and constants that it keeps.
    fn end(&mut self) -> (DeviceResult<usize>, RecordedMemory, Vec<Array>) {
        self.has_ended = true;
        let shared = &self.operations.shared;
        let constants = shared.recorder.end();
        let memory = shared.memory.end_recording();
        (self.operations.driver().end_capture(shared.recorder.stream), memory, constants)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if !self.has_ended
            && let (Ok(handle), ..) = self.end()
        {
            self.operations.driver().free_graph(handle);
        }
    }
}

impl Operations {
    /// Records what `work` enqueues, without running it, and returns the recording with the result of `work`. `work`
    /// must copy nothing to the host, wait for nothing, and have run before, so that what it needs is compiled. The
    /// work of other threads runs as usual meanwhile. `None` if nothing can be recorded, as after a failure, or if
    /// `work` copied something from the host: none of the recorded work has run then.
    pub fn record<R>(&self, work: impl FnOnce() -> R) -> Option<(Graph, R)> {
        let mut recording = Recording::begin(self)?;
        let before = recorder::written();
        let result = work();
        let (ended, _memory, _constants) = recording.end();
        match ended {
            Ok(handle) => {
                let graph = Graph { operations: self.clone(), handle, _memory, _constants };
                (recorder::written() == before).then_some((graph, result))
            }
            Err(error) => {
                self.remember(Err(error));
                None
            }
        }
    }

    /// Runs recorded work.
    ///
    /// # Panics
    /// If it was recorded by other operations.
    pub fn launch_graph(&self, graph: &Graph) {
        assert!(self.is(&graph.operations), "a graph of other operations");
        if self.failed().is_none() {
            self.remember(self.driver().launch_graph(graph.handle, self.shared.stream));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;
    use crate::{Cuda, Dtype};
    use std::io::Write;

    fn emulated() -> Option<Operations> {
        let made = Cuda::emulated().and_then(|cuda| cuda.operations(Dtype::F32));
        made.map_err(|error| drop(writeln!(std::io::stderr(), "skipped: {error}"))).ok()
    }

    #[test]
    fn recorded_work_runs_when_it_is_launched() {
        let Some(operations) = emulated() else { return };
        let [from, to] = [[1.0f32, 2.0], [0.0; 2]].map(|data| operations.upload(Kind::F32, &data, "a test"));
        let (graph, ()) = operations.record(|| operations.copy(&to, &from)).expect("the emulation records");
        assert_eq!(operations.read(&to), [0.0; 2]);
        for data in [[1.0f32, 2.0], [3.0, 4.0]] {
            operations.write(&from, &data);
            operations.launch_graph(&graph);
            assert_eq!(operations.read(&to), data);
        }
        operations.check().unwrap();
    }

    #[test]
    fn what_another_thread_does_is_not_recorded_and_shares_no_memory_with_the_graph() {
        let Some(operations) = emulated() else { return };
        let data = |x: f32| vec![x; 300];
        let [from, to] = [1.0, 0.0].map(|x| operations.upload(Kind::F32, &data(x), "a test"));
        let elsewhere = || {
            // Of the size of the block that the recorded work has returned.
            let theirs = operations.upload(Kind::F32, &data(7.0), "a test");
            let copied = operations.duplicate(&theirs);
            assert_eq!(operations.read(&copied), data(7.0), "it runs at once");
            [theirs, copied]
        };
        let recorded = operations.record(|| {
            let between = operations.duplicate(&from);
            operations.copy(&to, &between);
            drop(between);
            std::thread::scope(|scope| scope.spawn(elsewhere).join().expect("the other thread"))
        });
        let (graph, theirs) = recorded.expect("the emulation records");
        assert_eq!(operations.read(&to), data(0.0), "recorded work has not run");
        operations.launch_graph(&graph);
        assert_eq!(operations.read(&to), data(1.0));
        for array in &theirs {
            assert_eq!(operations.read(array), data(7.0), "the graph writes to its own memory alone");
        }
        operations.check().unwrap();
    }

    #[test]
    fn work_that_copies_from_the_host_is_not_recorded() {
        let Some(operations) = emulated() else { return };
        let mut constant = None;
        let recorded = operations.record(|| constant = Some(operations.constant(&[5.0, 6.0])));
        assert!(recorded.is_none());
        assert_eq!(operations.read(&constant.expect("the work has run")), [5.0, 6.0]);
        let recorded = operations.record(|| operations.constant(&[5.0, 6.0]));
        assert!(recorded.is_some());
        operations.check().unwrap();
    }

    #[test]
    fn a_panic_ends_the_recording() {
        let Some(operations) = emulated() else { return };
        let panics = std::panic::AssertUnwindSafe(|| operations.record(|| panic!("within a recording")));
        assert!(std::panic::catch_unwind(panics).is_err());
        let array = operations.upload(Kind::F32, &[1.0f32], "a test");
        assert_eq!(operations.read(&operations.duplicate(&array)), [1.0]);
        assert!(operations.record(|| ()).is_some());
        operations.check().unwrap();
    }
}
