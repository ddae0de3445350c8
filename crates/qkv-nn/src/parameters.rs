//! Parameters. Each has a name, under which the checkpoint stores it, and a handle by which layers refer to it. Frozen
//! parameters have no gradient and no moments. A frozen matrix may be stored only at reduced precision, as quantized
//! blocks or 16-bit floats, and may have a low-rank adapter that is trained in its place ([`Adapter`]).

use crate::adapter::Adapter;
use crate::elements::Elements;
use crate::float::Float;
use crate::loops::{Fill, MovingAverage, SquareSum};
use crate::machine::Machine;
use crate::pool::Pool;
use crate::stored_matrix::{DeviceMatrix, HalfMatrix, StoredMatrix};
use crate::tensor::Tensor;
use half::bf16;
use qkv_cuda::operations::{Array, BlockMatrix, Kind, Operations};
use qkv_simd::Isa;
use qkv_simd::huge_pages::advise_huge_pages;
use qkv_simd::int8::Int8Matrix;
use qkv_simd::matmul::{Operand, RightOperand};
use qkv_simd::panels::PackedMatrix;
use qkv_simd::philox;
use qkv_simd::quantized::QuantizedMatrix;
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// A handle to one parameter of one [`Parameters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Param(usize);

impl Param {
    /// Its index in the order of the parameters.
    pub fn index(self) -> usize {
        self.0
    }
}

/// Initialization of a parameter. It depends only on the seed and the parameter's name, so adding a layer changes no
/// other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All 0: biases.
    Zeros,
    /// All 1: the gains of norms.
    Ones,
    /// Uniform within `±√(6 / (rows + columns))` (Glorot and Bengio 2010): the matrices of a Transformer.
    Xavier,
    /// Normal with this standard deviation: embeddings, `C^(−1/2)` where they are tied to the output (Vaswani et al.
    /// 2017).
    Normal(f64),
    /// Uniform within `±bound`: recurrent cells, `1/√C` as in PyTorch.
    Uniform(f64),
}

#[derive(Clone, Debug)]
struct Entry<T: Float> {
    name: String,
    shape: Vec<usize>,
    /// Shared with clones until one of them writes; empty if only the reduced-precision form is kept.
    data: Arc<Elements<T>>,
    /// The quantized matrix of which `data` is the widened copy, if the file has one.
    quantized: Option<Arc<QuantizedMatrix>>,
    /// The 16-bit matrix of which `data` is the widened copy, if the file has one.
    half: Option<Arc<HalfMatrix>>,
    /// The matrix packed for inference; made on first use.
    packed: OnceLock<Arc<PackedMatrix<T>>>,
    /// The matrix in 8 bits for inference; made on first use, `None` if it cannot be rounded.
    int8: OnceLock<Option<Arc<Int8Matrix>>>,
    /// Whether the rows of its 8-bit products are rounded in two parts.
    is_fine: bool,
    /// The widened matrix in device memory, if only the reduced-precision form is kept; made on first use there.
    widened: OnceLock<(Operations, Array)>,
    /// The quantized matrix in device memory; made on first use there for inference.
    blocks: OnceLock<(Operations, BlockMatrix)>,
    /// Factor of the learning rate; 0 if frozen.
    rate: f64,
    /// The adapter of a matrix.
    adapter: Option<Adapter>,
}

impl<T: Float> Entry<T> {
    /// Drops everything derived from the old elements.
    fn forget(&mut self) {
        (self.quantized, self.half, self.packed, self.int8) = (None, None, OnceLock::new(), OnceLock::new());
        (self.widened, self.blocks) = (OnceLock::new(), OnceLock::new());
    }

    /// Number of elements.
    fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// The reduced-precision form, if there is one.
    fn stored(&self) -> Option<StoredMatrix<'_>> {
        match (&self.quantized, self.half.as_deref()) {
            (Some(quantized), _) => Some(StoredMatrix::Quantized(quantized)),
            (_, Some(HalfMatrix::Bf16(matrix))) => Some(StoredMatrix::Bf16(matrix)),
            (_, Some(HalfMatrix::F16(matrix))) => Some(StoredMatrix::F16(matrix)),
            (None, None) => None,
        }
    }

    /// Its reduced-precision form, if only that is kept.
    fn stored_alone(&self) -> Option<StoredMatrix<'_>> {
        self.stored().filter(|_| self.data.is_empty())
    }
}

