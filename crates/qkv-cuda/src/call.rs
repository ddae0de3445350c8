//! What every path of a plan shares: the description and its shapes, the mask program and other constants in device
//! memory, and the checks and launches that do not depend on which kernels run.

use crate::device::Stream;
use crate::driver::{Driver, Kernel, TensorMap};
use crate::error::{Error, Result};
use crate::general_params::{GeneralParams, Tensor, mask_program};
use crate::memory::{Buffer, Dtype, Strided};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams, Vector};
use qkv::engine::{CompiledMask, MaskProgram};
use qkv::{Attention, Place, Scale, Score, alibi_slopes};
use std::fmt;
use std::sync::Arc;

/// The sizes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub b: usize,
    pub hq: usize,
    pub hk: usize,
    pub n: usize,
    pub m: usize,
    pub d: usize,
    pub dv: usize,
}

impl Sizes {
    pub fn of(tensors: &Tensors) -> Sizes {
        let ([b, hq, n, d], [_, hk, m, _]) = (tensors.q.shape, tensors.k.shape);
        Sizes { b, hq, hk, n, m, d, dv: tensors.v.shape[3] }
    }

    /// Query rows of all heads.
    pub fn rows(&self) -> usize {
        self.b * self.hq * self.n
    }

    /// Refuses widths that no kernel has, and sizes that overflow the 32-bit indices of kernels.
    fn check(&self) -> Result<()> {
        let Sizes { b, hq, hk, n, m, d, dv } = *self;
        if d.max(dv) > 256 {
            return Err(Error::cpu_only(format!("a head width of {} (at most 256)", d.max(dv))));
        }
        let fits = |x: usize| i32::try_from(x).is_ok_and(|x| x < 1 << 30);
        let tiles = |heads: usize, len: usize| b.saturating_mul(heads).saturating_mul(len.div_ceil(16));
        if fits(n) && fits(m) && fits(b.saturating_mul(hq)) && fits(tiles(hq, n).max(tiles(hk, m))) {
            return Ok(());
        }
        Err(qkv::Error::TooLarge { tensor: "q", shape: vec![b, hq, n.max(m), d] }.into())
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { b, hq, hk, n, m, d, dv } = self;
        write!(f, "q [{b}, {hq}, {n}, {d}], k [{b}, {hk}, {m}, {d}], v [{b}, {hk}, {m}, {dv}]")
    }
}

/// The scalars of a description, in the form kernels use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    /// The position of query 0.
    pub offset: i64,
    /// The factor of the dot product, temperature included; unused if the scale is learned.
    pub scale: f32,
    pub inverse_temperature: f32,
    /// 0 without a soft-cap.
    pub softcap: f32,
    /// 0 without dropout.
    pub dropout_threshold: u32,
    pub dropout_scale: f32,
}

impl Scalars {
    fn of(attention: &Attention, place: Place, sizes: &Sizes) -> Scalars {
        let temperature = attention.temperature.unwrap_or(1.0);
        let own = if attention.score == Score::ScaledDot { 1.0 / (sizes.d.max(1) as f64).sqrt() } else { 1.0 };
        let scale = if let Scale::Fixed(scale) = attention.scale { scale } else { own };
        let dropout = attention.dropout.filter(|dropout| dropout.threshold() > 0);
        Scalars {
            offset: position_of_query_0(place, sizes.n, sizes.m),
            scale: (scale / temperature) as f32,
            inverse_temperature: (1.0 / temperature) as f32,
            softcap: attention.softcap.unwrap_or(0.0) as f32,
            dropout_threshold: dropout.map_or(0, |dropout| dropout.threshold()),
            dropout_scale: dropout.map_or(1.0, |dropout| dropout.kept_scale() as f32),
        }
    }
}

/// The position of query 0 among the keys; 0 if positions are given explicitly.
pub(crate) fn position_of_query_0(place: Place, n: usize, m: usize) -> i64 {
    match place {
        Place::Start | Place::Given => 0,
        Place::End => m as i64 - n as i64,
        Place::Offset(offset) => offset,
    }
}

