//! The tape: what was computed, in order, and the way back. Its methods, one family a file in `ops/`, are the operations.

use crate::float::Float;
use crate::machine::Machine;
use crate::ops::attention::Captured;
use crate::parameters::{Gradients, Parameters};
use crate::pool::Pool;
use crate::tensor::Tensor;
use qkv::Scratch;

/// A value on the tape. Dropping the last clone of it frees its memory, unless an operation keeps it for the way back: code
/// that no longer needs a value lets go of it.
#[derive(Clone, Debug)]
pub struct Var<T: Float> {
    /// Where its gradient is collected; `None` for what needs none.
    pub(crate) slot: Option<usize>,
    pub(crate) value: Tensor<T>,
}

impl<T: Float> Var<T> {
    /// Its numbers.
    pub fn value(&self) -> &Tensor<T> {
        &self.value
    }

    /// Its axes.
    pub fn shape(&self) -> &[usize] {
        self.value.shape()
    }

    /// The same numbers with other axes.
    ///
    /// # Panics
    /// Where the shape has another number of elements.
    pub fn reshaped(self, shape: &[usize]) -> Self {
        Var { value: self.value.reshaped(shape), ..self }
    }
}

/// The way back through one operation: what it kept, and where its inputs' gradients go.
pub(crate) trait Backward<T: Float>: Send {
    /// Takes the gradient of the output and adds to those of the inputs.
    fn backward(self: Box<Self>, upstream: Tensor<T>, back: &mut Back<'_, T>);
}

struct Node<T: Float> {
    /// The slot of its output.
    output: usize,
    operation: Box<dyn Backward<T>>,
}

/// A tape over some parameters.
pub struct Tape<'a, T: Float> {
    pub(crate) parameters: &'a Parameters<T>,
    pub(crate) gradients: Option<&'a mut Gradients<T>>,
    pub(crate) pool: &'a Pool<T>,
    pub(crate) machine: &'a Machine,
    pub(crate) scratch: Scratch<T>,
    nodes: Vec<Node<T>>,
    slots: Vec<Option<Tensor<T>>>,
    seed: u64,
    streams: u64,
    penalty: f64,
    noise: bool,
    pub(crate) captured: Option<Vec<Captured<T>>>,
}

/// What the way back works with.
pub(crate) struct Back<'t, T: Float> {
    pub parameters: &'t Parameters<T>,
    pub gradients: &'t mut Gradients<T>,
    pub pool: &'t Pool<T>,
    pub machine: &'t Machine,
    pub scratch: &'t Scratch<T>,
    slots: &'t mut [Option<Tensor<T>>],
}

impl<'a, T: Float> Tape<'a, T> {
    /// A tape that remembers the way back. Noise (dropout, sampled attention) is drawn from `seed` and is on.
    pub fn training(
        parameters: &'a Parameters<T>,
        gradients: &'a mut Gradients<T>,
        pool: &'a Pool<T>,
        machine: &'a Machine,
        seed: u64,
    ) -> Self {
        Tape { gradients: Some(gradients), seed, noise: true, ..Tape::inference(parameters, pool, machine) }
    }

    /// A tape that keeps nothing: values only, no noise.
    pub fn inference(parameters: &'a Parameters<T>, pool: &'a Pool<T>, machine: &'a Machine) -> Self {
        Tape {
            parameters,
            gradients: None,
            pool,
            machine,
            scratch: Scratch::new(),
            nodes: Vec::new(),
            slots: Vec::new(),
            seed: 0,
            streams: 0,
            penalty: 0.0,
            noise: false,
            captured: None,
        }
    }

    /// From here on, keeps what is needed to look at each attention later, in the order in which they are computed.
    pub fn capture(&mut self) {
        self.captured = Some(Vec::new());
    }

    /// What was captured so far.
    pub fn captured(&mut self) -> Vec<Captured<T>> {
        self.captured.take().unwrap_or_default()
    }

    /// The same tape without noise: what the loss of a finished model depends on.
    pub fn quiet(self) -> Self {
        Tape { noise: false, ..self }
    }

