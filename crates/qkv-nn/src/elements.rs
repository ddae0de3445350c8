//! Elements that are in host memory, in device memory, or in both. Whoever needs them on one side copies them there on
//! first use; a write drops the copy on the other side. So an operation that a device does not have computes on the
//! host, and nothing else has to know. Those of a quantized matrix are on neither side until somebody needs them.

use crate::float::Float;
use crate::pool::Pool;
use qkv_cuda::operations::{Array, Kind, Operations, RowNorm};
use qkv_simd::quantized::QuantizedMatrix;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

/// Elements, row-major, wherever they are.
pub struct Elements<T: Float> {
    len: usize,
    /// At least `len` elements. On neither side, they are those of `source`, or all zero.
    host: OnceLock<Vec<T>>,
    device: OnceLock<OnDevice<T>>,
    source: Option<Arc<QuantizedMatrix>>,
    /// Where the host's memory goes in the end.
    pool: Option<Pool<T>>,
}

/// A copy in device memory.
struct OnDevice<T: Float> {
    operations: Operations,
    array: OnceLock<Array>,
    /// What the array is computed from when somebody needs it.
    pending: Option<PendingNorm<T>>,
    /// A copy as activations, where the array has another type.
    rounded: OnceLock<Array>,
}

/// A norm of `[rows, width]` whose result may never be needed: a product of few rows computes it by itself.
pub(crate) struct PendingNorm<T: Float> {
    pub norm: RowNorm,
    pub sizes: [usize; 2],
    /// What is normalized, shared so that nobody writes to it.
    pub _input: Arc<Elements<T>>,
}

impl<T: Float> OnDevice<T> {
    fn new(operations: &Operations, array: Array) -> OnDevice<T> {
        OnDevice {
            operations: operations.clone(),
            array: OnceLock::from(array),
            pending: None,
            rounded: OnceLock::new(),
        }
    }

    fn array(&self) -> &Array {
        self.array.get_or_init(|| {
            let PendingNorm { norm, sizes, .. } = self.pending.as_ref().expect("an array, or what it is computed from");
            self.operations.normalize(norm, *sizes)
        })
    }
}

impl<T: Float> fmt::Debug for Elements<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Elements({})", self.len)
    }
}

impl<T: Float> Drop for Elements<T> {
    fn drop(&mut self) {
        if let (Some(pool), Some(host)) = (&self.pool, self.host.take()) {
            pool.give(host);
        }
    }
}

impl<T: Float> Clone for Elements<T> {
    /// In memory of its own, on the side where they are.
    fn clone(&self) -> Self {
        let mut clone = Elements::zeros(self.len);
        clone.source = self.source.clone();
        if let Some(device) = self.device.get() {
            let copy = device.operations.duplicate(device.array());
            clone.device = OnceLock::from(OnDevice::new(&device.operations, copy));
        } else if let Some(host) = self.host.get() {
            clone.host = OnceLock::from(match &self.pool {
                Some(pool) => {
                    let mut data = pool.take(self.len);
                    data[..self.len].copy_from_slice(&host[..self.len]);
                    data
                }
                None => host[..self.len].to_vec(),
            });
            clone.pool = self.pool.clone();
        }
        clone
    }
}

impl<T: Float> From<Vec<T>> for Elements<T> {
    fn from(host: Vec<T>) -> Self {
        let (len, host) = (host.len(), OnceLock::from(host));
        Elements { len, host, device: OnceLock::new(), source: None, pool: None }
    }
}

impl<T: Float> Elements<T> {
    /// Zeros.
    pub fn zeros(len: usize) -> Self {
        Elements { len, host: OnceLock::new(), device: OnceLock::new(), source: None, pool: None }
    }

    /// Those of a quantized matrix, widened when somebody needs them.
    pub(crate) fn quantized(source: &Arc<QuantizedMatrix>) -> Self {
        let (len, source) = (source.rows() * source.width(), Some(source.clone()));
        Elements { len, host: OnceLock::new(), device: OnceLock::new(), source, pool: None }
    }

    /// Memory of a pool, at least `len` elements.
    pub(crate) fn pooled(pool: &Pool<T>, data: Vec<T>, len: usize) -> Self {
        let (host, pool) = (OnceLock::from(data), Some(pool.clone()));
        Elements { len, host, device: OnceLock::new(), source: None, pool }
    }

    /// An array.
    pub(crate) fn on_device(operations: &Operations, array: Array) -> Self {
        let (len, device) = (array.len(), OnceLock::from(OnDevice::new(operations, array)));
        Elements { len, host: OnceLock::new(), device, source: None, pool: None }
    }

    /// A norm that is computed when somebody needs it.
    pub(crate) fn normalized(operations: &Operations, pending: PendingNorm<T>) -> Self {
        let len = pending.sizes.iter().product();
        let (array, rounded) = (OnceLock::new(), OnceLock::new());
        let device = OnDevice { operations: operations.clone(), array, pending: Some(pending), rounded };
        Elements { len, host: OnceLock::new(), device: OnceLock::from(device), source: None, pool: None }
    }

    /// The norm that they are, as long as nobody needed its result.
    pub(crate) fn pending_norm(&self, operations: &Operations) -> Option<&RowNorm> {
        let device =
            self.device.get().filter(|device| device.operations.is(operations) && device.array.get().is_none());
        device.and_then(|device| device.pending.as_ref()).map(|pending| &pending.norm)
    }

    /// The device that they are on.
    pub(crate) fn operations(&self) -> Option<&Operations> {
        self.device.get().map(|device| &device.operations)
    }

