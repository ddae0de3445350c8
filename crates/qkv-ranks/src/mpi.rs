//! MPI as a transport. Calls are made one at a time (`MPI_THREAD_SERIALIZED`) and none of them blocks, so that a
//! background thread can progress messages and watch the other ranks: see [`watch`].

mod abi;
mod watch;

use crate::error::{Error, Result};
use crate::transport::{PendingMessage, Transport};
use abi::{Abi, Request};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use watch::Watch;

/// Settings of MPI ranks.
#[derive(Clone, Copy, Debug)]
pub struct MpiOptions {
    /// A rank that gives no sign of life for this long counts as gone.
    pub timeout: Duration,
    /// Called with the reason before the job is ended because a rank is gone.
    pub on_lost: fn(&Error),
}

impl Default for MpiOptions {
    fn default() -> Self {
        MpiOptions { timeout: Duration::from_secs(30), on_lost: |_| {} }
    }
}

/// The ranks of an MPI job, `MPI_COMM_WORLD`. Exists once per process; a job ends with [`finish`](Mpi::finish) on every
/// rank or with [`abort`](Mpi::abort) on one.
pub struct Mpi {
    library: Arc<MpiLibrary>,
    watch: Option<Watch>,
}

/// The library, and the lock that serializes calls to it.
struct MpiLibrary {
    abi: Abi,
    turn: Mutex<()>,
    rank: usize,
    size: usize,
}

impl MpiLibrary {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Mpi {
    /// Loads the library and joins the job.
    ///
    /// # Errors
    /// If there is no library with the standard ABI, or it reports an error.
    pub fn start(options: MpiOptions) -> Result<Mpi> {
        let abi = Abi::load()?;
        let started = Arc::new(AtomicBool::new(false));
        watch::starting(options, started.clone());
        let joined = abi.init();
        started.store(true, Ordering::Relaxed);
        joined?;
        let (rank, size) = abi.place()?;
        let library = Arc::new(MpiLibrary { abi, turn: Mutex::new(()), rank, size });
        let watch = (size > 1).then(|| Watch::start(library.clone(), options));
        Ok(Mpi { library, watch })
    }

    /// The version that the library reports.
    pub fn version(&self) -> String {
        let _turn = self.library.lock();
        self.library.abi.version()
    }

    /// Leaves the job, once all other ranks have called this, too.
    ///
    /// # Errors
    /// If a rank is gone, or the library reports an error.
    pub fn finish(&self) -> Result<()> {
        if let Some(watch) = &self.watch {
            watch.finish()?;
        }
        let _turn = self.library.lock();
        self.library.abi.finalize()
    }

    /// Ends all ranks of the job at once, with this exit code.
    pub fn abort(&self, code: u8) -> ! {
        let _turn = self.library.lock();
        self.library.abi.abort(code)
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.library.rank
    }

    fn size(&self) -> usize {
        self.library.size
    }

    fn send(&self, to: usize, tag: u32, bytes: Vec<u8>) -> Result<Box<dyn PendingMessage>> {
        let turn = self.library.lock();
        let request = self.library.abi.send(bytes, to, tag)?;
        drop(turn);
        Ok(Box::new(MpiMessage { request: Some(request), library: self.library.clone() }))
    }

    fn receive(&self, from: usize, tag: u32, len: usize) -> Result<Box<dyn PendingMessage>> {
        let turn = self.library.lock();
        let request = self.library.abi.receive(len, from, tag)?;
        drop(turn);
        Ok(Box::new(MpiMessage { request: Some(request), library: self.library.clone() }))
    }
}

struct MpiMessage {
    /// `None` once it has been waited for.
    request: Option<Request>,
    library: Arc<MpiLibrary>,
}

/// Polls without a pause before the core is yielded to another rank, and polls in all before a rank sleeps.
const LOOKS: u32 = 200;
const YIELDS: u32 = 2000;
/// How long a rank sleeps between two polls: longer than a thread switch, shorter than a step.
const SLEEP: Duration = Duration::from_micros(100);

impl PendingMessage for MpiMessage {
    fn is_done(&mut self) -> Result<bool> {
        let Some(request) = &mut self.request else { return Ok(true) };
        let _turn = self.library.lock();
        self.library.abi.is_done(request)
    }

    fn wait(mut self: Box<Self>) -> Result<Vec<u8>> {
        let mut looks = 0;
        while !self.is_done()? {
            looks += 1;
            match looks {
                0..LOOKS => std::hint::spin_loop(),
                LOOKS..YIELDS => std::thread::yield_now(),
                _ => std::thread::sleep(SLEEP),
            }
        }
        Ok(self.request.take().expect("waited for once").into_bytes())
    }
}

impl Drop for MpiMessage {
    fn drop(&mut self) {
        if !self.is_done().unwrap_or(false) {
            // MPI may still read or write the memory, so it is leaked.
            std::mem::forget(self.request.take());
        }
    }
}
