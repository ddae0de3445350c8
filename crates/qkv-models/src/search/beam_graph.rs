//! A step of beam search on a device as one CUDA graph: each beam takes over its parent's cache, reads a token, and its
//! highest logits are found. The host chooses among these.

use super::Search;
use super::beam::SourceBeams;
use crate::batch::Rows;
use crate::transformer::{CountedBeams, Transformer};
use crate::{Model, Result};
use qkv_cuda::operations::{Array, MOST_HIGHEST, Operations, RepeatedWork};
use qkv_nn::{Activation, Tape, Var};
use qkv_simd::logits::Survey;

/// One step for all beams of all sources.
pub(super) struct BeamGraph<'a> {
    transformer: &'a Transformer,
    operations: Operations,
    state: CountedBeams<f32>,
    /// How many of the highest logits to find.
    most: usize,
    /// The repeated step; its result is the surveys.
    repeated: RepeatedWork<Array>,
}

impl<'a> BeamGraph<'a> {
    /// For a search in which only the highest logits decide; `None` if there is no device, or it does not support the
    /// whole step.
    pub fn new(
        search: &Search,
        model: &'a Model,
        tape: &mut Tape<'_, f32>,
        source: &Rows,
        memory: &Var<f32>,
        sources: &[SourceBeams],
    ) -> Result<Option<Self>> {
        let most = search.surveyed();
        let (Some(transformer), Some(operations)) = (model.transformer(), tape.machine().cuda().cloned()) else {
            return Ok(None);
        };
        if !search.cache || !search.is_by_logits_alone() || most > MOST_HIGHEST {
            return Ok(None);
        }
        let tokens = sources.iter().map(|beams| beams.max_len + 1).max().unwrap_or(1);
        let state = transformer.start_counted(tape, memory, source, [search.beam, tokens])?;
        let repeated = RepeatedWork::default();
        Ok(state.map(|state| BeamGraph { transformer, operations, state, most, repeated }))
    }

    /// Continues every beam from its parent with a token; returns surveys of the next logits.
    ///
    /// # Errors
    /// If the device fails.
    pub fn step(&mut self, tape: &mut Tape<'_, f32>, ids: &[u32], parents: &[u32]) -> Result<Vec<Survey>> {
        self.operations.write(self.state.batch.ids(), ids);
        self.operations.write(&self.state.parents, parents);
        let (mut repeated, operations) = (std::mem::take(&mut self.repeated), self.operations.clone());
        repeated.run(&operations, || self.compute(tape))?;
        self.repeated = repeated;
        let surveys = self.repeated.result().expect("of the step just done");
        let surveys = self.operations.read_surveys(surveys, ids.len());
        tape.machine().check()?;
        Ok(surveys)
    }

    fn compute(&mut self, tape: &mut Tape<'_, f32>) -> Result<Array> {
        let hidden = self.transformer.step_counted(tape, &mut self.state)?; // [B, 1, C]
        let (weight, bias) = (self.transformer.output(), self.transformer.output_bias());
        let logits = tape.linear(&hidden, weight, bias, Activation::None, 0.0); // [B, 1, V]
        Ok(tape.begin_survey(&logits, self.most, &self.state.batch))
    }
}
