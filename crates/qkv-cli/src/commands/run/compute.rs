//! The call itself, by whichever engine: forward, weights, backward, each with its time. What is computed comes from
//! `description`, what it is computed from is `given`'s, what becomes of it is `results`'.

use crate::arguments::Engine;
use crate::failure::Failure;
use crate::given::Given;
use qkv::reference::Reference;
use qkv::{Attention, Element, Gradients, Inputs, Lsh, Output, Tensor, Tiles, Upstream};
use qkv_cuda::{Cuda, Uses};
use serde::Serialize;
use std::path::Path;
use std::time::Instant;

/// What a call gave.
#[derive(Debug)]
pub(crate) struct Computed<T: qkv_simd::Element> {
    pub out: Output<T>,
    /// `[B, Hq, N, M]`, if they were asked for.
    pub weights: Option<Tensor<T, 4>>,
    /// If there was an upstream gradient.
    pub gradients: Option<Gradients<T>>,
    pub tiles: Tiles,
    pub forward_ms: f64,
    pub backward_ms: Option<f64>,
    /// What ran on a GPU, if anything.
    pub ran: Option<Ran>,
}

/// Which kernels ran, and where.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Ran {
    pub card: String,
    pub forward: String,
    pub backward: Option<String>,
}

/// Computes an attention. Where it sees hash buckets, hashing is part of the forward pass and of its time.
pub(crate) fn compute<T: Element>(
    engine: Engine,
    attention: &Attention,
    hash: Option<Lsh>,
    given: &Given<T>,
    seed: u64,
    with_weights: bool,
    path: Option<&Path>,
) -> Result<Computed<T>, Failure> {
    let told = |error: qkv::Error| Failure::refused(&error, path);
    let hashed = |lsh: Lsh| timed(|| Ok((lsh.hash(given.q.view()?)?, lsh.hash(given.k.view()?)?)));
    let (hash_ms, buckets) = hash.map(hashed).transpose().map_err(told)?.unzip();
    let inputs = match &buckets {
        Some((queries, keys)) => given.inputs().map_err(told)?.buckets(queries, keys),
        None => given.inputs().map_err(told)?,
    };
    let inputs = inputs.seed(seed);
    let tiles = attention.tiles(inputs).map_err(told)?;
    let upstream = given.upstream().map_err(told)?;
    let asked = (attention, inputs, upstream, with_weights.then(|| given.k.axes()[2]));
    let mut computed = match engine {
        Engine::Cuda => on_card(asked, tiles)?,
        engine => on_cpu(engine, asked, tiles).map_err(told)?,
    };
    computed.forward_ms = to_the_microsecond(computed.forward_ms + hash_ms.unwrap_or(0.0));
    Ok(computed)
}

/// What is computed of what, with how many keys where all weights are wanted.
type Asked<'a, T> = (&'a Attention, Inputs<'a, T>, Option<Upstream<'a, T>>, Option<usize>);

/// On the first GPU. Its time is that of the kernels, by the card's clock.
fn on_card<T: Element>(
    (attention, inputs, upstream, with_weights): Asked<'_, T>,
    tiles: Tiles,
) -> Result<Computed<T>, Failure> {
    let cuda = Cuda::new(0)?;
    let uses = Uses { backward: upstream.is_some(), weights: with_weights.is_some(), ..Uses::default() };
    let mut session = cuda.session(attention, inputs, attention.place, uses)?;
    let out = session.forward()?;
    let forward_ms = session.milliseconds().unwrap_or(0.0);
    let mut weights = None;
    if let Some(m) = with_weights {
        let [batch, heads, n, _] = out.values.shape();
        let mut all = Vec::new();
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            all.extend(session.rectangle([b, h], 0..n, 0..m)?.data().iter().map(|&weight| T::narrow(weight)));
        }
        weights = Some(Tensor::new(all, [batch, heads, n, m]).map_err(|error| Failure::refused(&error, None))?);
    }
    let gradients = upstream.map(|upstream| session.backward(upstream)).transpose()?;
    let backward_ms = gradients.as_ref().and_then(|_| session.milliseconds()).map(to_the_microsecond);
    let plan = session.plan();
    let ran = Ran { card: cuda.card().name.clone(), forward: plan.forward_kernel(), backward: plan.backward_kernel() };
    Ok(Computed { out, weights, gradients, tiles, forward_ms, backward_ms, ran: Some(ran) })
}

fn on_cpu<T: Element>(
    engine: Engine,
    (attention, inputs, upstream, with_weights): Asked<'_, T>,
    tiles: Tiles,
) -> Result<Computed<T>, qkv::Error> {
    Ok(match engine {
        // The library takes the engine that the score belongs to.
        Engine::Exact | Engine::Feature | Engine::Cuda => {
            let (forward_ms, out) = timed(|| attention.forward(inputs))?;
            let weights = with_weights.map(|m| all_weights(attention, inputs, &out, m)).transpose()?;
            let backward = upstream.map(|upstream| timed(|| attention.backward(inputs, &out, upstream))).transpose()?;
            let (backward_ms, gradients) = backward.unzip();
            Computed { out, weights, gradients, tiles, forward_ms, backward_ms, ran: None }
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
                weights: with_weights.map(|_| forward.weights.rounded()),
                gradients: gradients.map(|gradients| gradients.rounded()),
                tiles,
                forward_ms,
                backward_ms,
                ran: None,
            }
        }
    })
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
    let [batch, heads, n, _] = out.values.shape();
    let mut all = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            let head = weights.rows(b, h, 0..n)?;
            all.extend(head.data().iter().map(|&weight| T::narrow(weight)));
        }
    }
    Tensor::new(all, [batch, heads, n, m])
}
