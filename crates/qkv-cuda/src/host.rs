//! Host tensors on a card: for tests, the program, and whoever has a few. Everything is copied in and out, so this is no
//! way to be fast; [`Plan`] on device memory is.

use crate::Cuda;
use crate::driver::Stream;
use crate::error::{Error, Result};
use crate::memory::{Buffer, Dtype, Strided};
use crate::plan::{Plan, Uses};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams, Vector};
use crate::workspace::Workspace;
use qkv::engine::{self, Problem};
use qkv::{Attention, Element, Inputs, Output, Place, Pool, Real, Tensor, Upstream, View};
use std::ops::Range;

/// An attention with its inputs on a card.
#[derive(Debug)]
pub struct Session<'a, T: Element> {
    cuda: &'a Cuda,
    inputs: Inputs<'a, T>,
    plan: Plan,
    tensors: Tensors,
    /// What the tensors point to.
    _held: Vec<Buffer>,
    values: Buffer,
    lse: Buffer,
    entropy: Option<Buffer>,
    milliseconds: Option<f64>,
}

impl Cuda {
    /// An attention and its inputs, checked, planned and copied to the card.
    pub fn session<'a, T: Element>(
        &'a self,
        attention: &Attention,
        inputs: Inputs<'a, T>,
        place: Place,
        uses: Uses,
    ) -> Result<Session<'a, T>> {
        let Some(dtype) = Dtype::named(T::NAME) else {
            return Err(Error::on_the_cpu(format!("the type `{}`", T::NAME)));
        };
        let problem = Problem::placed(attention, inputs, place)?;
        let mut held = Vec::new();
        let mut hold = |buffer: Result<Buffer>| {
            let buffer = buffer?;
            let at = buffer.at();
            held.push(buffer);
            Ok::<u64, Error>(at)
        };
        let driver = &self.driver;
        let put = |view: &View<'_, T>| Buffer::holding(driver, &view.to_vec(), Stream(0));
        let rows = |source: &qkv::Source<'_, T>| {
            let [b, h, m, d] = source.shape();
            let dense = Tensor::from_fn([b, h, m, d], |[b, h, j, x]| source.at(b, h, j, x));
            Buffer::holding(driver, dense.data(), Stream(0))
        };
        let mut tensor = |buffer: Result<Buffer>, shape| hold(buffer).map(|at| Strided::contiguous(at, shape));
        let q = tensor(put(&inputs.q), inputs.q.shape())?;
        let k = tensor(rows(&inputs.k), inputs.k.shape())?;
        let v = tensor(rows(&inputs.v), inputs.v.shape())?;
        let mut tensors = Tensors::new(q, k, v);
        tensors.bias = inputs.bias.map(|bias| tensor(put(&bias), bias.shape())).transpose()?;
        tensors.table = inputs.table.map(|table| tensor(put(&table), table.shape())).transpose()?;
        let bits = |view: View<'_, u8>| Buffer::holding(driver, &view.to_vec(), Stream(0));
        tensors.bits = inputs.bits.map(|view| tensor(bits(view), view.shape())).transpose()?;
        let mut vector = |buffer: Result<Buffer>, len| hold(buffer).map(|at| Vector::new(at, len));
        let numbers = |data: &[T]| Buffer::holding(driver, data, Stream(0));
        let integers = |data: &[i32]| Buffer::holding(driver, data, Stream(0));
        tensors.scale = inputs.scale.map(|scale| vector(numbers(scale), scale.len())).transpose()?;
        tensors.sinks = inputs.sinks.map(|sinks| vector(numbers(sinks), sinks.len())).transpose()?;
        if let Some(lengths) = inputs.lengths {
            let data: Vec<i32> = lengths.iter().map(|&length| i32::try_from(length).unwrap_or(i32::MAX)).collect();
            tensors.lengths = Some(vector(integers(&data), data.len())?);
        }
        if let Some((queries, keys)) = inputs.segments {
            let queries = vector(integers(queries), queries.len())?;
            tensors.segments = Some((queries, vector(integers(keys), keys.len())?));
        }
        if let Some(positions) = inputs.positions {
            tensors.positions = Some(vector(Buffer::holding(driver, positions, Stream(0)), positions.len())?);
        }
        if let Some((queries, keys)) = inputs.buckets {
            let queries = vector(integers(&queries.to_vec()), queries.len())?;
            tensors.buckets = Some((queries, vector(integers(&keys.to_vec()), keys.len())?));
        }
        tensors.seed = inputs.seed;
        let plan = Plan::new(driver, attention, dtype, place, &tensors, uses)?;
        let rows = plan.sizes.rows();
        let values = Buffer::new(driver, rows * plan.sizes.dv * dtype.size())?;
        let lse = Buffer::new(driver, rows * 4)?;
        let entropy = attention.entropy.then(|| Buffer::new(driver, rows * 4)).transpose()?;
        let _ = problem;
        Ok(Session { cuda: self, inputs, plan, tensors, _held: held, values, lse, entropy, milliseconds: None })
    }

    /// The forward pass: [`Attention::forward`](qkv::Attention::forward), on this card.
    pub fn forward<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        self.session(attention, inputs, attention.place, Uses::default())?.forward()
    }

    /// A few queries at the end of many keys: [`Attention::decode`](qkv::Attention::decode), on this card.
    pub fn decode<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        let place = if inputs.positions.is_some() { Place::Given } else { Place::End };
        self.session(attention, inputs, place, Uses::default())?.forward()
    }

    /// The backward pass: [`Attention::backward`](qkv::Attention::backward), on this card.
    pub fn backward<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
    ) -> Result<qkv::Gradients<T>> {
        let uses = Uses { backward: true, ..Uses::default() };
        let mut session = self.session(attention, inputs, engine::place_of(out), uses)?;
        session.take(out)?;
        session.backward(upstream)
    }

    /// Whole rows of the weights of one head, `[rows, M]`, recomputed from what the forward pass kept.
    pub fn weights<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        [b, h]: [usize; 2],
        rows: Range<usize>,
    ) -> Result<Tensor<T::Acc, 2>> {
        let uses = Uses { weights: true, ..Uses::default() };
        let mut session = self.session(attention, inputs, engine::place_of(out), uses)?;
        session.take(out)?;
        let cols = 0..session.plan.sizes.m;
        session.rectangle([b, h], rows, cols)
    }
}

