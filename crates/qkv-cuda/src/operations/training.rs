//! The loss, and the optimizer over all parameters in one launch.

use super::launch::{Argument, count};
use super::{Array, Fetched, Kind, Operations};
use Argument::{F32, Ptr, U32};

/// The arrays of one trained parameter.
#[derive(Clone, Debug)]
pub struct ParameterArrays {
    /// Its values, f32.
    pub value: Array,
    /// Their gradient, f32.
    pub gradient: Array,
    /// The moments of Adam, f32.
    pub moments: [Array; 2],
    /// Its copy as activations, updated with the values.
    pub half: Option<Array>,
    /// Factor of the learning rate.
    pub rate: f32,
    /// Weight decay.
    pub decay: f32,
}

/// `Slice` of `optimizer.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Slice {
    value: u64,
    gradient: u64,
    first: u64,
    second: u64,
    half: u64,
    len: u32,
    rate: f32,
    decay: f32,
    _pad: u32,
}

/// What changes from step to step: `StepFactors` of `optimizer.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct StepFactors {
    /// Learning rate.
    pub rate: f32,
    /// `1 / (1 − β₁ᵗ)`.
    pub mean: f32,
    /// `1 / √(1 − β₂ᵗ)`.
    pub root: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second.
    pub beta2: f32,
    /// Added to the root of the second.
    pub epsilon: f32,
    /// The largest gradient norm; 0 for any.
    pub clip: f32,
}

/// Classes that 256 threads keep in registers, four times eight each.
const MANY_CLASSES: usize = 256 * 32;

/// Elements from one row of logits to the next: products are much faster over rows that are aligned to 16 bytes.
pub fn logits_stride(classes: usize) -> usize {
    classes.next_multiple_of(8)
}

/// Elements per slice, the work of a block.
const SLICE: usize = 1 << 14;

/// All parameters as the optimizer's kernels read them. It keeps their arrays alive.
#[derive(Debug)]
pub struct OptimizerTable {
    slices: Array,
    squares: Array,
    norm: Array,
    factors: Array,
    arrays: Vec<ParameterArrays>,
}

impl OptimizerTable {
    /// Whether it was made from these arrays.
    pub fn is_of(&self, arrays: &[ParameterArrays]) -> bool {
        self.arrays.iter().map(ParameterArrays::key).eq(arrays.iter().map(ParameterArrays::key))
    }
}

impl ParameterArrays {
    fn key(&self) -> ([u64; 5], [u32; 2]) {
        let ParameterArrays { value, gradient, moments: [first, second], half, rate, decay } = self;
        let [value, gradient, first, second] = [value, gradient, first, second].map(Array::ptr);
        let half = half.as_ref().map_or(0, Array::ptr);
        ([value, gradient, first, second, half], [rate.to_bits(), decay.to_bits()])
    }
}

impl Operations {
    /// The cross-entropy of rows of logits `[rows, classes]` plus `bias`. With `scale`, the logits are replaced by
    /// their gradient times `scale`; rows begin [`logits_stride`] elements apart. Adds to `totals`, four f64: the loss
    /// with label smoothing and without, the number of rows whose target had the highest logit, and the number of rows
    /// that count; those of the class `ignore` do not. Returns the same four for each row, in f32.
    ///
    /// # Panics
    /// If an array is too short. The ids must be classes, or `ignore`.
    #[allow(clippy::too_many_arguments)] // What a loss has.
    pub fn cross_entropy(
        &self,
        logits: &Array,
        bias: Option<&Array>,
        ids: &Array,
        classes: usize,
        ignore: Option<u32>,
        smoothing: f32,
        scale: Option<f32>,
        totals: &Array,
    ) -> Array {
        let rows = ids.len();
        let stride = logits_stride(classes);
        let losses = self.empty(Kind::F32, 4 * rows, "losses");
        let pointers = [
            logits.expect(self.activation_kind(), rows * stride),
            bias.map_or(0, |bias| bias.expect(Kind::F32, classes)),
            ids.expect(Kind::U32, rows),
            losses.ptr(),
        ];
        let arguments = [
            &pointers.map(Ptr)[..],
            &[count(classes), count(stride), U32(ignore.unwrap_or(u32::MAX)), F32(smoothing)],
            &[F32(scale.unwrap_or(0.0)), U32(u32::from(scale.is_some()))],
        ];
        let name = if classes > MANY_CLASSES { "cross_entropy_wide" } else { "cross_entropy" };
        // SAFETY: `cross_entropy(T*, const float*, const u32*, float*, int, int, u32, float, float, int)`.
        unsafe { self.launch(name, [rows, usize::from(classes > 0)], &arguments.concat()) };
        self.sum_losses(&losses, totals, rows);
        losses
    }

