//! Attention on a GPU over host tensors, for tests and the command line: everything is copied to the device and back.
//! For tensors that are already on the device, use a [`Plan`].

use crate::Cuda;
use crate::call::Sizes;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::memory::{Buffer, Dtype, Strided};
use crate::plan::{Plan, PlanOptions};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams, Vector};
use crate::workspace::Workspace;
use qkv::engine::{self, Problem};
use qkv::{Attention, Element, Inputs, Output, Place, Pool, Real, Source, Tensor, Upstream, View};
use std::ops::Range;

/// An attention with its inputs on a device.
#[derive(Debug)]
pub struct Session<'a, T: Element> {
    cuda: &'a Cuda,
    inputs: Inputs<'a, T>,
    plan: Plan,
    tensors: Tensors,
    /// The memory that the tensors point to.
    _buffers: Vec<Buffer>,
    values: Buffer,
    lse: Buffer,
    entropy: Option<Buffer>,
    milliseconds: Option<f64>,
}

impl Cuda {
    /// Checks an attention and its inputs, plans it, and copies the inputs to the device.
    pub fn session<'a, T: Element>(
        &'a self,
        attention: &Attention,
        inputs: Inputs<'a, T>,
        place: Place,
        options: PlanOptions,
    ) -> Result<Session<'a, T>> {
        let Some(dtype) = Dtype::named(T::NAME) else {
            return Err(Error::cpu_only(format!("the type `{}`", T::NAME)));
        };
        // These checks read lengths and positions, too; the plan below needs no others.
        Problem::placed(attention, inputs, place)?;
        let (tensors, buffers) = self.upload(&inputs)?;
        let driver = &self.driver;
        let plan = Plan::new(driver, attention, dtype, place, &tensors, options)?;
        let rows = plan.call.sizes.rows();
        let values = Buffer::new(driver, rows * plan.call.sizes.dv * dtype.size())?;
        let lse = Buffer::new(driver, rows * 4)?;
        let entropy = attention.entropy.then(|| Buffer::new(driver, rows * 4)).transpose()?;
        Ok(Session { cuda: self, inputs, plan, tensors, _buffers: buffers, values, lse, entropy, milliseconds: None })
    }

    /// Copies inputs to the device, row by row.
    fn upload<T: Element>(&self, inputs: &Inputs<'_, T>) -> Result<(Tensors, Vec<Buffer>)> {
        let mut upload = Upload { cuda: self, buffers: Vec::new() };
        let rows = |source: &Source<'_, T>| (source.to_vec(), source.shape());
        let view = |view: View<'_, T>| (view.to_vec(), view.shape());
        let q = upload.tensor(view(inputs.q))?;
        let k = upload.tensor(rows(&inputs.k))?;
        let v = upload.tensor(rows(&inputs.v))?;
        let mut tensors = Tensors::new(q, k, v);
        tensors.bias = inputs.bias.map(|bias| upload.tensor(view(bias))).transpose()?;
        tensors.table = inputs.table.map(|table| upload.tensor(view(table))).transpose()?;
        tensors.bits = inputs.bits.map(|bits| upload.tensor((bits.to_vec(), bits.shape()))).transpose()?;
        tensors.scale = inputs.scale.map(|scale| upload.vector(scale)).transpose()?;
        tensors.sinks = inputs.sinks.map(|sinks| upload.vector(sinks)).transpose()?;
        if let Some(lengths) = inputs.lengths {
            let lengths: Vec<i32> = lengths.iter().map(|&len| i32::try_from(len).unwrap_or(i32::MAX)).collect();
            tensors.lengths = Some(upload.vector(&lengths)?);
        }
        if let Some((queries, keys)) = inputs.segments {
            tensors.segments = Some((upload.vector(queries)?, upload.vector(keys)?));
        }
        tensors.positions = inputs.positions.map(|positions| upload.vector(positions)).transpose()?;
        if let Some((queries, keys)) = inputs.buckets {
            tensors.buckets = Some((upload.vector(&queries.to_vec())?, upload.vector(&keys.to_vec())?));
        }
        tensors.seed = inputs.seed;
        Ok((tensors, upload.buffers))
    }

    /// The forward pass: [`Attention::forward`](qkv::Attention::forward) on this device.
    pub fn forward<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        self.session(attention, inputs, attention.place, PlanOptions::default())?.forward()
    }

    /// A few queries at the end of many keys: [`Attention::decode`](qkv::Attention::decode) on this device.
    pub fn decode<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        let place = if inputs.positions.is_some() { Place::Given } else { Place::End };
        self.session(attention, inputs, place, PlanOptions::default())?.forward()
    }

    /// The backward pass: [`Attention::backward`](qkv::Attention::backward) on this device.
    pub fn backward<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
    ) -> Result<qkv::Gradients<T>> {
        let options = PlanOptions::default().backward(true);
        let mut session = self.session(attention, inputs, engine::place_of(out), options)?;
        session.set_output(out)?;
        session.backward(upstream)
    }

    /// Rows of the weights of one head, `[rows, M]`, recomputed from the log-sum-exp of the forward pass.
    pub fn weights<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        [b, h]: [usize; 2],
        rows: Range<usize>,
    ) -> Result<Tensor<T::Acc, 2>> {
        let options = PlanOptions::default().weights(true);
        let mut session = self.session(attention, inputs, engine::place_of(out), options)?;
        session.set_output(out)?;
        let cols = 0..session.plan.call.sizes.m;
        session.rectangle([b, h], rows, cols)
    }
}

