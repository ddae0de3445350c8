//! Gradient checkpointing (Chen et al. 2016, arXiv:1604.06174): only the input of a segment of the model is saved; its
//! operations are recomputed in the backward pass, with the same dropout. It saves memory at the price of a second
//! forward pass.

use crate::context::SharedContext;
use crate::float::Float;
use crate::parameters::Param;
use crate::rewards::Reinforce;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;

/// A segment of a model: from one value to another.
type Segment<T> = Box<dyn for<'t> Fn(&mut Tape<'t, T>, Var<T>) -> qkv::Result<Var<T>> + Send>;

struct RecomputeBackward<T: Float> {
    x: Option<usize>,
    input: Tensor<T>,
    segment: Segment<T>,
    /// The state of the random draws at the start of the segment.
    stream: (u64, u64),
    noise: bool,
    share: f64,
    reinforce: Option<Reinforce>,
    context: Option<SharedContext<T>>,
}

impl<T: Float> Tape<'_, T> {
    /// Runs a segment and saves only its input.
    ///
    /// # Errors
    /// Any error of the segment.
    pub fn recomputed(
        &mut self,
        x: Var<T>,
        segment: impl for<'t> Fn(&mut Tape<'t, T>, Var<T>) -> qkv::Result<Var<T>> + Send + 'static,
    ) -> qkv::Result<Var<T>> {
        if !self.is_training() {
            return segment(self, x);
        }
        let (slot, input, stream) = (x.slot, x.value.clone(), self.draws());
        let output = self.suspend(|tape| {
            let x = tape.constant(x.value);
            segment(tape, x)
        })?;
        let (noise, share, context) = (self.has_noise(), self.penalty_factor(), self.context.clone());
        let (segment, reinforce) = (Box::new(segment), self.reinforce);
        let backward = || RecomputeBackward { x: slot, input, segment, stream, noise, share, reinforce, context };
        Ok(self.record(output.value, true, backward))
    }
}

impl<T: Float> Backward<T> for RecomputeBackward<T> {
    fn parameters(&self) -> Option<Vec<Param>> {
        None
    }

    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let (parameters, pool, machine) = (context.parameters, context.pool, context.machine);
        let mut tape = Tape::training(parameters, context.gradients, pool, machine, 0).share(self.share);
        tape.set_draws(self.stream, self.noise);
        tape.context = self.context;
        (tape.reinforce, tape.rewards) = (self.reinforce, context.rewards.cloned());
        let x = match self.x {
            Some(_) => tape.input(self.input),
            None => tape.constant(self.input),
        };
        let output = (self.segment)(&mut tape, x.clone()).expect("the forward pass went through it");
        tape.seed(&output, upstream);
        drop(output);
        tape.backward();
        let d_x = tape.take_gradient(&x);
        drop(tape);
        if let Some(d_x) = d_x {
            context.add(self.x, d_x);
        }
    }
}
