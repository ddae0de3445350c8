//! Ranks that are threads of one process, for tests of the algorithms. A thread that ends early or panics is a rank
//! that is gone: whoever waits for it gets an error.

use crate::error::{Error, Result};
use crate::ranks::Ranks;
use crate::transport::{PendingMessage, Transport};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Sender, receiver and tag.
type Route = (usize, usize, u32);

#[derive(Default)]
struct Mail {
    messages: HashMap<Route, VecDeque<Vec<u8>>>,
    gone: Vec<usize>,
}

#[derive(Default)]
struct Hub {
    mail: Mutex<Mail>,
    changed: Condvar,
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, Mail> {
        // Whole messages are moved in and out: a panic elsewhere leaves nothing half done.
        self.mail.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// One of several ranks in this process.
pub struct InProcess {
    rank: usize,
    size: usize,
    hub: Arc<Hub>,
}

impl InProcess {
    /// All ranks of a job of this size.
    pub fn all(size: usize) -> Vec<InProcess> {
        let hub = Arc::new(Hub::default());
        (0..size).map(|rank| InProcess { rank, size, hub: hub.clone() }).collect()
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.hub.lock().gone.push(self.rank);
        self.hub.changed.notify_all();
    }
}

impl Transport for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn send(&self, to: usize, tag: u32, bytes: Vec<u8>) -> Result<Box<dyn PendingMessage>> {
        self.hub.lock().messages.entry((self.rank, to, tag)).or_default().push_back(bytes.clone());
        self.hub.changed.notify_all();
        Ok(Box::new(Sent(bytes)))
    }

    fn receive(&self, from: usize, tag: u32, len: usize) -> Result<Box<dyn PendingMessage>> {
        Ok(Box::new(Expected { hub: self.hub.clone(), route: (from, self.rank, tag), len, arrived: None }))
    }
}

struct Sent(Vec<u8>);

impl PendingMessage for Sent {
    fn is_done(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>> {
        Ok(self.0)
    }
}

struct Expected {
    hub: Arc<Hub>,
    route: Route,
    len: usize,
    arrived: Option<Vec<u8>>,
}

impl Expected {
    /// The message, if it has already arrived.
    fn take(&self, mail: &mut Mail) -> Result<Option<Vec<u8>>> {
        let from = self.route.0;
        match mail.messages.get_mut(&self.route).and_then(VecDeque::pop_front) {
            Some(bytes) if bytes.len() == self.len => Ok(Some(bytes)),
            Some(bytes) => Err(Error::Length { from, found: bytes.len(), expected: self.len }),
            None if mail.gone.contains(&from) => Err(Error::Lost { rank: from, reason: "its thread ended".to_owned() }),
            None => Ok(None),
        }
    }
}

impl PendingMessage for Expected {
    fn is_done(&mut self) -> Result<bool> {
        if self.arrived.is_none() {
            self.arrived = self.take(&mut self.hub.lock())?;
        }
        Ok(self.arrived.is_some())
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>> {
        if let Some(bytes) = self.arrived {
            return Ok(bytes);
        }
        let mut mail = self.hub.lock();
        loop {
            if let Some(bytes) = self.take(&mut mail)? {
                return Ok(bytes);
            }
            mail = self.hub.changed.wait(mail).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}

/// Runs `work` on `size` ranks, each a thread of this process, and returns what each of them returned.
///
/// ```
/// let sums = qkv_ranks::run_in_process(3, |ranks| {
///     let all = ranks.all_gather(&[ranks.rank() as u8 + 1])?;
///     Ok::<u8, qkv_ranks::Error>(all.iter().map(|bytes| bytes[0]).sum())
/// });
/// assert_eq!(sums, [Ok(6), Ok(6), Ok(6)]);
/// ```
///
/// # Panics
/// If `work` panics.
pub fn run_in_process<R: Send>(size: usize, work: impl Fn(Ranks) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let spawn = |transport| {
            let work = &work;
            scope.spawn(move || work(Ranks::new(Arc::new(transport))))
        };
        let threads: Vec<_> = InProcess::all(size).into_iter().map(spawn).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
