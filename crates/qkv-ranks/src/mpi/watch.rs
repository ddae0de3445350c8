//! A background thread. It lets MPI progress messages while the rank computes, and sends and expects signs of life:
//! every rank sends to the next and hears from the previous one. A rank that was killed is noticed by the launcher; one
//! that is stopped or hangs entirely sends nothing, and its neighbor ends the job.
//!
//! Silence is counted in iterations of this thread and not by the clock, so that a job that is stopped as a whole and
//! then resumed does not end.

use super::{MpiLibrary, MpiOptions};
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The tag of signs of life.
const SIGN: u32 = 15;
/// Time between two iterations.
const LOOK: Duration = Duration::from_millis(2);
/// Time between two signs of life.
const PERIOD: Duration = Duration::from_millis(500);

/// The least time that ranks get to start: a launcher may take a while for many of them.
const START: Duration = Duration::from_secs(10);

/// Time for the launcher to forward what a rank has printed: it drops output in flight when the job ends.
const PASS_ON: Duration = Duration::from_millis(500);

const ALIVE: u8 = 0;
const LAST: u8 = 1;

/// Ends this process if the others do not join the job in time, so that the launcher ends the others: one of them is
/// stopped or hangs, and there are no signs of life before all have joined.
pub(super) fn starting(options: MpiOptions, started: Arc<AtomicBool>) {
    thread::spawn(move || {
        let (mut waited, limit) = (Duration::ZERO, options.timeout.max(START));
        while !started.load(Ordering::Relaxed) {
            if waited >= limit {
                let message = format!("not all ranks joined within {} s: one of them is stopped", limit.as_secs());
                (options.on_lost)(&Error::Mpi { call: "MPI_Init_thread", message });
                thread::sleep(PASS_ON);
                std::process::exit(1);
            }
            let start = Instant::now();
            thread::sleep(10 * LOOK);
            waited += start.elapsed().min(100 * LOOK);
        }
    });
}

pub(super) struct Watch {
    ending: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<Result<()>>>>,
}

impl Watch {
    pub fn start(library: Arc<MpiLibrary>, options: MpiOptions) -> Watch {
        let ending = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let ending = ending.clone();
            move || watch(&library, options, &ending)
        });
        Watch { ending, thread: Mutex::new(Some(thread)) }
    }

    /// Ends the thread, once the neighbors end theirs.
    pub fn finish(&self) -> Result<()> {
        self.ending.store(true, Ordering::Relaxed);
        let thread = self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        match thread.map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

fn watch(library: &MpiLibrary, options: MpiOptions, ending: &AtomicBool) -> Result<()> {
    let (abi, rank, size) = (&library.abi, library.rank, library.size);
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut heard = Some({
        let _turn = library.lock();
        abi.receive(1, before, SIGN)?
    });
    let (mut sending, mut last_sent) = (None, false);
    let (mut silence, mut since_sign) = (Duration::ZERO, PERIOD);
    loop {
        let start = Instant::now();
        {
            let _turn = library.lock();
            match &mut sending {
                Some(request) => {
                    if abi.is_done(request)? {
                        sending = None;
                    }
                }
                None if last_sent => {}
                None => {
                    let last = ending.load(Ordering::Relaxed);
                    if last || since_sign >= PERIOD {
                        sending = Some(abi.send(vec![if last { LAST } else { ALIVE }], next, SIGN)?);
                        (last_sent, since_sign) = (last, Duration::ZERO);
                    }
                }
            }
            if let Some(mut request) = heard.take() {
                if abi.is_done(&mut request)? {
                    silence = Duration::ZERO;
                    if request.into_bytes() == [ALIVE] {
                        heard = Some(abi.receive(1, before, SIGN)?);
                    }
                } else {
                    heard = Some(request);
                }
            }
            abi.progress(SIGN)?;
        }
        if last_sent && sending.is_none() && heard.is_none() {
            return Ok(());
        }
        if heard.is_some() && silence >= options.timeout {
            let seconds = options.timeout.as_secs_f64();
            let reason = format!("no sign of life for {seconds} s: it is stopped, or its machine is");
            (options.on_lost)(&Error::Lost { rank: before, reason });
            thread::sleep(PASS_ON);
            let _turn = library.lock();
            abi.abort(1);
        }
        thread::sleep(LOOK);
        // An iteration that took much longer than the pause was itself stopped.
        let took = start.elapsed().min(10 * LOOK);
        silence += took;
        since_sign += took;
    }
}
