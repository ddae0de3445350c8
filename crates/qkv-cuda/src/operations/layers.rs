//! Products, activations, norms, gates and recurrence: the layers of models, forward and backward.

use super::launch::{Argument, DropoutArgument, DropoutKey, count};
use super::{Array, FewRowsInput, FewRowsProduct, Kind, MatrixRef, Operations};
use crate::matmul::{Epilogue, Matmul, MatmulOperand, MatmulPointers};
use crate::memory::Dtype;
use Argument::{F32, Ptr, U32};

/// An activation function; its discriminant is its number in the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The identity.
    None = 0,
    /// `max(x, 0)`.
    Relu = 1,
    /// GELU with the error function.
    Gelu = 2,
    /// GELU, tanh approximation.
    GeluTanh = 3,
    /// The hyperbolic tangent.
    Tanh = 4,
    /// `1 / (1 + e⁻ˣ)`.
    Sigmoid = 5,
}

/// The function applied to a gate; its discriminant is its number in the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x / (1 + e⁻ˣ)`.
    Silu = 0,
    /// `x Φ(x)`.
    Gelu = 1,
    /// `1 / (1 + e⁻ˣ)`.
    Sigmoid = 2,
    /// `x Φ(x)`, tanh approximation.
    GeluTanh = 3,
}

/// A factor of a matrix product, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Factor<'a> {
    /// Its elements.
    pub array: &'a Array,
    /// Whether the product uses its transpose.
    pub transposed: bool,
    /// Elements from one row to the next, if not the width of a row.
    pub stride: Option<usize>,
}

impl<'a> Factor<'a> {
    /// The matrix itself.
    pub fn new(array: &'a Array) -> Factor<'a> {
        Factor { array, transposed: false, stride: None }
    }

    /// The transpose of the matrix.
    pub fn transposed(array: &'a Array) -> Factor<'a> {
        Factor { array, transposed: true, stride: None }
    }

    /// With rows that begin this many elements apart.
    pub fn stride(self, stride: usize) -> Factor<'a> {
        Factor { stride: Some(stride), ..self }
    }

    /// The operand `[rows, columns]`, and its address.
    fn operand(self, [rows, columns]: [usize; 2]) -> (MatmulOperand, u64) {
        let kind = self.array.kind();
        let dtype = if kind == Kind::F32 { Dtype::F32 } else { Dtype::Bf16 };
        let [rows, columns] = if self.transposed { [columns, rows] } else { [rows, columns] };
        let stride = self.stride.unwrap_or(columns);
        let len = if rows == 0 { 0 } else { (rows - 1) * stride + columns };
        (MatmulOperand { dtype, transposed: self.transposed, stride }, self.array.expect(kind, len))
    }
}

/// Rows whose gradients of gain and bias form one partial sum: fewer if there are few rows, so that blocks run in
/// parallel.
fn norm_rows(rows: usize) -> usize {
    (rows / 512).clamp(8, 64).next_multiple_of(8)
}

/// The kernels of a norm's gradient: for any width, and for widths of up to 256, 512, 768 and 1,024.
const LAYER_NORM_GRADIENTS: [&str; 5] = [
    "layer_norm_gradient",
    "layer_norm_gradient_256",
    "layer_norm_gradient_512",
    "layer_norm_gradient_768",
    "layer_norm_gradient_1024",
];
const RMS_NORM_GRADIENTS: [&str; 5] = [
    "rms_norm_gradient",
    "rms_norm_gradient_256",
    "rms_norm_gradient_512",
    "rms_norm_gradient_768",
    "rms_norm_gradient_1024",
];

/// The index of the kernel for a width.
fn by_width(width: usize) -> usize {
    if width.is_multiple_of(8) && width <= 1024 { width.div_ceil(256) } else { 0 }
}

/// Rows per partial sum of columns: more if there are many, since one block adds all partial sums.
fn column_rows(rows: usize) -> usize {
    (rows / 256).next_power_of_two().clamp(64, 1024)
}

/// Columns per block of `column_sums`.
const COLUMNS: usize = 256;
/// The most blocks of columns that a matrix may have.
const MAX_COLUMN_BLOCKS: usize = 4096;

/// What is added to a product before it is stored.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProductSum<'a> {
    /// As long as `C`, or `C` itself.
    pub added: Option<&'a Array>,
    /// One for each column.
    pub bias: Option<&'a Array>,
    /// Where the sum goes, before GELU is applied.
    pub before: Option<&'a Array>,
}

