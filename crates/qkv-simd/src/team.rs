//! A team of threads for many short pieces of work one after another, such as the layers for one token. Between two
//! pieces its members spin for some microseconds instead of sleeping, so that handing out work costs a fraction of a
//! microsecond; if they stay without work for longer, they sleep.
//!
//! Tasks are taken one by one by whichever thread is free. A member that the system does not schedule takes none, and
//! nobody waits for it: on a busy machine a team is not slower than its leader alone.

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// How many times a member looks for work before it sleeps: about 50 µs.
const SPINS: u32 = 1_000;
/// The largest number of tasks of one ticket; more are handed out several at a time.
const MOST_TASKS: usize = 1 << 15;

/// Threads that work together. Work given to a team that is busy is done by the caller alone.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// let (team, sum) = (qkv_simd::team::Team::new(2), AtomicUsize::new(0));
/// team.run(10, |task| { sum.fetch_add(task, Ordering::Relaxed); });
/// assert_eq!(sum.into_inner(), 45);
/// ```
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    members: Vec<JoinHandle<()>>,
    /// Held by the leader while its work is being done.
    leader: Mutex<()>,
}

/// A task's body without its lifetime.
type Body = *const (dyn Fn(usize) + Sync);

#[derive(Debug)]
struct Shared {
    /// The serial number of the work in 32 bits, the next task in 16 and the number of tasks in 16. The thread that
    /// advances the next task owns it.
    ticket: AtomicU64,
    /// Written by the leader before a ticket has tasks, and read by the owner of a task.
    body: UnsafeCell<Option<Body>>,
    done: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleeping: AtomicU32,
    asleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: the body is written only while no task is owned or left (the leader waits for all of them), and read only by
// owners of a task, whose acquiring exchange saw the leader's releasing store. The body itself is `Sync` and outlives
// its tasks, because the leader waits.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Takes the next task.
    fn claim(&self) -> Option<usize> {
        let mut ticket = self.ticket.load(Ordering::Acquire);
        loop {
            let (next, tasks) = (ticket >> 16 & 0xffff, ticket & 0xffff);
            if next >= tasks {
                return None;
            }
            match self.ticket.compare_exchange_weak(ticket, ticket + (1 << 16), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(next as usize),
                Err(found) => ticket = found,
            }
        }
    }

    /// Runs a task that the caller owns.
    fn perform(&self, task: usize) -> std::thread::Result<()> {
        // SAFETY: the owner of a task may read the body, which is valid until the task is done.
        let body = unsafe { &*(*self.body.get()).expect("a ticket with tasks has a body") };
        let result = catch_unwind(AssertUnwindSafe(|| body(task)));
        if result.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        self.done.fetch_add(1, Ordering::Release);
        result
    }

    fn has_tasks(&self) -> bool {
        let ticket = self.ticket.load(Ordering::SeqCst);
        (ticket >> 16 & 0xffff) < (ticket & 0xffff)
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.asleep.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The main loop of a member.
    fn serve(&self) {
        let mut spins = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if let Some(task) = self.claim() {
                // The leader reports the panic.
                let _ = self.perform(task);
                spins = 0;
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                let mut guard = self.lock();
                // The leader publishes a ticket and then looks for sleepers; a member announces that it sleeps and then
                // looks for a ticket. At least one of them sees the other.
                self.sleeping.fetch_add(1, Ordering::SeqCst);
                while !self.has_tasks() && !self.stop.load(Ordering::SeqCst) {
                    guard = self.wake.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner());
                }
                self.sleeping.fetch_sub(1, Ordering::SeqCst);
                spins = 0;
            }
        }
    }

    fn wake_sleepers(&self) {
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.lock());
            self.wake.notify_all();
        }
    }
}

thread_local! {
    /// The team that this thread works within.
    static CURRENT: Cell<Option<*const Team>> = const { Cell::new(None) };
}

/// [`Team::run`] of the team that this thread works [within](Team::within); returns `false`, with nothing done, if
/// there is none.
pub(crate) fn run_within(tasks: usize, body: impl Fn(usize) + Sync) -> bool {
    let Some(team) = CURRENT.get() else { return false };
    // SAFETY: `within` borrows the team for as long as it is set.
    unsafe { &*team }.run(tasks, body);
    true
}

