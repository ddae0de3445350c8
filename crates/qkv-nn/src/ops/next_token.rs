//! Choosing tokens where a device has the logits.

use crate::float::Float;
use crate::layers::KvCache;
use crate::tape::{Tape, Var};
use qkv_cuda::operations::{Array, DecodeBatch, Drawing, Draws, MOST_HIGHEST};
use qkv_simd::logits::Survey;

impl<T: Float> Tape<'_, T> {
    /// Takes the likeliest token of each sequence, by its logits `[B, 1, V]`, as the one that it reads next, one
    /// position further. Returns the logits in device memory.
    ///
    /// # Panics
    /// Where the tape computes on the CPU.
    pub fn take_likeliest(&mut self, logits: &Var<T>, batch: &DecodeBatch) -> Array {
        let operations = self.machine.cuda().expect("a device that counts");
        let logits = logits.value.array(operations);
        operations.next_token(&logits, batch);
        logits
    }

    /// The same with tokens that are drawn.
    ///
    /// # Panics
    /// Where the tape computes on the CPU.
    pub fn draw_tokens(&mut self, logits: &Var<T>, batch: &DecodeBatch, draws: &Draws, drawing: Drawing) -> Array {
        let operations = self.machine.cuda().expect("a device that counts");
        let logits = logits.value.array(operations);
        operations.draw_token(&logits, batch, draws, drawing);
        logits
    }

    /// Lets sequences go on from others, `parents [B]`, whose [counted](KvCache::counted) caches become theirs.
    ///
    /// # Panics
    /// Where the tape computes on the CPU.
    pub fn reorder<'c>(&mut self, caches: impl Iterator<Item = &'c KvCache<T>>, parents: &Array, batch: &DecodeBatch)
    where
        T: 'c,
    {
        let operations = self.machine.cuda().expect("a device that counts");
        operations.reorder(caches.filter_map(KvCache::counted_rows).flatten(), parents, batch);
    }

    /// Begins to survey the logits `[B, 1, V]` of sequences for the `most` highest of each; they stand one position
    /// further.
    ///
    /// # Panics
    /// Where the tape computes on the CPU.
    pub fn begin_survey(&mut self, logits: &Var<T>, most: usize, batch: &DecodeBatch) -> Array {
        let operations = self.machine.cuda().expect("a device that counts");
        operations.begin_survey(&logits.value.array(operations), batch.len(), most, Some(batch))
    }

    /// Surveys every row of logits `[.., V]` for the `most` highest, where a device has them and can; `None` on a CPU,
    /// and where there are more than a device looks for.
    pub fn survey(&self, logits: &Var<T>, most: usize) -> Option<Vec<Survey>> {
        let operations = self.machine.cuda().filter(|_| most <= MOST_HIGHEST && logits.value.width() > 0)?;
        Some(operations.survey(&logits.value.array(operations), logits.value.rows(), most))
    }
}
