//! The tape: the operations of a pass in order, and the backward pass over them. The operations are its methods, one
//! family per file in `ops/`.

use crate::activation_source::ActivationSource;
use crate::captured::Captured;
use crate::context::SharedContext;
use crate::float::Float;
use crate::machine::Machine;
use crate::parameters::{Gradients, Param, Parameters};
use crate::pending::Pending;
use crate::pool::Pool;
use crate::rewards::{Reinforce, Rewards};
use crate::tensor::Tensor;
use qkv::Scratch;
use qkv_cuda::operations::{Array, Kind, Operations};
use std::collections::HashMap;
use std::sync::Arc;

/// A value on the tape. Its memory is freed with the last clone, unless an operation saves it for the backward pass, so
/// drop values as soon as they have been used.
#[derive(Clone, Debug)]
pub struct Var<T: Float> {
    /// The slot in which its gradient is accumulated; `None` for constants.
    pub(crate) slot: Option<usize>,
    pub(crate) value: Tensor<T>,
    /// What it can be recomputed from, if that is saved anyway.
    pub(crate) source: Option<Arc<ActivationSource<T>>>,
}

impl<T: Float> Var<T> {
    /// The tensor.
    pub fn value(&self) -> &Tensor<T> {
        &self.value
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        self.value.shape()
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If the shape has another number of elements.
    pub fn reshaped(self, shape: &[usize]) -> Self {
        Var { value: self.value.reshaped(shape), ..self }
    }
}

/// The backward pass of one operation: the values it saved, and the slots of its inputs' gradients.
pub(crate) trait Backward<T: Float>: Send {
    /// Consumes the gradient of the output and adds to those of the inputs.
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>);

    /// The parameters whose gradients it adds to; `None` if they are known only while it runs.
    fn parameters(&self) -> Option<Vec<Param>> {
        Some(Vec::new())
    }
}

struct Node<T: Float> {
    /// The slot of its output.
    output: usize,
    operation: Box<dyn Backward<T>>,
}

/// Penalties on attention that a device may still be summing. Reading them blocks until they are complete.
#[derive(Clone, Debug, Default)]
pub struct PendingPenalty {
    known: f64,
    on_device: Option<(Operations, Array)>,
}

impl PendingPenalty {
    /// Their sum.
    pub fn read(&self) -> f64 {
        self.fetch().read()
    }

    /// Starts copying to the host their sum after the work submitted so far.
    pub fn fetch(&self) -> Pending<f64> {
        let known = self.known;
        let Some((operations, totals)) = &self.on_device else { return known.into() };
        let totals = operations.fetch(totals);
        Pending::later(move || known + totals.read::<f64>()[0])
    }
}

/// Which attentions are captured.
enum Capture {
    None,
    All,
    Where(Box<dyn Fn(&str) -> bool + Send>),
}

/// A tape over a set of parameters.
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
    penalty: PendingPenalty,
    /// The factor of penalties: this tape's share of a step.
    share: f64,
    /// The places to which guides lead queries, `[B, N]`; `None` for the diagonal.
    led_places: Option<Vec<f32>>,
    /// How choices are trained, whether one was made, and the rewards they earned.
    pub(crate) reinforce: Option<Reinforce>,
    pub(crate) chosen: bool,
    pub(crate) rewards: Option<Rewards>,
    noise: bool,
    /// Whether layers are recomputed in the backward pass.
    recompute: bool,
    /// Whether this is the forward pass of a segment that will be recomputed for its backward pass.
    suspended: bool,
    capture: Capture,
    pub(crate) captured: Vec<Captured<T>>,
    /// The sequences that this tape shares with others.
    pub(crate) context: Option<SharedContext<T>>,
}

/// The context of an operation's backward pass.
pub(crate) struct BackwardContext<'t, T: Float> {
    pub parameters: &'t Parameters<T>,
    pub gradients: &'t mut Gradients<T>,
    pub pool: &'t Pool<T>,
    pub machine: &'t Machine,
    pub scratch: &'t Scratch<T>,
    pub rewards: Option<&'t Rewards>,
    slots: &'t mut [Option<Tensor<T>>],
}

