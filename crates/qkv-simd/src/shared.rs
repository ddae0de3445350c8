//! Memory shared by the workers of a deterministic parallel engine: tasks handed out in order, blocks filled on first
//! use, regions entered in a fixed turn, and output rows that are written once.

use crate::number::Element;
use crate::view::{View, ViewMut};
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

/// Runs `body` for every task `0 .. tasks` on up to `threads` workers of the current rayon pool, which take tasks in
/// ascending order. Each worker builds its own state with `worker`. A body may wait for an earlier task, which is
/// already running and never waits for a later one, but must not call into rayon. [Within](crate::team::Team::within) a
/// team, the workers are its threads.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// let sum = AtomicUsize::new(0);
/// qkv_simd::shared::for_each_task(2, 10, || (), |_, task| { sum.fetch_add(task, Ordering::Relaxed); });
/// assert_eq!(sum.into_inner(), 45);
/// ```
pub fn for_each_task<W>(
    threads: usize,
    tasks: usize,
    worker: impl Fn() -> W + Sync,
    body: impl Fn(&mut W, usize) + Sync,
) {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut state = None;
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            body(state.get_or_insert_with(&worker), task);
        }
    };
    match threads.min(tasks) {
        0 => {}
        1 => work(),
        workers if crate::team::run_within(workers, |_| work()) => {}
        workers => rayon::in_place_scope(|scope| {
            for _ in 1..workers {
                scope.spawn(|_| work());
            }
            work();
        }),
    }
}

/// Runs `body` for every task `0 .. tasks` on up to `threads` workers of the current rayon pool, or of the team
/// [within](crate::team::Team::within) which it is called. Every worker begins with a share of its own and then takes
/// what is left of the others'. In a pool of `threads` threads, a thread's share is the same in every call of as many
/// tasks: passes over the same rows find most of them in the cache of the core that wrote them.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// let sum = AtomicUsize::new(0);
/// qkv_simd::shared::for_each_share(2, 10, |task| { sum.fetch_add(task, Ordering::Relaxed); });
/// assert_eq!(sum.into_inner(), 45);
/// ```
pub fn for_each_share(threads: usize, tasks: usize, body: impl Fn(usize) + Sync) {
    let workers = threads.min(tasks);
    if workers < 2 {
        return (0..tasks).for_each(body);
    }
    let first = |share: usize| tasks * share / workers;
    let next: Vec<Share> = (0..workers).map(|share| Share(AtomicUsize::new(first(share)))).collect();
    let work = |own: usize| {
        for share in (own..workers).chain(0..own) {
            loop {
                let task = next[share].0.fetch_add(1, Ordering::Relaxed);
                if task >= first(share + 1) {
                    break;
                }
                body(task);
            }
        }
    };
    if crate::team::run_within(workers, work) {
        return;
    }
    let work = || work(rayon::current_thread_index().unwrap_or(0) % workers);
    rayon::in_place_scope(|scope| {
        for _ in 1..workers {
            scope.spawn(|_| work());
        }
        work();
    });
}

/// The next task of a share, in a cache line of its own.
#[repr(align(64))]
struct Share(AtomicUsize);

/// Spins for a while, then yields.
fn pause(waited: &mut u32) {
    *waited += 1;
    if *waited < 64 { std::hint::spin_loop() } else { std::thread::yield_now() }
}

fn cells<A>(data: &mut [A]) -> &[UnsafeCell<A>] {
    // SAFETY: `UnsafeCell<A>` has the layout of `A`, and the exclusive borrow is the only access to the elements.
    unsafe { &*(std::ptr::from_mut(data) as *const [UnsafeCell<A>]) }
}

const EMPTY: u8 = 0;
const BUSY: u8 = 1;
const READY: u8 = 2;
const READY_NOT_FINITE: u8 = 3;

/// The states of the blocks of [`LazyBlocks`], kept so that their memory can be reused.
#[derive(Debug, Default)]
pub struct BlockStates(Vec<AtomicU8>);

/// A buffer of blocks of equal size, each filled by the first worker that needs it and then read by all.
pub struct LazyBlocks<'a, A> {
    data: &'a [UnsafeCell<A>],
    states: &'a [AtomicU8],
    size: usize,
}

// SAFETY: a block is written only by the worker that moved its state from empty to busy, and read only once it is
// ready.
unsafe impl<A: Send + Sync> Sync for LazyBlocks<'_, A> {}

