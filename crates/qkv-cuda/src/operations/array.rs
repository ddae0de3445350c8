//! Device memory that is allocated once and reused, and the arrays in it.

use super::Operations;
use super::recorder::{count_written, this_thread};
use crate::driver::{Driver, PendingCopy};
use crate::error::{Error, Result};
use crate::memory::{Dtype, Scalar};
use half::bf16;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The elements of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// f32: parameters, gradients, sums.
    F32,
    /// bf16: activations.
    Bf16,
    /// f64: norms and losses.
    F64,
    /// Any integer of 32 bits.
    U32,
    /// Any integer of 64 bits.
    U64,
}

impl Kind {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Kind::Bf16 => 2,
            Kind::F32 | Kind::U32 => 4,
            Kind::F64 | Kind::U64 => 8,
        }
    }
}

impl From<Dtype> for Kind {
    fn from(dtype: Dtype) -> Kind {
        if dtype == Dtype::F32 { Kind::F32 } else { Kind::Bf16 }
    }
}

/// Free blocks of device memory, and counts of bytes.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    driver: Arc<dyn Driver>,
    state: Mutex<MemoryState>,
}

#[derive(Debug, Default)]
struct MemoryState {
    /// Keyed by size.
    free: BTreeMap<usize, Vec<u64>>,
    free_bytes: usize,
    used: usize,
    /// The largest `used` so far.
    peak: usize,
    recorded: Option<RecordedBlocks>,
}

/// While a graph is recorded: the recording thread, and the blocks that the graph has used and may reuse. They count as
/// used.
#[derive(Debug)]
struct RecordedBlocks {
    thread: u64,
    blocks: BTreeMap<usize, Vec<u64>>,
}

/// Memory that a graph uses whenever it runs; returned when dropped.
#[derive(Debug)]
pub(super) struct RecordedMemory {
    blocks: BTreeMap<usize, Vec<u64>>,
    memory: Arc<DeviceMemory>,
}

impl Drop for RecordedMemory {
    fn drop(&mut self) {
        let mut state = self.memory.state();
        for (bytes, blocks) in std::mem::take(&mut self.blocks) {
            blocks.into_iter().for_each(|ptr| state.give_back(ptr, bytes));
        }
    }
}

/// The most constants kept.
const MAX_CONSTANTS: usize = 64;

/// Allocations are multiples of this, the alignment of CUDA's own allocations.
const ALIGNMENT: usize = 256;

/// `bytes` rounded up to one of eight sizes between two powers of two, so that batches of slightly different shapes
/// share their memory.
fn class(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 16).max(ALIGNMENT);
    bytes.div_ceil(step).max(1) * step
}