/// A description with its shapes, on a device.
#[derive(Debug)]
pub(crate) struct Call {
    pub driver: Arc<dyn Driver>,
    pub attention: Attention,
    pub place: Place,
    pub dtype: Dtype,
    pub sizes: Sizes,
    pub scalars: Scalars,
    shapes: [(&'static str, Vec<usize>); 14],
    pub mask: CompiledMask,
    program: MaskProgram,
    /// The data of `program`, and the ALiBi slopes.
    constants: Buffer,
    slopes: u64,
}

impl Call {
    /// `tensors` have been checked against the description.
    pub fn new(
        driver: &Arc<dyn Driver>,
        attention: &Attention,
        dtype: Dtype,
        place: Place,
        tensors: &Tensors,
    ) -> Result<Call> {
        let sizes = Sizes::of(tensors);
        sizes.check()?;
        let mask = CompiledMask::new(&attention.mask, sizes.n, sizes.m, place);
        let program = mask_program(&mask)?;
        let slopes: Vec<u8> = match attention.bias.has_alibi() {
            true => alibi_slopes(sizes.hq).into_iter().flat_map(|slope| (slope as f32).to_le_bytes()).collect(),
            false => Vec::new(),
        };
        let constants = [program.data.clone(), slopes].concat();
        let constants = Buffer::from_slice(driver, &constants, Stream(0))?;
        if constants.bytes() > 0 {
            driver.wait(Stream(0))?;
        }
        let has_slopes = attention.bias.has_alibi();
        Ok(Call {
            driver: driver.clone(),
            attention: attention.clone(),
            place,
            dtype,
            sizes,
            scalars: Scalars::of(attention, place, &sizes),
            shapes: tensors.shapes(),
            slopes: if has_slopes { constants.ptr() + program.data.len() as u64 } else { 0 },
            mask,
            program,
            constants,
        })
    }

    /// Device memory of the constants.
    pub fn constant_bytes(&self) -> usize {
        self.constants.bytes()
    }

    /// The address of the ALiBi slopes, or 0.
    pub fn slopes(&self) -> u64 {
        self.slopes
    }

    /// The parameters that all launches of the general kernels share.
    pub fn params(&self, tensors: &Tensors) -> Result<GeneralParams> {
        let Sizes { b, hq, hk, n, m, d, dv } = self.sizes;
        let Scalars { offset, scale, inverse_temperature, softcap, dropout_threshold, dropout_scale } = self.scalars;
        let bits = tensors.bits.map(|bits| bits.broadcast("bits", [b, hq, n, m])).transpose()?;
        let bias = tensors.bias.map(|bias| bias.broadcast("bias", [b, hq, n, m])).transpose()?;
        let vectorized = |tensor: &Strided, bit: i32| i32::from(tensor.is_vectorized(self.dtype)) << bit;
        let plain = self.attention.softcap.is_none() && !self.attention.bias.has_alibi();
        let mut params = GeneralParams {
            q: tensors.q.into(),
            k: tensors.k.into(),
            v: tensors.v.into(),
            bias: bias.map_or(Tensor::default(), Tensor::from),
            bias_shape: tensors.bias.map_or([0; 4], |bias| bias.shape.map(|axis| axis as i32)),
            learned_scale: ptr(tensors.scale),
            learned_scale_count: tensors.scale.map_or(1, |scale| scale.len as i32),
            table: tensors.table.map_or(0, |table| table.ptr),
            table_rows: tensors.table.map_or(1, |table| table.shape[2] as i32),
            table_row: tensors.table.map_or(0, |table| table.strides[2]),
            table_col: tensors.table.map_or(0, |table| table.strides[3]),
            reach: self.attention.bias.reach().unwrap_or(0) as i64,
            sinks: ptr(tensors.sinks),
            alibi_slopes: self.slopes,
            positions: ptr(tensors.positions),
            lengths: ptr(tensors.lengths),
            segments_q: ptr(tensors.segments.map(|(queries, _)| queries)),
            segments_k: ptr(tensors.segments.map(|(_, keys)| keys)),
            bits: bits.map_or(0, |bits| bits.ptr),
            bits_strides: bits.map_or([0; 4], |bits| bits.strides),
            buckets_q: ptr(tensors.buckets.map(|(queries, _)| queries)),
            buckets_k: ptr(tensors.buckets.map(|(_, keys)| keys)),
            offset,
            seed: tensors.seed.unwrap_or(0),
            dropout_threshold,
            dropout_scale,
            scale,
            inverse_temperature,
            cap: softcap,
            batch: b as i32,
            heads: hq as i32,
            key_heads: hk as i32,
            group: hq.checked_div(hk).unwrap_or(1) as i32,
            n: n as i32,
            m: m as i32,
            d: d as i32,
            dv: dv as i32,
            splits: 1,
            vectorized: vectorized(&tensors.q, 0) | vectorized(&tensors.k, 1) | vectorized(&tensors.v, 2),
            plain_scores: i32::from(plain && bias.is_none() && tensors.table.is_none()),
            ..GeneralParams::default()
        };
        params.set_mask(&self.program, self.constants.ptr());
        Ok(params)
    }

    /// Launches a general kernel; an empty grid launches nothing.
    pub fn launch(&self, kernel: &Kernel, grid: [usize; 2], params: &GeneralParams, stream: Stream) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let (grid, params) = (grid.map(|axis| axis as u32), &raw const *params);
        // SAFETY: general kernels take this block; its pointers are valid by the contract of `Plan`'s passes.
        self.describe(unsafe { self.driver.launch(kernel, grid, stream, &[params.cast()]) })
    }

    /// Like [`launch`](Call::launch), for a kernel that itself waits for the preceding launch.
    pub fn launch_dependent(
        &self,
        kernel: &Kernel,
        grid: [usize; 2],
        params: &GeneralParams,
        stream: Stream,
    ) -> Result<()> {
        let (grid, params) = (grid.map(|axis| axis as u32), &raw const *params);
        // SAFETY: likewise.
        self.describe(unsafe { self.driver.launch_dependent(kernel, grid, stream, &[params.cast()]) })
    }

    /// A tensor map with boxes of `rows` × 64 elements.
    pub fn tensor_map(&self, tensor: &Strided, rows: usize) -> Result<TensorMap> {
        let [b, h, n, d] = tensor.shape;
        let dims = [d, n, h, b].map(|axis| axis as u64);
        // The stride of an axis of length 1 is never used, but must be valid.
        let stride = |axis: usize| if tensor.shape[axis] <= 1 { 16 } else { tensor.strides[axis] as u64 * 2 };
        let strides = [stride(2), stride(1), stride(0)];
        self.driver.tensor_map(tensor.ptr, self.dtype == Dtype::Bf16, dims, strides, rows as u32)
    }

    /// Adds the shapes to an error of the driver.
    pub fn describe(&self, result: Result<()>) -> Result<()> {
        result.map_err(|error| match error {
            Error::Driver { action, message } => {
                Error::Driver { action: format!("{action}, for {}", self.sizes), message }
            }
            error => error,
        })
    }

    /// Checks that the tensors have the shapes the plan was made for. Their pointers and strides may differ.
    pub fn check_tensors(&self, tensors: &Tensors) -> Result<()> {
        for ((name, planned), (_, found)) in self.shapes.iter().zip(tensors.shapes()) {
            if *planned != found {
                let problem = format!("has the shape {found:?}, and the plan was made for {planned:?}");
                return Err(Error::memory(name, problem));
            }
        }
        Ok(())
    }

    /// Checks tensors and outputs of a forward pass.
    pub fn check_forward(&self, tensors: &Tensors, out: &Outputs) -> Result<()> {
        self.check_tensors(tensors)?;
        let Sizes { b, hq, n, dv, .. } = self.sizes;
        check_shape("out", &out.values, [b, hq, n, dv])?;
        check_len("lse", out.lse, self.sizes.rows())?;
        match (out.entropy, self.attention.entropy) {
            (Some(entropy), true) => check_len("entropy", entropy, self.sizes.rows()),
            (None, false) => Ok(()),
            (None, true) => {
                Err(qkv::Error::Missing { tensor: "entropy", needed_by: "an attention with entropy" }.into())
            }
            (Some(_), false) => {
                let reason = "the attention does not compute it";
                Err(qkv::Error::Unused { tensor: "entropy", reason }.into())
            }
        }
    }

    /// Checks the gradients of a backward pass.
    pub fn check_backward(&self, tensors: &Tensors, upstream: &Upstreams, into: &Gradients) -> Result<()> {
        let Sizes { b, hq, hk, n, m, d, dv } = self.sizes;
        check_shape("d_out", &upstream.values, [b, hq, n, dv])?;
        for (tensor, vector) in [("d_lse", upstream.lse), ("d_entropy", upstream.entropy)] {
            vector.map_or(Ok(()), |vector| check_len(tensor, vector, self.sizes.rows()))?;
        }
        if upstream.entropy.is_some() && !self.attention.entropy {
            let needed_by = "its gradient (ask for it with `with_entropy`)";
            return Err(qkv::Error::Missing { tensor: "entropy", needed_by }.into());
        }
        check_shape("d_q", &into.q, [b, hq, n, d])?;
        check_shape("d_k", &into.k, [b, hk, m, d])?;
        check_shape("d_v", &into.v, [b, hk, m, dv])?;
        if let (Some(into), Some(bias)) = (&into.bias, &tensors.bias) {
            check_shape("d_bias", into, bias.shape)?;
        }
        for (tensor, into, len) in [
            ("d_table", into.table, tensors.table.map(|table| table.shape[2] * table.shape[3])),
            ("d_scale", into.scale, tensors.scale.map(|scale| scale.len)),
            ("d_sinks", into.sinks, tensors.sinks.map(|sinks| sinks.len)),
        ] {
            match (into, len) {
                (Some(into), Some(len)) => check_len(tensor, into, len)?,
                (Some(_), None) => return Err(qkv::Error::Unused { tensor, reason: "there is no such input" }.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Zeros every gradient: for attention without queries or keys.
    pub fn zero_gradients(&self, into: &Gradients, stream: Stream) -> Result<()> {
        let size = self.dtype.size();
        for tensor in [Some(into.q), Some(into.k), Some(into.v), into.bias].into_iter().flatten() {
            let dense = Strided::contiguous(tensor.ptr, tensor.shape);
            if dense.strides != tensor.strides && tensor.span() > 0 {
                return Err(Error::memory("gradient", "has to be contiguous if there are no keys or no queries"));
            }
            self.driver.zero(tensor.ptr, tensor.span() * size, stream)?;
        }
        for vector in [into.table, into.scale, into.sinks].into_iter().flatten() {
            self.driver.zero(vector.ptr, vector.len * size, stream)?;
        }
        Ok(())
    }
}

/// The address of an optional vector, or 0.
pub(crate) fn ptr(vector: Option<Vector>) -> u64 {
    vector.map_or(0, |vector| vector.ptr)
}

fn check_shape(tensor: &'static str, found: &Strided, expected: [usize; 4]) -> Result<()> {
    if found.shape == expected {
        return Ok(());
    }
    Err(qkv::Error::Shape { tensor, found: found.shape.to_vec(), expected: format!("{expected:?}") }.into())
}

pub(crate) fn check_len(tensor: &'static str, found: Vector, expected: usize) -> Result<()> {
    if found.len >= expected {
        return Ok(());
    }
    Err(qkv::Error::Shape { tensor, found: vec![found.len], expected: format!("{expected} numbers") }.into())
}
