//! Trained parameters. Each has a name, which is its name in the checkpoint, and a handle by which layers find it.

use crate::float::Float;
use crate::machine::Machine;
use qkv_simd::pass::Pass;
use qkv_simd::philox;
use qkv_simd::quantized::QuantizedMatrix;
use std::collections::HashMap;
use std::sync::Arc;

/// A handle to one parameter of one [`Parameters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Param(usize);

/// Initialization of a parameter. It depends on the seed and the parameter's name alone, so that adding a layer changes
/// no other.
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
struct Entry<T> {
    name: String,
    shape: Vec<usize>,
    data: Vec<T>,
    /// The quantized matrix of which `data` is the widened copy, where the file had one.
    quantized: Option<Arc<QuantizedMatrix>>,
}

/// Named tensors, in the order in which they were added.
#[derive(Clone, Debug, Default)]
pub struct Parameters<T> {
    entries: Vec<Entry<T>>,
    names: HashMap<String, usize>,
}

impl<T: Float> Parameters<T> {
    /// Without parameters.
    pub fn new() -> Self {
        Parameters { entries: Vec::new(), names: HashMap::new() }
    }

    /// Adds a parameter.
    ///
    /// # Panics
    /// Where the name is taken.
    pub fn add(&mut self, name: &str, shape: &[usize], init: Init, seed: u64) -> Param {
        let data = initial(name, shape, init, seed);
        let at = self.entries.len();
        assert!(self.names.insert(name.to_owned(), at).is_none(), "two parameters are called `{name}`");
        self.entries.push(Entry { name: name.to_owned(), shape: shape.to_vec(), data, quantized: None });
        Param(at)
    }

    /// Finds a parameter by name.
    pub fn find(&self, name: &str) -> Option<Param> {
        self.names.get(name).copied().map(Param)
    }

    /// Its elements.
    pub fn get(&self, param: Param) -> &[T] {
        &self.entries[param.0].data
    }

    /// Its elements, for writing; a quantized form of the old ones is dropped.
    pub fn get_mut(&mut self, param: Param) -> &mut [T] {
        self.entries[param.0].quantized = None;
        &mut self.entries[param.0].data
    }

    /// Attaches the quantized form of a matrix with the same values: products with few rows read it, which is faster.
    ///
    /// # Panics
    /// Where the shapes differ.
    pub fn set_quantized(&mut self, param: Param, quantized: QuantizedMatrix) {
        let entry = &mut self.entries[param.0];
        assert_eq!(entry.shape, [quantized.rows(), quantized.width()], "`{}`", entry.name);
        entry.quantized = Some(Arc::new(quantized));
    }

    /// Its quantized form, where it has one.
    pub(crate) fn quantized(&self, param: Param) -> Option<&QuantizedMatrix> {
        self.entries[param.0].quantized.as_deref()
    }

    /// Its shape.
    pub fn shape(&self, param: Param) -> &[usize] {
        &self.entries[param.0].shape
    }

    /// Its name.
    pub fn name(&self, param: Param) -> &str {
        &self.entries[param.0].name
    }

    /// All of them, in order.
    pub fn all(&self) -> impl Iterator<Item = Param> + use<T> {
        (0..self.entries.len()).map(Param)
    }

    /// Number of elements of all parameters.
    pub fn count(&self) -> usize {
        self.entries.iter().map(|entry| entry.data.len()).sum()
    }

    /// Updates an exponential moving average of `others`: `self = decay · self + (1 − decay) · others`.
    ///
    /// # Panics
    /// Where the shapes differ.
    pub fn average(&mut self, others: &Parameters<T>, decay: f64, machine: &Machine) {
        let (decay, rest) = (T::of_f64(decay), T::of_f64(1.0 - decay));
        let entries = self.entries.iter_mut().zip(&others.entries);
        let parts = entries.flat_map(|(own, other)| {
            assert_eq!(own.shape, other.shape, "`{}`", own.name);
            own.quantized = None;
            own.data.chunks_mut(BLOCK).zip(other.data.chunks(BLOCK))
        });
        let parts: Vec<_> = parts.collect();
        machine.each(parts, |_, (own, other): (&mut [T], &[T])| machine.run(MovingAverage { own, other, decay, rest }));
    }

