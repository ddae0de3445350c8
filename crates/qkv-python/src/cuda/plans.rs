//! The plans of a process: one for each description, type, layout of tensors and device, made on first use. The least
//! recently used plans are evicted if there are many, so that a program with a new shape in every call does not grow. A
//! plan with which a CUDA graph was captured stays, because the graph reads its memory whenever it is replayed.

use super::on::On;
use crate::errors::refused_on_cuda;
use pyo3::intern;
use pyo3::prelude::*;
use qkv_cuda::{Cuda, Dtype, Error, Plan, PlanOptions, Stream, Strided, Tensors};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// Maximum number of plans: more than a model has shapes.
const MOST: usize = 256;

/// Maximum device memory that plans hold together; a single plan may exceed it.
const MOST_BYTES: usize = 256 << 20;

/// The key of a plan, except for the tensors.
pub struct Call<'a> {
    /// The device number.
    pub device: i32,
    /// The description's JSON.
    pub description: &'a str,
    /// The element type of q.
    pub dtype: Dtype,
    /// Whether the plan computes gradients.
    pub backward: bool,
    /// Whether the plan recomputes weights.
    pub weights: bool,
    /// The stream handle of the call.
    pub stream: u64,
}

impl<'a> Call<'a> {
    /// A forward pass.
    pub fn new(on: &On<'_>, description: &'a str, dtype: Dtype) -> Call<'a> {
        Call { device: on.device, description, dtype, backward: false, weights: false, stream: on.stream }
    }
}

#[derive(PartialEq, Eq, Hash)]
struct Key {
    device: i32,
    description: String,
    dtype: Dtype,
    backward: bool,
    weights: bool,
    layout: Vec<i64>,
}

struct Entry {
    plan: Arc<Plan>,
    /// The value of `lookups` when it was last used.
    used: u64,
    /// Whether a CUDA graph was captured with it.
    captured: bool,
}

#[derive(Default)]
struct Plans {
    entries: HashMap<Key, Entry>,
    lookups: u64,
    bytes: usize,
}

static PLANS: LazyLock<Mutex<Plans>> = LazyLock::new(Mutex::default);

static DEVICES: Mutex<Vec<(i32, Cuda)>> = Mutex::new(Vec::new());

fn plans() -> MutexGuard<'static, Plans> {
    PLANS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of plans, and their total device memory in bytes.
pub fn size() -> (usize, usize) {
    let plans = plans();
    (plans.entries.len(), plans.bytes)
}

/// Drops every plan with which no graph was captured.
pub fn forget() {
    let mut plans = plans();
    plans.entries.retain(|_, entry| entry.captured);
    plans.bytes = plans.entries.values().map(|entry| entry.plan.device_bytes()).sum();
}

/// The plan of a call. If there is none, it is made, which compiles, allocates and waits; that is an error while a CUDA
/// graph is being captured.
pub fn get(py: Python<'_>, call: &Call<'_>, attention: &qkv::Attention, tensors: &Tensors) -> PyResult<Arc<Plan>> {
    let cuda = device(py, call.device)?;
    let captured = cuda.is_capturing(Stream(call.stream)).map_err(refused_on_cuda)?;
    let key = Key::new(call, tensors);
    if let Some(plan) = plans().find(&key, captured) {
        return Ok(plan);
    }
    if captured {
        let [q, k] = [tensors.q.shape, tensors.k.shape];
        let pass = if call.backward { "backward" } else { "forward" };
        let what = format!("a {pass} pass of {}, q {q:?}, k {k:?}", call.dtype);
        return Err(refused_on_cuda(Error::Capturing { what }));
    }
    let options = PlanOptions::default().backward(call.backward).weights(call.weights);
    let made = py.detach(|| cuda.plan(attention, call.dtype, attention.place, tensors, options));
    let plan = Arc::new(made.map_err(refused_on_cuda)?);
    // Freeing device memory waits for the device, so drop plans with the GIL released.
    let forgotten = plans().insert(key, plan.clone());
    py.detach(|| drop(forgotten));
    Ok(plan)
}