impl DeviceMemory {
    pub fn new(driver: &Arc<dyn Driver>) -> DeviceMemory {
        DeviceMemory { driver: driver.clone(), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn in_use(&self) -> [usize; 2] {
        let state = self.state();
        [state.used, state.peak]
    }

    /// A block of at least this size, with arbitrary contents.
    fn take(self: &Arc<Self>, bytes: usize, purpose: &str) -> Result<Arc<Block>> {
        let bytes = class(bytes);
        let mut state = self.state();
        if let Some(ptr) = state.recorded().and_then(|recorded| recorded.get_mut(&bytes)?.pop()) {
            return Ok(Arc::new(Block { ptr, bytes, memory: Some(self.clone()) }));
        }
        // A slightly larger block will do; a much larger one is left for larger arrays.
        let size = state.free.range(bytes..=bytes + bytes / 8).next().map(|(&size, _)| size);
        let found = size.and_then(|size| state.pop(size).map(|ptr| (ptr, size)));
        let (ptr, bytes) = match found {
            Some(found) => found,
            None => (self.allocate(&mut state, bytes, purpose)?, bytes),
        };
        state.used += bytes;
        state.peak = state.peak.max(state.used);
        Ok(Arc::new(Block { ptr, bytes, memory: Some(self.clone()) }))
    }

    /// From now on, the blocks that this thread returns stay with the graph that it records.
    pub fn begin_recording(&self) {
        self.state().recorded = Some(RecordedBlocks { thread: this_thread(), blocks: BTreeMap::new() });
    }

    /// Ends the recording; returns the memory that the graph keeps.
    pub fn end_recording(self: &Arc<Self>) -> RecordedMemory {
        let recorded = self.state().recorded.take();
        RecordedMemory { blocks: recorded.map_or_else(BTreeMap::new, |of| of.blocks), memory: self.clone() }
    }

    /// Allocates from the driver; if it has no memory left, frees all free blocks and tries again.
    fn allocate(&self, state: &mut MemoryState, bytes: usize, purpose: &str) -> Result<u64> {
        if let Ok(ptr) = self.driver.allocate(bytes) {
            return Ok(ptr);
        }
        while let Some(size) = state.free.keys().next_back().copied() {
            state.pop(size).into_iter().for_each(|ptr| self.driver.free(ptr));
        }
        self.driver.allocate(bytes).map_err(|_| Error::OutOfMemory {
            bytes,
            purpose: purpose.into(),
            used: state.used,
            total: self.driver.device().memory_bytes,
        })
    }
}

impl MemoryState {
    /// The blocks of the graph that this thread records, if any.
    fn recorded(&mut self) -> Option<&mut BTreeMap<usize, Vec<u64>>> {
        self.recorded.as_mut().filter(|of| of.thread == this_thread()).map(|of| &mut of.blocks)
    }

    fn give_back(&mut self, ptr: u64, bytes: usize) {
        self.used -= bytes;
        self.free_bytes += bytes;
        self.free.entry(bytes).or_default().push(ptr);
    }

    fn pop(&mut self, size: usize) -> Option<u64> {
        let blocks = self.free.get_mut(&size)?;
        let ptr = blocks.pop();
        if blocks.is_empty() {
            self.free.remove(&size);
        }
        self.free_bytes -= if ptr.is_some() { size } else { 0 };
        ptr
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for ptr in state.free.values().flatten() {
            self.driver.free(*ptr);
        }
    }
}

/// Memory of one or several arrays; returned with the last of them.
#[derive(Debug)]
struct Block {
    ptr: u64,
    bytes: usize,
    /// `None` for an empty block, after a failure.
    memory: Option<Arc<DeviceMemory>>,
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let mut state = memory.state();
        match state.recorded() {
            Some(recorded) => recorded.entry(self.bytes).or_default().push(self.ptr),
            None => state.give_back(self.ptr, self.bytes),
        }
    }
}

/// Elements in device memory. Clones and slices share it.
#[derive(Clone, Debug)]
pub struct Array {
    block: Arc<Block>,
    /// In bytes.
    offset: usize,
    len: usize,
    kind: Kind,
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The type of its elements.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether no other array shares its memory.
    pub fn is_unshared(&mut self) -> bool {
        Arc::get_mut(&mut self.block).is_some()
    }

    /// Whether it shares the memory of another.
    pub fn is_part_of(&self, other: &Array) -> bool {
        Arc::ptr_eq(&self.block, &other.block)
    }

    /// A slice of its elements.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Array {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        let offset = self.offset + range.start * self.kind.size();
        Array { block: self.block.clone(), offset, len: range.len(), kind: self.kind }
    }

    pub(super) fn ptr(&self) -> u64 {
        if self.block.ptr == 0 { 0 } else { self.block.ptr + self.offset as u64 }
    }

    fn bytes(&self) -> usize {
        self.len * self.kind.size()
    }

    /// The address, after checking the type and the length that a kernel relies on.
    pub(super) fn expect(&self, kind: Kind, len: usize) -> u64 {
        assert!(
            self.kind == kind && self.len >= len,
            "{len} of {kind:?} expected, not {} of {:?}",
            self.len,
            self.kind
        );
        self.ptr()
    }
}

