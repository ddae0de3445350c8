//! [`Borrowed`]: the memory of any Python array, borrowed for the duration of a call without a copy. It is accessed
//! through DLPack's exchange functions (PyTorch), NumPy's array interface, a DLPack capsule, or the buffer protocol, in
//! this order.

use crate::dlpack::{self, Exchange, FromPyObject, Managed, ManagedVersioned};
use crate::dtype::{Dtype, Typed};
use crate::errors::{kind, refused, value};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple, PyType};
use qkv::{Tensor, View, ViewMut};
use std::cell::RefCell;
use std::mem::MaybeUninit;

/// Maximum rank that is described; tensors of a call have at most 4 axes.
const RANK: usize = 8;

/// The memory in which the arrays of a call must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Host memory.
    Host,
    /// Memory of the CUDA device with this number. Producers are asked to make their memory ready for this stream,
    /// numbered as in DLPack; −1 if the caller takes care of that.
    Cuda { device: i32, stream: i64 },
}

/// The number of the emulated CUDA device, whose memory is the host's; for tests.
pub const EMULATED: i32 = -1;

/// An array that Python owns: address, type, shape and strides in elements. It holds a reference that keeps the memory
/// alive.
pub struct Borrowed {
    name: &'static str,
    data: *mut u8,
    dtype: Dtype,
    rank: usize,
    shape: [usize; RANK],
    strides: [isize; RANK],
    read_only: bool,
    _owner: Owner,
}

// SAFETY: an address with a description; the memory is accessed like that of views, while the owner lives.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

/// The reference that keeps the memory alive.
#[expect(dead_code, reason = "held until the call ends")]
enum Owner {
    Object(Py<PyAny>),
    Buffer(PyUntypedBuffer),
}

