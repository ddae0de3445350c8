//! Elements in host memory, device memory, or both. The first use on one side copies them there; a write drops the copy
//! on the other side. So an operation that a device lacks runs on the host, transparently to the rest of the tape. The
//! elements of a quantized matrix are on neither side until they are first used.

use crate::float::Float;
use crate::loops::Fill;
use crate::pool::Pool;
use qkv_cuda::operations::{Array, Kind, Operations, RowNorm};
use qkv_simd::Isa;
use qkv_simd::quantized::QuantizedMatrix;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

/// Elements in row-major order, on the host, a device, or both.
pub struct Elements<T: Float> {
    len: usize,
    /// At least `len` elements. If neither side holds them, they are those of `source`, or all zero.
    host: OnceLock<Vec<T>>,
    device: OnceLock<OnDevice<T>>,
    source: Option<Arc<QuantizedMatrix>>,
    /// The pool to which the host memory returns when dropped.
    pool: Option<Pool<T>>,
}

/// A copy in device memory.
struct OnDevice<T: Float> {
    operations: Operations,
    array: OnceLock<Array>,
    /// The norm that computes the array on first use.
    pending: Option<PendingNorm<T>>,
    /// A copy in the activation type, if the array has another type.
    rounded: OnceLock<Array>,
}

/// A norm of `[rows, width]` whose result may never be materialized: a product of few rows computes the norm itself.
pub(crate) struct PendingNorm<T: Float> {
    pub norm: RowNorm,
    pub sizes: [usize; 2],
    /// The input of the norm; holding it makes it shared, so that nobody writes to it in place.
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
    /// A deep copy, on the side that holds the elements (the device if both do).
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

    /// The elements of a quantized matrix, widened on first use.
    pub(crate) fn quantized(source: &Arc<QuantizedMatrix>) -> Self {
        let (len, source) = (source.rows() * source.width(), Some(source.clone()));
        Elements { len, host: OnceLock::new(), device: OnceLock::new(), source, pool: None }
    }

    /// A pool's buffer of at least `len` elements.
    pub(crate) fn pooled(pool: &Pool<T>, data: Vec<T>, len: usize) -> Self {
        let (host, pool) = (OnceLock::from(data), Some(pool.clone()));
        Elements { len, host, device: OnceLock::new(), source: None, pool }
    }

    /// The elements of a device array.
    pub(crate) fn on_device(operations: &Operations, array: Array) -> Self {
        let (len, device) = (array.len(), OnceLock::from(OnDevice::new(operations, array)));
        Elements { len, host: OnceLock::new(), device, source: None, pool: None }
    }

    /// The result of a norm, computed on first use.
    pub(crate) fn normalized(operations: &Operations, pending: PendingNorm<T>) -> Self {
        let len = pending.sizes.iter().product();
        let (array, rounded) = (OnceLock::new(), OnceLock::new());
        let device = OnDevice { operations: operations.clone(), array, pending: Some(pending), rounded };
        Elements { len, host: OnceLock::new(), device: OnceLock::from(device), source: None, pool: None }
    }

    /// The norm that produces these elements, if it has not been computed yet.
    pub(crate) fn pending_norm(&self, operations: &Operations) -> Option<&RowNorm> {
        let device =
            self.device.get().filter(|device| device.operations.is(operations) && device.array.get().is_none());
        device.and_then(|device| device.pending.as_ref()).map(|pending| &pending.norm)
    }

    /// The device that holds them, if any.
    pub(crate) fn operations(&self) -> Option<&Operations> {
        self.device.get().map(|device| &device.operations)
    }

    /// Number of elements. Unlike the slice's `len` through [`Deref`], this copies nothing to the host.
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

    /// The elements as a device array: of f32 for parameters and the like, or of activations. An array that already
    /// exists keeps its type.
    pub(crate) fn array(&self, operations: &Operations, kind: Kind) -> Array {
        let device = self.device.get_or_init(|| OnDevice::new(operations, self.upload(operations, kind)));
        // Elements on another device are copied through the host.
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

    /// A device array to write to; the host copy is dropped.
    pub(crate) fn array_mut(&mut self, operations: &Operations, kind: Kind) -> Array {
        let array = self.array(operations, kind);
        if self.device.get().is_some_and(|device| !device.operations.is(operations)) {
            self.device = OnceLock::from(OnDevice::new(operations, array.clone()));
        }
        self.forget_host();
        array
    }

    /// Drops the host copy, because the array was written to.
    pub(crate) fn forget_host(&mut self) {
        self.source = None;
        if let (Some(host), Some(pool)) = (self.host.take(), &self.pool) {
            pool.give(host);
        }
    }

    /// The elements in the activation type, for products: a copy made on first use, unless the array already has that
    /// type. Code that writes the array must also update the [copy](Elements::rounded_copy).
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

    /// The copy in the activation type, if one exists. Code that writes the array must also update this copy or
    /// [drop](Elements::forget_rounded) it.
    pub(crate) fn rounded_copy(&self) -> Option<Array> {
        self.device.get().and_then(|device| device.rounded.get()).cloned()
    }

    /// Drops the copy in the activation type.
    pub(crate) fn forget_rounded(&mut self) {
        if let Some(device) = self.device.get_mut() {
            device.rounded = OnceLock::new();
        }
    }

    /// Moves them into an array whose memory someone else owns.
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

    /// Replaces them with an array.
    pub(crate) fn replace(&mut self, operations: &Operations, array: Array) {
        self.forget_host();
        self.device = OnceLock::from(OnDevice::new(operations, array));
    }

    /// Whether they are a slice of this array.
    pub(crate) fn is_part_of(&self, array: &Array) -> bool {
        self.device.get().is_some_and(|device| device.array().is_part_of(array))
    }

    /// Sets them to zero, on the side that holds them.
    pub(crate) fn clear(&mut self) {
        if let Some(device) = self.device.get() {
            device.operations.clear(device.array());
            self.forget_host();
        } else if let Some(host) = self.host.get_mut() {
            T::run(Isa::best(), Fill(host, T::ZERO).into());
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

/// Fewest rows that justify another thread.
const WIDENED_ALONE: usize = 256;

/// Widens a quantized matrix on all threads of the CPU. These are not the threads of a pool, because a pool thread that
/// waits may steal a task that enters this function again.
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