    /// Converted to another element type.
    pub fn rounded<U: Float>(&self) -> Parameters<U> {
        let round = |x: &T| U::of_f64(x.to_f64());
        let entry = |entry: &Entry<T>| Entry {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            data: entry.data.iter().map(round).collect(),
            quantized: None,
        };
        Parameters { entries: self.entries.iter().map(entry).collect(), names: self.names.clone() }
    }
}

/// `own = decay · own + rest · other`.
pub struct MovingAverage<'a, T> {
    own: &'a mut [T],
    other: &'a [T],
    decay: T,
    rest: T,
}

impl<T: Float> Pass for MovingAverage<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (own, &other) in self.own.iter_mut().zip(self.other) {
            *own = *own * self.decay + other * self.rest;
        }
    }
}

fn initial<T: Float>(name: &str, shape: &[usize], init: Init, seed: u64) -> Vec<T> {
    let len = shape.iter().product();
    let seed = name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3) // FNV-1a
    });
    let unit = |at: usize, word: usize| {
        let words = philox::block([at as u32, (at >> 32) as u32, 0x7061_7261, 0], seed);
        (f64::from(words[word]) + 0.5) / 4_294_967_296.0
    };
    let uniform = |bound: f64| (0..len).map(|at| T::of_f64((2.0 * unit(at, 0) - 1.0) * bound)).collect();
    match init {
        Init::Zeros => vec![T::ZERO; len],
        Init::Ones => vec![T::ONE; len],
        Init::Uniform(bound) => uniform(bound),
        Init::Xavier => uniform((6.0 / shape.iter().sum::<usize>() as f64).sqrt()),
        Init::Normal(deviation) => (0..len)
            .map(|at| {
                let radius = (-2.0 * unit(at, 0).ln()).sqrt();
                T::of_f64(deviation * radius * (std::f64::consts::TAU * unit(at, 1)).cos())
            })
            .collect(),
    }
}

/// The gradient of each parameter, accumulated since it was last cleared.
#[derive(Clone, Debug)]
pub struct Gradients<T> {
    sums: Vec<Vec<T>>,
}

/// Elements whose squares are summed together: the order of a norm does not depend on the threads.
const BLOCK: usize = 1 << 13;

impl<T: Float> Gradients<T> {
    /// Zeros in the shapes of the parameters.
    pub fn of(parameters: &Parameters<T>) -> Self {
        Gradients { sums: parameters.entries.iter().map(|entry| vec![T::ZERO; entry.data.len()]).collect() }
    }

    /// The gradient of one parameter.
    pub fn get(&self, param: Param) -> &[T] {
        &self.sums[param.0]
    }

    pub(crate) fn get_mut(&mut self, param: Param) -> &mut [T] {
        &mut self.sums[param.0]
    }

    /// Sets all gradients to zero.
    pub fn clear(&mut self, machine: &Machine) {
        let parts = self.sums.iter_mut().flat_map(|sums| sums.chunks_mut(1 << 18)).collect();
        machine.each(parts, |_, part: &mut [T]| part.fill(T::ZERO));
    }

    /// The global L2 norm, of all gradients as one vector.
    pub fn norm(&self, machine: &Machine) -> f64 {
        let blocks: Vec<&[T]> = self.sums.iter().flat_map(|sums| sums.chunks(BLOCK)).collect();
        let mut squares = vec![0.0; blocks.len()];
        let each = blocks.len().div_ceil(4 * machine.threads()).max(1);
        let parts = blocks.chunks(each).zip(squares.chunks_mut(each)).collect();
        machine.each(parts, |_, (blocks, squares): (&[&[T]], &mut [f64])| {
            for (block, square) in blocks.iter().zip(squares) {
                *square = block.iter().map(|x| x.to_f64() * x.to_f64()).sum();
            }
        });
        squares.iter().sum::<f64>().sqrt()
    }
}
