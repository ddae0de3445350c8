//! The call itself, on one of the engines: forward, weights and backward. The two passes are timed.

use super::args::Engine;
use super::over_ranks::{self, Division, RankReport};
use super::tensors::InputTensors;
use crate::failure::Failure;
use qkv::reference::Reference;
use qkv::{Attention, Element, Gradients, Inputs, Lsh, Output, Tensor, Tiles, Upstream};
use qkv_cuda::{Cuda, PlanOptions};
use qkv_ranks::Number;
use serde::Serialize;
use std::path::Path;
use std::time::Instant;

/// The results of a call.
#[derive(Debug)]
pub(crate) struct RunOutput<T: qkv_simd::Element> {
    pub out: Output<T>,
    /// `[B, Hq, N, M]`, with `--weights`.
    pub weights: Option<Tensor<T, 4>>,
    /// With an upstream gradient.
    pub gradients: Option<Gradients<T>>,
    pub tiles: Tiles,
    pub forward_ms: f64,
    pub backward_ms: Option<f64>,
    /// With `--device cuda`.
    pub kernels: Option<DeviceKernels>,
    /// On several ranks.
    pub ranks: Option<RankReport>,
}

/// The kernels that ran on a GPU.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DeviceKernels {
    pub device: String,
    pub forward: String,
    pub backward: Option<String>,
}

/// How an attention is computed.
#[derive(Clone, Debug)]
pub(crate) struct CallOptions<'a> {
    pub engine: Engine,
    /// The seed of everything drawn at random.
    pub seed: u64,
    pub with_weights: bool,
    /// The file of the tensors.
    pub path: Option<&'a Path>,
    pub division: &'a Division,
}

/// Computes an attention; `None` on ranks other than the first. Hashing for LSH buckets counts as part of the forward
/// pass.
pub(crate) fn compute<T>(
    attention: &Attention,
    hash: Option<Lsh>,
    tensors: &InputTensors<T>,
    options: &CallOptions<'_>,
) -> Result<Option<RunOutput<T>>, Failure>
where
    T: Element + Number,
    T::Acc: Element<Acc = T::Acc> + Number,
{
    let &CallOptions { engine, seed, with_weights, path, division } = options;
    let refused = |error: qkv::Error| Failure::refused(&error, path);
    let hashed = |lsh: Lsh| timed(|| Ok((lsh.hash(tensors.q.view()?)?, lsh.hash(tensors.k.view()?)?)));
    let (hash_ms, buckets) = hash.map(hashed).transpose().map_err(refused)?.unzip();
    let inputs = match &buckets {
        Some((queries, keys)) => tensors.inputs().map_err(refused)?.buckets(queries, keys),
        None => tensors.inputs().map_err(refused)?,
    };
    let inputs = inputs.seed(seed);
    let tiles = attention.tiles(inputs).map_err(refused)?;
    let upstream = tensors.upstream().map_err(refused)?;
    let call = (attention, inputs, upstream, with_weights.then(|| tensors.k.axes()[2]));
    let alone = division.ranks.size() == 1;
    let mut computed = match engine {
        Engine::Exact | Engine::Feature if !alone => {
            let computed = over_ranks::compute(call, tiles, division).map_err(|error| match error {
                qkv_ranks::Error::Attention(error) => refused(error),
                error => error.into(),
            })?;
            let Some(computed) = computed else { return Ok(None) };
            computed
        }
        Engine::Cuda | Engine::Reference if !alone => {
            let what = format!("`{}` runs in one process, not on {} ranks", engine.name(), division.ranks.size());
            return Err(Failure::new(what).hint("leave out `--engine` or `--device`, or run without ranks"));
        }
        Engine::Cuda => on_device(call, tiles)?,
        // The library picks the engine for the score.
        Engine::Exact | Engine::Feature => on_cpu(call, tiles).map_err(refused)?,
        Engine::Reference => {
            // Compiled for f64 only: widening is exact, so every type gives the same bits.
            let wide = tensors.widened();
            let inputs = match &buckets {
                Some((queries, keys)) => wide.inputs().map_err(refused)?.buckets(queries, keys),
                None => wide.inputs().map_err(refused)?,
            };
            let upstream = wide.upstream().map_err(refused)?;
            let call = (attention, inputs.seed(seed), upstream, with_weights.then_some(0));
            by_reference(call, tiles).map_err(refused)?.rounded()
        }
    };
    computed.forward_ms = to_the_microsecond(computed.forward_ms + hash_ms.unwrap_or(0.0));
    Ok(Some(computed))
}