    /// Adds the losses of rows, `[rows, 4]` in f32, to `totals`, four f64.
    pub(super) fn sum_losses(&self, losses: &Array, totals: &Array, rows: usize) {
        let arguments = [Ptr(losses.expect(Kind::F32, 4 * rows)), Ptr(totals.expect(Kind::F64, 4)), count(rows)];
        // SAFETY: `sum_losses(const float*, double*, u32)`.
        unsafe { self.launch("sum_losses", [usize::from(rows > 0), 1], &arguments) };
    }

    /// The table of an optimizer over these parameters.
    ///
    /// # Panics
    /// If the arrays of a parameter have different lengths.
    pub fn optimizer_table(&self, parameters: Vec<ParameterArrays>) -> OptimizerTable {
        let mut slices = Vec::new();
        for parameter in &parameters {
            let ParameterArrays { value, gradient, moments: [first, second], half, rate, decay } = parameter;
            let len = value.len();
            let floats = [value, gradient, first, second].map(|array| array.expect(Kind::F32, len));
            let half = half.as_ref().map_or(0, |half| half.expect(self.activation_kind(), len));
            for start in (0..len).step_by(SLICE) {
                let [value, gradient, first, second] = floats.map(|ptr| ptr + 4 * start as u64);
                let half = if half == 0 { 0 } else { half + (self.activation_kind().size() * start) as u64 };
                let (len, rate, decay) = ((len - start).min(SLICE) as u32, *rate, *decay);
                slices.push(Slice { value, gradient, first, second, half, len, rate, decay, _pad: 0 });
            }
        }
        let words: Vec<u64> = slices.iter().flat_map(Slice::words).collect();
        OptimizerTable {
            slices: self.upload(Kind::U64, &words, "the optimizer"),
            squares: self.empty(Kind::F64, slices.len(), "the optimizer"),
            norm: self.zeros(Kind::F64, 1, "the optimizer"),
            factors: self.empty(Kind::F32, size_of::<StepFactors>() / 4, "the optimizer"),
            arrays: parameters,
        }
    }

    /// Computes the global norm of the gradients on the device, and takes an AdamW step, with gradients clipped to
    /// `factors.clip`. Gradients that are not finite change nothing.
    pub fn adamw(&self, table: &OptimizerTable, factors: &StepFactors) {
        let OptimizerTable { slices, squares, norm, factors: into, .. } = table;
        let StepFactors { rate, mean, root, beta1, beta2, epsilon, clip } = *factors;
        self.write(into, &[rate, mean, root, beta1, beta2, epsilon, clip]);
        self.gradient_norm(table);
        let arguments = [slices.ptr(), into.ptr(), norm.ptr()].map(Ptr);
        // SAFETY: `adamw(const Slice*, const StepFactors*, const double*)`; a slice is a part of arrays that the table
        // keeps alive.
        unsafe { self.launch("adamw", [squares.len(), 1], &arguments) };
    }

    /// Computes the global norm of the gradients.
    pub fn gradient_norm(&self, table: &OptimizerTable) {
        let OptimizerTable { slices, squares, norm, .. } = table;
        // SAFETY: `gradient_squares(const Slice*, double*)` and `gradient_norm(const double*, double*, u32)`.
        unsafe {
            self.launch("gradient_squares", [squares.len(), 1], &[Ptr(slices.ptr()), Ptr(squares.ptr())]);
            let arguments = [Ptr(squares.ptr()), Ptr(norm.ptr()), count(squares.len())];
            self.launch("gradient_norm", [usize::from(!squares.is_empty()), 1], &arguments);
        }
    }

    /// `own = decay · own + (1 − decay) · other`, f32.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn moving_average(&self, own: &Array, other: &Array, decay: f32) {
        let len = own.len();
        let pointers = [Ptr(own.expect(Kind::F32, len)), Ptr(other.expect(Kind::F32, len))];
        let grid = [self.blocks(len), 1];
        // SAFETY: `moving_average(float*, const float*, float, u32)`.
        unsafe { self.launch("moving_average", grid, &[&pointers[..], &[F32(decay), count(len)]].concat()) };
    }

    /// Fetches the norm computed last: one f64.
    pub fn fetch_norm(&self, table: &OptimizerTable) -> Fetched {
        self.fetch(&table.norm)
    }
}

impl Slice {
    /// Its bytes, as words.
    fn words(&self) -> [u64; 7] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let Slice { value, gradient, first, second, half, len, rate, decay, .. } = *self;
        [value, gradient, first, second, half, pair(len, rate.to_bits()), pair(decay.to_bits(), 0)]
    }
}

const _: () = assert!(size_of::<Slice>() == 56 && size_of::<StepFactors>() == 28);
