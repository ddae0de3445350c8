//! Choosing tokens where the logits are: on the device that holds them, or a part of the vocabulary at a time.

use crate::float::Float;
use crate::layers::KvCache;
use crate::loops::Activation;
use crate::parameters::Param;
use crate::tape::{Tape, Var};
use qkv_cuda::operations::{Array, DecodeBatch, Drawing, Draws, MOST_HIGHEST};
use qkv_simd::logits::{Projection, Survey, survey, survey_products};
use std::time::Instant;

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
}

impl Tape<'_, f32> {
    /// Surveys the logits `x Wᵀ + b` of every row of `x [.., C]`, with `W [V, C]` and `b [V]`, for the `most` highest.
    /// With a packed matrix the logits are never in memory as a whole; with one in 8 bits whose rows would be rounded
    /// in two parts, the highest logits are computed again in f32 instead.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn survey_linear(&mut self, x: &Var<f32>, w: Param, b: Option<Param>, most: usize) -> Vec<Survey> {
        if let Some(surveys) = self.survey_packed(x, w, b, most) {
            return surveys;
        }
        let logits = self.linear(x, w, b, Activation::None, 0.0);
        self.survey(&logits, most)
    }

    /// Surveys every row of logits `[.., V]` for the `most` highest, on the device that holds them if it supports as
    /// many.
    pub fn survey(&self, logits: &Var<f32>, most: usize) -> Vec<Survey> {
        let width = logits.value.width();
        if let Some(operations) = self.machine.cuda().filter(|_| most <= MOST_HIGHEST && width > 0) {
            return operations.survey(&logits.value.array(operations), logits.value.rows(), most);
        }
        let rows = logits.value.data().chunks_exact(width.max(1));
        rows.map(|row| survey(self.machine.isa(), row, most)).collect()
    }

    fn survey_packed(&self, x: &Var<f32>, w: Param, b: Option<Param>, most: usize) -> Option<Vec<Survey>> {
        let (machine, parameters, start) = (self.machine, self.parameters, Instant::now());
        let adapted = parameters.adapter(w).is_some();
        if machine.cuda().is_some() || !self.is_inference() || !machine.is_exact() || adapted {
            return None;
        }
        let int8 = if machine.is_int8() { parameters.int8(w) } else { None };
        let (projection, bytes) = match int8 {
            Some(matrix) if parameters.is_fine(w) => {
                (Projection::Int8ThenF32(matrix, parameters.get(w)), matrix.bytes())
            }
            Some(matrix) => (Projection::Int8(matrix), matrix.bytes()),
            None => {
                let matrix = parameters.packed(w)?;
                (Projection::Packed(matrix), matrix.bytes())
            }
        };
        let (isa, team, bias) = (machine.isa(), machine.team(), b.map(|b| parameters.get(b)));
        let surveys = survey_products(isa, team, x.value.data(), projection, bias, most);
        machine.count(start, bytes, |usage, seconds, bytes| {
            usage.products += seconds;
            usage.product_bytes += bytes;
        });
        Some(surveys)
    }
}
