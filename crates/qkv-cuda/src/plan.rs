//! A plan: which kernels a description takes on a card, for tensors of these shapes, and how much device memory beside
//! them. Everything that takes time or memory happens here; what is launched later allocates and compiles nothing.

use crate::driver::{Card, Driver, Kernel, Module, Stream};
use crate::error::{Error, Result};
use crate::hopper::{Hopper, takes};
use crate::job::{Job, MOST_OPS, Op, Tensor};
use crate::memory::{Buffer, Dtype};
use crate::program::{General, Program};
use crate::rules::Rules;
use crate::tensors::Tensors;
use qkv::{Attention, Place, Scale, Score, Select, alibi_slopes};
use std::fmt;
use std::sync::Arc;

/// Keys in a piece, where the keys of a few queries are shared out over many blocks.
const PIECE: usize = 512;
/// Up to so many queries are few. Neither this nor the size of a piece may depend on the card or the batch: a row's sum
/// has one order.
const FEW_QUERIES: usize = 16;
/// Parts in which the gradient of a relative table is summed.
pub(crate) const TABLE_PARTS: usize = 64;

/// What a plan is to be able to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// Gradients.
    pub backward: bool,
    /// Weights on demand.
    pub weights: bool,
    /// Never a kernel that is made for one generation of cards.
    pub general_only: bool,
    /// A backward pass that may add in any order, where that is faster.
    pub any_order: bool,
}

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

    pub fn rows(&self) -> usize {
        self.b * self.hq * self.n
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { b, hq, hk, n, m, d, dv } = self;
        write!(f, "q [{b}, {hq}, {n}, {d}], k [{b}, {hk}, {m}, {d}], v [{b}, {hk}, {m}, {dv}]")
    }
}

/// A kernel with the tiles that its mask is asked about.
#[derive(Clone, Debug)]
pub(crate) struct Tiled {
    pub kernel: Kernel,
    pub extents: Option<Kernel>,
    pub tiles: (usize, usize),
}

/// The forward pass.
#[derive(Clone, Debug)]
pub(crate) enum Forward {
    General {
        forward: Tiled,
        merge: Kernel,
        pieces: usize,
    },
    /// `rows`: query heads that share a key head, of which so many at a time. `copied`: by the copy engine.
    Decode {
        decode: Kernel,
        merge: Kernel,
        pieces: usize,
        rows: usize,
        copied: bool,
    },
}

/// The backward pass: the first two always, the rest as asked for.
#[derive(Clone, Debug)]
pub(crate) struct Backward {
    pub row_terms: Kernel,
    /// Rows of a block of the first.
    pub rows_tile: usize,
    pub queries: Tiled,
    pub keys: Vec<Tiled>,
    pub bias: Option<Tiled>,
    pub table: Option<(Tiled, Kernel)>,
    pub scale: Kernel,
    pub sinks: Kernel,
}

/// Weights on demand.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    pub rectangle: Kernel,
    pub columns: Kernel,
    pub cells: Kernel,
    pub tiles: (usize, usize),
}

/// What a description takes on a card. See [`Cuda::plan`](crate::Cuda::plan).
#[derive(Debug)]
pub struct Plan {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) attention: Attention,
    pub(crate) place: Place,
    pub(crate) dtype: Dtype,
    pub(crate) sizes: Sizes,
    pub(crate) uses: Uses,
    pub(crate) hopper: Option<Hopper>,
    pub(crate) forward: Forward,
    pub(crate) backward: Option<Backward>,
    pub(crate) weights: Option<Weights>,
    pub(crate) ops: Vec<Op>,
    /// Sets and bits of the mask, and ALiBi's slopes: what `ops` and `slopes` point to.
    _constants: Buffer,
    pub(crate) slopes: u64,
}