/// A matrix `[O, I]` for products of many rows: its elements, a copy widened from its reduced-precision form, or that
/// form itself if both it and the products are in bf16.
pub(crate) struct Matrix<'p, T: Float> {
    shape: [usize; 2],
    form: MatrixForm<'p, T>,
}

enum MatrixForm<'p, T: Float> {
    Dense(&'p [T]),
    Widened(Tensor<T>),
    Bf16(&'p PackedMatrix<bf16>),
}

impl<T: Float> Matrix<'_, T> {
    /// The right operand of `d_y W`.
    pub fn operand(&self) -> RightOperand<'_, T> {
        match &self.form {
            MatrixForm::Dense(data) => self.rows(data).into(),
            MatrixForm::Widened(tensor) => self.rows(tensor.data()).into(),
            MatrixForm::Bf16(matrix) => RightOperand::Packed(matrix),
        }
    }

    /// The right operand of `x Wᵀ`.
    pub fn transposed(&self) -> RightOperand<'_, T> {
        match self.operand() {
            RightOperand::Rows(rows) => rows.transposed().into(),
            RightOperand::Packed(matrix) => RightOperand::PackedTransposed(matrix),
            RightOperand::PackedTransposed(matrix) => RightOperand::Packed(matrix),
        }
    }

    fn rows<'a>(&self, data: &'a [T]) -> Operand<'a, T> {
        Operand::rows(data, self.shape[0], self.shape[1])
    }
}

/// A thread widens a multiple of this many rows: whole panels of packed matrices.
const WIDENED_TOGETHER: usize = 16;

/// Named tensors in insertion order.
#[derive(Clone, Debug, Default)]
pub struct Parameters<T: Float> {
    entries: Vec<Entry<T>>,
    names: HashMap<String, usize>,
    /// Whether matrices are packed when they are first used for inference.
    packs: bool,
}

impl<T: Float> Parameters<T> {
    /// An empty set.
    pub fn new() -> Self {
        Parameters { entries: Vec::new(), names: HashMap::new(), packs: false }
    }

    /// Adds a parameter.
    ///
    /// # Panics
    /// If the name is already taken.
    pub fn add(&mut self, name: &str, shape: &[usize], init: Init, seed: u64) -> Param {
        let data = Arc::new(initial(name, shape, init, seed).into());
        let at = self.entries.len();
        assert!(self.names.insert(name.to_owned(), at).is_none(), "two parameters are called `{name}`");
        let (name, shape) = (name.to_owned(), shape.to_vec());
        let (quantized, half, packed, int8) = (None, None, OnceLock::new(), OnceLock::new());
        let (widened, blocks) = (OnceLock::new(), OnceLock::new());
        let (is_fine, rate, adapter) = (false, 1.0, None);
        let forms = Entry { name, shape, data, quantized, half, packed, int8, is_fine, widened, blocks, rate, adapter };
        self.entries.push(forms);
        Param(at)
    }

    /// Redraws a parameter with another initialization.
    pub fn redraw(&mut self, param: Param, init: Init, seed: u64) {
        let Entry { name, shape, .. } = &self.entries[param.0];
        let data = initial(name, shape, init, seed);
        self.get_mut(param).copy_from_slice(&data);
    }

    /// Sets the number of rows of a matrix; new rows, at the end, are copies of `row`.
    ///
    /// # Panics
    /// If the parameter is not a matrix with rows of that length.
    pub fn set_rows(&mut self, param: Param, rows: usize, row: &[T]) {
        let entry = &mut self.entries[param.0];
        assert!(entry.shape.len() == 2 && entry.shape[1] == row.len(), "rows of `{}`", entry.name);
        let mut data = entry.data.to_vec();
        let before = entry.shape[0];
        data.truncate(rows * row.len());
        (before..rows).for_each(|_| data.extend_from_slice(row));
        (entry.data, entry.shape[0]) = (Arc::new(data.into()), rows);
        entry.forget();
    }

