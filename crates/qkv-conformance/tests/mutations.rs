//! The test of the test: engines with a deliberate defect must break the bound, in every element type.

use qkv::half::{bf16, f16};
use qkv::{Attention, Blocks, Element, Gradients, Inputs, Mask, Output, Place, Result, Tensor, Upstream};
use qkv_conformance::case::{Case, Extras, Sizes};
use qkv_conformance::check::{definition, distances};
use qkv_conformance::{Engine, Exact};

/// A defect.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Defect {
    None,
    /// One tile of 64 queries × 64 keys is never visited.
    DroppedTile,
    /// The scale is 2 % too large, everywhere.
    Scale,
    /// The same in the forward pass only, with the right log-sum-exp beside the wrong output.
    ScaleOfOutput,
    /// The same in the backward pass only.
    ScaleOfGradients,
    /// A query sees one key beyond the diagonal.
    MaskOffByOne,
    /// When the running maximum of the online softmax grows, the running sum keeps its old scale.
    MissingRescale,
    /// Two keys of one head change places, their values do not.
    SwappedKeys,
}

const DEFECTS: [Defect; 7] = [
    Defect::DroppedTile,
    Defect::Scale,
    Defect::ScaleOfOutput,
    Defect::ScaleOfGradients,
    Defect::MaskOffByOne,
    Defect::MissingRescale,
    Defect::SwappedKeys,
];

/// Keys of a tile of the online softmax.
const TILE: usize = 64;

/// The exact engine with a defect.
struct Mutant(Defect);

fn scaled<T: Element>(attention: &Attention, inputs: &Inputs<'_, T>) -> Attention {
    let d = inputs.q.shape()[3] as f64;
    attention.clone().scale(1.02 / d.sqrt())
}

impl Mutant {
    fn attention<T: Element>(&self, attention: &Attention, inputs: &Inputs<'_, T>) -> Attention {
        match self.0 {
            Defect::DroppedTile => {
                let seen = (0..4).map(|row| (0..4).map(|column| (row, column) != (1, 1)).collect()).collect();
                attention.clone().mask(Mask::blocks(Blocks { size: TILE, seen }))
            }
            Defect::Scale => scaled(attention, inputs),
            Defect::MaskOffByOne => attention.clone().place(Place::Offset(1)),
            _ => attention.clone(),
        }
    }

    /// The keys, with two of the first head in each other's place.
    fn keys<T: Element>(&self, inputs: &Inputs<'_, T>) -> Tensor<T, 4> {
        let [b, h, m, d] = inputs.k.shape();
        let swap = self.0 == Defect::SwappedKeys;
        Tensor::from_fn([b, h, m, d], |[b, h, j, x]| {
            let j = if swap && h == 0 && j < 2 { 1 - j } else { j };
            inputs.k.at(b, h, j, x)
        })
    }
}

fn with_keys<'a, T: Element>(mut inputs: Inputs<'a, T>, k: &'a Tensor<T, 4>) -> Inputs<'a, T> {
    inputs.k = k.into();
    inputs
}

fn acc<T: Element>(x: f64) -> T::Acc {
    <T::Acc as qkv_simd::Element>::of_f64(x)
}

/// Divides by sums that were not rescaled when the maximum grew.
fn without_rescale<T: Element>(out: &mut Output<T>) -> Result<()> {
    let (truth, _) = definition(&case(), &case().data::<T>().wide())?;
    let [b, h, n, m] = truth.scores.shape();
    let dv = out.values.shape()[3];
    for at in 0..b * h * n {
        let place = [at / (h * n), at / n % h, at % n];
        let [b, h, i] = place;
        let scores: Vec<f64> = (0..m).map(|j| truth.scores[[b, h, i, j]]).collect();
        let (mut most, mut sum) = (f64::NEG_INFINITY, 0.0);
        for tile in scores.chunks(TILE) {
            most = tile.iter().copied().fold(most, f64::max);
            sum += tile.iter().map(|score| (score - most).exp()).sum::<f64>();
        }
        let wrong = most + sum.ln();
        let factor = (truth.output.lse[place] - wrong).exp();
        out.lse[place] = acc::<T>(wrong);
        for x in 0..dv {
            out.values[[b, h, i, x]] = T::of_f64(truth.output.values[[b, h, i, x]] * factor);
        }
    }
    Ok(())
}

impl Engine for Mutant {
    fn forward<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        let (changed, k) = (self.attention(attention, &inputs), self.keys(&inputs));
        let mut out = Exact.forward(&changed, with_keys(inputs, &k))?;
        match self.0 {
            Defect::ScaleOfOutput => out.values = Exact.forward(&scaled(attention, &inputs), inputs)?.values,
            Defect::MissingRescale => without_rescale(&mut out)?,
            _ => {}
        }
        Ok(out)
    }

    fn backward<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
    ) -> Result<Gradients<T>> {
        let (changed, k) = (self.attention(attention, &inputs), self.keys(&inputs));
        let mut grad = Exact.backward(&changed, with_keys(inputs, &k), out, upstream)?;
        if self.0 == Defect::ScaleOfGradients {
            let larger = |x: &T| T::of_f64(x.to_f64() * 1.02);
            (grad.q, grad.k) = (grad.q.map(larger), grad.k.map(larger));
        }
        Ok(grad)
    }

    fn weights<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        b: usize,
        h: usize,
    ) -> Result<Tensor<T::Acc, 2>> {
        let (changed, k) = (self.attention(attention, &inputs), self.keys(&inputs));
        Exact.weights(&changed, with_keys(inputs, &k), out, b, h)
    }
}

fn case() -> Case {
    let attention = Attention::scaled_dot().mask(Mask::causal());
    Case::new("causal", attention, Sizes::new(150, 150, 16).heads(2, 4, 2), Extras::default())
}

/// The results that a defect breaks.
fn broken<T: Element>(defect: Defect) -> Vec<&'static str> {
    let distances = distances::<T>(&Mutant(defect), &case()).expect("the case is well formed");
    distances.into_iter().filter(|distance| !distance.holds()).map(|distance| distance.name).collect()
}

fn bites<T: Element>() {
    assert_eq!(broken::<T>(Defect::None), [""; 0], "{}: the engine itself holds", T::NAME);
    for defect in DEFECTS {
        let broken = broken::<T>(defect);
        // The results that the defect itself corrupts, each of which has to be out of bounds on its own.
        let expected: &[&str] = match defect {
            Defect::ScaleOfOutput => &["out"],
            Defect::ScaleOfGradients => &["d_q", "d_k"],
            _ => &["out", "lse", "weights", "d_q", "d_k", "d_v"],
        };
        for name in expected {
            assert!(broken.contains(name), "{} {defect:?}: {name} holds, only {broken:?} are out of bounds", T::NAME);
        }
    }
}

#[test]
fn every_defect_breaks_the_bound_in_f32() {
    bites::<f32>();
}

#[test]
fn every_defect_breaks_the_bound_in_f64() {
    bites::<f64>();
}

#[test]
fn every_defect_breaks_the_bound_in_bf16() {
    bites::<bf16>();
}

#[test]
fn every_defect_breaks_the_bound_in_f16() {
    bites::<f16>();
}
