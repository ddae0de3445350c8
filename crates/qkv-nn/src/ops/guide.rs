//! Guided attention (Tachibana et al. 2018, arXiv:1710.08969): a penalty on attention weight far from the diagonal, for
//! models such as speech synthesis that read their input from left to right while they write.
//!
//! The penalty of a weight depends on query and key: `1 − exp(−d²/2g²)`, with `d` the difference of their places as
//! fractions of their sequences. Tiled attention never materializes its weights, but a sum of weights times a function
//! of the key is an attention over different values. So the Gaussian is expanded as a Fourier series, whose terms are
//! products of a function of the query and a function of the key: the same queries and keys attend to sines and cosines
//! of the keys' places. The series is truncated beyond [`NEGLIGIBLE`] standard deviations.

use super::attention::AttendOptions;
use crate::float::Float;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Kind, Operations};
use std::f64::consts::TAU;

/// Guidance of an attention towards the diagonal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guide {
    /// Factor of the penalty in the loss.
    pub weight: f64,
    /// How far from the diagonal attention may spread, `g`, as a fraction of the length: 0.2 in the paper.
    pub width: f64,
}

/// Number of standard deviations beyond which a Gaussian is negligible: below 3e-7.
const NEGLIGIBLE: f64 = 5.5;

/// A term of the series: its angular frequency, its factor, and whether it is a sine.
#[derive(Clone, Copy)]
struct Term {
    frequency: f64,
    factor: f64,
    sine: bool,
}

impl Term {
    fn at(self, place: f64) -> f64 {
        let angle = self.frequency * place;
        if self.sine { angle.sin() } else { angle.cos() }
    }
}

impl Guide {
    /// The penalty of a weight by definition; places are fractions of the sequences.
    pub fn penalty(&self, query: f64, key: f64) -> f64 {
        1.0 - (-(query - key).powi(2) / (2.0 * self.width * self.width)).exp()
    }

    /// The constant term of the Gaussian's Fourier series, and the other terms.
    fn series(&self) -> (f64, Vec<Term>) {
        // Distances are at most 1; the period is long enough that the Gaussian has vanished where the next copy begins.
        let period = 1.0 + (NEGLIGIBLE * self.width).max(1.0);
        let constant = self.width * TAU.sqrt() / period;
        let count = (NEGLIGIBLE * period / (TAU * self.width)).ceil() as usize;
        let terms = (1..=count).flat_map(|k| {
            let frequency = TAU * k as f64 / period;
            let factor = 2.0 * constant * (-(frequency * self.width).powi(2) / 2.0).exp();
            [false, true].map(|sine| Term { frequency, factor, sine })
        });
        (constant, terms.collect())
    }
}

/// The center of a token, as a fraction of its sequence.
fn place(at: usize, length: usize) -> f64 {
    (at as f64 + 0.5) / length.max(1) as f64
}

/// Frequencies, phases and factors of terms, `[3, width]`, padded with zeros.
fn waves(terms: &[Term], width: usize, factor: impl Fn(&Term) -> f64) -> Vec<f32> {
    let mut waves = vec![0.0; 3 * width];
    for (at, term) in terms.iter().enumerate() {
        let phase = if term.sine { TAU / 4.0 } else { 0.0 };
        for (row, x) in [term.frequency, phase, factor(term)].into_iter().enumerate() {
            waves[row * width + at] = x as f32;
        }
    }
    waves
}