impl Plan {
    pub(crate) fn new(
        driver: &Arc<dyn Driver>,
        attention: &Attention,
        dtype: Dtype,
        place: Place,
        tensors: &Tensors,
        uses: Uses,
    ) -> Result<Plan> {
        refuse(attention)?;
        tensors.check(attention, place)?;
        let sizes = Sizes::of(tensors);
        check_sizes(&sizes)?;
        let rules = Rules::of(&attention.mask, sizes.n, sizes.m, place)?;
        let slopes: Vec<u8> = match attention.bias.has_alibi() {
            true => alibi_slopes(sizes.hq).into_iter().flat_map(|slope| (slope as f32).to_le_bytes()).collect(),
            false => Vec::new(),
        };
        let constants = [rules.bytes.clone(), slopes].concat();
        let constants = Buffer::holding(driver, &constants, Stream(0))?;
        driver.wait(Stream(0))?;
        let ops = rules.at(constants.at());
        let segments = attention.mask.uses(&qkv::Mask::Segments);
        let kernels = Kernels { driver, dtype, sizes, segments, place, general_only: uses.general_only };
        let forward = kernels.forward(tensors, attention)?;
        let backward = uses.backward.then(|| kernels.backward(attention)).transpose()?;
        let weights = uses.weights.then(|| kernels.weights()).transpose()?;
        let slopes = if attention.bias.has_alibi() { constants.at() + rules.bytes.len() as u64 } else { 0 };
        let mut plan = Plan {
            driver: driver.clone(),
            attention: attention.clone(),
            place,
            dtype,
            sizes,
            uses,
            hopper: None,
            forward,
            backward,
            weights,
            ops,
            _constants: constants,
            slopes,
        };
        plan.hopper = Hopper::of(&plan, tensors)?;
        Ok(plan)
    }

    /// The kernel of the forward pass.
    pub fn forward_kernel(&self) -> String {
        match (&self.hopper, &self.forward) {
            (Some(hopper), _) if hopper.forward_fits() => hopper.forward_name(),
            (_, Forward::Decode { copied: true, .. }) => format!("hopper decode {}", self.dtype),
            (_, Forward::Decode { .. }) => format!("decode {}", self.dtype),
            (_, Forward::General { pieces: 1, .. }) => format!("general {}", self.dtype),
            (_, Forward::General { pieces, .. }) => format!("general {} in {pieces} pieces", self.dtype),
        }
    }

    /// The kernel of the backward pass, if there is one.
    pub fn backward_kernel(&self) -> Option<String> {
        self.backward.as_ref().map(|_| match &self.hopper {
            Some(hopper) if hopper.backward_fits() => hopper.backward_name(),
            _ => format!("general {}", self.dtype),
        })
    }

    /// The card it is for.
    pub fn card(&self) -> &Card {
        self.driver.card()
    }

    /// What all launches are told alike.
    pub(crate) fn job(&self, tensors: &Tensors) -> Result<Job> {
        let Sizes { b, hq, hk, n, m, d, dv } = self.sizes;
        let attention = &self.attention;
        let temperature = attention.temperature.unwrap_or(1.0);
        let own = if attention.score == Score::ScaledDot { 1.0 / (d.max(1) as f64).sqrt() } else { 1.0 };
        let scale = if let Scale::Fixed(scale) = attention.scale { scale } else { own };
        let mut mask = [Op::default(); MOST_OPS];
        mask[..self.ops.len()].copy_from_slice(&self.ops);
        let bits = tensors.bits.map(|bits| bits.broadcast("bits", [b, hq, n, m])).transpose()?;
        let bias = tensors.bias.map(|bias| bias.broadcast("bias", [b, hq, n, m])).transpose()?;
        let at = |vector: Option<crate::tensors::Vector>| vector.map_or(0, |vector| vector.at);
        let dropout = attention.dropout.filter(|dropout| dropout.threshold() > 0);
        let reads = |tensor: &crate::memory::Strided, bit: i32| i32::from(tensor.reads_sixteen(self.dtype)) << bit;
        Ok(Job {
            q: tensors.q.into(),
            k: tensors.k.into(),
            v: tensors.v.into(),
            bias: bias.map_or(Tensor::default(), Tensor::from),
            bias_shape: tensors.bias.map_or([0; 4], |bias| bias.shape.map(|axis| axis as i32)),
            learned: at(tensors.scale),
            learned_count: tensors.scale.map_or(1, |scale| scale.len as i32),
            table: tensors.table.map_or(0, |table| table.at),
            table_rows: tensors.table.map_or(1, |table| table.shape[2] as i32),
            table_row: tensors.table.map_or(0, |table| table.strides[2]),
            table_col: tensors.table.map_or(0, |table| table.strides[3]),
            reach: attention.bias.reach().unwrap_or(0) as i64,
            sinks: at(tensors.sinks),
            slopes: self.slopes,
            positions: at(tensors.positions),
            lengths: at(tensors.lengths),
            segments_q: at(tensors.segments.map(|(queries, _)| queries)),
            segments_k: at(tensors.segments.map(|(_, keys)| keys)),
            bits: bits.map_or(0, |bits| bits.at),
            bits_strides: bits.map_or([0; 4], |bits| bits.strides),
            buckets_q: at(tensors.buckets.map(|(queries, _)| queries)),
            buckets_k: at(tensors.buckets.map(|(_, keys)| keys)),
            offset: match self.place {
                Place::Start | Place::Given => 0,
                Place::End => m as i64 - n as i64,
                Place::Offset(offset) => offset,
            },
            seed: tensors.seed.unwrap_or(0),
            threshold: dropout.map_or(0, |dropout| dropout.threshold()),
            kept_scale: dropout.map_or(1.0, |dropout| dropout.kept_scale() as f32),
            scale: (scale / temperature) as f32,
            inverse_temperature: (1.0 / temperature) as f32,
            cap: attention.softcap.unwrap_or(0.0) as f32,
            batch: b as i32,
            heads: hq as i32,
            key_heads: hk as i32,
            group: hq.checked_div(hk).unwrap_or(1) as i32,
            n: n as i32,
            m: m as i32,
            d: d as i32,
            dv: dv as i32,
            pieces: 1,
            vectors: reads(&tensors.q, 0) | reads(&tensors.k, 1) | reads(&tensors.v, 2),
            ops: self.ops.len() as i32,
            plain: i32::from(
                attention.softcap.is_none() && !attention.bias.has_alibi() && bias.is_none() && tensors.table.is_none(),
            ),
            mask,
            ..Job::default()
        })
    }
}

