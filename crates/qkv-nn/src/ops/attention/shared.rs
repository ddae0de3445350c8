//! Attention over sequences whose rows are split over several tapes ([`ContextParallel`](crate::ContextParallel)).

use super::SavedOutput;
use crate::context::SharedContext;
use crate::float::Float;
use crate::heads::merge_heads;
use crate::saved_call::SavedCall;
use crate::tape::{Tape, Var};

impl<T: Float> Tape<'_, T> {
    /// A call over sequences whose other rows are on other tapes.
    pub(super) fn attend_shared(
        &mut self,
        call: SavedCall<T>,
        depends: bool,
        slots: [Option<usize>; 4],
    ) -> qkv::Result<Var<T>> {
        let refuse = |first, reason| Err(qkv::Error::Conflict { first, second: "a sequence over ranks", reason });
        if call.buckets.is_some() || call.center.is_some() {
            return refuse("LSH or predictive attention", "buckets and centers are computed from all rows");
        }
        if call.attention.entropy {
            return refuse("an entropy penalty", "it is a mean over all rows");
        }
        let Some(SharedContext { with, length }) = &call.context else { unreachable!("the caller has seen it") };
        let inputs = call.inputs(self.parameters);
        let out = with.forward(*length, &call.attention, inputs, self.machine.threads())?;
        let values = merge_heads(self.pool, self.machine, &out.values);
        Ok(self.record_attention(values, depends, call, slots, SavedOutput::Any(Box::new(out)), None))
    }
}