impl Borrowed {
    /// The memory of an array on the host.
    pub fn new(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Borrowed> {
        Borrowed::new_in(name, object, Memory::Host)
    }

    /// The memory of an array, on the host or on a device.
    pub fn new_in(name: &'static str, object: &Bound<'_, PyAny>, memory: Memory) -> PyResult<Borrowed> {
        if let Some(exchange) = exchange_of(&object.get_type())?
            && let Some(tensor_from_object) = exchange.tensor_from_object
        {
            return Borrowed::exchanged(name, object, tensor_from_object, memory);
        }
        let py = object.py();
        if memory == Memory::Host
            && let Ok(interface) = object.getattr(intern!(py, "__array_interface__"))
        {
            return Borrowed::of_interface(name, object, &interface);
        }
        if let Ok(device) = object.getattr(intern!(py, "__dlpack_device__")) {
            let (kind, id): (i32, i32) = device.call0()?.extract()?;
            memory.check(name, dlpack::Device { kind, id })?;
            return Borrowed::of_capsule(name, object, memory);
        }
        if memory == Memory::Host
            && let Ok(buffer) = PyUntypedBuffer::get(object)
        {
            return Borrowed::of_buffer(name, buffer);
        }
        Err(kind(format!(
            "`{name}` is of type {}, expected an array: NumPy, PyTorch, JAX, or anything with `__dlpack__` or a buffer",
            object.get_type().name()?
        )))
    }

    fn described(name: &'static str, dtype: Dtype, data: *mut u8, owner: Owner) -> Borrowed {
        let (shape, strides) = ([1; RANK], [0; RANK]);
        Borrowed { name, data, dtype, rank: 0, shape, strides, read_only: false, _owner: owner }
    }

    /// Sets its axes; strides are in elements, row-major if absent.
    fn axes(
        mut self,
        shape: impl ExactSizeIterator<Item = i64>,
        strides: Option<impl Iterator<Item = i64>>,
    ) -> PyResult<Borrowed> {
        let name = self.name;
        self.rank = shape.len();
        if self.rank > RANK {
            return Err(value(format!("`{name}` has {} axes, expected at most 4", self.rank)));
        }
        for (to, len) in self.shape.iter_mut().zip(shape) {
            *to = usize::try_from(len).map_err(|_| value(format!("`{name}` has an axis of {len}")))?;
        }
        match strides {
            Some(strides) => self.strides.iter_mut().zip(strides).for_each(|(to, stride)| *to = stride as isize),
            None => {
                let mut step = 1isize;
                for axis in (0..self.rank).rev() {
                    self.strides[axis] = step;
                    step = step.saturating_mul(self.shape[axis].max(1) as isize);
                }
            }
        }
        let empty = self.shape[..self.rank].contains(&0);
        if !empty && self.data.is_null() {
            return Err(value(format!("`{name}` has no memory")));
        }
        if !empty && !self.data.addr().is_multiple_of(self.dtype.size()) {
            return Err(value(format!("`{name}` is not aligned to its elements in memory; copy it first")));
        }
        Ok(self)
    }

    fn exchanged(
        name: &'static str,
        object: &Bound<'_, PyAny>,
        from: FromPyObject,
        memory: Memory,
    ) -> PyResult<Borrowed> {
        let mut tensor = MaybeUninit::<dlpack::Tensor>::uninit();
        // SAFETY: the function came from the object's type, and `tensor` has room for the result.
        if unsafe { from(object.as_ptr().cast(), tensor.as_mut_ptr()) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: 0 means that it was filled in; its pointers are valid as long as the object, which the owner holds.
        unsafe { Borrowed::of_tensor(name, tensor.assume_init_ref(), Owner::Object(object.clone().unbind()), memory) }
    }

    /// # Safety
    /// The tensor and the memory it points to must live as long as the owner.
    unsafe fn of_tensor(
        name: &'static str,
        tensor: &dlpack::Tensor,
        owner: Owner,
        memory: Memory,
    ) -> PyResult<Borrowed> {
        memory.check(name, tensor.device)?;
        let dtype = Dtype::of_dlpack(tensor.dtype).ok_or_else(|| {
            let dlpack::DataType { code, bits, lanes } = tensor.dtype;
            kind(format!("`{name}` has an unknown type (DLPack code {code}, {bits} bits, {lanes} lanes)"))
        })?;
        let rank = usize::try_from(tensor.rank).map_err(|_| value(format!("`{name}` has a negative rank")))?;
        let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        let list = |at: *const i64| match rank {
            0 => &[][..],
            // SAFETY: DLPack has one entry per axis behind both pointers, which are checked not to be null before this
            // is called.
            rank => unsafe { std::slice::from_raw_parts(at, rank) },
        };
        if rank > 0 && tensor.shape.is_null() {
            return Err(value(format!("`{name}` has no shape")));
        }
        let strides = (!tensor.strides.is_null()).then(|| list(tensor.strides).iter().copied());
        Borrowed::described(name, dtype, data, owner).axes(list(tensor.shape).iter().copied(), strides)
    }

    fn of_capsule(name: &'static str, object: &Bound<'_, PyAny>, memory: Memory) -> PyResult<Borrowed> {
        let py = object.py();
        let export = object.getattr(intern!(py, "__dlpack__"))?;
        let versioned = PyDict::new(py);
        versioned.set_item("max_version", (1, 0))?;
        let plain = PyDict::new(py);
        if let Memory::Cuda { stream, .. } = memory {
            versioned.set_item("stream", stream)?;
            plain.set_item("stream", stream)?;
        }
        let capsule = match export.call((), Some(&versioned)) {
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => export.call((), Some(&plain))?,
            other => other?,
        };
        let capsule =
            capsule.cast_into::<PyCapsule>().map_err(|_| kind(format!("`{name}` exports no DLPack capsule")))?;
        let owner = Owner::Object(capsule.clone().into_any().unbind());
        // The capsule is not consumed: it still owns the tensor, and frees it when the owner releases the capsule.
        if let Ok(managed) = capsule.pointer_checked(Some(dlpack::VERSIONED_CAPSULE)) {
            // SAFETY: a capsule of this name holds this structure.
            let managed = unsafe { managed.cast::<ManagedVersioned>().as_ref() };
            if managed.version.major != 1 {
                return Err(value(format!("`{name}` exports DLPack {}, expected 1", managed.version.major)));
            }
            // SAFETY: the owner keeps the capsule alive, and with it the tensor.
            let mut borrowed = unsafe { Borrowed::of_tensor(name, &managed.tensor, owner, memory)? };
            borrowed.read_only = managed.flags & dlpack::READ_ONLY != 0;
            return Ok(borrowed);
        }
        let managed = capsule.pointer_checked(Some(dlpack::CAPSULE))?;
        // SAFETY: as above, for the unversioned form.
        unsafe { Borrowed::of_tensor(name, &managed.cast::<Managed>().as_ref().tensor, owner, memory) }
    }

    fn of_interface(name: &'static str, object: &Bound<'_, PyAny>, found: &Bound<'_, PyAny>) -> PyResult<Borrowed> {
        let py = object.py();
        let typestr: String = found.get_item(intern!(py, "typestr"))?.extract()?;
        let type_name = || object.getattr(intern!(py, "dtype")).and_then(|dtype| dtype.getattr(intern!(py, "name")));
        let spelled = || type_name().and_then(|name| name.extract::<String>()).ok();
        let dtype = Dtype::of_typestr(&typestr, spelled)
            .ok_or_else(|| kind(format!("`{name}` has the type {}", spelled().unwrap_or(typestr))))?;
        let (address, read_only): (usize, bool) = found.get_item(intern!(py, "data"))?.extract()?;
        let shape: Vec<i64> = found.get_item(intern!(py, "shape"))?.extract()?;
        let strides: Option<Vec<i64>> = match found.get_item(intern!(py, "strides")) {
            Ok(strides) => strides.extract()?,
            Err(_) => None,
        };
        let strides = strides.map(|strides| in_elements(name, dtype, &shape, &strides)).transpose()?;
        let data = std::ptr::with_exposed_provenance_mut(address);
        let mut borrowed = Borrowed::described(name, dtype, data, Owner::Object(object.clone().unbind()))
            .axes(shape.into_iter(), strides.map(Vec::into_iter))?;
        borrowed.read_only = read_only;
        Ok(borrowed)
    }

    fn of_buffer(name: &'static str, buffer: PyUntypedBuffer) -> PyResult<Borrowed> {
        let format = buffer.format().to_string_lossy().into_owned();
        let dtype = Dtype::of_format(&format, buffer.item_size())
            .ok_or_else(|| kind(format!("`{name}` is a buffer of the format {format}")))?;
        if buffer.suboffsets().is_some_and(|offsets| offsets.iter().any(|&offset| offset >= 0)) {
            return Err(value(format!("`{name}` is a buffer of pointers; copy it first")));
        }
        let shape: Vec<i64> = buffer.shape().iter().map(|&len| len as i64).collect();
        let strides: Vec<i64> = buffer.strides().iter().map(|&stride| stride as i64).collect();
        let strides = in_elements(name, dtype, &shape, &strides)?;
        let (data, read_only) = (buffer.buf_ptr().cast(), buffer.readonly());
        let mut borrowed = Borrowed::described(name, dtype, data, Owner::Buffer(buffer))
            .axes(shape.into_iter(), Some(strides.into_iter()))?;
        borrowed.read_only = read_only;
        Ok(borrowed)
    }

    /// The type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The axes.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// The name used in errors.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The address of the first element, which may be on a device.
    pub fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// Whether the elements are in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        let axes = self.shape().iter().zip(&self.strides).rev();
        self.shape().contains(&0)
            || axes.into_iter().all(|(&len, &stride)| {
                let fits = len == 1 || stride == step;
                step *= len as isize;
                fits
            })
    }

    /// Axes and strides as `[batch, heads, length, width]`: missing leading axes have length 1.
    pub fn four(&self) -> PyResult<([usize; 4], [isize; 4])> {
        let (mut shape, mut strides) = ([1; 4], [0; 4]);
        let Some(front) = 4usize.checked_sub(self.rank) else {
            return Err(value(format!("`{}` has {} axes, expected at most 4", self.name, self.rank)));
        };
        shape[front..].copy_from_slice(self.shape());
        strides[front..].copy_from_slice(&self.strides[..self.rank]);
        Ok((shape, strides))
    }

    fn expect<T: Typed>(&self) -> PyResult<()> {
        if self.dtype == T::DTYPE {
            return Ok(());
        }
        let (found, expected) = (self.dtype.name(), T::DTYPE.name());
        Err(kind(format!("`{}` has the type {found}, expected {expected}, as `q` has", self.name)))
    }

    /// A view with four axes.
    pub fn view<T: Typed>(&self) -> PyResult<View<'_, T>> {
        self.expect::<T>()?;
        let (shape, strides) = self.four()?;
        // SAFETY: the exporter guarantees memory of this type, shape and strides while the owner lives, which `self`
        // borrows; `axes` checked the alignment.
        unsafe { View::from_raw(self.data.cast_const().cast(), shape, strides) }
            .map_err(|error| value(format!("`{}`: {error}", self.name)))
    }