/// Says what only the CPU computes.
fn refuse(attention: &Attention) -> Result<()> {
    match attention.score {
        Score::Dot | Score::ScaledDot => {}
        score => return Err(Error::on_the_cpu(format!("the score `{}`", score.name()))),
    }
    match attention.select {
        Select::Soft => {}
        select => return Err(Error::on_the_cpu(format!("the selection {select:?}"))),
    }
    match attention.local {
        None => Ok(()),
        Some(_) => Err(Error::on_the_cpu("predictive local attention")),
    }
}

/// Kernels count rows in 32 bits.
fn check_sizes(sizes: &Sizes) -> Result<()> {
    let Sizes { b, hq, hk, n, m, d, dv } = *sizes;
    if d.max(dv) > 256 {
        return Err(Error::on_the_cpu(format!("a head width of {} (at most 256)", d.max(dv))));
    }
    let fits = |x: usize| i32::try_from(x).is_ok_and(|x| x < 1 << 30);
    let rows =
        b.saturating_mul(hq).saturating_mul(n.div_ceil(16)).max(b.saturating_mul(hk).saturating_mul(m.div_ceil(16)));
    if fits(n) && fits(m) && fits(b.saturating_mul(hq)) && fits(rows) {
        return Ok(());
    }
    Err(qkv::Error::TooLarge { tensor: "q", shape: vec![b, hq, n.max(m), d] }.into())
}

/// Finds kernels, compiling what is not compiled yet.
struct Kernels<'a> {
    driver: &'a Arc<dyn Driver>,
    dtype: Dtype,
    sizes: Sizes,
    segments: bool,
    place: Place,
    general_only: bool,
}