/// The device with this number, opened once.
pub fn device(py: Python<'_>, number: i32) -> PyResult<Cuda> {
    let devices = || DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, cuda)) = devices().iter().find(|(known, _)| *known == number) {
        return Ok(cuda.clone());
    }
    if number >= 0 {
        // The Python package locates CUDA's compiler in this environment.
        py.import(intern!(py, "qkv._nvrtc"))?.call_method0(intern!(py, "look_for_compiler"))?;
    }
    let opened = py.detach(|| if number < 0 { Cuda::emulated() } else { Cuda::new(number as usize) });
    let cuda = opened.map_err(refused_on_cuda)?;
    let mut devices = devices();
    // If another thread has opened it in the meantime, keep the first one.
    if let Some((_, known)) = devices.iter().find(|(known, _)| *known == number) {
        return Ok(known.clone());
    }
    devices.push((number, cuda.clone()));
    Ok(cuda)
}

impl Key {
    fn new(call: &Call<'_>, tensors: &Tensors) -> Key {
        let mut layout = Vec::with_capacity(64);
        for tensor in [Some(&tensors.q), Some(&tensors.k), Some(&tensors.v), tensors.bias.as_ref()] {
            push(&mut layout, tensor);
        }
        push(&mut layout, tensors.table.as_ref());
        push(&mut layout, tensors.bits.as_ref());
        let (segments, buckets) = (tensors.segments.unzip(), tensors.buckets.unzip());
        let vectors = [
            tensors.scale,
            tensors.sinks,
            tensors.lengths,
            segments.0,
            segments.1,
            tensors.positions,
            buckets.0,
            buckets.1,
        ];
        layout.extend(vectors.iter().map(|vector| vector.map_or(-1, |vector| vector.len as i64)));
        layout.push(i64::from(tensors.seed.is_some()));
        let Call { device, description, dtype, backward, weights, .. } = *call;
        Key { device, description: description.into(), dtype, backward, weights, layout }
    }
}

/// Adds shape, strides and alignment. The stride of an axis of one element does not matter.
fn push(layout: &mut Vec<i64>, tensor: Option<&Strided>) {
    let Some(Strided { ptr, shape, strides }) = tensor else {
        layout.push(-1);
        return;
    };
    layout.push(i64::from(ptr.is_multiple_of(16)));
    for (&len, &stride) in shape.iter().zip(strides) {
        layout.extend([len as i64, if len == 1 { 0 } else { stride }]);
    }
}

impl Plans {
    fn find(&mut self, key: &Key, captured: bool) -> Option<Arc<Plan>> {
        self.lookups += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.lookups;
        entry.captured |= captured;
        Some(entry.plan.clone())
    }

    /// Inserts a plan and returns the evicted ones.
    fn insert(&mut self, key: Key, plan: Arc<Plan>) -> Vec<Arc<Plan>> {
        let mut forgotten = Vec::new();
        let (bytes, used) = (plan.device_bytes(), self.lookups);
        // If another thread has made it in the meantime, keep the first one.
        self.entries.entry(key).or_insert_with(|| {
            self.bytes += bytes;
            Entry { plan, used, captured: false }
        });
        while self.entries.len() > MOST || self.bytes > MOST_BYTES {
            let Some(plan) = self.forget_oldest() else { break };
            forgotten.push(plan);
        }
        forgotten
    }

    /// Removes the least recently used plan, except the newest and those of graphs.
    fn forget_oldest(&mut self) -> Option<Arc<Plan>> {
        let newest = self.entries.values().map(|entry| entry.used).max()?;
        let may_go = |entry: &Entry| !entry.captured && entry.used < newest;
        let oldest = self.entries.values().filter(|entry| may_go(entry)).map(|entry| entry.used).min()?;
        let mut found = self.entries.extract_if(|_, entry| may_go(entry) && entry.used == oldest);
        let (_, entry) = found.next()?;
        drop(found);
        self.bytes -= entry.plan.device_bytes();
        Some(entry.plan)
    }
}