impl<T: Element> Session<'_, T> {
    /// The plan that was made.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The inputs, on the device.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// How long the last pass took, by the card's clock.
    pub fn milliseconds(&self) -> Option<f64> {
        self.milliseconds
    }

    fn outputs(&self) -> Outputs {
        let crate::plan::Sizes { b, hq, n, dv, .. } = self.plan.sizes;
        let rows = |buffer: &Buffer| Vector::new(buffer.at(), b * hq * n);
        Outputs {
            values: Strided::contiguous(self.values.at(), [b, hq, n, dv]),
            lse: rows(&self.lse),
            entropy: self.entropy.as_ref().map(rows),
        }
    }

    fn workspace(&self, bytes: usize) -> Result<(Buffer, Workspace)> {
        let buffer = Buffer::new(&self.cuda.driver, bytes)?;
        let workspace = Workspace { at: buffer.at(), bytes };
        Ok((buffer, workspace))
    }

    /// The forward pass.
    pub fn forward(&mut self) -> Result<Output<T>> {
        let (_held, workspace) = self.workspace(self.plan.forward_workspace())?;
        let (plan, tensors, out) = (&self.plan, &self.tensors, self.outputs());
        let mut pass = || {
            // SAFETY: all of it is memory of this session's, sized by the plan, and read back before it is freed.
            unsafe { plan.forward(tensors, &out, workspace, Stream(0)) }
        };
        let ms = self.cuda.driver.timed(Stream(0), &mut pass)?;
        self.milliseconds = Some(ms);
        let crate::plan::Sizes { b, hq, n, dv, .. } = self.plan.sizes;
        let values = self.values.read_elements::<T>(b * hq * n * dv)?;
        let lse = rows::<T>(&self.lse, [b, hq, n])?;
        let entropy = self.entropy.as_ref().map(|entropy| rows::<T>(entropy, [b, hq, n])).transpose()?;
        Ok(engine::output(Tensor::new(values, [b, hq, n, dv])?, lse, entropy, self.plan.place))
    }

    /// Takes the output of an earlier forward pass, of any engine.
    pub fn take(&mut self, out: &Output<T>) -> Result<()> {
        let crate::plan::Sizes { b, hq, n, dv, .. } = self.plan.sizes;
        let wrong = |tensor, found: &[usize], expected: &[usize]| {
            Err(qkv::Error::Shape { tensor, found: found.to_vec(), expected: format!("{expected:?}") }.into())
        };
        if out.values.shape() != [b, hq, n, dv] {
            return wrong("out", &out.values.shape(), &[b, hq, n, dv]);
        }
        if out.lse.shape() != [b, hq, n] {
            return wrong("lse", &out.lse.shape(), &[b, hq, n]);
        }
        self.values.put(out.values.data(), Stream(0))?;
        let floats =
            |t: &Tensor<T::Acc, 3>| t.data().iter().map(|x| qkv_simd::Element::to_f64(*x) as f32).collect::<Vec<f32>>();
        self.lse.write(&floats(&out.lse), Stream(0))?;
        match (&self.entropy, &out.entropy) {
            (Some(to), Some(from)) => to.write(&floats(from), Stream(0)),
            _ => Ok(()),
        }
    }

    /// The backward pass, after the forward pass or after taking what another gave.
    pub fn backward(&mut self, upstream: Upstream<'_, T>) -> Result<qkv::Gradients<T>> {
        let driver = &self.cuda.driver;
        let size = self.plan.dtype.size();
        let shape = upstream.values.shape();
        let d_out = Buffer::holding(driver, &upstream.values.to_vec(), Stream(0))?;
        let floats = |given: &[T::Acc]| {
            let data: Vec<f32> = given.iter().map(|x| qkv_simd::Element::to_f64(*x) as f32).collect();
            Buffer::holding(driver, &data, Stream(0))
        };
        let (d_lse, d_entropy) = (upstream.lse.map(floats).transpose()?, upstream.entropy.map(floats).transpose()?);
        let len = |buffer: &Buffer| Vector::new(buffer.at(), buffer.bytes() / 4);
        let from = Upstreams {
            values: Strided::contiguous(d_out.at(), shape),
            lse: d_lse.as_ref().map(len),
            entropy: d_entropy.as_ref().map(len),
        };
        let room = |shape: [usize; 4]| Buffer::new(driver, shape.iter().product::<usize>() * size);
        let shapes = [self.tensors.q.shape, self.tensors.k.shape, self.tensors.v.shape];
        let [q, k, v] = [room(shapes[0])?, room(shapes[1])?, room(shapes[2])?];
        let bias = self
            .tensors
            .bias
            .filter(|_| upstream.for_bias)
            .map(|bias| Ok::<_, Error>((room(bias.shape)?, bias.shape)))
            .transpose()?;
        let table = self.tensors.table.map(|table| Ok::<_, Error>((room(table.shape)?, table.shape))).transpose()?;
        let numbers =
            |vector: Option<Vector>| vector.map(|v| Ok::<_, Error>((room([1, 1, 1, v.len])?, v.len))).transpose();
        let (scale, sinks) = (numbers(self.tensors.scale)?, numbers(self.tensors.sinks)?);
        let vector =
            |given: &Option<(Buffer, usize)>| given.as_ref().map(|(buffer, len)| Vector::new(buffer.at(), *len));
        let into = Gradients {
            q: Strided::contiguous(q.at(), shapes[0]),
            k: Strided::contiguous(k.at(), shapes[1]),
            v: Strided::contiguous(v.at(), shapes[2]),
            bias: bias.as_ref().map(|(buffer, shape)| Strided::contiguous(buffer.at(), *shape)),
            table: table.as_ref().map(|(buffer, shape)| Vector::new(buffer.at(), shape.iter().product())),
            scale: vector(&scale),
            sinks: vector(&sinks),
        };
        let (_held, workspace) = self.workspace(self.plan.backward_workspace())?;
        let (plan, tensors, out) = (&self.plan, &self.tensors, self.outputs());
        // SAFETY: as for the forward pass.
        let mut work = || unsafe { plan.backward(tensors, &out, &from, &into, workspace, Stream(0)) };
        let ms = driver.timed(Stream(0), &mut work)?;
        let dense = |buffer: &Buffer, shape: [usize; 4]| {
            Ok::<_, Error>(Tensor::new(buffer.read_elements::<T>(shape.iter().product())?, shape)?)
        };
        let tensor = |given: &Option<(Buffer, [usize; 4])>| {
            given.as_ref().map(|(buffer, shape)| dense(buffer, *shape)).transpose()
        };
        let numbers = |given: &Option<(Buffer, usize)>| {
            given.as_ref().map(|(buffer, len)| buffer.read_elements::<T>(*len)).transpose()
        };
        let mut gradients = qkv::Gradients::new(dense(&q, shapes[0])?, dense(&k, shapes[1])?, dense(&v, shapes[2])?);
        (gradients.scale, gradients.sinks) = (numbers(&scale)?, numbers(&sinks)?);
        (gradients.bias, gradients.table) = (tensor(&bias)?, tensor(&table)?);
        self.milliseconds = Some(ms);
        Ok(gradients)
    }

    /// A rectangle of the weights of one head, `[rows, cols]`.
    pub fn rectangle(&self, head: [usize; 2], rows: Range<usize>, cols: Range<usize>) -> Result<Tensor<T::Acc, 2>> {
        let shape = [rows.len(), cols.len()];
        let into = Buffer::new(&self.cuda.driver, shape[0] * shape[1] * 4)?;
        let (out, room) = (self.outputs(), Vector::new(into.at(), shape[0] * shape[1]));
        // SAFETY: all of it is memory of this session's, as large as it says.
        unsafe { self.plan.rectangle(&self.tensors, out.lse, head, rows, cols, room, Stream(0)) }?;
        picture::<T>(&into, shape)
    }

    /// A rectangle of the weights of one head as a picture of `[height, width]` cells.
    pub fn pooled(
        &self,
        head: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
        shape: [usize; 2],
        pool: Pool,
    ) -> Result<Tensor<T::Acc, 2>> {
        let into = Buffer::new(&self.cuda.driver, shape[0] * shape[1] * 4)?;
        let (_held, workspace) = self.workspace(shape[0] * cols.len() * 4)?;
        let (out, room) = (self.outputs(), Vector::new(into.at(), shape[0] * shape[1]));
        // SAFETY: likewise.
        unsafe { self.plan.pooled(&self.tensors, out.lse, head, rows, cols, shape, pool, room, workspace, Stream(0)) }?;
        picture::<T>(&into, shape)
    }

    /// A rectangle of the weights of one head as a map: cells that each cover `[down, across]` weights, the last ones what is
    /// left.
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
        let into = Buffer::new(&self.cuda.driver, shape[0] * shape[1] * 4)?;
        let (_held, workspace) = self.workspace(shape[0] * cols.len() * 4)?;
        let (out, room) = (self.outputs(), Vector::new(into.at(), shape[0] * shape[1]));
        // SAFETY: likewise.
        unsafe { self.plan.map(&self.tensors, out.lse, head, rows, cols, cells, pool, room, workspace, Stream(0)) }?;
        picture::<T>(&into, shape)
    }

    /// The inputs, where they came from.
    pub fn inputs(&self) -> Inputs<'_, T> {
        self.inputs
    }
}

