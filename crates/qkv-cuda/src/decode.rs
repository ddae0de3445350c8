//! Decoding: one query per head against many keys, in bf16 or f16, for widths of 64, 128 and 256. The query heads of a
//! group are packed into one tensor-core tile, and the keys are split among blocks (Flash-Decoding). On Hopper TMA
//! loads the keys; elsewhere `cp.async` does.

use crate::call::{Call, Sizes};
use crate::device::Stream;
use crate::driver::Kernel;
use crate::error::{Error, Result};
use crate::general::{Splits, forward_params};
use crate::general_params::GeneralParams;
use crate::memory::Dtype;
use crate::program::{Kind, Program};
use crate::tensors::{Outputs, Tensors};
use crate::workspace::Layout;
use qkv::{Mask, Place};

/// Shared memory of a Hopper multiprocessor, and what the driver reserves per block, in bytes.
const MULTIPROCESSOR_SHARED: usize = 233_472;
const RESERVED_SHARED: usize = 1024;
/// Keys per TMA box.
const TMA_ROWS: usize = 64;

/// The kernels of a forward pass over one query per head.
#[derive(Debug)]
pub(crate) struct DecodeForward {
    kernel: Kernel,
    splits: Splits,
    /// Query heads per block.
    heads: usize,
    tma: bool,
}

impl DecodeForward {
    /// `None` if the call does not qualify: more than one query, f32, other widths, unaligned rows.
    pub fn new(
        call: &Call,
        tensors: &Tensors,
        general_only: bool,
        layout: &mut Layout,
    ) -> Result<Option<DecodeForward>> {
        let Sizes { hq, hk, n, m, d, dv, .. } = call.sizes;
        let attention = &call.attention;
        // The heads of a group share a tile: values of a key that only some of them see could spread NaN to the others.
        let same_keys = tensors.bits.is_none_or(|bits| bits.shape[1] == 1) && attention.mask.lsh_buckets().is_none();
        let widths = d == dv && [64, 128, 256].contains(&d);
        if n != 1 || m == 0 || call.dtype == Dtype::F32 || !widths || !is_vectorized(call, tensors) || !same_keys {
            return Ok(None);
        }
        let device = call.driver.device();
        let tma = device.is_hopper() && !general_only && is_tma_addressable(tensors);
        let eights = (hq / hk).div_ceil(8).min(2);
        let (kind, heads) = match (tma, sees_first_keys(call, tensors)) {
            (false, _) => (Kind::Decode, 16),
            (true, false) => (Kind::DecodeTma, 16),
            (true, true) => (Kind::DecodePlain { heads: eights }, 8 * eights),
        };
        let program = Program::fixed(kind, call.dtype, d, [64, 64]);
        if program.shared() as usize > device.shared_bytes {
            return Ok(None);
        }
        let module = call.driver.module(&program.source())?;
        let kernel = call.driver.kernel(&module, "decode", program.threads(), program.shared())?;
        Ok(Some(DecodeForward { kernel, splits: Splits::new(call, &module, true, layout)?, heads, tma }))
    }

    pub fn name(&self, call: &Call) -> String {
        if self.tma { format!("hopper decode {}", call.dtype) } else { format!("decode {}", call.dtype) }
    }

    pub fn launch(&self, call: &Call, tensors: &Tensors, out: &Outputs, base: u64, stream: Stream) -> Result<()> {
        if !is_vectorized(call, tensors) || self.tma && !is_tma_addressable(tensors) {
            return Err(Error::memory("q, k, v", "has strides that the plan was not made for"));
        }
        let mut params = forward_params(call, tensors, out)?;
        self.splits.set(&mut params, base);
        let Sizes { b, hq, hk, .. } = call.sizes;
        let tiles = b * hk * (hq / hk).div_ceil(self.heads);
        match self.tma {
            true => self.launch_tma(call, tensors, tiles * self.splits.count, &params, stream)?,
            false => call.launch(&self.kernel, [tiles, self.splits.count], &params, stream)?,
        }
        self.splits.merge(call, &params, true, stream)
    }

    /// Launches persistent blocks, as many as fit on the device at once, each of which processes one split after
    /// another. They themselves wait for the preceding launch, and read nothing before it has ended.
    fn launch_tma(
        &self,
        call: &Call,
        tensors: &Tensors,
        work: usize,
        params: &GeneralParams,
        stream: Stream,
    ) -> Result<()> {
        let maps = [call.tensor_map(&tensors.k, TMA_ROWS)?, call.tensor_map(&tensors.v, TMA_ROWS)?];
        let per_multiprocessor = (MULTIPROCESSOR_SHARED / (self.kernel.shared as usize + RESERVED_SHARED)).clamp(1, 3);
        let blocks = work.min(per_multiprocessor * call.driver.device().processors as usize) as u32;
        let arguments: [*const u8; 3] =
            [(&raw const *params).cast(), (&raw const maps[0]).cast(), (&raw const maps[1]).cast()];
        // SAFETY: these are the kernel's parameters; the pointers in them are valid by the contract of `Plan`'s passes.
        call.describe(unsafe { call.driver.launch_dependent(&self.kernel, [blocks, 1], stream, &arguments) })
    }
}

fn is_vectorized(call: &Call, tensors: &Tensors) -> bool {
    [tensors.q, tensors.k, tensors.v].iter().all(|tensor| tensor.is_vectorized(call.dtype))
}

fn is_tma_addressable(tensors: &Tensors) -> bool {
    tensors.k.is_tma_addressable() && tensors.v.is_tma_addressable()
}

/// Whether the query sees all keys or a prefix of them, scores are scaled products, and only the output is computed.
fn sees_first_keys(call: &Call, tensors: &Tensors) -> bool {
    let attention = &call.attention;
    let dropout = attention.dropout.is_some_and(|dropout| dropout.threshold() > 0);
    let biased = attention.bias.has_alibi() || tensors.table.is_some() || tensors.bias.is_some();
    let causal_at_the_end = call.place == Place::End && attention.mask == Mask::Causal;
    let full = matches!(attention.mask, Mask::Full | Mask::Lengths) || causal_at_the_end;
    full && attention.softcap.is_none() && !biased && !dropout && !attention.entropy
}