    /// Freezes a parameter: it has no gradient, and no step of the optimizer changes it.
    pub fn freeze(&mut self, param: Param) {
        self.set_rate(param, 0.0);
    }

    /// Sets the factor of a parameter's learning rate; 0 freezes it.
    pub fn set_rate(&mut self, param: Param, rate: f64) {
        self.entries[param.0].rate = rate;
    }

    /// The factor of a parameter's learning rate.
    pub fn rate(&self, param: Param) -> f64 {
        self.entries[param.0].rate
    }

    /// Whether a parameter is trained.
    pub fn is_trained(&self, param: Param) -> bool {
        self.entries[param.0].rate != 0.0
    }

    /// The trained parameters, in order.
    pub fn trained(&self) -> impl Iterator<Item = Param> + '_ {
        self.all().filter(|&param| self.is_trained(param))
    }

    /// Number of trained elements.
    pub fn trained_count(&self) -> usize {
        self.trained().map(|param| self.entries[param.0].count()).sum()
    }

    /// The adapter of a matrix, if it has one.
    pub fn adapter(&self, param: Param) -> Option<Adapter> {
        self.entries[param.0].adapter
    }

    /// Sets or removes the adapter of a matrix.
    pub(crate) fn set_adapter(&mut self, param: Param, adapter: Option<Adapter>) {
        self.entries[param.0].adapter = adapter;
    }

    /// Drops the f32 values of a matrix that also has a reduced-precision form, and freezes it. From then on
    /// [`get`](Parameters::get) returns no elements for it; [`values`](Parameters::values) works for every matrix.
    pub fn keep_stored(&mut self, param: Param) {
        let entry = &mut self.entries[param.0];
        if entry.stored().is_some() {
            (entry.data, entry.rate) = (Arc::new(Elements::zeros(0)), 0.0);
        }
    }

    /// The elements of a parameter, widened if only the reduced-precision form is kept.
    pub fn values(&self, param: Param) -> Cow<'_, [T]> {
        let entry = &self.entries[param.0];
        let Some(stored) = entry.stored_alone() else { return Cow::Borrowed(&entry.data) };
        let mut values = vec![0.0; entry.count()];
        stored.widen(Isa::best(), 0, &mut values);
        Cow::Owned(T::from_floats(values))
    }

    /// A matrix for a product of many rows: borrowed, or widened into the pool's memory.
    ///
    /// # Panics
    /// If the parameter is not a matrix.
    pub(crate) fn matrix(&self, param: Param, pool: &Pool<T>, machine: &Machine) -> Matrix<'_, T> {
        let entry = &self.entries[param.0];
        let &[rows, columns] = &entry.shape[..] else { panic!("`{}` is no matrix", entry.name) };
        let form = match entry.stored_alone() {
            None => MatrixForm::Dense(&entry.data),
            Some(StoredMatrix::Bf16(matrix)) if machine.multiplies_in_bf16::<T>() => MatrixForm::Bf16(matrix),
            Some(stored) => MatrixForm::Widened(Parameters::widened(entry, stored, pool, machine)),
        };
        Matrix { shape: [rows, columns], form }
    }

    /// Whether a matrix is there in the tape's element type, not in a reduced-precision form alone.
    pub(crate) fn has_elements(&self, param: Param) -> bool {
        self.entries[param.0].stored_alone().is_none()
    }

    fn widened(entry: &Entry<T>, stored: StoredMatrix<'_>, pool: &Pool<T>, machine: &Machine) -> Tensor<T> {
        let mut widened = Tensor::unwritten(pool, &entry.shape);
        let width = stored.width();
        let each = machine.rows_each(entry.shape[0], width).next_multiple_of(WIDENED_TOGETHER);
        let parts = widened.data_mut().chunks_mut((each * width).max(1)).collect();
        machine.each(parts, |at, rows: &mut [T]| {
            if let Some(rows) = T::as_floats_mut(rows) {
                return stored.widen(machine.isa(), at * each, rows);
            }
            let mut row = vec![0.0; width];
            for (r, to) in rows.chunks_exact_mut(width).enumerate() {
                stored.widen(machine.isa(), at * each + r, &mut row);
                to.iter_mut().zip(&row).for_each(|(to, &x)| *to = T::of_f64(f64::from(x)));
            }
        });
        widened
    }

    /// The elements of a parameter in device memory, f32.
    pub(crate) fn array(&self, param: Param, operations: &Operations) -> Array {
        self.entries[param.0].data.array(operations, Kind::F32)
    }

    /// The elements of a parameter in device memory for a product, in the activation type. If only the
    /// reduced-precision form is kept, they are widened on first use and stay on the device.
    pub(crate) fn rounded_array(&self, param: Param, operations: &Operations) -> Array {
        let entry = &self.entries[param.0];
        if entry.stored_alone().is_none() {
            return entry.data.rounded(operations);
        }
        let upload = || operations.upload_activations(&T::to_floats(&self.values(param)));
        let (device, array) = entry.widened.get_or_init(|| (operations.clone(), upload()));
        if device.is(operations) { array.clone() } else { upload() }
    }

    /// A matrix in device memory for a product in inference: its quantized blocks if it has them, packed on first use
    /// and kept on the device.
    pub(crate) fn device_matrix(&self, param: Param, operations: &Operations) -> DeviceMatrix {
        let entry = &self.entries[param.0];
        let Some(quantized) = &entry.quantized else {
            return DeviceMatrix::Elements(self.rounded_array(param, operations));
        };
        let upload = || operations.upload_blocks(quantized);
        let (device, blocks) = entry.blocks.get_or_init(|| (operations.clone(), upload()));
        DeviceMatrix::Blocks(if device.is(operations) { blocks.clone() } else { upload() })
    }

    /// An embedding table in device memory for inference: its quantized blocks if it has them, otherwise f32.
    pub(crate) fn device_table(&self, param: Param, operations: &Operations) -> DeviceMatrix {
        match self.has_quantized(param) {
            true => self.device_matrix(param, operations),
            false => DeviceMatrix::Elements(self.array(param, operations)),
        }
    }

    /// The elements of a parameter in device memory, mutable: in f32, and the copy for products, which the caller must
    /// update too.
    pub(crate) fn arrays_mut(&mut self, param: Param, operations: &Operations) -> (Array, Option<Array>) {
        let entry = &mut self.entries[param.0];
        entry.data.array(operations, Kind::F32);
        entry.forget();
        let data = Arc::make_mut(&mut entry.data);
        (data.array_mut(operations, Kind::F32), data.rounded_copy())
    }

    /// Finds a parameter by name.
    pub fn find(&self, name: &str) -> Option<Param> {
        self.names.get(name).copied().map(Param)
    }

    /// The elements of a parameter; empty if [only the reduced-precision form](Parameters::keep_stored) is kept.
    pub fn get(&self, param: Param) -> &[T] {
        &self.entries[param.0].data
    }

    /// The elements of a parameter, mutable; a reduced-precision form of the old ones is dropped.
    pub fn get_mut(&mut self, param: Param) -> &mut [T] {
        let widened = self.entries[param.0].data.is_empty().then(|| self.values(param).into_owned());
        let entry = &mut self.entries[param.0];
        entry.forget();
        if let Some(widened) = widened {
            entry.data = Arc::new(widened.into());
        }
        &mut Arc::make_mut(&mut entry.data)[..]
    }

    /// Sets the elements of a parameter, without copying them.
    ///
    /// # Panics
    /// If the number of values does not match the parameter's shape.
    pub fn set(&mut self, param: Param, values: Vec<T>) {
        let entry = &mut self.entries[param.0];
        assert_eq!(values.len(), entry.shape.iter().product::<usize>(), "`{}`", entry.name);
        entry.forget();
        entry.data = Arc::new(values.into());
    }

    /// Sets a parameter to a quantized matrix, which products with few rows read directly because that is faster. Its
    /// elements are widened on first use.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn set_quantized(&mut self, param: Param, quantized: QuantizedMatrix) {
        let entry = &mut self.entries[param.0];
        assert_eq!(entry.shape, [quantized.rows(), quantized.width()], "`{}`", entry.name);
        entry.forget();
        let quantized = Arc::new(quantized);
        (entry.data, entry.quantized) = (Arc::new(Elements::quantized(&quantized)), Some(quantized));
    }

    /// Whether a parameter has a quantized form.
    pub fn has_quantized(&self, param: Param) -> bool {
        self.entries[param.0].quantized.is_some()
    }

    /// Attaches a 16-bit matrix with the same values, which products with few rows read because that is faster.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn set_half(&mut self, param: Param, half: HalfMatrix) {
        let entry = &mut self.entries[param.0];
        let shape = match &half {
            HalfMatrix::Bf16(matrix) => [matrix.rows(), matrix.width()],
            HalfMatrix::F16(matrix) => [matrix.rows(), matrix.width()],
        };
        assert_eq!(entry.shape, shape, "`{}`", entry.name);
        entry.half = Some(Arc::new(half));
    }

    /// The reduced-precision form, if there is one.
    pub(crate) fn stored(&self, param: Param) -> Option<StoredMatrix<'_>> {
        self.entries[param.0].stored()
    }

    /// Whether a parameter has a reduced-precision form.
    pub fn has_stored(&self, param: Param) -> bool {
        self.stored(param).is_some()
    }

    /// Makes inference pack each matrix on first use and keep the packed copy. Later products skip packing, and a row's
    /// result does not depend, bit for bit, on the rows beside it.
    pub fn pack_for_inference(&mut self) {
        self.packs = true;
    }

    /// A matrix packed for inference; `None` if it has a reduced-precision form or packing is off.
    pub(crate) fn packed(&self, param: Param) -> Option<&PackedMatrix<T>> {
        let entry = &self.entries[param.0];
        let &[_, width] = &entry.shape[..] else { return None };
        if !self.packs || self.stored(param).is_some() || width == 0 {
            return None;
        }
        Some(entry.packed.get_or_init(|| Arc::new(PackedMatrix::new(&entry.data, width))))
    }

    /// Makes 8-bit products with this matrix round their rows in two parts. This is for products whose error matters
    /// most: those of activations with a few large elements, and logits.
    pub fn round_finely(&mut self, param: Param) {
        self.entries[param.0].is_fine = true;
    }

    /// Whether 8-bit products with this matrix round their rows in two parts.
    pub(crate) fn is_fine(&self, param: Param) -> bool {
        self.entries[param.0].is_fine
    }

    /// A matrix rounded to 8 bits for inference; `None` if it has a reduced-precision form, packing is off, or it
    /// cannot be rounded.
    pub(crate) fn int8(&self, param: Param) -> Option<&Int8Matrix> {
        let entry = &self.entries[param.0];
        let &[_, width] = &entry.shape[..] else { return None };
        if !self.packs || self.stored(param).is_some() || width == 0 {
            return None;
        }
        let round = || Int8Matrix::new(Isa::best(), &T::to_floats(&entry.data), width).map(Arc::new);
        entry.int8.get_or_init(round).as_deref()
    }

    /// The shape of a parameter.
    pub fn shape(&self, param: Param) -> &[usize] {
        &self.entries[param.0].shape
    }

    /// The name of a parameter.
    pub fn name(&self, param: Param) -> &str {
        &self.entries[param.0].name
    }

    /// All parameters, in order.
    pub fn all(&self) -> impl Iterator<Item = Param> + use<T> {
        (0..self.entries.len()).map(Param)
    }

    /// Number of elements of all parameters.
    pub fn count(&self) -> usize {
        self.entries.iter().map(Entry::count).sum()
    }

    /// Updates an exponential moving average of `others`: `self = decay · self + (1 − decay) · others`.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn average(&mut self, others: &Parameters<T>, decay: f64, machine: &Machine) {
        if let Some(operations) = machine.cuda() {
            for param in others.trained().collect::<Vec<_>>() {
                let (own, _) = self.arrays_mut(param, operations);
                Arc::make_mut(&mut self.entries[param.0].data).forget_rounded();
                operations.moving_average(&own, &others.array(param, operations), decay as f32);
            }
            return;
        }
        let (decay, rest) = (T::of_f64(decay), T::of_f64(1.0 - decay));
        // Frozen parameters are the same in both.
        let entries = self.entries.iter_mut().zip(&others.entries).filter(|(_, other)| other.rate != 0.0);
        let parts = entries.flat_map(|(own, other)| {
            assert_eq!(own.shape, other.shape, "`{}`", own.name);
            own.forget();
            Arc::make_mut(&mut own.data).chunks_mut(BLOCK).zip(other.data.chunks(BLOCK))
        });
        let parts: Vec<_> = parts.collect();
        machine.each(parts, |_, (own, other): (&mut [T], &[T])| machine.run(MovingAverage { own, other, decay, rest }));
    }

    /// The parameters converted to another element type.
    pub fn rounded<U: Float>(&self) -> Parameters<U> {
        let round = |x: &T| U::of_f64(x.to_f64());
        let entry = |(at, entry): (usize, &Entry<T>)| Entry {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            data: Arc::new(self.values(Param(at)).iter().map(round).collect::<Vec<U>>().into()),
            quantized: None,
            half: None,
            packed: OnceLock::new(),
            int8: OnceLock::new(),
            is_fine: entry.is_fine,
            widened: OnceLock::new(),
            blocks: OnceLock::new(),
            rate: entry.rate,
            adapter: entry.adapter,
        };
        let entries = self.entries.iter().enumerate().map(entry).collect();
        Parameters { entries, names: self.names.clone(), packs: self.packs }
    }
}