impl Operations {
    /// An array with arbitrary contents. `purpose` is for the error message if there is no memory left.
    pub fn empty(&self, kind: Kind, len: usize, purpose: &str) -> Array {
        let found = match self.failed() {
            None => self.shared.memory.take(len * kind.size(), purpose),
            Some(error) => Err(error),
        };
        let block = found.unwrap_or_else(|error| {
            self.remember(Err(error));
            Arc::new(Block { ptr: 0, bytes: 0, memory: None })
        });
        Array { block, offset: 0, len, kind }
    }

    /// An array of activations with arbitrary contents.
    pub fn activations(&self, len: usize) -> Array {
        self.empty(self.activation_kind(), len, "activations")
    }

    /// The type of activations.
    pub fn activation_kind(&self) -> Kind {
        self.shared.dtype.into()
    }

    /// Sets all bytes to zero.
    pub fn clear(&self, array: &Array) {
        if self.failed().is_none() && !array.is_empty() {
            self.remember(self.driver().zero(array.ptr(), array.bytes(), self.stream()));
        }
    }

    /// An array of zeros.
    pub fn zeros(&self, kind: Kind, len: usize, purpose: &str) -> Array {
        let array = self.empty(kind, len, purpose);
        self.clear(&array);
        array
    }

    /// Uploads scalars, whose type has the size of the array's.
    pub fn upload<S: Scalar>(&self, kind: Kind, data: &[S], purpose: &str) -> Array {
        assert_eq!(size_of::<S>(), kind.size(), "a scalar of another size");
        let array = self.empty(kind, data.len(), purpose);
        self.write(&array, data);
        array
    }

    /// Overwrites an array from the host, immediately: this is never recorded.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn write<S: Scalar>(&self, array: &Array, data: &[S]) {
        assert_eq!(size_of_val(data), array.bytes(), "as many bytes");
        if self.failed().is_none() {
            // SAFETY: scalars have no padding, so they may be read as bytes.
            let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) };
            count_written(bytes.len());
            self.remember(self.driver().write(array.ptr(), bytes, self.shared.stream));
        }
    }

    /// Uploads activations, rounded to their type.
    pub fn upload_activations(&self, data: &[f32]) -> Array {
        match self.activation_kind() {
            Kind::F32 => self.upload(Kind::F32, data, "activations"),
            kind => self.upload(kind, &rounded(data), "activations"),
        }
    }

    /// The elements of an array of floats, after all work; after a failure NaN, which nobody mistakes for results.
    pub fn read(&self, array: &Array) -> Vec<f32> {
        let numbers = match array.kind {
            Kind::F32 => self.read_scalars(array),
            Kind::Bf16 => self.read_scalars::<bf16>(array).into_iter().map(bf16::to_f32).collect(),
            Kind::F64 => self.read_scalars::<f64>(array).into_iter().map(|x| x as f32).collect(),
            Kind::U32 | Kind::U64 => panic!("{:?} are no floats", array.kind),
        };
        if self.failed().is_some() { vec![f32::NAN; array.len] } else { numbers }
    }

    /// The elements of an array, after all work; zeros after a failure.
    ///
    /// # Panics
    /// If the type has another size.
    pub fn read_scalars<S: Scalar>(&self, array: &Array) -> Vec<S> {
        assert_eq!(size_of::<S>(), array.kind.size(), "a scalar of another size");
        let mut data = vec![S::default(); array.len];
        if self.failed().is_none() {
            // SAFETY: every bit pattern is a value of the sealed scalar types.
            let bytes = unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), array.bytes()) };
            self.shared.bytes_read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            self.remember(self.driver().read(bytes, array.ptr(), self.shared.stream));
        }
        data
    }

    /// Begins to copy a few numbers, at most 64 bytes, to the host, as they are after the work enqueued so far. Reading
    /// them later waits only for that work, so that the host can run a step ahead of the device.
    pub fn fetch(&self, array: &Array) -> Fetched {
        let copy = match self.failed() {
            None => self.driver().read_later(array.ptr(), array.bytes(), self.shared.stream),
            Some(error) => Err(error),
        };
        self.shared.bytes_read.fetch_add(array.bytes() as u64, Ordering::Relaxed);
        let copy = copy.map_err(|error| self.remember(Err(error))).ok();
        Fetched { operations: self.clone(), copy, len: array.len, kind: array.kind }
    }

    /// Copies an array into another of its type and length.
    ///
    /// # Panics
    /// If they differ.
    pub fn copy(&self, to: &Array, from: &Array) {
        assert_eq!((to.kind, to.len), (from.kind, from.len), "arrays of one type and length");
        if self.failed().is_none() && !to.is_empty() {
            self.remember(self.driver().copy(to.ptr(), from.ptr(), to.bytes(), self.stream()));
        }
    }

    /// Constants in f32 that many calls need, such as tables of angles: copied to the device once.
    pub fn constant(&self, data: &[f32]) -> Array {
        let bits: Vec<u32> = data.iter().map(|x| x.to_bits()).collect();
        let mut constants = self.shared.constants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = constants.get(&bits) {
            self.shared.recorder.keep(found);
            return found.clone();
        }
        if constants.len() >= MAX_CONSTANTS {
            constants.clear();
        }
        let array = self.upload(Kind::F32, data, "constants");
        constants.insert(bits, array.clone());
        array
    }

    /// Concatenates arrays of one type.
    ///
    /// # Panics
    /// If there is none, or their types differ.
    pub fn joined(&self, parts: &[Array]) -> Array {
        let joined = self.empty(parts[0].kind, parts.iter().map(Array::len).sum(), "activations");
        let mut start = 0;
        for part in parts {
            self.copy(&joined.slice(start..start + part.len()), part);
            start += part.len();
        }
        joined
    }

    /// A copy in its own memory.
    pub fn duplicate(&self, array: &Array) -> Array {
        let copy = self.empty(array.kind, array.len, "a copy");
        self.copy(&copy, array);
        copy
    }
}

