//! A fused linear layer: `y = dropout(activation(x Wᵀ + b))`.

use super::adapter::AdapterCall;
use super::rotary::Angles;
use crate::activation_source::ActivationSource;
use crate::dropout_mask::{DropoutMask, apply_dropout};
use crate::float::Float;
use crate::layers::KvCache;
use crate::loops::{Activate, Activation, ActivationGradient, Gate};
use crate::machine::{Machine, summed_rows};
use crate::parameters::Param;
use crate::stored_matrix::DeviceMatrix;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Array, FEW_ROWS, Factor, FewRowsInput, FewRowsProduct, Operations};
use qkv_simd::finish::Finish;
use qkv_simd::matmul::{Operand, Product};
use std::sync::Arc;
use std::time::Instant;

/// Tokens per sequence up to which reduced-precision matrices are multiplied directly; beyond that, one product with
/// the widened matrix is faster. The number of sequences in the batch does not count, so that it does not change a
/// sequence's result.
const MAX_STORED_TOKENS: usize = 4;

/// How much of a linear layer the packed product computed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Packed {
    Nothing,
    /// `x Wᵀ`.
    Products,
    /// The whole layer.
    Finished,
}

/// The value that the activation's gradient is computed from.
enum Saved<T: Float> {
    /// Nothing: the gradient is 1.
    Nothing,
    /// The output, dropout included: ReLU's gradient is 0 where the output is 0, and those of tanh and sigmoid are
    /// functions of the output.
    Output(Tensor<T>),
    /// The input of the activation.
    Input(Tensor<T>),
}

/// The input of a linear layer.
enum SavedInput<T: Float> {
    Tensor(Tensor<T>),
    Activation(Arc<ActivationSource<T>>),
}

struct LinearBackward<T: Float> {
    x: Option<usize>,
    shape: Vec<usize>,
    /// The input, if the matrix is trained or adapted.
    input: Option<SavedInput<T>>,
    adapter: Option<AdapterCall<T>>,
    w: Param,
    b: Option<Param>,
    activation: Activation,
    saved: Saved<T>,
    dropout: Option<DropoutMask>,
    /// The slot of the residual that was added to the output.
    residual: Option<usize>,
}