/// Buffers of the inputs copied so far.
struct Upload<'a> {
    cuda: &'a Cuda,
    buffers: Vec<Buffer>,
}

impl Upload<'_> {
    fn tensor<T: Copy>(&mut self, (data, shape): (Vec<T>, [usize; 4])) -> Result<Strided> {
        Ok(Strided::contiguous(self.vector(&data)?.ptr, shape))
    }

    fn vector<T: Copy>(&mut self, data: &[T]) -> Result<Vector> {
        let buffer = Buffer::from_slice(&self.cuda.driver, data, Stream(0))?;
        let vector = Vector::new(buffer.ptr(), data.len());
        self.buffers.push(buffer);
        Ok(vector)
    }
}

impl<T: Element> Session<'_, T> {
    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The inputs on the device.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The inputs on the host.
    pub fn inputs(&self) -> Inputs<'_, T> {
        self.inputs
    }

    /// How long the last pass took on the device.
    pub fn milliseconds(&self) -> Option<f64> {
        self.milliseconds
    }

    fn outputs(&self) -> Outputs {
        let Sizes { b, hq, n, dv, .. } = self.plan.call.sizes;
        let rows = |buffer: &Buffer| Vector::new(buffer.ptr(), b * hq * n);
        let mut out = Outputs::new(Strided::contiguous(self.values.ptr(), [b, hq, n, dv]), rows(&self.lse));
        out.entropy = self.entropy.as_ref().map(rows);
        out
    }

    fn workspace(&self, bytes: usize) -> Result<(Buffer, Workspace)> {
        let buffer = Buffer::new(&self.cuda.driver, bytes)?;
        let workspace = Workspace::new(buffer.ptr(), bytes);
        Ok((buffer, workspace))
    }

    /// The forward pass.
    pub fn forward(&mut self) -> Result<Output<T>> {
        let (_buffer, workspace) = self.workspace(self.plan.forward_workspace())?;
        let (plan, tensors, out) = (&self.plan, &self.tensors, self.outputs());
        let mut pass = || {
            // SAFETY: all memory belongs to this session, is sized by the plan, and is read back before it is freed.
            unsafe { plan.forward(tensors, &out, workspace, Stream(0)) }
        };
        let ms = self.cuda.driver.timed(Stream(0), &mut pass)?;
        self.milliseconds = Some(ms);
        let Sizes { b, hq, n, dv, .. } = self.plan.call.sizes;
        let values = self.values.read_elements::<T>(b * hq * n * dv)?;
        let lse = read_floats::<T, 3>(&self.lse, [b, hq, n])?;
        let entropy = self.entropy.as_ref().map(|entropy| read_floats::<T, 3>(entropy, [b, hq, n])).transpose()?;
        Ok(engine::output(Tensor::new(values, [b, hq, n, dv])?, lse, entropy, self.plan.call.place))
    }

    /// Sets the output of an earlier forward pass, by any engine.
    pub fn set_output(&mut self, out: &Output<T>) -> Result<()> {
        let Sizes { b, hq, n, dv, .. } = self.plan.call.sizes;
        let wrong = |tensor, found: &[usize], expected: &[usize]| {
            Err(qkv::Error::Shape { tensor, found: found.to_vec(), expected: format!("{expected:?}") }.into())
        };
        if out.values.shape() != [b, hq, n, dv] {
            return wrong("out", &out.values.shape(), &[b, hq, n, dv]);
        }
        if out.lse.shape() != [b, hq, n] {
            return wrong("lse", &out.lse.shape(), &[b, hq, n]);
        }
        self.values.write_unpadded(out.values.data(), Stream(0))?;
        self.lse.write(&to_floats::<T>(out.lse.data()), Stream(0))?;
        match (&self.entropy, &out.entropy) {
            (Some(to), Some(from)) => to.write(&to_floats::<T>(from.data()), Stream(0)),
            _ => Ok(()),
        }
    }

    /// The backward pass, after [`forward`](Session::forward) or [`set_output`](Session::set_output).
    pub fn backward(&mut self, upstream: Upstream<'_, T>) -> Result<qkv::Gradients<T>> {
        let driver = &self.cuda.driver;
        let size = self.plan.call.dtype.size();
        let d_out = Buffer::from_slice(driver, &upstream.values.to_vec(), Stream(0))?;
        let floats = |data: &[T::Acc]| Buffer::from_slice(driver, &to_floats::<T>(data), Stream(0));
        let (d_lse, d_entropy) = (upstream.lse.map(floats).transpose()?, upstream.entropy.map(floats).transpose()?);
        let whole = |buffer: &Buffer| Vector::new(buffer.ptr(), buffer.bytes() / 4);
        let mut from = Upstreams::new(Strided::contiguous(d_out.ptr(), upstream.values.shape()));
        (from.lse, from.entropy) = (d_lse.as_ref().map(whole), d_entropy.as_ref().map(whole));
        let allocate =
            |shape: [usize; 4]| Ok::<_, Error>((Buffer::new(driver, shape.iter().product::<usize>() * size)?, shape));
        let numbers = |vector: Option<Vector>| vector.map(|vector| allocate([1, 1, 1, vector.len])).transpose();
        let Tensors { q, k, v, bias, table, scale, sinks, .. } = self.tensors;
        let [d_q, d_k, d_v] = [allocate(q.shape)?, allocate(k.shape)?, allocate(v.shape)?];
        let d_bias = bias.filter(|_| upstream.for_bias).map(|bias| allocate(bias.shape)).transpose()?;
        let d_table = table.map(|table| allocate(table.shape)).transpose()?;
        let (d_scale, d_sinks) = (numbers(scale)?, numbers(sinks)?);
        let strided = |(buffer, shape): &(Buffer, [usize; 4])| Strided::contiguous(buffer.ptr(), *shape);
        let vector =
            |(buffer, shape): &(Buffer, [usize; 4])| Vector::new(buffer.ptr(), shape.iter().product::<usize>());
        let mut into = Gradients::new(strided(&d_q), strided(&d_k), strided(&d_v));
        into.bias = d_bias.as_ref().map(strided);
        into.table = d_table.as_ref().map(vector);
        (into.scale, into.sinks) = (d_scale.as_ref().map(vector), d_sinks.as_ref().map(vector));
        let (_buffer, workspace) = self.workspace(self.plan.backward_workspace())?;
        let (plan, tensors, out) = (&self.plan, &self.tensors, self.outputs());
        // SAFETY: as for the forward pass.
        let mut pass = || unsafe { plan.backward(tensors, &out, &from, &into, workspace, Stream(0)) };
        let ms = driver.timed(Stream(0), &mut pass)?;
        let dense = |(buffer, shape): &(Buffer, [usize; 4])| {
            Ok::<_, Error>(Tensor::new(buffer.read_elements::<T>(shape.iter().product())?, *shape)?)
        };
        let list = |(buffer, shape): &(Buffer, [usize; 4])| buffer.read_elements::<T>(shape.iter().product::<usize>());
        let mut gradients = qkv::Gradients::new(dense(&d_q)?, dense(&d_k)?, dense(&d_v)?);
        gradients.scale = d_scale.as_ref().map(list).transpose()?;
        gradients.sinks = d_sinks.as_ref().map(list).transpose()?;
        gradients.bias = d_bias.as_ref().map(dense).transpose()?;
        gradients.table = d_table.as_ref().map(dense).transpose()?;
        self.milliseconds = Some(ms);
        Ok(gradients)
    }

    /// The weights of one head in a rectangle, `[rows, cols]`.
    pub fn rectangle(&self, head: [usize; 2], rows: Range<usize>, cols: Range<usize>) -> Result<Tensor<T::Acc, 2>> {
        let shape = [rows.len(), cols.len()];
        let (buffer, into) = self.weights_buffer(shape)?;
        // SAFETY: all memory belongs to this session, and is as large as it says.
        unsafe {
            self.plan.rectangle(&self.tensors, self.outputs().lse, head, rows, cols, into, Stream(0))?;
        }
        read_floats::<T, 2>(&buffer, shape)
    }

    /// The weights of one head in a rectangle, pooled to `[height, width]` cells.
    pub fn pooled(
        &self,
        head: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
        shape: [usize; 2],
        pool: Pool,
    ) -> Result<Tensor<T::Acc, 2>> {
        let (buffer, into) = self.weights_buffer(shape)?;
        let (_buffer, workspace) = self.workspace(shape[0] * cols.len() * 4)?;
        let (tensors, lse) = (&self.tensors, self.outputs().lse);
        // SAFETY: likewise.
        unsafe { self.plan.pooled(tensors, lse, head, rows, cols, shape, pool, into, workspace, Stream(0)) }?;
        read_floats::<T, 2>(&buffer, shape)
    }

    /// The weights of one head in a rectangle, pooled to cells that each cover `[down, across]` weights; the last cells
    /// cover what is left.
    pub fn map(
        &self,
        head: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
        cells: [usize; 2],
        pool: Pool,
    ) -> Result<Tensor<T::Acc, 2>> {
        let [down, across] = cells.map(|each| each.max(1));
        let shape = [rows.len().div_ceil(down), cols.len().div_ceil(across)];
        let (buffer, into) = self.weights_buffer(shape)?;
        let (_buffer, workspace) = self.workspace(shape[0] * cols.len() * 4)?;
        let (tensors, lse) = (&self.tensors, self.outputs().lse);
        // SAFETY: likewise.
        unsafe { self.plan.map(tensors, lse, head, rows, cols, cells, pool, into, workspace, Stream(0)) }?;
        read_floats::<T, 2>(&buffer, shape)
    }

    fn weights_buffer(&self, shape: [usize; 2]) -> Result<(Buffer, Vector)> {
        let count = shape[0] * shape[1];
        let buffer = Buffer::new(&self.cuda.driver, count * 4)?;
        let vector = Vector::new(buffer.ptr(), count);
        Ok((buffer, vector))
    }
}

fn to_floats<T: Element>(data: &[T::Acc]) -> Vec<f32> {
    data.iter().map(|x| qkv_simd::Element::to_f64(*x) as f32).collect()
}

fn read_floats<T: Element, const R: usize>(buffer: &Buffer, shape: [usize; R]) -> Result<Tensor<T::Acc, R>> {
    let data = buffer.read::<f32>(shape.iter().product(), Stream(0))?;
    Ok(Tensor::new(data.into_iter().map(|x| T::Acc::from_f64(f64::from(x))).collect(), shape)?)
}

impl Buffer {
    fn read_elements<T: Element>(&self, count: usize) -> Result<Vec<T>> {
        let bytes = count.saturating_mul(size_of::<T>());
        if bytes > self.bytes() {
            return Err(Error::memory("buffer", format!("has {} bytes, fewer than the {bytes} to read", self.bytes())));
        }
        let raw = self.read::<u8>(bytes, Stream(0))?;
        let element = |chunk: &[u8]| {
            // SAFETY: elements are the sealed number types of `qkv`, of which every bit pattern is a value.
            unsafe { chunk.as_ptr().cast::<T>().read_unaligned() }
        };
        Ok(raw.chunks_exact(size_of::<T>()).map(element).collect())
    }
}