    /// Bools or bytes as a view of bytes.
    pub fn bits(&self) -> PyResult<View<'_, u8>> {
        if !matches!(self.dtype, Dtype::Bool | Dtype::U8) {
            return Err(kind(format!("`{}` has the type {}, expected bool or uint8", self.name, self.dtype.name())));
        }
        let (shape, strides) = self.four()?;
        // SAFETY: as in `view`; a bool is a byte, and any byte is a `u8`.
        unsafe { View::from_raw(self.data.cast_const(), shape, strides) }
            .map_err(|error| value(format!("`{}`: {error}", self.name)))
    }

    /// A mutable view, whose memory no other tensor of the call may share: see [`apart`].
    pub fn view_mut<T: Typed>(&mut self) -> PyResult<ViewMut<'_, T>> {
        self.expect::<T>()?;
        if self.read_only {
            return Err(value(format!("`{}` is read-only", self.name)));
        }
        let (shape, strides) = self.four()?;
        // SAFETY: as in `view`; it is writable, and `apart` checked that no other view of the call shares it.
        unsafe { ViewMut::from_raw(self.data.cast(), shape, strides) }
            .map_err(|error| value(format!("`{}`: {error}", self.name)))
    }

    /// Writes elements in row-major order.
    pub fn fill_from<T: Typed>(&mut self, from: &[T]) -> PyResult<()> {
        self.view_mut::<T>()?;
        let (shape, strides) = self.four()?;
        assert_eq!(self.shape().iter().product::<usize>(), from.len(), "one number an element");
        let data = self.data.cast::<T>();
        for (at, &number) in from.iter().enumerate() {
            let (mut rest, mut offset) = (at, 0isize);
            for axis in (0..4).rev() {
                offset += (rest % shape[axis]) as isize * strides[axis];
                rest /= shape[axis];
            }
            // SAFETY: `view_mut` checked type, strides and that the memory is writable; the index is inside the shape.
            unsafe { data.offset(offset).write(number) };
        }
        Ok(())
    }

    /// The elements in row-major order.
    pub fn to_vec<T: Typed>(&self) -> PyResult<Vec<T>> {
        Ok(self.view::<T>()?.to_vec())
    }

    /// The elements of any integer type.
    pub fn integers(&self) -> PyResult<Vec<i64>> {
        fn wide<T: Typed + Into<i64>>(found: &Borrowed) -> PyResult<Vec<i64>> {
            Ok(found.view::<T>()?.to_vec().into_iter().map(Into::into).collect())
        }
        match self.dtype {
            Dtype::U8 => wide::<u8>(self),
            Dtype::I8 => wide::<i8>(self),
            Dtype::I16 => wide::<i16>(self),
            Dtype::I32 => wide::<i32>(self),
            Dtype::I64 => wide::<i64>(self),
            other => Err(kind(format!("`{}` has the type {}, expected whole numbers", self.name, other.name()))),
        }
    }

    /// The elements of any integer type; an error if one does not fit 32 bits.
    pub fn integers_i32(&self) -> PyResult<Vec<i32>> {
        let narrow = |x: i64| i32::try_from(x).map_err(|_| value(format!("`{}` holds {x}, beyond 32 bits", self.name)));
        self.integers()?.into_iter().map(narrow).collect()
    }

    /// The same as a tensor with four axes.
    pub fn tensor_i32(&self) -> PyResult<Tensor<i32, 4>> {
        let (shape, _) = self.four()?;
        Tensor::new(self.integers_i32()?, shape).map_err(refused)
    }

    /// The address range of its memory; `None` if it is empty.
    fn span(&self) -> Option<(usize, usize)> {
        if self.shape().contains(&0) {
            return None;
        }
        let (mut low, mut high) = (self.data.addr() as i128, self.data.addr() as i128);
        for (&len, &stride) in self.shape().iter().zip(&self.strides) {
            let last = (len as i128 - 1) * stride as i128 * self.dtype.size() as i128;
            if last < 0 { low += last } else { high += last }
        }
        Some((low.max(0) as usize, (high + self.dtype.size() as i128).max(0) as usize))
    }
}

