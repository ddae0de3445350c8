//! Choosing tokens on the device that holds the logits.

use crate::float::Float;
use crate::layers::KvCache;
use crate::tape::{Tape, Var};
use qkv_cuda::operations::{Array, DecodeBatch, Drawing, Draws, MOST_HIGHEST};
use qkv_simd::logits::Survey;

impl<T: Float> Tape<'_, T> {
    /// Sets the next input token of each sequence to the likeliest one by its logits `[B, 1, V]`, and advances it by
    /// one position. Returns the logits in device memory.
    ///
    /// # Panics
    /// If the tape computes on the CPU.
    pub fn take_likeliest(&mut self, logits: &Var<T>, batch: &DecodeBatch) -> Array {
        let operations = self.machine.cuda().expect("a device that counts");
        let logits = logits.value.array(operations);
        operations.next_token(&logits, batch);
        logits
    }

    /// The same with randomly drawn tokens.
    ///
    /// # Panics
    /// If the tape computes on the CPU.
    pub fn draw_tokens(&mut self, logits: &Var<T>, batch: &DecodeBatch, draws: &Draws, drawing: Drawing) -> Array {
        let operations = self.machine.cuda().expect("a device that counts");
        let logits = logits.value.array(operations);
        operations.draw_token(&logits, batch, draws, drawing);
        logits
    }

    /// Makes each sequence continue from another, given by `parents [B]`, whose rows of the [counted](KvCache::counted)
    /// caches it takes over.
    ///
    /// # Panics
    /// If the tape computes on the CPU.
    pub fn reorder<'c>(&mut self, caches: impl Iterator<Item = &'c KvCache<T>>, parents: &Array, batch: &DecodeBatch)
    where
        T: 'c,
    {
        let operations = self.machine.cuda().expect("a device that counts");
        operations.reorder(caches.filter_map(KvCache::counted_rows).flatten(), parents, batch);
    }

    /// Starts surveying the logits `[B, 1, V]` of sequences for the `most` highest of each, and advances the sequences
    /// by one position.
    ///
    /// # Panics
    /// If the tape computes on the CPU.
    pub fn begin_survey(&mut self, logits: &Var<T>, most: usize, batch: &DecodeBatch) -> Array {
        let operations = self.machine.cuda().expect("a device that counts");
        operations.begin_survey(&logits.value.array(operations), batch.len(), most, Some(batch))
    }

    /// Surveys every row of logits `[.., V]` for the `most` highest on a device; `None` on a CPU, or if `most` is more
    /// than a device supports.
    pub fn survey(&self, logits: &Var<T>, most: usize) -> Option<Vec<Survey>> {
        let operations = self.machine.cuda().filter(|_| most <= MOST_HIGHEST && logits.value.width() > 0)?;
        Some(operations.survey(&logits.value.array(operations), logits.value.rows(), most))
    }
}