    /// Whether dropout and sampling are on.
    pub(crate) fn has_noise(&self) -> bool {
        self.noise
    }

    /// Whether this tape remembers the way back.
    pub fn is_training(&self) -> bool {
        self.gradients.is_some()
    }

    /// A value that needs no gradient.
    pub fn constant(&self, value: Tensor<T>) -> Var<T> {
        Var { slot: None, value }
    }

    /// A value whose gradient is wanted: [`gradient`](Tape::gradient) finds it after [`backward`](Tape::backward).
    pub fn input(&mut self, value: Tensor<T>) -> Var<T> {
        let slot = self.slot();
        Var { slot: Some(slot), value }
    }

    /// The gradient of an [`input`](Tape::input), once the way back is done.
    pub fn gradient(&self, input: &Var<T>) -> Option<&Tensor<T>> {
        self.slots[input.slot?].as_ref()
    }

    /// What the penalties of attentions sum to so far.
    pub fn penalty(&self) -> f64 {
        self.penalty
    }

    pub(crate) fn add_penalty(&mut self, penalty: f64) {
        self.penalty += penalty;
    }

    /// A seed for noise that no other operation of this tape draws from.
    pub(crate) fn stream(&mut self) -> u64 {
        self.streams += 1;
        self.seed.wrapping_add(self.streams.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn slot(&mut self) -> usize {
        self.slots.push(None);
        self.slots.len() - 1
    }

    /// The value of an operation, and, on a tape that trains, the way back through it.
    pub(crate) fn record<B: Backward<T> + 'static>(
        &mut self,
        value: Tensor<T>,
        operation: impl FnOnce() -> B,
    ) -> Var<T> {
        if !self.is_training() {
            return Var { slot: None, value };
        }
        let output = self.slot();
        self.nodes.push(Node { output, operation: Box::new(operation()) });
        Var { slot: Some(output), value }
    }

    /// Starts a gradient: what comes back to `var` from above. Losses do this by themselves.
    ///
    /// # Panics
    /// Where the shapes differ.
    pub fn seed(&mut self, var: &Var<T>, gradient: Tensor<T>) {
        assert_eq!(var.shape(), gradient.shape(), "the gradient of a value has its shape");
        if let Some(slot) = var.slot {
            add(&mut self.slots[slot], gradient, self.machine);
        }
    }

    /// Walks back over everything, adding to the gradients of the parameters. Afterwards the tape is empty.
    pub fn backward(&mut self) {
        let Some(gradients) = self.gradients.as_deref_mut() else { return };
        while let Some(Node { output, operation }) = self.nodes.pop() {
            // What nobody used has no gradient.
            let Some(upstream) = self.slots[output].take() else { continue };
            let mut back = Back {
                parameters: self.parameters,
                gradients,
                pool: self.pool,
                machine: self.machine,
                scratch: &self.scratch,
                slots: &mut self.slots,
            };
            operation.backward(upstream, &mut back);
        }
    }
}

impl<T: Float> Back<'_, T> {
    /// Adds to the gradient of an input, if it wants one.
    pub fn add(&mut self, slot: Option<usize>, gradient: Tensor<T>) {
        if let Some(slot) = slot {
            add(&mut self.slots[slot], gradient, self.machine);
        }
    }

    /// The gradient of an input of that shape so far, to be added to in part; `None` where it wants none.
    pub fn sum(&mut self, slot: Option<usize>, shape: &[usize]) -> Option<&mut [T]> {
        let sum = &mut self.slots[slot?];
        Some(sum.get_or_insert_with(|| Tensor::zeros(self.pool, shape)).data_mut())
    }
}

/// `sum += gradient`, in whichever of the two nobody else holds.
fn add<T: Float>(sum: &mut Option<Tensor<T>>, mut gradient: Tensor<T>, machine: &Machine) {
    let Some(mut before) = sum.take() else {
        *sum = Some(gradient);
        return;
    };
    if !before.is_unshared() && gradient.is_unshared() {
        std::mem::swap(&mut before, &mut gradient);
    }
    crate::ops::add_onto(machine, before.data_mut(), gradient.data());
    *sum = Some(before);
}