impl<'a, A> LazyBlocks<'a, A> {
    /// `blocks` empty blocks of `size` over `data`.
    ///
    /// # Panics
    /// If `data` is shorter.
    pub fn new(data: &'a mut [A], states: &'a mut BlockStates, blocks: usize, size: usize) -> Self {
        assert!(data.len() >= blocks.saturating_mul(size));
        states.0.clear();
        states.0.resize_with(blocks, || AtomicU8::new(EMPTY));
        LazyBlocks { data: cells(data), states: &states.0, size }
    }

    /// A block, and whether all of it is finite. The first caller fills it with `fill`, which returns that flag.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn get(&self, block: usize, fill: impl FnOnce(&mut [A]) -> bool) -> (&[A], bool) {
        let state = &self.states[block];
        let cells = &self.data[block * self.size..][..self.size];
        let (mut waited, mut fill) = (0, Some(fill));
        loop {
            match state.load(Ordering::Acquire) {
                EMPTY => {
                    if state.compare_exchange(EMPTY, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        let release = Release(state, EMPTY);
                        let first = UnsafeCell::raw_get(cells.as_ptr());
                        // SAFETY: the exchange gave this worker exclusive access until the state changes.
                        let block = unsafe { std::slice::from_raw_parts_mut(first, self.size) };
                        let finite = fill.take().expect("a block is filled once")(block);
                        release.with(if finite { READY } else { READY_NOT_FINITE });
                    }
                }
                BUSY => pause(&mut waited),
                ready => {
                    // SAFETY: a ready block is never written again, and the acquiring load sees everything its writer
                    // wrote.
                    let block = unsafe { std::slice::from_raw_parts(UnsafeCell::raw_get(cells.as_ptr()), self.size) };
                    return (block, ready == READY);
                }
            }
        }
    }
}

/// Resets a block's state if filling it panics, so that no worker waits forever.
struct Release<'a>(&'a AtomicU8, u8);

impl Release<'_> {
    fn with(mut self, state: u8) {
        self.1 = state;
    }
}

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(self.1, Ordering::Release);
    }
}

const LOCKED: u64 = 1 << 63;
const ABANDONED: u64 = u64::MAX;

/// A buffer of regions of equal size, each entered by one worker at a time in the order of its turns, so that additions
/// from many workers have one order whatever their timing.
pub struct Turnstile<'a, A> {
    data: &'a [UnsafeCell<A>],
    turns: Vec<AtomicU64>,
    size: usize,
}

// SAFETY: a region is accessed only by the worker that locked its turn.
unsafe impl<A: Send> Sync for Turnstile<'_, A> {}

impl<'a, A> Turnstile<'a, A> {
    /// `regions` regions of `size` over `data`; `first` gives the first turn of each.
    ///
    /// # Panics
    /// If `data` is shorter.
    pub fn new(data: &'a mut [A], regions: usize, size: usize, first: impl Fn(usize) -> u64) -> Self {
        assert!(data.len() >= regions.saturating_mul(size));
        Turnstile { data: cells(data), turns: (0..regions).map(|r| AtomicU64::new(first(r))).collect(), size }
    }

    /// Waits for `turn` of the region and then holds the region.
    ///
    /// # Panics
    /// If there is no such region, the turn is 2⁶³ or later, or a worker that held the region panicked.
    pub fn enter(&self, region: usize, turn: u64) -> Region<'_, A> {
        // The highest bit marks a held region: a turn with that bit would match a region that another worker holds.
        assert!(turn < LOCKED, "turn {turn} is out of range");
        let state = &self.turns[region];
        let cells = &self.data[region * self.size..][..self.size];
        let mut waited = 0;
        loop {
            match state.compare_exchange_weak(turn, turn | LOCKED, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(ABANDONED) => panic!("another worker panicked in this region"),
                Err(_) => pause(&mut waited),
            }
        }
        Region { cells, state, next: ABANDONED }
    }
}

/// A held region. It borrows cells: an exclusive borrow would last until the end of [`leave`](Region::leave), when the
/// worker whose turn is next may already have entered.
pub struct Region<'a, A> {
    cells: &'a [UnsafeCell<A>],
    state: &'a AtomicU64,
    next: u64,
}

impl<A> Region<'_, A> {
    /// Leaves the region to the turn `next`.
    pub fn leave(mut self, next: u64) {
        self.next = next;
    }
}

impl<A> Deref for Region<'_, A> {
    type Target = [A];
    fn deref(&self) -> &[A] {
        // SAFETY: this worker alone accesses the region until it leaves, and does not write while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(UnsafeCell::raw_get(self.cells.as_ptr()), self.cells.len()) }
    }
}