impl<T: Float> Tape<'_, T> {
    /// `dropout(activation(x Wᵀ + b))` with `x [.., I]`, `W [O, I]`, `b [O]`: a tensor `[.., O]`. If `W` has an
    /// [adapter](crate::Adapter), its product is added to `x Wᵀ`.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn linear(&mut self, x: &Var<T>, w: Param, b: Option<Param>, activation: Activation, dropout: f64) -> Var<T> {
        let (rows, width) = (x.value.rows(), x.value.width());
        let &[out, inner] = self.parameters.shape(w) else { panic!("`{}` is no matrix", self.parameters.name(w)) };
        assert_eq!(width, inner, "the width of the input and of `{}`", self.parameters.name(w));
        let shape = [&x.shape()[..x.shape().len() - 1], &[out]].concat();
        if let Some(operations) = self.machine.cuda() {
            return self.linear_on_cuda(operations, x, w, b, activation, dropout);
        }
        let mut y = Tensor::unwritten(self.pool, &shape); // (R, O)
        let finish = self.finish(w, b, activation, dropout);
        let done = self.packed_products(x, &[w], std::slice::from_mut(&mut y), &[finish]);
        if done == Packed::Finished {
            return self.constant(y);
        }
        if done == Packed::Nothing {
            let matrix = self.parameters.matrix(w, self.pool, self.machine);
            let x = Operand::rows(x.value.data(), rows, inner);
            self.machine.product(y.data_mut(), x, matrix.transposed(), false);
        }
        self.activated(x, y, w, b, activation, dropout)
    }

    /// Several linear layers of the same input, without activations. They are one job if all matrices are packed for
    /// inference or, outside inference, none is there in reduced precision alone.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn linear_together<const N: usize>(&mut self, x: &Var<T>, layers: [(Param, Option<Param>); N]) -> [Var<T>; N] {
        if let Some(operations) = self.machine.cuda() {
            let one_launch = self.few_rows_together(operations, x, &layers);
            return one_launch.unwrap_or_else(|| layers.map(|(w, b)| self.linear(x, w, b, Activation::None, 0.0)));
        }
        let outer = &x.shape()[..x.shape().len() - 1];
        let mut ys =
            layers.map(|(w, _)| Tensor::unwritten(self.pool, &[outer, &self.parameters.shape(w)[..1]].concat()));
        let finishes = layers.map(|(w, b)| self.finish(w, b, Activation::None, 0.0));
        match self.packed_products(x, &layers.map(|(w, _)| w), &mut ys, &finishes) {
            Packed::Nothing if self.is_inference() || layers.iter().any(|&(w, _)| !self.parameters.has_elements(w)) => {
                return layers.map(|(w, b)| self.linear(x, w, b, Activation::None, 0.0));
            }
            Packed::Nothing => {
                let matrices = layers.map(|(w, _)| self.parameters.matrix(w, self.pool, self.machine));
                let a = Operand::rows(x.value.data(), x.value.rows(), x.value.width());
                let products = ys.iter_mut().zip(&matrices);
                let mut products: Vec<_> = products
                    .map(|(y, matrix)| Product { c: y.data_mut(), a, b: matrix.transposed(), add: false })
                    .collect();
                self.machine.products(&mut products);
            }
            Packed::Finished => return ys.map(|y| self.constant(y)),
            Packed::Products => {}
        }
        let mut layers = layers.into_iter();
        ys.map(|y| {
            let (w, b) = layers.next().expect("as many layers as outputs");
            self.activated(x, y, w, b, Activation::None, 0.0)
        })
    }

    /// `f(gate) · up` of two linear layers of the same input, without other activations.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn gated_linear(&mut self, x: &Var<T>, layers: [(Param, Option<Param>); 2], of: Gate) -> Var<T> {
        if let Some(operations) = self.machine.cuda()
            && let Some(y) = self.few_rows_gated(operations, x, layers, of)
        {
            return y;
        }
        let [gate, up] = self.linear_together(x, layers);
        self.gated(&gate, &up, of)
    }

    /// [`gated_linear`](Tape::gated_linear) for a few rows in inference, as one launch on a device. Returns `None` and
    /// does nothing if [`has_few_rows`](Tape::has_few_rows) is false or no kernel fits.
    fn few_rows_gated(
        &self,
        operations: &Operations,
        x: &Var<T>,
        layers: [(Param, Option<Param>); 2],
        of: Gate,
    ) -> Option<Var<T>> {
        if !self.has_few_rows(x, &layers) {
            return None;
        }
        let outer = &x.shape()[..x.shape().len() - 1];
        let y = Tensor::activations(operations, &[outer, &self.parameters.shape(layers[0].0)[..1]].concat());
        let matrices = layers.map(|layer| self.device_layer(operations, layer));
        let matrices = matrices.each_ref().map(|(w, b)| (w.as_ref(), b.as_ref()));
        let (rows, into) = (x.value.rows(), y.array(operations));
        let product = |input: FewRowsInput<'_>| operations.few_rows_gated(input, rows, matrices, &into, of.on_device());
        x.value.with_few_rows(operations, product).then(|| self.constant(y))
    }

    /// The queries for the next token of each sequence of a [counted](KvCache::counted) cache, from a few rows
    /// `x [B, 1, C]`, with its keys and values appended to the cache, and queries and keys rotated by the angles of its
    /// position, all in one launch. Returns `None` and does nothing if the cache is not counted,
    /// [`has_few_rows`](Tape::has_few_rows) is false, or no kernel fits.
    pub(crate) fn few_rows_appended(
        &self,
        x: &Var<T>,
        layers: [(Param, Option<Param>); 3],
        cache: &mut KvCache<T>,
        angles: Option<&Angles<T>>,
    ) -> Option<Var<T>> {
        let (operations, end) = cache.counted_end(angles)?;
        let [q_width, k_width, v_width] = layers.map(|(w, _)| self.parameters.shape(w)[0]);
        let fits = x.value.rows() == end.batch.len() && cache.has_widths([k_width, v_width]);
        if !fits || !self.has_few_rows(x, &layers) {
            return None;
        }
        let outer = &x.shape()[..x.shape().len() - 1];
        let q = Tensor::activations(operations, &[outer, &[q_width]].concat());
        let matrices = layers.map(|layer| self.device_layer(operations, layer));
        let matrices = matrices.each_ref().map(|(w, b)| (w.as_ref(), b.as_ref()));
        let into = q.array(operations);
        let product = |input: FewRowsInput<'_>| operations.few_rows_appended(input, matrices, &into, end);
        x.value.with_few_rows(operations, product).then(|| self.constant(q))
    }

    /// The matrix and the bias of a linear layer in device memory, for inference.
    fn device_layer(&self, operations: &Operations, (w, b): (Param, Option<Param>)) -> (DeviceMatrix, Option<Array>) {
        let bias = b.map(|b| self.parameters.rounded_array(b, operations));
        (self.parameters.device_matrix(w, operations), bias)
    }

    /// Whether a device has specialized kernels for products of these rows: few rows, in inference, without adapters.
    fn has_few_rows(&self, x: &Var<T>, layers: &[(Param, Option<Param>)]) -> bool {
        let adapted = layers.iter().any(|&(w, _)| self.parameters.adapter(w).is_some());
        self.is_inference() && !adapted && x.value.rows() <= FEW_ROWS
    }

    /// A matrix for a product on a device. Outside inference it is in the form that the backward pass also uses.
    fn product_matrix(&self, operations: &Operations, w: Param) -> DeviceMatrix {
        match self.is_inference() {
            true => self.parameters.device_matrix(w, operations),
            false => DeviceMatrix::Elements(self.parameters.rounded_array(w, operations)),
        }
    }

    /// Products of a few rows in inference, as one launch on a device. Returns `None` and does nothing if
    /// [`has_few_rows`](Tape::has_few_rows) is false or no kernel fits.
    fn few_rows_together<const N: usize>(
        &self,
        operations: &Operations,
        x: &Var<T>,
        layers: &[(Param, Option<Param>); N],
    ) -> Option<[Var<T>; N]> {
        if !self.has_few_rows(x, layers) || N > 3 {
            return None;
        }
        let outer = &x.shape()[..x.shape().len() - 1];
        let ys = layers.map(|(w, _)| {
            let outputs = self.parameters.shape(w)[0];
            (Tensor::activations(operations, &[outer, &[outputs]].concat()), outputs)
        });
        let matrices = layers.map(|layer| self.device_layer(operations, layer));
        let into = ys.each_ref().map(|(y, outputs)| (y.array(operations), *outputs));
        let products: Vec<_> = (matrices.iter().zip(&into))
            .map(|((w, bias), (y, outputs))| FewRowsProduct {
                w: w.as_ref(),
                bias: bias.as_ref(),
                y,
                outputs: *outputs,
                residual: None,
            })
            .collect();
        let product = |input: FewRowsInput<'_>| operations.few_rows(input, x.value.rows(), &products);
        x.value.with_few_rows(operations, product).then(|| ys.map(|(y, _)| self.constant(y)))
    }

    fn linear_on_cuda(
        &mut self,
        operations: &Operations,
        x: &Var<T>,
        w: Param,
        b: Option<Param>,
        activation: Activation,
        p: f64,
    ) -> Var<T> {
        let &[out, inner] = self.parameters.shape(w) else { unreachable!("`linear` had a matrix") };
        let (rows, shape) = (x.value.rows(), [&x.shape()[..x.shape().len() - 1], &[out]].concat());
        let adapter = self.parameters.adapter(w);
        let [a, b_low] = [adapter.map(|adapter| adapter.a), adapter.map(|adapter| adapter.b)];
        let depends = self.depends(&[x.slot], &[Some(w), b, a, b_low]);
        let mut y = Tensor::activations(operations, &shape); // (R, O)
        let (input, matrix) = (x.value.array(operations), self.product_matrix(operations, w));
        let is_plain = adapter.is_none();
        let bias = b.filter(|_| is_plain).map(|b| self.parameters.rounded_array(b, operations));
        let of_input = depends && matches!(activation, Activation::Gelu | Activation::GeluTanh);
        let mut before = of_input.then(|| Tensor::activations(operations, &shape));
        let (sizes, array) = ([rows, out, inner], y.array_mut(operations));
        // The tanh GELU can be fused into the product's epilogue if rows are multiples of 16 bytes.
        let fused = match (&bias, &mut before) {
            (Some(bias), Some(before)) if activation == Activation::GeluTanh && out % 8 == 0 => {
                let matrix = self.parameters.rounded_array(w, operations);
                operations.linear_gelu(&array, &before.array_mut(operations), &input, &matrix, bias, sizes);
                true
            }
            (bias, before) => {
                let to = before.as_mut().map_or(array.clone(), |before| before.array_mut(operations));
                operations.linear(&to, &input, matrix.as_ref(), [bias.as_ref(), None], sizes);
                false
            }
        };
        let adapter = adapter.map(|adapter| {
            let to = before.as_mut().unwrap_or(&mut y);
            self.add_adapter(to, x, adapter)
        });
        let dropout = self.dropout_mask(p);
        let key = dropout.map(DropoutMask::key);
        let bias = b.filter(|_| !is_plain).map(|b| self.parameters.array(b, operations));
        let left = if fused { Activation::None } else { activation };
        if bias.is_some() || left != Activation::None || key.is_some() {
            let to = y.array_mut(operations);
            let from = match &mut before {
                Some(before) if !fused => before.array_mut(operations),
                _ => to.clone(),
            };
            operations.activate(&from, &to, bias.as_ref(), [rows, out], left.into(), key.as_ref());
        }
        let saved = match (activation, before) {
            (Activation::None, _) => Saved::Nothing,
            (_, Some(before)) => Saved::Input(before),
            _ => Saved::Output(y.clone()),
        };
        let source = match &saved {
            Saved::Input(before) if self.machine.recomputes(before.len()) => {
                Some(Arc::new(ActivationSource { before: before.clone(), activation, dropout }))
            }
            _ => None,
        };
        let input = match adapter {
            Some(_) => Some(SavedInput::Tensor(x.value.clone())),
            None => self.parameters.is_trained(w).then(|| self.saved_input(x)),
        };
        let (x, shape) = (x.slot, x.shape().to_vec());
        let y = self.record(y, depends, || LinearBackward {
            x,
            shape,
            input,
            adapter,
            w,
            b,
            activation,
            saved,
            dropout,
            residual: None,
        });
        Var { source, ..y }
    }

    /// `residual + dropout(x Wᵀ + b)`, with a residual `[.., O]`.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn linear_residual(
        &mut self,
        x: &Var<T>,
        w: Param,
        b: Option<Param>,
        residual: &Var<T>,
        dropout: f64,
    ) -> Var<T> {
        let is_dropped = dropout > 0.0 && self.has_noise();
        if let Some(operations) = self.machine.cuda().filter(|_| !is_dropped && self.parameters.adapter(w).is_none()) {
            return self.linear_residual_on_cuda(operations, x, w, b, residual);
        }
        if let Some(finish) = self.finish(w, b, Activation::None, dropout) {
            let shape = [&x.shape()[..x.shape().len() - 1], &self.parameters.shape(w)[..1]].concat();
            assert_eq!(residual.shape(), shape, "the residual of `{}`", self.parameters.name(w));
            let mut y = Tensor::unwritten(self.pool, &shape); // (R, O)
            let finish = Some(Finish { residual: Some(residual.value.data()), ..finish });
            match self.packed_products(x, &[w], std::slice::from_mut(&mut y), &[finish]) {
                Packed::Finished => return self.constant(y),
                Packed::Products => {
                    let y = self.activated(x, y, w, b, Activation::None, 0.0);
                    return self.residual(residual, y, dropout);
                }
                Packed::Nothing => {}
            }
        }
        let y = self.linear(x, w, b, Activation::None, 0.0);
        self.residual(residual, y, dropout)
    }

    /// The rest of a linear layer, if the epilogue of the CPU's product can do it: in inference, with ReLU or no
    /// activation, without adapter or dropout.
    pub(super) fn finish(
        &self,
        w: Param,
        b: Option<Param>,
        activation: Activation,
        dropout: f64,
    ) -> Option<Finish<'_, T>> {
        let simple = matches!(activation, Activation::None | Activation::Relu) && self.parameters.adapter(w).is_none();
        let is_dropped = dropout > 0.0 && self.has_noise();
        (simple && !is_dropped && self.is_inference() && self.machine.cuda().is_none()).then(|| Finish {
            bias: b.map(|b| self.parameters.get(b)),
            relu: activation == Activation::Relu,
            ..Finish::default()
        })
    }

    /// [`linear_residual`](Tape::linear_residual) as one product, without dropout.
    fn linear_residual_on_cuda(
        &mut self,
        operations: &Operations,
        x: &Var<T>,
        w: Param,
        b: Option<Param>,
        residual: &Var<T>,
    ) -> Var<T> {
        let &[out, inner] = self.parameters.shape(w) else { panic!("`{}` is no matrix", self.parameters.name(w)) };
        let shape = [&x.shape()[..x.shape().len() - 1], &[out]].concat();
        assert_eq!((x.value.width(), residual.shape()), (inner, &shape[..]), "shapes of `{}`", self.parameters.name(w));
        let mut y = Tensor::activations(operations, &shape); // (R, O)
        let bias = b.map(|b| self.parameters.rounded_array(b, operations));
        let [input, added] = [x, residual].map(|var| var.value.array(operations));
        let (matrix, sizes) = (self.product_matrix(operations, w), [x.value.rows(), out, inner]);
        operations.linear(&y.array_mut(operations), &input, matrix.as_ref(), [bias.as_ref(), Some(&added)], sizes);
        let depends = self.depends(&[x.slot, residual.slot], &[Some(w), b]);
        let input = self.parameters.is_trained(w).then(|| self.saved_input(x));
        let (x, shape, residual) = (x.slot, x.shape().to_vec(), residual.slot);
        let (activation, saved) = (Activation::None, Saved::Nothing);
        self.record(y, depends, || LinearBackward {
            x,
            shape,
            input,
            adapter: None,
            w,
            b,
            activation,
            saved,
            dropout: None,
            residual,
        })
    }

    /// Saves the input of a layer without an adapter, possibly in a form from which it is recomputed.
    fn saved_input(&self, x: &Var<T>) -> SavedInput<T> {
        match &x.source {
            Some(source) if source.before.width() == x.value.width() => SavedInput::Activation(source.clone()),
            _ => SavedInput::Tensor(x.value.clone()),
        }
    }

    /// `y = x Wᵀ` with packed matrices in inference, with the finishes applied if every layer has one and the matrices'
    /// storage format allows it.
    fn packed_products(
        &self,
        x: &Var<T>,
        ws: &[Param],
        ys: &mut [Tensor<T>],
        finishes: &[Option<Finish<'_, T>>],
    ) -> Packed {
        if !self.is_inference() || !self.machine.is_exact() {
            return Packed::Nothing;
        }
        let (machine, parameters, start) = (self.machine, self.parameters, Instant::now());
        let count = |bytes| {
            machine.count(start, bytes, |usage, seconds, bytes| {
                usage.products += seconds;
                usage.product_bytes += bytes;
            });
        };
        let (isa, rows, width) = (machine.isa(), x.value.data(), x.value.width());
        let tokens = x.shape().iter().rev().nth(1).copied().unwrap_or(1);
        let finished = if finishes.iter().all(Option::is_some) { Packed::Finished } else { Packed::Products };
        let how =
            |at: usize| if finished == Packed::Finished { finishes[at].unwrap_or_default() } else { Finish::default() };
        let outputs = ys.iter_mut().enumerate().map(|(at, y)| (y.data_mut(), how(at)));
        if tokens <= MAX_STORED_TOKENS
            && let Some(stored) = ws.iter().map(|&w| parameters.stored(w)).collect::<Option<Vec<_>>>()
        {
            let bytes = stored.iter().map(|matrix| matrix.bytes()).sum();
            let mut outputs: Vec<_> = stored.into_iter().zip(outputs).map(|(matrix, (y, _))| (matrix, y)).collect();
            if !T::stored_products(isa, machine.team(), rows, width, &mut outputs) {
                return Packed::Nothing;
            }
            count(bytes);
            return Packed::Products;
        }
        if machine.is_int8()
            && let Some(int8) = ws.iter().map(|&w| parameters.int8(w)).collect::<Option<Vec<_>>>()
        {
            let bytes = int8.iter().map(|matrix| matrix.bytes()).sum();
            let mut outputs: Vec<_> =
                int8.into_iter().zip(outputs).map(|(matrix, (y, how))| (matrix, y, how)).collect();
            let fine = ws.iter().any(|&w| parameters.is_fine(w));
            if !T::int8_products(isa, machine.team(), rows, width, fine, &mut outputs) {
                return Packed::Nothing;
            }
            count(bytes);
            return finished;
        }
        let packed = ws.iter().map(|&w| parameters.packed(w)).collect::<Option<Vec<_>>>();
        let Some(packed) = packed else { return Packed::Nothing };
        let bytes = packed.iter().map(|matrix| matrix.bytes()).sum();
        let mut outputs: Vec<_> = packed.into_iter().zip(outputs).map(|(matrix, (y, how))| (matrix, y, how)).collect();
        if !T::packed_products(isa, machine.team(), rows, &mut outputs) {
            return Packed::Nothing;
        }
        count(bytes);
        finished
    }

    /// The rest of a linear layer, after the product `y = x Wᵀ`.
    fn activated(
        &mut self,
        x: &Var<T>,
        mut y: Tensor<T>,
        w: Param,
        b: Option<Param>,
        activation: Activation,
        dropout: f64,
    ) -> Var<T> {
        let shape = y.shape().to_vec();
        let adapter = self.parameters.adapter(w);
        let [a, b_low] = [adapter.map(|adapter| adapter.a), adapter.map(|adapter| adapter.b)];
        let depends = self.depends(&[x.slot], &[Some(w), b, a, b_low]);
        let adapter = adapter.map(|adapter| self.add_adapter(&mut y, x, adapter));
        let bias = b.map(|b| self.parameters.get(b));

        let dropout = self.dropout_mask(dropout);
        let of_input = matches!(activation, Activation::Gelu | Activation::GeluTanh);
        let before = if of_input && depends {
            // The gradient of GELU is a function of its input: save that, and write the output elsewhere.
            let mut out = Tensor::unwritten(self.pool, &shape);
            activate(
                self.machine,
                y.data_mut(),
                Some(out.data_mut()),
                bias,
                shape[shape.len() - 1],
                activation,
                dropout,
            );
            Some(std::mem::replace(&mut y, out))
        } else {
            activate(self.machine, y.data_mut(), None, bias, shape[shape.len() - 1], activation, dropout);
            None
        };
        let saved = match (activation, before) {
            (Activation::None, _) => Saved::Nothing,
            (_, Some(before)) => Saved::Input(before),
            _ => Saved::Output(y.clone()),
        };
        let is_needed = adapter.is_some() || self.parameters.is_trained(w);
        let input = is_needed.then(|| SavedInput::Tensor(x.value.clone()));
        let (x, shape) = (x.slot, x.shape().to_vec());
        self.record(y, depends, || LinearBackward {
            x,
            shape,
            input,
            adapter,
            w,
            b,
            activation,
            saved,
            dropout,
            residual: None,
        })
    }
}