/// Rejects written memory whose address range overlaps that of another tensor of the call.
pub fn apart<'a>(written: &[&Borrowed], read: impl Iterator<Item = &'a Borrowed>) -> PyResult<()> {
    let overlap = |a: &Borrowed, b: &Borrowed| match (a.span(), b.span()) {
        (Some(a), Some(b)) => a.0 < b.1 && b.0 < a.1,
        _ => false,
    };
    let refuse = |a: &Borrowed, b: &Borrowed| value(format!("`{}` overlaps `{}` in memory", a.name, b.name));
    for (at, one) in written.iter().enumerate() {
        if let Some(other) = written[..at].iter().find(|other| overlap(one, other)) {
            return Err(refuse(one, other));
        }
    }
    for other in read {
        if let Some(one) = written.iter().find(|one| overlap(one, other)) {
            return Err(refuse(one, other));
        }
    }
    Ok(())
}

/// Strides in bytes as strides in elements.
fn in_elements(name: &str, dtype: Dtype, shape: &[i64], strides: &[i64]) -> PyResult<Vec<i64>> {
    let size = dtype.size() as i64;
    let one = |(&len, &stride): (&i64, &i64)| match stride % size {
        0 => Ok(stride / size),
        // The stride of an axis of at most one element is never used.
        _ if len <= 1 => Ok(0),
        _ => {
            Err(value(format!("`{name}` has a stride of {stride} bytes, expected a multiple of {size}; copy it first")))
        }
    };
    if shape.len() != strides.len() {
        return Err(value(format!("`{name}` has {} axes and {} strides", shape.len(), strides.len())));
    }
    shape.iter().zip(strides).map(one).collect()
}

