//! Threads. There is one pool per process id, made on first use: a child forked after its parent computed something
//! makes its own pool, and never waits for workers that the fork did not copy. There are no locks here, so none can be
//! held by a thread that no longer exists. Small calls use scratch memory of their thread, others that of the process.

use qkv::Scratch;
use rayon::ThreadPool;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::{process, ptr, thread};

struct Pool {
    process: u32,
    threads: usize,
    workers: ThreadPool,
}

static POOL: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());

/// The number of threads set by [`set_threads`]; 0 for one per core.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Multiply-adds below which waking another thread costs more than it gains: about 40 µs of work. Results do not depend
/// on the number of threads.
const SMALL: usize = 1 << 20;

/// The number of threads that was set, if any.
pub fn set() -> Option<usize> {
    Some(THREADS.load(Ordering::Relaxed)).filter(|&threads| threads > 0)
}

/// The number of threads of calls that do not specify it: the number that was set, or one per core.
pub fn threads() -> usize {
    set().unwrap_or_else(|| thread::available_parallelism().map_or(1, |cores| cores.get()))
}

/// Sets the number of threads; 0 for one per core.
pub fn set_threads(threads: usize) {
    THREADS.store(threads, Ordering::Relaxed);
}

/// Scratch memory of a process. It is locked briefly, so a forked child makes its own instead of inheriting a held
/// lock.
struct Kept {
    process: u32,
    f32: Scratch<f32>,
    f64: Scratch<f64>,
}

static KEPT: AtomicPtr<Kept> = AtomicPtr::new(ptr::null_mut());

/// Bytes of scratch that a process keeps for its next calls: several times the buffers of 16 threads.
const MOST_KEPT: usize = 64 << 20;

/// The scratch memory of this process.
fn kept() -> &'static Kept {
    let process = process::id();
    loop {
        let found = KEPT.load(Ordering::Acquire);
        // SAFETY: a stored value is never freed or changed.
        if let Some(kept) = unsafe { found.as_ref() }
            && kept.process == process
        {
            return kept;
        }
        let (f32, f64) = (Scratch::keeping(MOST_KEPT), Scratch::keeping(MOST_KEPT));
        let made = Box::into_raw(Box::new(Kept { process, f32, f64 }));
        if KEPT.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: it was made above and never shared.
            drop(unsafe { Box::from_raw(made) });
        }
    }
}

/// An accumulator type with scratch memory that is kept from call to call, because allocating and clearing new memory
/// takes longer than a small call.
pub trait Accumulator: Sized + 'static {
    /// Calls `with` with the scratch memory of this thread.
    fn with_scratch<R>(with: impl FnOnce(&Scratch<Self>) -> R) -> R;

    /// The scratch memory of this process.
    fn of_process() -> &'static Scratch<Self>;
}

macro_rules! accumulator {
    ($($t:ident)*) => {$(
        impl Accumulator for $t {
            fn of_process() -> &'static Scratch<Self> {
                &kept().$t
            }

            fn with_scratch<R>(with: impl FnOnce(&Scratch<Self>) -> R) -> R {
                thread_local! {
                    static KEPT: Scratch<$t> = Scratch::new();
                }
                KEPT.with(with)
            }
        }
    )*};
}
accumulator! { f32 f64 }

/// Runs a computation of `work` multiply-adds on up to `threads` threads; on the calling thread if it is small or
/// `threads` is 1. The computation receives the number of threads to use, and scratch memory.
pub fn run<A: Accumulator, R: Send>(
    threads: usize,
    work: usize,
    computation: impl FnOnce(usize, &Scratch<A>) -> R + Send,
) -> R {
    if work < SMALL {
        return A::with_scratch(|scratch| computation(1, scratch));
    }
    match threads.clamp(1, MOST) {
        1 => computation(1, A::of_process()),
        threads => match pool(threads) {
            Some(pool) => pool.install(|| computation(threads, A::of_process())),
            None => computation(1, A::of_process()),
        },
    }
}

/// Runs a computation that takes its number of threads from the pool it runs in.
pub fn run_inside<R: Send>(threads: usize, computation: impl FnOnce() -> R + Send) -> R {
    match pool(threads.clamp(1, MOST)) {
        Some(pool) => pool.install(computation),
        None => computation(),
    }
}

/// Maximum number of threads, more than machines have cores: a mistyped number must not exhaust memory with stacks.
const MOST: usize = 1024;

/// The pool of this process with at least `threads` workers; `None` if the system cannot create threads.
fn pool(threads: usize) -> Option<&'static ThreadPool> {
    let process = process::id();
    loop {
        let found = POOL.load(Ordering::Acquire);
        // SAFETY: a pool that was stored is never freed or changed.
        if let Some(pool) = unsafe { found.as_ref() }
            && pool.process == process
            && pool.threads >= threads
        {
            return Some(&pool.workers);
        }
        let threads = threads.max(self::threads()).min(MOST);
        let workers = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|at| format!("qkv-{at}"));
        let made = Box::into_raw(Box::new(Pool { process, threads, workers: workers.build().ok()? }));
        if POOL.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: it was made above and never shared.
            drop(unsafe { Box::from_raw(made) });
        }
        // The pool that it replaces, if any, is leaked: it may be in use, or its workers belong to the parent.
    }
}