/// Adds the bias and applies activation and dropout to rows, in place or into `out`; in the latter case `rows` hold the
/// activation's input afterwards.
fn activate<T: Float>(
    machine: &Machine,
    rows: &mut [T],
    out: Option<&mut [T]>,
    bias: Option<&[T]>,
    width: usize,
    activation: Activation,
    dropout: Option<DropoutMask>,
) {
    if bias.is_none() && activation == Activation::None && dropout.is_none() || width == 0 {
        return;
    }
    let each = machine.rows_each(rows.len() / width, width) * width;
    let outs: Vec<Option<&mut [T]>> = match out {
        Some(out) => out.chunks_mut(each).map(Some).collect(),
        None => rows.chunks(each).map(|_| None).collect(),
    };
    let parts = rows.chunks_mut(each).zip(outs).collect();
    machine.each(parts, |at, (rows, mut out): (&mut [T], Option<&mut [T]>)| {
        let mut words = vec![u64::MAX; width.div_ceil(64)];
        for (r, row) in rows.chunks_exact_mut(width).enumerate() {
            let mut scale = T::ONE;
            if let Some(dropout) = dropout {
                dropout.bits(machine.isa(), at * each / width + r, &mut words);
                scale = dropout.scale();
            }
            let out = out.as_deref_mut().map(|out| &mut out[r * width..][..width]);
            machine.run(Activate { row, out, bias, activation, words: dropout.map(|_| &words[..]), scale });
        }
    });
}