/// The attention, its inputs, the upstream gradients, and with `--weights` the number of keys.
pub(super) type Call<'a, T> = (&'a Attention, Inputs<'a, T>, Option<Upstream<'a, T>>, Option<usize>);

/// Computes on the first GPU. The time is that of the kernels, by the device's clock.
fn on_device<T: Element>(
    (attention, inputs, upstream, with_weights): Call<'_, T>,
    tiles: Tiles,
) -> Result<RunOutput<T>, Failure> {
    let cuda = Cuda::new(0)?;
    let options = PlanOptions::default().backward(upstream.is_some()).weights(with_weights.is_some());
    let mut session = cuda.session(attention, inputs, attention.place, options)?;
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
    let kernels = DeviceKernels {
        device: cuda.device().name.clone(),
        forward: plan.forward_kernel(),
        backward: plan.backward_kernel(),
    };
    Ok(RunOutput { out, weights, gradients, tiles, forward_ms, backward_ms, kernels: Some(kernels), ranks: None })
}

fn on_cpu<T: Element>(
    (attention, inputs, upstream, with_weights): Call<'_, T>,
    tiles: Tiles,
) -> Result<RunOutput<T>, qkv::Error> {
    let (forward_ms, out) = timed(|| attention.forward(inputs))?;
    let weights = with_weights.map(|m| all_weights(attention, inputs, &out, m)).transpose()?;
    let backward = upstream.map(|upstream| timed(|| attention.backward(inputs, &out, upstream))).transpose()?;
    let (backward_ms, gradients) = backward.unzip();
    Ok(RunOutput { out, weights, gradients, tiles, forward_ms, backward_ms, kernels: None, ranks: None })
}

fn by_reference(
    (attention, inputs, upstream, with_weights): Call<'_, f64>,
    tiles: Tiles,
) -> Result<RunOutput<f64>, qkv::Error> {
    let reference = Reference::<f64>::exact();
    let (forward_ms, forward) = timed(|| reference.forward(attention, inputs))?;
    let backward =
        upstream.map(|upstream| timed(|| reference.backward(attention, inputs, &forward, upstream))).transpose()?;
    let (backward_ms, gradients) = backward.unzip();
    let weights = with_weights.map(|_| forward.weights);
    Ok(RunOutput {
        out: forward.output,
        weights,
        gradients,
        tiles,
        forward_ms,
        backward_ms,
        kernels: None,
        ranks: None,
    })
}

impl RunOutput<f64> {
    /// Rounds the results to another type.
    fn rounded<T: Element>(self) -> RunOutput<T> {
        RunOutput {
            out: self.out.rounded(),
            weights: self.weights.map(|weights| weights.rounded()),
            gradients: self.gradients.map(|gradients| gradients.rounded()),
            tiles: self.tiles,
            forward_ms: self.forward_ms,
            backward_ms: self.backward_ms,
            kernels: self.kernels,
            ranks: self.ranks,
        }
    }
}

/// A result and its milliseconds.
pub(super) fn timed<R, E>(work: impl FnOnce() -> Result<R, E>) -> Result<(f64, R), E> {
    let start = Instant::now();
    let result = work()?;
    Ok((to_the_microsecond(start.elapsed().as_secs_f64() * 1e3), result))
}

/// Milliseconds, without the digits that the clock cannot resolve.
fn to_the_microsecond(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// All weights, head by head.
pub(super) fn all_weights<T: Element>(
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