fn rows<T: Element>(buffer: &Buffer, shape: [usize; 3]) -> Result<Tensor<T::Acc, 3>> {
    let data = buffer.read::<f32>(shape.iter().product(), Stream(0))?;
    Ok(Tensor::new(data.into_iter().map(|x| T::Acc::from_f64(f64::from(x))).collect(), shape)?)
}

fn picture<T: Element>(buffer: &Buffer, shape: [usize; 2]) -> Result<Tensor<T::Acc, 2>> {
    let data = buffer.read::<f32>(shape[0] * shape[1], Stream(0))?;
    Ok(Tensor::new(data.into_iter().map(|x| T::Acc::from_f64(f64::from(x))).collect(), shape)?)
}

impl Buffer {
    fn read_elements<T: Element>(&self, count: usize) -> Result<Vec<T>> {
        let bytes = count.saturating_mul(size_of::<T>());
        if bytes > self.bytes() {
            return Err(Error::memory("buffer", format!("has {} bytes, and {bytes} were to be read", self.bytes())));
        }
        let raw = self.read::<u8>(bytes, Stream(0))?;
        let element = |chunk: &[u8]| {
            // SAFETY: elements are the library's sealed types of numbers, of which every pattern of bits is one.
            unsafe { chunk.as_ptr().cast::<T>().read_unaligned() }
        };
        Ok(raw.chunks_exact(size_of::<T>()).map(element).collect())
    }
}