impl<'a, T: Float> Tape<'a, T> {
    /// A tape that records operations for [`backward`](Tape::backward), with dropout and sampling on, drawn from
    /// `seed`.
    pub fn training(
        parameters: &'a Parameters<T>,
        gradients: &'a mut Gradients<T>,
        pool: &'a Pool<T>,
        machine: &'a Machine,
        seed: u64,
    ) -> Self {
        Tape { gradients: Some(gradients), seed, noise: true, ..Tape::inference(parameters, pool, machine) }
    }

    /// A tape that records nothing, with dropout and sampling off.
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
            penalty: PendingPenalty::default(),
            share: 1.0,
            led_places: None,
            reinforce: None,
            chosen: false,
            rewards: None,
            noise: false,
            recompute: false,
            suspended: false,
            capture: Capture::None,
            captured: Vec::new(),
            context: None,
        }
    }

    /// The machine that this tape computes on.
    pub fn machine(&self) -> &'a Machine {
        self.machine
    }

    /// Captures every attention from now on: see [`captured`](Tape::captured).
    pub fn capture(&mut self) {
        self.capture = Capture::All;
    }

    /// Captures the attentions whose label satisfies `wanted`; the others save nothing for capture.
    pub fn capture_where(&mut self, wanted: impl Fn(&str) -> bool + Send + 'static) {
        self.capture = Capture::Where(Box::new(wanted));
    }

    /// Takes the attentions captured so far, in the order of their calls, and stops capturing.
    pub fn captured(&mut self) -> Vec<Captured<T>> {
        self.capture = Capture::None;
        std::mem::take(&mut self.captured)
    }

    /// Whether an attention with this label is captured.
    pub(crate) fn captures(&self, label: &str) -> bool {
        match &self.capture {
            Capture::None => false,
            Capture::All => true,
            Capture::Where(wanted) => wanted(label),
        }
    }

    /// The same tape without dropout and sampling, for gradients of the deterministic model.
    pub fn without_noise(self) -> Self {
        Tape { noise: false, ..self }
    }

    /// The same tape with dropout and sampling, drawn from `seed`, for models that are random in inference too.
    pub fn with_noise(self, seed: u64) -> Self {
        Tape { noise: true, seed, ..self }
    }

    /// The same tape with gradient checkpointing: layers save only their input and are recomputed in the backward pass.
    pub fn recompute(self, recompute: bool) -> Self {
        Tape { recompute, ..self }
    }

    /// Whether layers are recomputed in the backward pass.
    pub(crate) fn recomputes(&self) -> bool {
        self.recompute && self.is_training()
    }

    /// Whether dropout and sampling are on.
    pub(crate) fn has_noise(&self) -> bool {
        self.noise
    }

    /// Whether operations are recorded for the backward pass.
    pub fn is_training(&self) -> bool {
        self.gradients.is_some()
    }

    /// Whether neither this pass nor a later recomputation of the same operations is recorded.
    pub(crate) fn is_inference(&self) -> bool {
        !self.is_training() && !self.suspended
    }

    /// A value without a gradient.
    pub fn constant(&self, value: Tensor<T>) -> Var<T> {
        Var { slot: None, value, source: None }
    }

    /// A value whose gradient [`gradient`](Tape::gradient) returns after [`backward`](Tape::backward).
    pub fn input(&mut self, value: Tensor<T>) -> Var<T> {
        let slot = self.slot();
        Var { slot: Some(slot), value, source: None }
    }

    /// The gradient of an [`input`](Tape::input), after the backward pass.
    pub fn gradient(&self, input: &Var<T>) -> Option<&Tensor<T>> {
        self.slots[input.slot?].as_ref()
    }

    /// The same tape as a share of a step whose gradients are summed over several tapes; penalties on attention are
    /// multiplied by the share.
    pub fn share(self, share: f64) -> Self {
        Tape { share, ..self }
    }

    /// From now on, leads [guided](Tape::guide) attention along these places instead of the diagonal: one for every
    /// query of every sequence, `[B, N]`, as a fraction of the sequence's keys.
    pub fn lead(&mut self, places: Vec<f32>) {
        self.led_places = Some(places);
    }

    /// The places to which guides lead queries, if not the diagonal.
    pub(crate) fn led_places(&self) -> Option<&[f32]> {
        self.led_places.as_deref()
    }

    /// The factor of penalties on attention.
    pub(crate) fn penalty_factor(&self) -> f64 {
        self.share
    }

    /// The sum of the attention penalties so far.
    pub fn penalty(&self) -> PendingPenalty {
        self.penalty.clone()
    }

    pub(crate) fn add_penalty(&mut self, penalty: f64) {
        self.penalty.known += penalty;
    }

    /// Four f64 in device memory; penalties are added to the first.
    pub(crate) fn penalty_totals(&mut self, operations: &Operations) -> Array {
        let zeros = || (operations.clone(), operations.zeros(Kind::F64, 4, "a penalty"));
        self.penalty.on_device.get_or_insert_with(zeros).1.clone()
    }

    /// A seed that no other operation of this tape draws from.
    pub(crate) fn stream(&mut self) -> u64 {
        self.streams += 1;
        self.seed.wrapping_add(self.streams.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// The state of its random draws.
    pub(crate) fn draws(&self) -> (u64, u64) {
        (self.seed, self.streams)
    }

    /// Continues the random draws of another tape.
    pub(crate) fn set_draws(&mut self, (seed, streams): (u64, u64), noise: bool) {
        (self.seed, self.streams, self.noise) = (seed, streams, noise);
    }

    /// Runs operations without recording them, because they are recomputed later.
    pub(crate) fn suspend<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let (gradients, before) = (self.gradients.take(), std::mem::replace(&mut self.suspended, true));
        let result = body(self);
        (self.gradients, self.suspended) = (gradients, before);
        result
    }

    /// Takes the gradient of an [`input`](Tape::input), after the backward pass.
    pub(crate) fn take_gradient(&mut self, input: &Var<T>) -> Option<Tensor<T>> {
        self.slots[input.slot?].take()
    }

    fn slot(&mut self) -> usize {
        self.slots.push(None);
        self.slots.len() - 1
    }

    /// Whether an operation has a backward pass: on a training tape, if one of these inputs has a gradient or one of
    /// these parameters is trained.
    pub(crate) fn depends(&self, slots: &[Option<usize>], parameters: &[Option<Param>]) -> bool {
        let trained = |param: &Param| self.parameters.is_trained(*param);
        self.is_training() && (slots.iter().any(Option::is_some) || parameters.iter().flatten().any(trained))
    }

    /// The output of an operation; its backward pass is recorded if [it has one](Tape::depends).
    pub(crate) fn record<B: Backward<T> + 'static>(
        &mut self,
        value: Tensor<T>,
        depends: bool,
        operation: impl FnOnce() -> B,
    ) -> Var<T> {
        if !depends {
            return Var { slot: None, value, source: None };
        }
        let output = self.slot();
        self.nodes.push(Node { output, operation: Box::new(operation()) });
        Var { slot: Some(output), value, source: None }
    }

    /// Adds to the gradient with which the backward pass starts at `var`. Losses do this themselves.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn seed(&mut self, var: &Var<T>, gradient: Tensor<T>) {
        assert_eq!(var.shape(), gradient.shape(), "the gradient of a value has its shape");
        if let Some(slot) = var.slot {
            add(&mut self.slots[slot], gradient, self.machine);
        }
    }

    /// Runs the backward pass over the recorded operations, last first, and adds to the gradients of the parameters.
    /// The tape is empty afterwards.
    pub fn backward(&mut self) {
        self.backward_with(|_, _| {});
    }

    /// [`backward`](Tape::backward) that calls `finished` with parameters as soon as their gradients are final, once
    /// for each parameter. This lets a caller send gradients to other ranks before the last one is done.
    pub fn backward_with(&mut self, mut finished: impl FnMut(&Gradients<T>, &[Param])) {
        let Some(gradients) = self.gradients.as_deref_mut() else { return };
        // The first operation that uses a parameter is the last one to add to its gradient.
        let mut last: HashMap<Param, usize> = HashMap::new();
        for (at, node) in self.nodes.iter().enumerate() {
            for param in node.operation.parameters().unwrap_or_else(|| self.parameters.all().collect()) {
                last.entry(param).or_insert(at);
            }
        }
        let unused: Vec<Param> = self.parameters.all().filter(|param| !last.contains_key(param)).collect();
        finished(gradients, &unused);
        while let Some(Node { output, operation }) = self.nodes.pop() {
            let mut done = operation.parameters().unwrap_or_else(|| self.parameters.all().collect());
            done.retain(|param| last.get(param) == Some(&self.nodes.len()));
            // An output that the loss does not depend on has no gradient.
            if let Some(upstream) = self.slots[output].take() {
                let mut context = BackwardContext {
                    parameters: self.parameters,
                    gradients,
                    pool: self.pool,
                    machine: self.machine,
                    scratch: &self.scratch,
                    rewards: self.rewards.as_ref(),
                    slots: &mut self.slots,
                };
                operation.backward(upstream, &mut context);
            }
            if !done.is_empty() {
                done.sort_unstable();
                done.dedup();
                finished(gradients, &done);
            }
        }
    }
}