impl Memory {
    /// Rejects a tensor in other memory.
    fn check(self, name: &str, device: dlpack::Device) -> PyResult<()> {
        let place = match device.kind {
            kind if dlpack::HOST.contains(&kind) => "the host".into(),
            2 | 13 => format!("CUDA device {}", device.id),
            8 => "a Metal device".into(),
            10 | 11 => "a ROCm device".into(),
            _ => "another device".into(),
        };
        match self {
            Memory::Host if dlpack::HOST.contains(&device.kind) => Ok(()),
            Memory::Cuda { device: number, .. } if matches!(device.kind, 2 | 13) && device.id == number => Ok(()),
            Memory::Cuda { device: EMULATED, .. } if dlpack::HOST.contains(&device.kind) => Ok(()),
            Memory::Host => {
                Err(value(format!("`{name}` is on {place}; this call computes on the CPU: copy it to the host first")))
            }
            Memory::Cuda { device: number, .. } => {
                Err(value(format!("`{name}` is on {place}, and `q` on CUDA device {number}: expected one device")))
            }
        }
    }
}

thread_local! {
    /// Cache of types and their exchange functions. The types are never freed.
    static EXCHANGES: RefCell<Vec<(usize, Option<&'static Exchange>)>> = const { RefCell::new(Vec::new()) };
}

/// The exchange functions of a type, if it has them.
pub fn exchange_of(of: &Bound<'_, PyType>) -> PyResult<Option<&'static Exchange>> {
    let address = of.as_ptr().addr();
    let known = EXCHANGES.with_borrow(|list| list.iter().find(|(known, _)| *known == address).map(|(_, found)| *found));
    if let Some(known) = known {
        return Ok(known);
    }
    let found = match of.getattr(intern!(of.py(), "__dlpack_c_exchange_api__")) {
        Ok(capsule) => match capsule.cast_into::<PyCapsule>() {
            Ok(capsule) => {
                let exchange = capsule.pointer_checked(Some(dlpack::EXCHANGE_CAPSULE))?;
                // SAFETY: a capsule of this name holds this structure, whose head is the same in every version, and
                // which lives as long as the process.
                let exchange: &'static Exchange = unsafe { exchange.cast::<Exchange>().as_ref() };
                Some(exchange).filter(|exchange| exchange.version.major == 1)
            }
            Err(_) => None,
        },
        Err(_) => None,
    };
    EXCHANGES.with_borrow_mut(|list| {
        // A program uses a handful of array types; types beyond the limit are looked up each time.
        if list.len() < 16 {
            std::mem::forget(of.clone());
            list.push((address, found));
        }
    });
    Ok(found)
}

/// A pair of arrays: a tuple or list of two, or one array that stands for both.
pub fn pair<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    if object.is_instance_of::<PyTuple>() || object.is_instance_of::<pyo3::types::PyList>() {
        return object.extract().map_err(|_| kind(format!("`{name}` needs two arrays, of queries and of keys")));
    }
    Ok((object.clone(), object.clone()))
}

/// Sequence lengths.
pub fn lengths_of(found: &Borrowed) -> PyResult<Vec<usize>> {
    let one = |x: i64| usize::try_from(x).map_err(|_| value(format!("`lengths` is {x}, expected at least 0")));
    found.integers()?.into_iter().map(one).collect()
}