    /// Number of elements. Unlike what [`Deref`] has, this copies none to the host.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether they are in device memory.
    pub(crate) fn is_on_device(&self) -> bool {
        self.device.get().is_some()
    }

    fn host(&self) -> &Vec<T> {
        self.host.get_or_init(|| {
            let host = match (self.device.get(), &self.source) {
                (Some(device), _) => T::from_floats(device.operations.read(device.array())),
                (None, Some(source)) => T::from_floats(widened(source)),
                (None, None) => vec![T::ZERO; self.len],
            };
            self.pool.iter().for_each(|pool| pool.adopt(host.len()));
            host
        })
    }

    /// An array of them: of f32 for parameters and their like, or of activations. What is there already stays as it is.
    pub(crate) fn array(&self, operations: &Operations, kind: Kind) -> Array {
        let device = self.device.get_or_init(|| OnDevice::new(operations, self.upload(operations, kind)));
        // What is on another device goes through the host.
        if device.operations.is(operations) { device.array().clone() } else { self.upload(operations, kind) }
    }

    fn upload(&self, operations: &Operations, kind: Kind) -> Array {
        if self.host.get().is_none() && self.device.get().is_none() && self.source.is_none() {
            return operations.zeros(kind, self.len, "parameters");
        }
        let floats = T::to_floats(&self.host()[..self.len]);
        match kind {
            Kind::F32 => operations.upload(kind, &floats, "parameters"),
            _ => operations.upload_activations(&floats),
        }
    }

    /// An array to write to; the copy on the host is dropped.
    pub(crate) fn array_mut(&mut self, operations: &Operations, kind: Kind) -> Array {
        let array = self.array(operations, kind);
        if self.device.get().is_some_and(|device| !device.operations.is(operations)) {
            self.device = OnceLock::from(OnDevice::new(operations, array.clone()));
        }
        self.forget_host();
        array
    }

    /// Drops the copy on the host, because the array was written to.
    pub(crate) fn forget_host(&mut self) {
        self.source = None;
        if let (Some(host), Some(pool)) = (self.host.take(), &self.pool) {
            pool.give(host);
        }
    }

    /// The elements as activations, for products: a copy that is made on first use, unless the array has that type.
    /// Whoever writes the array writes [that](Elements::rounded_copy) as well.
    pub(crate) fn rounded(&self, operations: &Operations) -> Array {
        let array = self.array(operations, Kind::F32);
        if array.kind() == operations.activation_kind() {
            return array;
        }
        let round = || {
            let rounded = operations.empty(operations.activation_kind(), self.len, "parameters");
            operations.narrow(&array, &rounded);
            rounded
        };
        match self.device.get().filter(|device| device.operations.is(operations)) {
            Some(device) => device.rounded.get_or_init(round).clone(),
            None => round(),
        }
    }

    /// The copy as activations, if there is one: whoever writes the array writes that as well, or
    /// [drops](Elements::forget_rounded) it.
    pub(crate) fn rounded_copy(&self) -> Option<Array> {
        self.device.get().and_then(|device| device.rounded.get()).cloned()
    }

    /// Drops the copy as activations.
    pub(crate) fn forget_rounded(&mut self) {
        if let Some(device) = self.device.get_mut() {
            device.rounded = OnceLock::new();
        }
    }

    /// Puts them into an array of someone else's memory.
    pub(crate) fn move_to(&mut self, operations: &Operations, array: Array) {
        if let Some(device) = self.device.get().filter(|device| device.operations.is(operations)) {
            operations.copy(&array, device.array());
        } else if self.host.get().is_some() || self.source.is_some() {
            operations.write(&array, &T::to_floats(&self.host()[..self.len]));
        } else {
            operations.clear(&array);
        }
        self.replace(operations, array);
    }

    /// Takes an array in their place.
    pub(crate) fn replace(&mut self, operations: &Operations, array: Array) {
        self.forget_host();
        self.device = OnceLock::from(OnDevice::new(operations, array));
    }

    /// Whether they are a part of this array.
    pub(crate) fn is_part_of(&self, array: &Array) -> bool {
        self.device.get().is_some_and(|device| device.array().is_part_of(array))
    }

    /// Sets them to zero, on the side where they are.
    pub(crate) fn clear(&mut self) {
        if let Some(device) = self.device.get() {
            device.operations.clear(device.array());
            self.forget_host();
        } else if let Some(host) = self.host.get_mut() {
            host.fill(T::ZERO);
        }
        self.source = None;
    }
}

impl<T: Float> Deref for Elements<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.host()[..self.len]
    }
}

impl<T: Float> DerefMut for Elements<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.host();
        (self.device, self.source) = (OnceLock::new(), None);
        let len = self.len;
        &mut self.host.get_mut().expect("just set")[..len]
    }
}

/// Rows that one thread widens before another is worth starting.
const WIDENED_ALONE: usize = 256;

/// The elements of a quantized matrix, by all threads of the CPU: not those of a pool, of which one may come here again
/// while it waits.
fn widened(matrix: &QuantizedMatrix) -> Vec<f32> {
    let mut widened = vec![0.0; matrix.rows() * matrix.width()];
    let each = matrix.rows().div_ceil(std::thread::available_parallelism().map_or(1, usize::from)).max(WIDENED_ALONE);
    std::thread::scope(|scope| {
        let mut parts = widened.chunks_mut(each * matrix.width()).enumerate();
        let first = parts.next();
        parts.for_each(|(at, rows)| drop(scope.spawn(move || matrix.widen(at * each, rows))));
        first.into_iter().for_each(|(_, rows)| matrix.widen(0, rows));
    });
    widened
}
