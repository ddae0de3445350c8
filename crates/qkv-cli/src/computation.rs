//! The call itself, by either engine: forward, weights, backward, each with its time. What is computed comes from
//! `description`, what it is computed from is `given`'s, what becomes of it is `results`'.

use crate::arguments::Engine;
use crate::given::Given;
use qkv::reference::Reference;
use qkv::{Attention, Element, Gradients, Inputs, Lsh, Output, Tensor, Tiles};
use std::time::Instant;

/// What a call gave.
#[derive(Debug)]
pub(crate) struct Computed<T: qkv::Number> {
    pub out: Output<T>,
    /// `[B, Hq, N, M]`, if they were asked for.
    pub weights: Option<Tensor<T, 4>>,
    /// If there was an upstream gradient.
    pub gradients: Option<Gradients<T>>,
    pub tiles: Tiles,
    pub forward_ms: f64,
    pub backward_ms: Option<f64>,
}

/// Computes an attention. Where it sees hash buckets, hashing is part of the forward pass and of its time.
pub(crate) fn compute<T: Element>(
    engine: Engine,
    attention: &Attention,
    hash: Option<Lsh>,
    given: &Given<T>,
    with_weights: bool,
) -> Result<Computed<T>, qkv::Error> {
    let hashed = |lsh: Lsh| timed(|| Ok((lsh.hash(given.q.view()?)?, lsh.hash(given.k.view()?)?)));
    let (hash_ms, buckets) = hash.map(hashed).transpose()?.unzip();
    let inputs = match &buckets {
        Some((queries, keys)) => given.inputs()?.buckets(queries, keys),
        None => given.inputs()?,
    };
    let tiles = attention.tiles(inputs)?;
    let upstream = given.upstream()?;
    let mut computed = match engine {
        // The library takes the engine that the score belongs to.
        Engine::Exact | Engine::Feature => {
            let (forward_ms, out) = timed(|| attention.forward(inputs))?;
            let weights = with_weights.then(|| all_weights(attention, inputs, &out, given.k.axes()[2])).transpose()?;
            let backward = upstream.map(|upstream| timed(|| attention.backward(inputs, &out, upstream))).transpose()?;
            let (backward_ms, gradients) = backward.unzip();
            Computed { out, weights, gradients, tiles, forward_ms, backward_ms }
        }
        Engine::Reference => {
            let definition = Reference::<f64>::exact();
            let (forward_ms, forward) = timed(|| definition.forward(attention, inputs))?;
            let backward = upstream
                .map(|upstream| timed(|| definition.backward(attention, inputs, &forward, upstream)))
                .transpose()?;
            let (backward_ms, gradients) = backward.unzip();
            Computed {
                out: forward.output.rounded(),
                weights: with_weights.then(|| forward.weights.rounded()),
                gradients: gradients.map(|gradients| gradients.rounded()),
                tiles,
                forward_ms,
                backward_ms,
            }
        }
    };
    computed.forward_ms = to_the_microsecond(computed.forward_ms + hash_ms.unwrap_or(0.0));
    Ok(computed)
}

/// A result, and how many milliseconds it took.
fn timed<R>(what: impl FnOnce() -> Result<R, qkv::Error>) -> Result<(f64, R), qkv::Error> {
    let start = Instant::now();
    let result = what()?;
    Ok((to_the_microsecond(start.elapsed().as_secs_f64() * 1e3), result))
}

/// Milliseconds with as many digits as a clock can mean.
fn to_the_microsecond(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// Every weight, one head after the other.
fn all_weights<T: Element>(
    attention: &Attention,
    inputs: Inputs<'_, T>,
    out: &Output<T>,
    m: usize,
) -> Result<Tensor<T, 4>, qkv::Error> {
    let weights = attention.weights(inputs, out)?;
    let [batch, heads, n] = out.lse.shape();
    let mut all = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            let head = weights.rows(b, h, 0..n)?;
            all.extend(head.data().iter().map(|&weight| T::narrow(weight)));
        }
    }
    Tensor::new(all, [batch, heads, n, m])
}