/// The fewest numbers per rounding thread: for fewer, another thread is not worth starting.
const ROUNDED_ALONE: usize = 1 << 20;
/// The most rounding threads; more do not read memory faster.
const ROUNDING_THREADS: usize = 8;

/// Rounds numbers to bf16, with several threads if there are many.
fn rounded(data: &[f32]) -> Vec<bf16> {
    let mut rounded = vec![bf16::ZERO; data.len()];
    let round = |to: &mut [bf16], from: &[f32]| {
        to.iter_mut().zip(from).for_each(|(to, &from)| *to = bf16::from_f32(from));
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(ROUNDING_THREADS);
    let each = data.len().div_ceil(threads).max(ROUNDED_ALONE);
    std::thread::scope(|scope| {
        let mut parts = rounded.chunks_mut(each).zip(data.chunks(each));
        let first = parts.next();
        for (to, from) in parts {
            scope.spawn(move || round(to, from));
        }
        first.into_iter().for_each(|(to, from)| round(to, from));
    });
    rounded
}

/// Numbers in flight to the host: see [`Operations::fetch`].
#[derive(Debug)]
pub struct Fetched {
    operations: Operations,
    /// `None` after a failure.
    copy: Option<Box<dyn PendingCopy>>,
    len: usize,
    kind: Kind,
}

impl Fetched {
    /// Waits for the numbers; zeros after a failure.
    ///
    /// # Panics
    /// If the type has another size.
    pub fn read<S: Scalar>(self) -> Vec<S> {
        assert_eq!(size_of::<S>(), self.kind.size(), "a scalar of another size");
        let mut data = vec![S::default(); self.len];
        let Some(copy) = self.copy else { return data };
        match copy.take() {
            Ok(bytes) => {
                // SAFETY: every bit pattern is a value of the sealed scalar types.
                let into = unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(&*data)) };
                into.copy_from_slice(&bytes);
            }
            Err(error) => self.operations.remember(Err(error)),
        }
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_little() {
        for bytes in [0, 1, 255, 256, 257, 5000, 1 << 20, (1 << 20) + 1, 999_999_999] {
            assert!(class(bytes) >= bytes.max(1) && class(bytes) <= bytes + bytes / 8 + ALIGNMENT, "{bytes}");
        }
    }
}