impl<T: Float> Backward<T> for LinearBackward<T> {
    fn parameters(&self) -> Option<Vec<Param>> {
        let of_adapter = self.adapter.iter().flat_map(AdapterCall::parameters);
        Some([self.w].into_iter().chain(self.b).chain(of_adapter).collect())
    }

    fn backward(self: Box<Self>, mut upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let machine = context.machine;
        if let Some(operations) = machine.cuda() {
            return self.backward_on_cuda(operations, upstream, context);
        }
        let &[out, inner] = context.parameters.shape(self.w) else { unreachable!("forward had a matrix") };
        let rows = self.shape[..self.shape.len() - 1].iter().product();
        // ReLU's saved output is already zero where elements were dropped; with any other activation, draw the mask
        // again.
        if let (Some(dropout), false) = (self.dropout, self.activation == Activation::Relu) {
            upstream = apply_dropout(machine, upstream.reshaped(&[rows, out]), dropout);
        }
        let sum = self.b.and_then(|b| context.gradients.sum(b));
        let block = out.max(1) * if sum.is_some() { summed_rows(out) } else { machine.rows_each(rows, out) };
        match &self.saved {
            Saved::Output(saved) | Saved::Input(saved) => {
                let scale = self.dropout.map_or(T::ONE, DropoutMask::scale);
                let blocks = upstream.data_mut().chunks_mut(block).zip(saved.data().chunks(block)).collect();
                machine.add_columns(context.pool, blocks, sum, |(gradient, saved): (&mut [T], &[T])| {
                    machine.run(ActivationGradient { gradient, saved, activation: self.activation, scale });
                    gradient
                });
            }
            Saved::Nothing if sum.is_some() => {
                machine.add_columns(context.pool, upstream.data().chunks(block).collect(), sum, |rows| rows);
            }
            Saved::Nothing => {}
        }
        let d_y = Operand::rows(upstream.data(), rows, out);
        let mut products = Vec::new();
        if let (Some(SavedInput::Tensor(input)), Some(sum)) = (&self.input, context.gradients.sum(self.w)) {
            let input = Operand::rows(input.data(), rows, inner);
            products.push(Product { c: sum, a: d_y.transposed(), b: input.into(), add: true }); // (O, I)
        }
        let mut d_x = self.x.map(|_| Tensor::unwritten(context.pool, &self.shape));
        let matrix = d_x.as_ref().map(|_| context.parameters.matrix(self.w, context.pool, machine));
        if let (Some(d_x), Some(matrix)) = (&mut d_x, &matrix) {
            products.push(Product { c: d_x.data_mut(), a: d_y, b: matrix.operand(), add: false }); // (R, I)
        }
        machine.products(&mut products);
        if let (Some(adapter), Some(SavedInput::Tensor(input))) = (&self.adapter, &self.input) {
            adapter.backward(input, &upstream, d_x.as_mut(), context);
        }
        if let Some(d_x) = d_x {
            context.add(self.x, d_x);
        }
    }
}