impl<T: Float> BackwardContext<'_, T> {
    /// Adds to the gradient of an input; constants have none.
    pub fn add(&mut self, slot: Option<usize>, gradient: Tensor<T>) {
        if let Some(slot) = slot {
            add(&mut self.slots[slot], gradient, self.machine);
        }
    }

    /// The accumulated gradient of an input of this shape, for operations that add to some of its rows; `None` for
    /// constants.
    pub fn sum(&mut self, slot: Option<usize>, shape: &[usize]) -> Option<&mut [T]> {
        let sum = &mut self.slots[slot?];
        Some(sum.get_or_insert_with(|| Tensor::zeros(self.pool, shape)).data_mut())
    }
}

impl<T: Float> BackwardContext<'_, T> {
    /// The accumulated gradient of an input of this shape in device memory, for operations that add to it; `None` for
    /// constants. The flag tells whether a gradient already exists; if not, the content is arbitrary and must be
    /// overwritten.
    pub fn sum_array(
        &mut self,
        slot: Option<usize>,
        shape: &[usize],
        operations: &Operations,
    ) -> Option<(Array, bool)> {
        let sum = &mut self.slots[slot?];
        let there = sum.is_some();
        let sum = sum.get_or_insert_with(|| Tensor::activations(operations, shape));
        Some((sum.array_mut(operations), there))
    }

    /// [`sum_array`](BackwardContext::sum_array), zeroed if there is no gradient yet.
    pub fn sum_or_zeros(&mut self, slot: Option<usize>, shape: &[usize], operations: &Operations) -> Option<Array> {
        let (array, there) = self.sum_array(slot, shape, operations)?;
        if !there {
            operations.clear(&array);
        }
        Some(array)
    }
}

/// `sum += gradient`, in place in whichever of the two is not shared.
fn add<T: Float>(sum: &mut Option<Tensor<T>>, mut gradient: Tensor<T>, machine: &Machine) {
    let Some(mut before) = sum.take() else {
        *sum = Some(gradient);
        return;
    };
    if !before.is_unshared() && gradient.is_unshared() {
        std::mem::swap(&mut before, &mut gradient);
    }
    if let Some(operations) = machine.cuda() {
        let array = before.array_mut(operations);
        operations.add(&array, &gradient.array(operations));
        *sum = Some(before);
        return;
    }
    machine.add_assign(before.data_mut(), gradient.data());
    *sum = Some(before);
}
