//! A decoding step on a device as one CUDA graph: the device advances the positions of all sequences and chooses their
//! next tokens.

use super::{Generation, Generator};
use crate::gpt::CountedState;
use crate::{Result, finite};
use qkv_cuda::operations::{Array, Drawing, Draws, NO_TOKEN, Operations, RepeatedWork};
use qkv_nn::{Activation, Machine, Pool, Tape};

/// Room for the tokens of a sequence is allocated in multiples of this.
const ROOM_STEP: usize = 64;

/// One decoding step for all sequences on a device.
pub(super) struct GraphDecoder<'a> {
    generator: &'a Generator,
    pub machine: &'a Machine,
    operations: &'a Operations,
    pub pool: &'a Pool<f32>,
    pub state: CountedState<f32>,
    /// How the device samples tokens; without it, the device chooses the most probable ones.
    pub draws: Option<(Draws, Drawing)>,
    /// The step, with its logits `[B, V]`.
    repeated: RepeatedWork<Array>,
}

impl<'a> GraphDecoder<'a> {
    /// For this many sequences of at most `tokens` tokens; `None` on a CPU, or if the attention runs only there.
    pub fn new(
        generator: &'a Generator,
        settings: &Generation,
        machine: &'a Machine,
        pool: &'a Pool<f32>,
        sequences: usize,
        tokens: usize,
    ) -> Option<Self> {
        let gpt = generator.model.gpt()?;
        let operations = machine.cuda().filter(|_| gpt.runs_on_gpu())?;
        let room = tokens.min(gpt.max_len()).next_multiple_of(ROOM_STEP).min(gpt.max_len());
        let state = gpt.start_counted(operations, operations.decode_batch(sequences, room));
        let sample = settings.sample.filter(|_| settings.is_by_logits_alone());
        let draws = sample.map(|by| {
            (operations.draws(sequences), Drawing::new(by.temperature, by.top_p, by.min_p, by.top_k, by.seed))
        });
        Some(GraphDecoder { generator, machine, operations, pool, state, draws, repeated: RepeatedWork::default() })
    }

    /// Number of tokens that a sequence has room for.
    pub fn room(&self) -> usize {
        self.state.batch().room()
    }

    /// Sets what each sequence reads next.
    pub fn set(&self, reads: &[Reads]) {
        let of = |get: fn(&Reads) -> u32| reads.iter().map(get).collect::<Vec<u32>>();
        let (ids, positions) = (of(|reads| reads.token), of(|reads| reads.position));
        self.operations.set_decode_batch(self.state.batch(), &ids, &positions);
        if let Some((draws, _)) = &self.draws {
            self.operations.set_draws(draws, &of(|reads| reads.text), &of(|reads| reads.drawn));
        }
    }

    /// Replaces the tokens that were chosen.
    pub fn set_ids(&self, ids: &[u32]) {
        self.operations.write(self.state.batch().ids(), ids);
    }

    /// Reads one token of each sequence and chooses the next one, the most probable or a sampled one. Returns the
    /// chosen tokens, which the following step reads.
    ///
    /// # Errors
    /// If the model computes NaN, or the device fails.
    pub fn step(&mut self) -> Result<Vec<u32>> {
        let operations = self.operations;
        let mut repeated = std::mem::take(&mut self.repeated);
        repeated.run(operations, || self.compute())?;
        self.repeated = repeated;
        let ids = operations.read_scalars::<u32>(self.state.batch().ids());
        self.machine.check()?;
        match ids.contains(&NO_TOKEN) {
            true => Err(finite::refusal(&self.generator.parameters)),
            false => Ok(ids),
        }
    }

    fn compute(&mut self) -> Result<Array> {
        let gpt = self.generator.model.gpt().expect("checked when it was made");
        let mut tape = Tape::inference(&self.generator.parameters, self.pool, self.machine);
        let hidden = gpt.step_counted(&mut tape, &mut self.state)?; // [B, 1, C]
        let logits = tape.linear(&hidden, gpt.output(), None, Activation::None, 0.0); // [B, 1, V]
        Ok(match &self.draws {
            Some((draws, drawing)) => tape.draw_tokens(&logits, self.state.batch(), draws, *drawing),
            None => tape.take_likeliest(&logits, self.state.batch()),
        })
    }

    /// The logits of a sequence in the last step, `[V]`.
    pub fn logits(&self, sequence: usize) -> Vec<f32> {
        let Some(logits) = self.repeated.result() else { return Vec::new() };
        let each = logits.len() / self.state.batch().len();
        self.operations.read(&logits.slice(sequence * each..(sequence + 1) * each))
    }
}

/// What a sequence reads next.
#[derive(Clone, Copy, Default)]
pub(super) struct Reads {
    pub token: u32,
    pub position: u32,
    /// The number of the text, and how many of its tokens have been drawn: these select random numbers.
    pub text: u32,
    pub drawn: u32,
}
