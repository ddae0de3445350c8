//! Deferred copies of a few bytes to the host: begun now, taken later. Each goes to its own page-locked memory,
//! followed by an event, so that the host waits for the work before the copy and not for work enqueued after it.

use super::{PushedContext, check, handle};
use crate::device::Stream;
use crate::driver::{LATER_BYTES, PendingCopy, check_later};
use crate::error::Result;
use crate::libcuda::LibCuda;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// Page-locked memory for one copy, and the event that follows it, as addresses. Both live as long as the process.
#[derive(Debug)]
struct Slot {
    memory: usize,
    event: usize,
}

/// Free slots.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots(Arc<Mutex<Vec<Slot>>>);

impl Slots {
    fn take(&self, cuda: &LibCuda) -> Result<Slot> {
        if let Some(slot) = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(slot);
        }
        let check = |code| check(cuda, code, || "allocating page-locked memory".into());
        let (mut memory, mut event) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: each writes one pointer.
        unsafe {
            check((cuda.allocate_pinned)(&mut memory, LATER_BYTES))?;
            check((cuda.create_event)(&mut event, 0))?;
        }
        Ok(Slot { memory: memory as usize, event: event as usize })
    }

    /// The number of free slots.
    #[cfg(test)]
    pub fn unused(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn give_back(&self, slot: Slot) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
    }
}

/// A copy that has begun.
#[derive(Debug)]
pub(super) struct SmallCopy {
    cuda: &'static LibCuda,
    context: usize,
    slots: Slots,
    /// `None` once taken.
    slot: Option<Slot>,
    bytes: usize,
}

impl SmallCopy {
    /// Begins a copy of at most [`LATER_BYTES`], with the device's context current.
    pub fn begin(
        (cuda, context): (&'static LibCuda, usize),
        slots: &Slots,
        from: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<SmallCopy> {
        check_later(bytes)?;
        let slot = slots.take(cuda)?;
        let check = |code| check(cuda, code, || format!("copying {bytes} bytes to the host"));
        // SAFETY: the source is as large, and no other copy uses the slot.
        unsafe {
            check((cuda.copy_to_host)(slot.memory as *mut c_void, from, bytes, handle(stream)))?;
            check((cuda.record_event)(slot.event as *mut c_void, handle(stream)))?;
        }
        Ok(SmallCopy { cuda, context, slots: slots.clone(), slot: Some(slot), bytes })
    }

    fn wait(&self, slot: &Slot) -> Result<()> {
        let _context = PushedContext::push(self.cuda, self.context)?;
        // SAFETY: the event exists, and was recorded.
        let code = unsafe { (self.cuda.synchronize_event)(slot.event as *mut c_void) };
        check(self.cuda, code, || "waiting for a copy".into())
    }
}

impl PendingCopy for SmallCopy {
    fn take(mut self: Box<Self>) -> Result<Vec<u8>> {
        let slot = self.slot.take().expect("taken once");
        self.wait(&slot)?;
        // SAFETY: the device has written that many bytes, and writes no more.
        let bytes = unsafe { std::slice::from_raw_parts(slot.memory as *const u8, self.bytes) }.to_vec();
        self.slots.give_back(slot);
        Ok(bytes)
    }
}

impl Drop for SmallCopy {
    fn drop(&mut self) {
        // The device may still be writing to the slot; after a failure, the slot is not reused.
        if let Some(slot) = self.slot.take()
            && self.wait(&slot).is_ok()
        {
            self.slots.give_back(slot);
        }
    }
}