impl Operations {
    /// `C [m, n] = A [m, k] · B [k, n]` or, with `add`, `C += A · B`, accumulated in f32.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn product(&self, c: &Array, a: Factor<'_>, b: Factor<'_>, [m, n, k]: [usize; 3], add: bool) {
        let added = add.then_some(c);
        self.matmul((c, n), a, b, [m, n, k], ProductSum { added, ..ProductSum::default() });
    }

    /// The same into rows of `C` that begin `stride` elements apart.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn product_strided(&self, c: &Array, stride: usize, a: Factor<'_>, b: Factor<'_>, [m, n, k]: [usize; 3]) {
        self.matmul((c, stride), a, b, [m, n, k], ProductSum::default());
    }

    /// `y [m, n] = x [m, k] · Wᵀ + bias + residual`, with `W [n, k]`, `bias [n]` and `residual [m, n]` in the type of
    /// `y`.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn linear(
        &self,
        y: &Array,
        x: &Array,
        w: MatrixRef<'_>,
        [bias, residual]: [Option<&Array>; 2],
        [rows, outputs, inner]: [usize; 3],
    ) {
        let product = FewRowsProduct { w, bias, y, outputs, residual };
        if x.len() == rows * inner && self.few_rows(FewRowsInput::Rows(x), rows, &[product]) {
            return;
        }
        let sum = ProductSum { added: residual, bias, before: None };
        let widened = w.blocks().map(|blocks| self.widen_blocks(blocks));
        let w = Factor::transposed(w.elements().or(widened.as_ref()).expect("elements or blocks"));
        self.matmul((y, outputs), Factor::new(x), w, [rows, outputs, inner], sum);
    }

    /// `before = x · Wᵀ + bias` and `y = GELU(before)`, tanh approximation.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn linear_gelu(&self, y: &Array, before: &Array, x: &Array, w: &Array, bias: &Array, sizes: [usize; 3]) {
        let sum = ProductSum { added: None, bias: Some(bias), before: Some(before) };
        self.matmul((y, sizes[1]), Factor::new(x), Factor::transposed(w), sizes, sum);
    }

    /// Multiplies into rows of `c` that begin `c_stride` elements apart.
    fn matmul(
        &self,
        (c, c_stride): (&Array, usize),
        a: Factor<'_>,
        b: Factor<'_>,
        [m, n, k]: [usize; 3],
        ProductSum { added, bias, before }: ProductSum<'_>,
    ) {
        if m == 0 || n == 0 || self.failed().is_some() {
            return;
        }
        let sum = ProductSum { added, bias, before };
        if self.batch_invariant && self.rows_product((c, c_stride), a, b, [m, n, k], sum) {
            return;
        }
        let kind = c.kind();
        let ((a, a_ptr), (b, b_ptr)) = (a.operand([m, k]), b.operand([k, n]));
        let pointers = MatmulPointers {
            a: a_ptr,
            b: b_ptr,
            c: c.expect(kind, (m - 1) * c_stride + n),
            added: added.map_or(0, |added| added.expect(kind, (m - 1) * c_stride + n)),
            bias: bias.map_or(0, |bias| bias.expect(kind, n)),
            before: before.map_or(0, |before| before.expect(kind, m * n)),
        };
        let epilogue = match (bias, before) {
            (_, Some(_)) => Epilogue::Gelu,
            (Some(_), None) => Epilogue::Bias,
            (None, None) => Epilogue::None,
        };
        let c = if kind == Kind::F32 { Dtype::F32 } else { Dtype::Bf16 };
        let call = Matmul { sizes: [m, n, k], a, b, c, c_stride, add: added.is_some(), epilogue, pointers };
        // SAFETY: every array is as long as the sizes say.
        self.remember(unsafe { self.driver().matmul(&call, self.stream()) });
    }

    /// `out = dropout(activation(x + bias))` over rows of `width`, in place or elsewhere; `x` then keeps the sum.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn activate(
        &self,
        x: &Array,
        out: &Array,
        bias: Option<&Array>,
        [rows, width]: [usize; 2],
        activation: Activation,
        dropout: Option<&DropoutKey>,
    ) {
        let kind = self.activation_kind();
        let bias = bias.map_or(0, |bias| bias.expect(Kind::F32, width));
        let pointers = [x.expect(kind, rows * width), out.expect(kind, rows * width), bias].map(Ptr);
        let numbers = [count(rows), count(width), U32(activation as u32)];
        let dropout = [Argument::Dropout(DropoutArgument::new(dropout))];
        let grid = [self.blocks_of_eights(rows, width), 1];
        // SAFETY: `activate(T*, T*, const float*, u32, int, int, Dropout)`, over arrays as long as it needs.
        unsafe { self.launch("activate", grid, &[&pointers[..], &numbers, &dropout].concat()) };
    }

    /// Multiplies a gradient in place by the dropout mask and by the derivative of the activation, which is computed
    /// from the input of a GELU and from the output of the others.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn activation_gradient(
        &self,
        gradient: &Array,
        saved: Option<&Array>,
        [rows, width]: [usize; 2],
        activation: Activation,
        dropout: Option<&DropoutKey>,
    ) {
        let kind = self.activation_kind();
        let saved = saved.map_or(0, |saved| saved.expect(kind, rows * width));
        let pointers = [gradient.expect(kind, rows * width), saved].map(Ptr);
        let numbers = [count(rows), count(width), U32(activation as u32)];
        let dropout = [Argument::Dropout(DropoutArgument::new(dropout))];
        let grid = [self.blocks_of_eights(rows, width), 1];
        // SAFETY: `activation_gradient(T*, const T*, u32, int, int, Dropout)`.
        unsafe { self.launch("activation_gradient", grid, &[&pointers[..], &numbers, &dropout].concat()) };
    }

    /// `y = x + dropout(y)`, or `dropout(y)` without `x`.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn residual(&self, y: &Array, x: Option<&Array>, [rows, width]: [usize; 2], dropout: Option<&DropoutKey>) {
        let kind = self.activation_kind();
        let x = x.map_or(0, |x| x.expect(kind, rows * width));
        let pointers = [y.expect(kind, rows * width), x].map(Ptr);
        let rest = [count(rows), count(width), Argument::Dropout(DropoutArgument::new(dropout))];
        let grid = [self.blocks_of_eights(rows, width), 1];
        // SAFETY: `residual(T*, const T*, u32, int, Dropout)`.
        unsafe { self.launch("residual", grid, &[&pointers[..], &rest].concat()) };
    }

    /// `sum += more`, both activations or both f32, or activations into f32.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn add(&self, sum: &Array, more: &Array) {
        assert_eq!(sum.len(), more.len(), "a sum of two lengths");
        let (name, threads) = match (sum.kind(), more.kind()) {
            (to, from) if to == from && to == self.activation_kind() => ("add", sum.len().div_ceil(8)),
            (Kind::F32, Kind::F32) => ("add_floats", sum.len()),
            (Kind::F32, _) => ("add_widened", sum.len()),
            (to, from) => panic!("{from:?} are not added to {to:?}"),
        };
        let arguments = [Ptr(sum.ptr()), Ptr(more.ptr()), count(sum.len())];
        let grid = [self.blocks(threads), 1];
        // SAFETY: each takes two pointers of these types, and their length.
        unsafe { self.launch(name, grid, &arguments) };
    }

    /// Converts f32 to activations.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn narrow(&self, from: &Array, to: &Array) {
        let len = from.len();
        let arguments = [Ptr(from.expect(Kind::F32, len)), Ptr(to.expect(self.activation_kind(), len)), count(len)];
        // SAFETY: `from_floats(const float*, T*, u32)`.
        unsafe { self.launch("from_floats", [self.blocks(len), 1], &arguments) };
    }

    /// `x *= factor`.
    pub fn scale(&self, x: &Array, factor: f32) {
        let arguments = [Ptr(x.expect(self.activation_kind(), x.len())), F32(factor), count(x.len())];
        // SAFETY: `scale_all(T*, float, u32)`.
        unsafe { self.launch("scale_all", [self.blocks(x.len()), 1], &arguments) };
    }

    /// Multiplies sequence `b` by `factors[b]`.
    ///
    /// # Panics
    /// If the factors do not divide the elements.
    pub fn scale_sequences(&self, x: &Array, factors: &Array) {
        assert!(x.len().is_multiple_of(factors.len().max(1)), "sequences of one length");
        let each = x.len() / factors.len().max(1);
        let pointers = [Ptr(x.expect(self.activation_kind(), x.len())), Ptr(factors.expect(Kind::F32, factors.len()))];
        let grid = [self.blocks(x.len()), 1];
        // SAFETY: `scale_sequences(T*, const float*, u32, u32)`.
        unsafe { self.launch("scale_sequences", grid, &[&pointers[..], &[count(each), count(x.len())]].concat()) };
    }

    /// `sum[c] += Σ x[r][c]`, in f32, for as many columns as `sum` has.
    ///
    /// # Panics
    /// If an array is too short, or for more than a million columns.
    pub fn add_column_sums(&self, x: &Array, sum: &Array, [rows, width]: [usize; 2]) {
        let each = column_rows(rows);
        let parts = rows.div_ceil(each);
        let grid = [width.div_ceil(COLUMNS), parts];
        let partial = self.empty(Kind::F32, parts * width, "sums of columns");
        let arrived = self.shared.arrived.get_or_init(|| self.zeros(Kind::U32, MAX_COLUMN_BLOCKS, "counters"));
        let columns = width.min(sum.len());
        let pointers = [
            x.expect(self.activation_kind(), rows * width),
            partial.ptr(),
            sum.expect(Kind::F32, columns),
            arrived.expect(Kind::U32, grid[0]),
        ];
        let numbers = [count(rows), count(each), count(width), count(columns)];
        // SAFETY: `column_sums(const T*, float*, float*, u32*, u32, u32, int, int)`.
        unsafe { self.launch("column_sums", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// `sums[i][c] += Σ partial[p][i][c]`, over rows of `stride`, one or two sums of `width` in each.
    pub(super) fn add_partials(
        &self,
        partial: &Array,
        sums: [Option<&Array>; 2],
        parts: usize,
        [stride, width]: [usize; 2],
    ) {
        let columns = if sums[1].is_some() { 2 * width } else { width };
        if parts == 0 || columns == 0 || sums.iter().all(Option::is_none) {
            return;
        }
        let partial = partial.expect(Kind::F32, (parts - 1) * stride + columns);
        let [first, second] = sums.map(|sum| sum.map_or(0, |sum| sum.expect(Kind::F32, width)));
        let numbers = [count(parts), count(stride), count(width)];
        let arguments = [&[partial, first, second].map(Ptr)[..], &numbers].concat();
        // SAFETY: `add_partials(const float*, float*, float*, u32, u32, u32)`.
        unsafe { self.launch("add_partials", [columns.div_ceil(32), 1], &arguments) };
    }

    /// `y = (x − mean) / √(variance + ε) · gain + bias`, row by row; the mean and inverse deviation of each row go to
    /// `moments [rows, 2]`.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn layer_norm(
        &self,
        x: &Array,
        [y, moments]: [&Array; 2],
        [gain, bias]: [&Array; 2],
        [rows, width]: [usize; 2],
        epsilon: f32,
    ) {
        let kind = self.activation_kind();
        let pointers = [
            x.expect(kind, rows * width),
            y.expect(kind, rows * width),
            moments.expect(Kind::F32, 2 * rows),
            gain.expect(Kind::F32, width),
            bias.expect(Kind::F32, width),
        ];
        let numbers = [count(rows), count(width), F32(epsilon)];
        let grid = [self.blocks(rows * 32), 1];
        // SAFETY: `layer_norm(const T*, T*, float*, const float*, const float*, u32, int, float)`.
        unsafe { self.launch("layer_norm", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// The gradient of the input, written to `d_x` or added to it; those of gain and bias are added to `sums`, if they
    /// are trained.
    ///
    /// # Panics
    /// If an array is too short.
    #[allow(clippy::too_many_arguments)] // What a norm has.
    pub fn layer_norm_gradient(
        &self,
        [x, d_y, moments, gain]: [&Array; 4],
        d_x: &Array,
        add: bool,
        sums: [Option<&Array>; 2],
        [rows, width]: [usize; 2],
    ) {
        let (kind, each) = (self.activation_kind(), norm_rows(rows));
        let parts = rows.div_ceil(each);
        let partial = self.empty(Kind::F32, parts * 2 * width, "gradients of a norm");
        let pointers = [
            x.expect(kind, rows * width),
            d_y.expect(kind, rows * width),
            d_x.expect(kind, rows * width),
            moments.expect(Kind::F32, 2 * rows),
            gain.expect(Kind::F32, width),
            partial.ptr(),
        ];
        let numbers = [count(rows), count(each), count(width), U32(u32::from(add))];
        // SAFETY: `layer_norm_gradient` takes these six pointers and four numbers.
        unsafe {
            self.launch(LAYER_NORM_GRADIENTS[by_width(width)], [parts, 1], &[&pointers.map(Ptr)[..], &numbers].concat())
        };
        self.add_partials(&partial, sums, parts, [2 * width, width]);
    }

    /// `y = x / √(mean(x²) + ε) · gain`, row by row; the inverse root mean square of each row goes to `inverses`.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn rms_norm(
        &self,
        x: &Array,
        [y, inverses]: [&Array; 2],
        gain: &Array,
        [rows, width]: [usize; 2],
        epsilon: f32,
    ) {
        let kind = self.activation_kind();
        let pointers = [
            x.expect(kind, rows * width),
            y.expect(kind, rows * width),
            inverses.expect(Kind::F32, rows),
            gain.expect(Kind::F32, width),
        ];
        let numbers = [count(rows), count(width), F32(epsilon)];
        // SAFETY: `rms_norm(const T*, T*, float*, const float*, u32, int, float)`.
        unsafe { self.launch("rms_norm", [self.blocks(rows * 32), 1], &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// Like [`layer_norm_gradient`](Operations::layer_norm_gradient), without a bias.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn rms_norm_gradient(
        &self,
        [x, d_y, inverses, gain]: [&Array; 4],
        d_x: &Array,
        add: bool,
        sum: Option<&Array>,
        [rows, width]: [usize; 2],
    ) {
        let (kind, each) = (self.activation_kind(), norm_rows(rows));
        let parts = rows.div_ceil(each);
        let partial = self.empty(Kind::F32, parts * width, "gradients of a norm");
        let pointers = [
            x.expect(kind, rows * width),
            d_y.expect(kind, rows * width),
            d_x.expect(kind, rows * width),
            inverses.expect(Kind::F32, rows),
            gain.expect(Kind::F32, width),
            partial.ptr(),
        ];
        let numbers = [count(rows), count(each), count(width), U32(u32::from(add))];
        // SAFETY: `rms_norm_gradient` takes these six pointers and four numbers.
        unsafe {
            self.launch(RMS_NORM_GRADIENTS[by_width(width)], [parts, 1], &[&pointers.map(Ptr)[..], &numbers].concat())
        };
        self.add_partials(&partial, [sum, None], parts, [width, width]);
    }

    /// `y = f(gate) · up`; the arrays are gate, `up` and `y`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn gated(&self, arrays: [&Array; 3], of: Gate) {
        let (kind, len) = (self.activation_kind(), arrays[0].len());
        let pointers = arrays.map(|array| Ptr(array.expect(kind, len)));
        let grid = [self.blocks_of_eights(1, len), 1];
        // SAFETY: `gated(const T*, const T*, T*, u32, int)`.
        unsafe { self.launch("gated", grid, &[&pointers[..], &[count(len), U32(of as u32)]].concat()) };
    }

    /// From the gate and `up`, replaces the gradient of the output, the first of `gradients`, by that of `up`, and
    /// writes that of the gate to the second.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn gated_gradient(&self, gradients: [&Array; 2], from: [&Array; 2], of: Gate) {
        let (kind, len) = (self.activation_kind(), from[0].len());
        let pointers = [gradients, from].concat().into_iter().map(|array| Ptr(array.expect(kind, len)));
        let grid = [self.blocks_of_eights(1, len), 1];
        let arguments: Vec<Argument> = pointers.chain([count(len), U32(of as u32)]).collect();
        // SAFETY: `gated_gradient(T*, T*, const T*, const T*, u32, int)`.
        unsafe { self.launch("gated_gradient", grid, &arguments) };
    }

    /// Rotates pairs of each of `heads` heads in place by the angles of row `r mod length`, whose cosines and sines are
    /// `[length, half]`; if `inverse`, by the negated angles.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn rotate(&self, x: &Array, angles: [&Array; 2], heads: usize, length: usize, inverse: bool) {
        let half = angles[0].len() / length.max(1);
        let rows = x.len() / (2 * heads * half).max(1);
        let pointers =
            [x.expect(self.activation_kind(), x.len()), angles[0].ptr(), angles[1].expect(Kind::F32, length * half)];
        let sign = if inverse { -1.0 } else { 1.0 };
        let numbers = [count(rows), count(heads), count(half), count(length), F32(sign)];
        let grid = [self.blocks(rows * heads * half), 1];
        // SAFETY: `rotate(T*, const float*, const float*, u32, u32, u32, u32, float)`.
        unsafe { self.launch("rotate", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// One step of a gated recurrent unit: see `recurrent.cu`. `lengths` are those of the sequences.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn gru_cell(
        &self,
        [x, recurrent, before]: [&Array; 3],
        bias: &Array,
        [gates, after, out]: [&Array; 3],
        lengths: Option<&Array>,
        [batch, steps, step, width]: [usize; 4],
    ) {
        let kind = self.activation_kind();
        let pointers = [
            x.expect(kind, batch * steps * 3 * width),
            recurrent.expect(kind, batch * 3 * width),
            bias.expect(Kind::F32, 3 * width),
            before.expect(kind, batch * width),
            gates.expect(kind, batch * 4 * width),
            after.expect(kind, batch * width),
            out.expect(kind, batch * steps * width),
            lengths.map_or(0, |lengths| lengths.expect(Kind::U32, batch)),
        ];
        let numbers = [batch, steps, step, width].map(count);
        let grid = [self.blocks(batch * width), 1];
        // SAFETY: `gru_cell` takes these eight pointers and four numbers.
        unsafe { self.launch("gru_cell", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// The gradient of one step.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn gru_cell_gradient(
        &self,
        upstream: &Array,
        d_h: &Array,
        [before, gates]: [&Array; 2],
        [d_x, d_recurrent]: [&Array; 2],
        lengths: Option<&Array>,
        [batch, steps, step, width]: [usize; 4],
    ) {
        let kind = self.activation_kind();
        let pointers = [
            upstream.expect(kind, batch * steps * width),
            d_h.expect(kind, batch * width),
            before.expect(kind, batch * width),
            gates.expect(kind, batch * 4 * width),
            d_x.expect(kind, batch * steps * 3 * width),
            d_recurrent.expect(kind, batch * 3 * width),
            lengths.map_or(0, |lengths| lengths.expect(Kind::U32, batch)),
        ];
        let numbers = [batch, steps, step, width].map(count);
        let grid = [self.blocks(batch * width), 1];
        // SAFETY: `gru_cell_gradient` takes these seven pointers and four numbers.
        unsafe { self.launch("gru_cell_gradient", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }
}