impl<T: Float> LinearBackward<T> {
    fn backward_on_cuda(self, operations: &Operations, mut upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        if self.residual.is_some() {
            context.add(self.residual, upstream.clone());
        }
        let &[out, inner] = context.parameters.shape(self.w) else { unreachable!("forward had a matrix") };
        let rows = self.shape[..self.shape.len() - 1].iter().product();
        let saved = match &self.saved {
            Saved::Output(saved) | Saved::Input(saved) => Some(saved.array(operations)),
            Saved::Nothing => None,
        };
        if saved.is_some() || self.dropout.is_some() {
            let dropout = self.dropout.map(DropoutMask::key);
            let array = upstream.array_mut(operations);
            let activation = self.activation.into();
            operations.activation_gradient(&array, saved.as_ref(), [rows, out], activation, dropout.as_ref());
        }
        let d_y = upstream.array(operations);
        if let Some(sum) = self.b.and_then(|b| context.gradients.array(b, operations)) {
            operations.add_column_sums(&d_y, &sum, [rows, out]);
        }
        if let Some(input) = self.input.as_ref().filter(|_| context.parameters.is_trained(self.w))
            && let Some(sum) = context.gradients.array(self.w, operations)
        {
            let input = match input {
                SavedInput::Tensor(input) => input.array(operations),
                SavedInput::Activation(source) => source.output(operations),
            };
            let (left, right) = (Factor::transposed(&d_y), Factor::new(&input));
            operations.product(&sum, left, right, [out, inner, rows], true); // (O, I)
        }
        let matrix = self.x.map(|_| context.parameters.rounded_array(self.w, operations));
        if let Some(matrix) = &matrix
            && let Some((d_x, add)) = context.sum_array(self.x, &self.shape, operations)
        {
            operations.product(&d_x, Factor::new(&d_y), Factor::new(matrix), [rows, inner, out], add); // (R, I)
        }
        if let (Some(adapter), Some(SavedInput::Tensor(input))) = (&self.adapter, &self.input) {
            let mut d_x = matrix.is_some().then(|| {
                let mut zeros = Tensor::activations(operations, &self.shape);
                operations.clear(&zeros.array_mut(operations));
                zeros
            });
            adapter.backward(input, &upstream, d_x.as_mut(), context);
            if let Some(d_x) = d_x {
                context.add(self.x, d_x);
            }
        }
    }
}