impl<A> DerefMut for Region<'_, A> {
    fn deref_mut(&mut self) -> &mut [A] {
        // SAFETY: this worker alone accesses the region until it leaves, through `self`, which is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(UnsafeCell::raw_get(self.cells.as_ptr()), self.cells.len()) }
    }
}

impl<A> Drop for Region<'_, A> {
    fn drop(&mut self) {
        self.state.store(self.next, Ordering::Release);
    }
}

/// An output written by many workers, each row once.
pub struct Rows<'a, T> {
    view: ViewMut<'a, T>,
    written: Vec<AtomicU64>,
}

impl<'a, T: Element> Rows<'a, T> {
    /// For an output of which no row has been written yet.
    pub fn new(view: ViewMut<'a, T>) -> Self {
        let [batch, heads, length, width] = view.shape();
        // Rows without elements are not tracked: they may be more than can be counted.
        let rows = if width == 0 { 0 } else { batch * heads * length };
        let words = rows.div_ceil(64);
        Rows { view, written: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Rounds a row of accumulators into place. Elements of `row` beyond the width are ignored.
    ///
    /// # Panics
    /// If the row was written before, does not exist, or is longer than `row`.
    pub fn write(&self, b: usize, h: usize, i: usize, row: &[T::Acc]) {
        self.write_all(b, h, i, 1, row, row.len());
    }

    /// Rounds `count` rows of accumulators, which have stride `row` in `data`, into the rows from `i` on.
    ///
    /// # Panics
    /// If one of the rows was written before or does not exist, or `data` is too short.
    pub fn write_all(&self, b: usize, h: usize, i: usize, count: usize, data: &[T::Acc], row: usize) {
        let long = data.len() >= count.saturating_mul(row);
        assert!(row >= self.view.shape()[3] && long, "too little for {count} rows");
        self.claim(b, h, i, count);
        // SAFETY: the rows were claimed, so this is the first and only access to them.
        unsafe { self.view.store_rows([b, h, i], count, data, row) };
        self.count(count);
    }

    /// [`write_all`](Rows::write_all) with each row multiplied by its factor first: one row per factor.
    ///
    /// # Panics
    /// If one of the rows was written before or does not exist, or `data` is too short.
    pub fn write_scaled(&self, b: usize, h: usize, i: usize, factors: &[T::Acc], data: &[T::Acc], row: usize) {
        let long = data.len() >= factors.len().saturating_mul(row);
        assert!(row >= self.view.shape()[3] && long, "too little for {} rows", factors.len());
        self.claim(b, h, i, factors.len());
        // SAFETY: the rows were claimed, so this is the first and only access to them.
        unsafe { self.view.store_scaled([b, h, i], factors, data, row) };
        self.count(factors.len());
    }

    /// Counts rows once they are written. Claimed rows do not count: a caller that panics between the two, and is
    /// caught, leaves rows that [`Unwritten`](crate::Unwritten) must not take for initialized.
    fn count(&self, rows: usize) {
        if let Some(total) = self.view.count {
            total.fetch_add(rows, Ordering::Relaxed);
        }
    }

    /// Checks that some rows exist and are unwritten, and marks them as written.
    fn claim(&self, b: usize, h: usize, i: usize, count: usize) {
        let [batch, heads, length, _] = self.view.shape();
        assert!(
            b < batch && h < heads && i.saturating_add(count) <= length,
            "rows [{b}, {h}, {i}..] of {:?}",
            self.view.shape()
        );
        if count == 0 || self.view.shape()[3] == 0 {
            return;
        }
        let (start, end) = ((b * heads + h) * length + i, (b * heads + h) * length + i + count);
        for word in start / 64..end.div_ceil(64) {
            let (from, to) = (start.max(word * 64) - word * 64, end.min(word * 64 + 64) - word * 64);
            let bits = (u64::MAX >> (64 - (to - from))) << from;
            let before = self.written[word].fetch_or(bits, Ordering::Relaxed);
            assert!(before & bits == 0, "a row of [{b}, {h}, {i}..] is written twice");
        }
    }

    /// Shape `[batch, heads, length, width]`.
    pub fn shape(&self) -> [usize; 4] {
        self.view.shape()
    }
}

/// Widens every element to the accumulator type, in row-major order.
pub fn widened<T: Element>(view: View<'_, T>) -> Vec<T::Acc> {
    let [batch, heads, length, width] = view.shape();
    let mut out = vec![T::Acc::of_f64(0.0); view.len()];
    for (r, row) in out.chunks_exact_mut(width.max(1)).enumerate() {
        let (b, h, i) = (r / (heads * length).max(1), r / length.max(1) % heads.max(1), r % length.max(1));
        debug_assert!(b < batch);
        view.load_row(b, h, i, row);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_filled_once_and_seen_by_all() {
        let mut data = vec![0u32; 40];
        let fills = AtomicUsize::new(0);
        let mut states = BlockStates::default();
        let blocks = LazyBlocks::new(&mut data, &mut states, 4, 10);
        for_each_task(
            4,
            100,
            || (),
            |_, task| {
                let (block, finite) = blocks.get(task % 4, |block| {
                    fills.fetch_add(1, Ordering::Relaxed);
                    block.fill(task as u32 % 4 + 7);
                    task % 4 != 3
                });
                assert!(block.iter().all(|&x| x == task as u32 % 4 + 7));
                assert_eq!(finite, task % 4 != 3);
            },
        );
        assert_eq!(fills.into_inner(), 4);
    }

    #[test]
    fn every_task_of_every_share_is_done_once() {
        for (threads, tasks) in [(1, 7), (2, 1), (3, 10), (4, 4), (5, 3), (8, 0), (16, 1000)] {
            let done: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            let count = |task: usize| {
                done[task].fetch_add(1, Ordering::Relaxed);
            };
            for_each_share(threads, tasks, count);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
            pool.install(|| for_each_share(threads, tasks, count));
            crate::team::Team::new(2).within(|| for_each_share(threads, tasks, count));
            assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 3), "{threads} threads, {tasks} tasks");
        }
    }

    #[test]
    fn turns_are_taken_in_order_whoever_comes_first() {
        let mut data = vec![0u64; 3];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
        let gate = Turnstile::new(&mut data, 3, 1, |_| 0);
        pool.install(|| {
            for_each_task(
                5,
                60,
                || (),
                |_, task| {
                    let turn = (task / 3) as u64;
                    let mut region = gate.enter(task % 3, turn);
                    region[0] = region[0].wrapping_mul(31).wrapping_add(turn);
                    region.leave(turn + 1);
                },
            );
        });
        let expected = (0..20u64).fold(0u64, |x, turn| x.wrapping_mul(31).wrapping_add(turn));
        assert_eq!(data, [expected; 3]);
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn a_turn_that_looks_like_a_held_region_is_refused() {
        let mut data = [0u64; 1];
        let gate = Turnstile::new(&mut data, 1, 1, |_| 0);
        let _held = gate.enter(0, 0);
        gate.enter(0, LOCKED);
    }

    /// Runs what panics, and catches it.
    fn caught(body: impl FnOnce()) {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_err();
    }

    #[test]
    fn only_rows_that_hold_something_count_as_written() {
        use crate::Unwritten;
        #[allow(clippy::type_complexity)] // Five closures of one test.
        let refused: [&dyn Fn(&Rows<'_, f32>); 5] = [
            // No rows at all, from within a word of the bitmap.
            &|rows| rows.write_all(0, 0, 1, 0, &[], 2),
            // Claims that fail half way, and data that are too short.
            &|rows| caught(|| rows.write_all(0, 0, 0, 64, &[1.0; 128], 2)),
            &|rows| caught(|| rows.write_all(0, 0, 1, 63, &[1.0; 3], 2)),
            &|rows| caught(|| rows.write_scaled(0, 0, 1, &[1.0; 63], &[1.0; 3], 2)),
            &|rows| caught(|| rows.write(0, 0, 1, &[1.0])),
        ];
        for attempt in refused {
            let mut memory = Unwritten::<f32>::new([1, 1, 64, 2]).unwrap();
            let rows = Rows::new(memory.view());
            rows.write(0, 0, 0, &[1.0, 2.0]);
            attempt(&rows);
            drop(rows);
            caught(|| drop(memory.written()));
        }
    }

    #[test]
    fn outputs_without_elements_are_written_at_once() {
        use crate::Unwritten;
        for shape in [[0, usize::MAX, usize::MAX, 3], [2, 3, 0, 5], [2, 1, 4, 0]] {
            assert!(Unwritten::<f32>::new(shape).is_some_and(|mut memory| {
                drop(Rows::new(memory.view()));
                memory.written().is_empty()
            }));
        }
        assert!(Unwritten::<f32>::new([usize::MAX, usize::MAX, 1, 1]).is_none());
    }

    #[test]
    #[should_panic(expected = "written twice")]
    fn a_row_cannot_be_written_twice() {
        let mut data = vec![0.0f32; 4];
        let rows = Rows::new(ViewMut::new(&mut data, [1, 1, 2, 2]).unwrap());
        rows.write(0, 0, 1, &[1.0, 2.0]);
        rows.write(0, 0, 1, &[1.0, 2.0]);
    }
}