impl Kernels<'_> {
    fn program(&self, what: General) -> Result<Program> {
        let (d, dv, shared) = (self.sizes.d, self.sizes.dv, self.driver.card().shared_bytes);
        Program::general(what, self.dtype, d, dv, shared).ok_or_else(|| {
            Error::on_the_cpu(format!("a head width of {} in {shared} bytes of shared memory", d.max(dv)))
        })
    }

    fn tiled(&self, what: General, name: &'static str) -> Result<Tiled> {
        let program = self.program(what)?;
        let module = self.driver.module(&program)?;
        let kernel = self.driver.kernel(&module, name, program.threads(), program.shared())?;
        let extents = self.segments.then(|| self.driver.kernel(&module, "segment_extents", 128, 0)).transpose()?;
        Ok(Tiled { kernel, extents, tiles: program.tiles() })
    }

    fn forward(&self, tensors: &Tensors, attention: &Attention) -> Result<Forward> {
        let Sizes { n, m, d, dv, .. } = self.sizes;
        let few = n <= FEW_QUERIES;
        let pieces = if few { m.div_ceil(PIECE).max(1) } else { 1 };
        // Rows of a group see the same keys: one that only some see could bring NaN to the others.
        let alike = tensors.bits.is_none_or(|bits| bits.shape[1] == 1) && attention.mask.lsh_buckets().is_none();
        let whole = [tensors.q, tensors.k, tensors.v].iter().all(|tensor| tensor.reads_sixteen(self.dtype));
        if n == 1 && m > 0 && self.dtype != Dtype::F32 && d == dv && [64, 128, 256].contains(&d) && whole && alike {
            let copied = self.driver.card().is_hopper() && !self.general_only && takes(&tensors.k) && takes(&tensors.v);
            let heads = (self.sizes.hq / self.sizes.hk).div_ceil(8).min(2);
            let (what, rows) = match (copied, self.sees_all(tensors, attention)) {
                (false, _) => (General::Decode, 16),
                (true, false) => (General::DecodeHopper, 16),
                (true, true) => (General::DecodePlain { heads }, 8 * heads),
            };
            let program = Program::General { what, dtype: self.dtype, width: d, rows: 64, cols: 64 };
            if program.shared() as usize > self.driver.card().shared_bytes {
                return self.general_forward(pieces);
            }
            let module = self.driver.module(&program)?;
            let decode = self.driver.kernel(&module, "decode", program.threads(), program.shared())?;
            return Ok(Forward::Decode { decode, merge: self.merge(&module)?, pieces, rows, copied });
        }
        self.general_forward(pieces)
    }

    /// Whether one query sees every key, by scores that are scaled products, and nothing is asked for but the output.
    fn sees_all(&self, tensors: &Tensors, attention: &Attention) -> bool {
        let dropout = attention.dropout.is_some_and(|dropout| dropout.threshold() > 0);
        let shaped = attention.softcap.is_some() || attention.bias.has_alibi() || tensors.table.is_some();
        let at_the_end = self.place == Place::End && attention.mask == qkv::Mask::Causal;
        let whole = attention.mask == qkv::Mask::Full || at_the_end;
        whole && !shaped && !dropout && tensors.bias.is_none() && !attention.entropy
    }

    /// Eight groups of 32 threads: their sums, the shares of 256 pieces, and a number for each group.
    fn merge(&self, module: &Arc<dyn Module>) -> Result<Kernel> {
        self.driver.kernel(module, "merge", 256, 8 * 64 * 16 + (256 + 8) * 4)
    }

    fn general_forward(&self, pieces: usize) -> Result<Forward> {
        let forward = self.tiled(General::Forward, "forward")?;
        let merge = self.merge(&forward.kernel.module)?;
        Ok(Forward::General { forward, merge, pieces })
    }

    fn backward(&self, attention: &Attention) -> Result<Backward> {
        let rows = self.program(General::Rows)?;
        let module = self.driver.module(&rows)?;
        let wide = self.sizes.d.max(self.sizes.dv) > 128;
        let keys = if wide { &[(true, false), (false, true)][..] } else { &[(true, true)] };
        let keys = keys.iter().map(|&(k, v)| self.tiled(General::Keys { k, v }, "backward_keys"));
        let table = |tiled: Tiled| {
            let reduce = self.driver.kernel(&tiled.kernel.module, "reduce_table", 128, 0)?;
            Ok::<_, Error>((tiled, reduce))
        };
        Ok(Backward {
            row_terms: self.driver.kernel(&module, "row_terms", rows.threads(), rows.shared())?,
            rows_tile: rows.tiles().0,
            queries: self.tiled(General::Queries, "backward_queries")?,
            keys: keys.collect::<Result<_>>()?,
            bias: attention.bias.wants_tensor().then(|| self.tiled(General::Bias, "backward_bias")).transpose()?,
            table: match attention.bias.reach() {
                Some(_) => Some(table(self.tiled(General::Table, "backward_table")?)?),
                None => None,
            },
            scale: self.driver.kernel(&module, "reduce_scale", 256, 1024)?,
            sinks: self.driver.kernel(&module, "reduce_sinks", 256, 1024)?,
        })
    }

    fn weights(&self) -> Result<Weights> {
        let program = self.program(General::Weights)?;
        let module = self.driver.module(&program)?;
        let kernel = |name, threads, shared| self.driver.kernel(&module, name, threads, shared);
        Ok(Weights {
            rectangle: kernel("weights", program.threads(), program.shared())?,
            columns: kernel("weights_columns", program.threads(), program.shared())?,
            cells: kernel("weights_cells", 128, 0)?,
            tiles: program.tiles(),
        })
    }
}