impl<T: Float> Tape<'_, T> {
    /// For attention from `q [B, N, Hq·D]` to `k [B, M, Hk·D]`, adds the guide's weight times its mean penalty over the
    /// rows of weights to the tape's [penalty](Tape::penalty), and the gradient to those of `q` and `k`. Padding does
    /// not count. Does nothing outside training. If the tape [leads](Tape::lead), distances are measured from the given
    /// places instead of the diagonal.
    ///
    /// # Errors
    /// As [`attend`](Tape::attend).
    pub fn guide(&mut self, q: &Var<T>, k: &Var<T>, guide: Guide, options: &AttendOptions<'_>) -> qkv::Result<()> {
        if !self.is_training() || guide.weight == 0.0 {
            return Ok(());
        }
        let (&[batch, queries, _], &[_, keys, _]) = (q.shape(), k.shape()) else {
            panic!("attention takes [B, L, H·D], not {:?} and {:?}", q.shape(), k.shape())
        };
        let (heads, width) = (options.heads, q.value.width() / options.heads.query);
        let attention = options.attention.clone().for_evaluation();
        let options = AttendOptions { attention: &attention, label: "", entropy: 0.0, ..*options };
        let length = |lengths: Option<&[usize]>, b: usize, all: usize| lengths.map_or(all, |lengths| lengths[b]);
        let rows: usize = (0..batch).map(|b| heads.query * length(options.query_lengths, b, queries)).sum();
        let led = self.led_places().map(<[f32]>::to_vec);
        if let Some(led) = &led {
            assert_eq!(led.len(), batch * queries, "a place for every query");
        }
        let scale = self.penalty_factor() * guide.weight / rows.max(1) as f64;
        let (constant, terms) = guide.series();
        if let Some(operations) = self.machine.cuda() {
            self.add_penalty(scale * (1.0 - constant) * rows as f64);
            return self.guide_on_cuda(operations, [q, k], led, &terms, scale, &options);
        }
        let mut gaussian = constant * rows as f64;
        // The values are as wide as the keys, which every engine supports.
        for terms in terms.chunks(width) {
            let mut values = vec![T::ZERO; batch * keys * heads.key * width]; // (B, M, Hk·D)
            for (at, row) in values.chunks_exact_mut(width).enumerate() {
                let (b, key) = (at / heads.key / keys, at / heads.key % keys);
                let place = place(key, length(options.key_lengths, b, keys));
                row.iter_mut().zip(terms).for_each(|(x, term)| *x = T::of_f64(term.at(place)));
            }
            let values = self.constant(Tensor::new(values, &[batch, keys, heads.key * width]));
            let out = self.attend(q, k, &values, None, &options)?; // (B, N, Hq·D)
            let mut gradient = Tensor::zeros(self.pool, out.shape());
            let both = gradient.data_mut().chunks_exact_mut(width).zip(out.value.data().chunks_exact(width));
            for (at, (gradient, found)) in both.enumerate() {
                let (b, query) = (at / heads.query / queries, at / heads.query % queries);
                let count = length(options.query_lengths, b, queries);
                if query >= count {
                    continue;
                }
                let place = led.as_ref().map_or(place(query, count), |led| f64::from(led[b * queries + query]));
                for ((gradient, found), term) in gradient.iter_mut().zip(found).zip(terms) {
                    let factor = term.factor * term.at(place);
                    gaussian += factor * found.to_f64();
                    *gradient = T::of_f64(-scale * factor);
                }
            }
            self.seed(&out, gradient);
        }
        self.add_penalty(scale * (rows as f64 - gaussian));
        Ok(())
    }

    /// The same for the terms of the series, entirely on the device.
    fn guide_on_cuda(
        &mut self,
        operations: &Operations,
        [q, k]: [&Var<T>; 2],
        led: Option<Vec<f32>>,
        terms: &[Term],
        scale: f64,
        options: &AttendOptions<'_>,
    ) -> qkv::Result<()> {
        let (&[batch, queries, _], &[_, keys, _]) = (q.shape(), k.shape()) else { unreachable!("the caller looked") };
        let (heads, width) = (options.heads, q.value.width() / options.heads.query);
        let lengths = |lengths: Option<&[usize]>, all: usize| {
            let lengths: Vec<u32> = (0..batch).map(|b| lengths.map_or(all, |lengths| lengths[b]) as u32).collect();
            operations.upload(Kind::U32, &lengths, "lengths")
        };
        let (query_lengths, key_lengths) =
            (lengths(options.query_lengths, queries), lengths(options.key_lengths, keys));
        let totals = self.penalty_totals(operations);
        let led = led.map(|led| operations.upload(Kind::F32, &led, "places"));
        for terms in terms.chunks(width) {
            let values = Tensor::activations(operations, &[batch, keys, heads.key * width]);
            let of_keys = operations.constant(&waves(terms, width, |_| 1.0));
            let sizes = [keys, heads.key, width];
            operations.place_waves(&values.array(operations), &key_lengths, None, &of_keys, sizes);
            let values = self.constant(values);
            let out = self.attend(q, k, &values, None, options)?; // (B, N, Hq·D)
            let gradient = Tensor::activations(operations, out.shape());
            // The factors depend on the number of rows in the batch, so they are not a cached constant.
            let of_queries = waves(terms, width, |term| -scale * term.factor);
            let of_queries = operations.upload(Kind::F32, &of_queries, "waves");
            let array = gradient.array(operations);
            let sizes = [queries, heads.query, width];
            operations.place_waves(&array, &query_lengths, led.as_ref(), &of_queries, sizes);
            let size = [batch * queries, heads.query * width];
            operations.add_product([&array, &out.value.array(operations)], size, &totals);
            self.seed(&out, gradient);
        }
        Ok(())
    }
}