fn initial<T: Float>(name: &str, shape: &[usize], init: Init, seed: u64) -> Vec<T> {
    let len = shape.iter().product();
    let seed = name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3) // FNV-1a
    });
    let uniform = |bound: f64| (0..len).map(|at| T::of_f64((2.0 * uniform(seed, at)[0] - 1.0) * bound)).collect();
    match init {
        Init::Zeros => {
            let mut zeros = vec![T::ZERO; len];
            advise_huge_pages(&mut zeros);
            zeros
        }
        Init::Ones => vec![T::ONE; len],
        Init::Uniform(bound) => uniform(bound),
        Init::Xavier => uniform((6.0 / shape.iter().sum::<usize>() as f64).sqrt()),
        Init::Normal(deviation) => (0..len).map(|at| T::of_f64(normal(deviation, seed, at))).collect(),
    }
}

/// Two uniform numbers between 0 and 1 for one element.
fn uniform(seed: u64, at: usize) -> [f64; 2] {
    let [a, b, ..] = philox::block([at as u32, (at >> 32) as u32, 0x7061_7261, 0], seed);
    [a, b].map(|word| (f64::from(word) + 0.5) / 4_294_967_296.0)
}

/// A normally distributed number for one element.
fn normal(deviation: f64, seed: u64, at: usize) -> f64 {
    let [a, b] = uniform(seed, at);
    deviation * (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

/// The gradient of each trained parameter, accumulated since it was last cleared.
#[derive(Clone, Debug)]
pub struct Gradients<T: Float> {
    sums: Vec<Elements<T>>,
    /// The device memory of all gradients, concatenated, and the offset of each.
    flat: Option<(Array, Vec<usize>)>,
}

/// Elements whose squares are summed together. The fixed block size makes the order of a norm's sum independent of the
/// threads.
const BLOCK: usize = 1 << 13;

impl<T: Float> Gradients<T> {
    /// Zero gradients for the trained parameters.
    pub fn of(parameters: &Parameters<T>) -> Self {
        let zeros = |entry: &Entry<T>| Elements::zeros(if entry.rate == 0.0 { 0 } else { entry.count() });
        Gradients { sums: parameters.entries.iter().map(zeros).collect(), flat: None }
    }

    /// The gradient of one parameter; empty if it is frozen.
    pub fn get(&self, param: Param) -> &[T] {
        &self.sums[param.0]
    }

    /// The gradient of one parameter, to add to; `None` if it is frozen.
    pub(crate) fn sum(&mut self, param: Param) -> Option<&mut [T]> {
        Some(&mut self.sums[param.0]).filter(|sum| !sum.is_empty()).map(|sum| &mut sum[..])
    }

    /// The gradient of one parameter in device memory, to add to; `None` if it is frozen.
    pub(crate) fn array(&mut self, param: Param, operations: &Operations) -> Option<Array> {
        let (flat, starts) = self.flat.get_or_insert_with(|| {
            let mut total = 0;
            let start = |sum: &Elements<T>| {
                total += padded(sum.len());
                total - padded(sum.len())
            };
            let starts = self.sums.iter().map(start).collect();
            (operations.empty(Kind::F32, total, "gradients"), starts)
        });
        let sum = &mut self.sums[param.0];
        if sum.is_empty() {
            return None;
        }
        // Not on the device yet, or written by the host, as sums over ranks are.
        if !sum.is_part_of(flat) {
            let start = starts[param.0];
            sum.move_to(operations, flat.slice(start..start + sum.len()));
        }
        Some(sum.array_mut(operations, Kind::F32))
    }

    /// The gradient of one parameter, mutable; empty if it is frozen.
    pub fn get_mut(&mut self, param: Param) -> &mut [T] {
        &mut self.sums[param.0]
    }

    /// Adds the gradients of another set for the same parameters.
    pub fn add(&mut self, others: &Gradients<T>, machine: &Machine) {
        if let Some(operations) = machine.cuda() {
            let pairs = self.sums.iter_mut().zip(&others.sums).filter(|(sum, _)| !sum.is_empty());
            for (sum, other) in pairs {
                let sum = sum.array_mut(operations, Kind::F32);
                operations.add(&sum, &other.array(operations, Kind::F32));
            }
            return;
        }
        for (sums, others) in self.sums.iter_mut().zip(&others.sums) {
            machine.add_assign(sums, others);
        }
    }

    /// Sets all gradients to zero.
    pub fn clear(&mut self, machine: &Machine) {
        if let Some(operations) = machine.cuda() {
            let Some((flat, starts)) = &self.flat else { return self.sums.iter_mut().for_each(Elements::clear) };
            operations.clear(flat);
            for (sum, &start) in self.sums.iter_mut().zip(starts) {
                sum.replace(operations, flat.slice(start..start + sum.len()));
            }
            return;
        }
        let parts = self.sums.iter_mut().flat_map(|sums| sums.chunks_mut(1 << 18)).collect();
        machine.each(parts, |_, part: &mut [T]| machine.run(Fill(part, T::ZERO)));
    }

    /// The L2 norm of all gradients as one vector.
    pub fn norm(&self, machine: &Machine) -> f64 {
        let blocks = self.sums.iter().flat_map(|sums| sums.chunks(BLOCK)).collect();
        Gradients::squares(blocks, machine).iter().sum::<f64>().sqrt()
    }

    /// The sums of squares of some elements of a parameter's gradient, one per [`BLOCK`](Gradients::BLOCK) elements.
    /// The [norm](Gradients::norm) is the square root of their sum over all parameters, in order.
    pub fn squares_of(&self, param: Param, range: Range<usize>, machine: &Machine) -> Vec<f64> {
        Gradients::squares(self.get(param)[range].chunks(BLOCK).collect(), machine)
    }

    /// Elements whose squares are summed together.
    pub const BLOCK: usize = BLOCK;

    fn squares(blocks: Vec<&[T]>, machine: &Machine) -> Vec<f64> {
        let mut squares = vec![0.0; blocks.len()];
        let each = blocks.len().div_ceil(4 * machine.threads()).max(1);
        let parts = blocks.chunks(each).zip(squares.chunks_mut(each)).collect();
        machine.each(parts, |_, (blocks, squares): (&[&[T]], &mut [f64])| {
            for (block, square) in blocks.iter().zip(squares) {
                machine.run(SquareSum { x: block, sum: square });
            }
        });
        squares
    }
}

/// Length of a gradient with padding, so that the next one begins at a multiple of 256 bytes.
fn padded(len: usize) -> usize {
    len.next_multiple_of(64)
}
