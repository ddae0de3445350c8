//! Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685): a frozen matrix `W [O, I]` acts as `W + scale · B A`
//! with trained `A [r, I]` and `B [O, r]`. [`Tape::linear`](crate::Tape::linear) adds the adapter's product wherever
//! its matrix is used, so layers need not know about adapters. The models decide which matrices get one, and handle
//! files.

use crate::float::Float;
use crate::loops::AddLowRank;
use crate::parameters::{Init, Param, Parameters};
use qkv_simd::Isa;

/// The adapter of a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    /// `[r, I]`.
    pub a: Param,
    /// `[O, r]`.
    pub b: Param,
    /// Factor of the product: `alpha / r` in most settings.
    pub scale: f64,
    /// Dropout of the adapter's input.
    pub dropout: f64,
}

/// Suffixes of the names of an adapter's matrices, as in PEFT.
const ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

impl<T: Float> Parameters<T> {
    /// Adds an adapter to a matrix and freezes the matrix. `A` is drawn uniformly within `±1/√I`, as in PEFT, and `B`
    /// is zero, so the model's output is unchanged at first.
    ///
    /// ```
    /// use qkv_nn::{Init, Parameters};
    /// let mut parameters = Parameters::<f32>::new();
    /// let w = parameters.add("q_proj.weight", &[3, 2], Init::Xavier, 1);
    /// let adapter = parameters.adapt(w, 1, 2.0, 0.0, 1);
    /// assert_eq!((parameters.name(adapter.b), parameters.shape(adapter.b)), ("q_proj.lora_B.weight", &[3, 1][..]));
    /// assert!(parameters.is_trained(adapter.a) && !parameters.is_trained(w));
    /// let before = parameters.get(w).to_vec();
    /// parameters.merge(w);
    /// assert_eq!((parameters.get(w), parameters.adapter(w)), (&before[..], None)); // B is still zero
    /// ```
    ///
    /// # Panics
    /// If the parameter is not a matrix, or already has an adapter.
    pub fn adapt(&mut self, param: Param, rank: usize, scale: f64, dropout: f64, seed: u64) -> Adapter {
        let &[out, inner] = self.shape(param) else { panic!("`{}` is no matrix", self.name(param)) };
        let stem = self.name(param).strip_suffix(".weight").unwrap_or(self.name(param)).to_owned();
        let init = Init::Uniform((inner.max(1) as f64).powf(-0.5));
        let a = self.add(&format!("{stem}{}", ENDS[0]), &[rank, inner], init, seed);
        let b = self.add(&format!("{stem}{}", ENDS[1]), &[out, rank], Init::Zeros, seed);
        let adapter = Adapter { a, b, scale, dropout };
        self.set_adapter(param, Some(adapter));
        self.freeze(param);
        adapter
    }

    /// Merges a matrix's adapter into the matrix and removes it. The adapter's `A` and `B` stay among the parameters,
    /// unused and frozen.
    pub fn merge(&mut self, param: Param) {
        let Some(Adapter { a, b, scale, .. }) = self.adapter(param) else { return };
        let (left, right) = (self.get(b).to_vec(), self.get(a).to_vec());
        let (rank, inner) = (self.shape(a)[0], self.shape(a)[1]);
        for (row, left) in self.get_mut(param).chunks_exact_mut(inner.max(1)).zip(left.chunks_exact(rank.max(1))) {
            T::run(Isa::best(), AddLowRank { row, left, right: &right, scale }.into());
        }
        self.set_adapter(param, None);
        self.freeze(a);
        self.freeze(b);
    }

    /// The matrices with adapters, in order.
    pub fn adapted(&self) -> Vec<Param> {
        self.all().filter(|&param| self.adapter(param).is_some()).collect()
    }

    /// Whether a parameter's name is that of an adapter's matrix.
    pub fn is_of_adapter(&self, param: Param) -> bool {
        ENDS.iter().any(|end| self.name(param).ends_with(end))
    }
}