impl Team {
    /// A team of `threads`, the caller of [`run`](Team::run) among them.
    pub fn new(threads: usize) -> Team {
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(0),
            body: UnsafeCell::new(None),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: AtomicU32::new(0),
            asleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let member = |at: usize| {
            let shared = shared.clone();
            // If the system refuses a thread, the team is smaller.
            std::thread::Builder::new().name(format!("qkv-team-{at}")).spawn(move || shared.serve()).ok()
        };
        let members = (1..threads).map_while(member).collect();
        Team { shared, members, leader: Mutex::new(()) }
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.members.len() + 1
    }

    /// Calls `body` for every task `0 .. tasks`, each once, and returns when all are done.
    ///
    /// # Panics
    /// If `body` panics.
    pub fn run(&self, tasks: usize, body: impl Fn(usize) + Sync) {
        let _leader = match self.leader.try_lock() {
            Ok(leader) if tasks > 1 && !self.members.is_empty() => leader,
            _ => return (0..tasks).for_each(body),
        };
        let each = tasks.div_ceil(MOST_TASKS);
        let several = |ticket: usize| (ticket * each..tasks.min((ticket + 1) * each)).for_each(&body);
        self.lead(tasks.div_ceil(each), &several);
    }

    /// Runs `work`, within which [`for_each_task`](crate::shared::for_each_task) hands tasks to this team instead of
    /// rayon.
    pub fn within<R>(&self, work: impl FnOnce() -> R) -> R {
        struct Reset(Option<*const Team>);
        impl Drop for Reset {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let _reset = Reset(CURRENT.replace(Some(self)));
        work()
    }

    fn lead(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        let body = std::ptr::from_ref(body);
        // SAFETY: only the lifetime changes, and this function returns after the last use.
        let body = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Body>(body) };
        // SAFETY: every task of earlier work is done, so nobody reads the body.
        unsafe { *shared.body.get() = Some(body) };
        shared.done.store(0, Ordering::Relaxed);
        let number = (shared.ticket.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        shared.ticket.store(number << 32 | tasks as u64, Ordering::SeqCst);
        shared.wake_sleepers();
        let mut result = Ok(());
        while let Some(task) = shared.claim() {
            let found = shared.perform(task);
            result = result.and(found);
        }
        let mut waited = 0u32;
        while shared.done.load(Ordering::Acquire) < tasks {
            waited += 1;
            if waited < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = result {
            resume_unwind(panic);
        }
        assert!(!panicked, "a task of the team panicked");
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake_sleepers();
        for member in self.members.drain(..) {
            // A member catches the panics of its tasks and has none of its own.
            let _ = member.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_however_often_the_team_slept() {
        for threads in [1, 2, 3] {
            let team = Team::new(threads);
            for round in 0..if cfg!(miri) { 4 } else { 200 } {
                let counts: Vec<AtomicUsize> = (0..round % 37).map(|_| AtomicUsize::new(0)).collect();
                team.run(counts.len(), |task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} {round}");
                if round % 50 == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            }
        }
    }

    #[test]
    fn more_tasks_than_a_ticket_holds_are_all_done() {
        let (team, sum) = (Team::new(2), AtomicUsize::new(0));
        let tasks = if cfg!(miri) { 5 } else { 3 * MOST_TASKS + 5 };
        team.run(tasks, |task| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), tasks * (tasks - 1) / 2);
    }

    #[test]
    fn work_within_work_is_done_by_its_caller() {
        let (team, sum) = (Team::new(2), AtomicUsize::new(0));
        team.run(4, |_| {
            team.run(5, |task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 40);
    }

    #[test]
    fn a_panic_reaches_the_leader_and_the_team_goes_on() {
        let team = Team::new(2);
        for at in 0..8 {
            let found = catch_unwind(AssertUnwindSafe(|| team.run(8, |task| assert_ne!(task, at))));
            assert!(found.is_err());
            team.run(3, |_| ());
        }
    }
}
